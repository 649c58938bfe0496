"""Labelling over HTTP: blind, one vote an item and annotator, nothing lost, and files that training reads."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from runs_for_tests import STAGES, arrays, make_run, rollout
from studio_for_tests import HERE, Studio

from posttrain.runs.write import RunWriter
from posttrain.studio.library import path_id


@pytest.fixture
def studio(tmp_path: Path) -> Studio:
    (tmp_path / "labels").mkdir()
    rows = [{"prompt": f"p{n}", "chosen": f"better {n}", "rejected": f"worse {n}", "model": "secret-7b"} for n in range(30)]
    (tmp_path / "labels" / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "labels" / "guidelines.txt").write_text("Prefer what is true.")
    return Studio(tmp_path)


def file(studio: Studio) -> str:
    (found,) = studio.get("/api/label")
    return f"/api/label/{found['id']}"


def test_annotators_see_no_source_and_sides_are_shuffled(studio: Studio) -> None:
    place = file(studio)
    sides = {"ann": 0, "bob": 0}
    for who in sides:
        for _ in range(30):
            found = studio.get(f"{place}/next", annotator=who)
            assert "secret" not in json.dumps(found) and "chosen" not in json.dumps(found)
            better = next(n for n, text in enumerate(found["item"]["responses"]) if text.startswith("better"))
            sides[who] += better == 0
            studio.post(f"{place}/vote", 201, annotator=who, item=found["item"]["id"], choice=[better], seconds=2)
        assert studio.get(f"{place}/next", annotator=who)["item"] is None
    assert all(5 < count < 25 for count in sides.values())
    assert found["guidelines"] == "Prefer what is true."
    (listed,) = studio.get("/api/label")
    report = listed["report"]
    assert report["cohen"]["ann and bob"] == 1.0 and report["labelled"] == report["usable"] == 30 and report["pace"] == 2
    rows = [json.loads(line) for line in studio.get(f"{place}/labels.jsonl").splitlines()]
    assert len(rows) == 30 and all(
        row["chosen"].startswith("better") and set(row) == {"prompt", "chosen", "rejected"} for row in rows
    )


@pytest.mark.parametrize("choice", [[2], [-1], [0, 0], [], "best", ["0"], [True], 3, None, [[0]]])
def test_votes_that_make_no_sense_are_refused(studio: Studio, choice: object) -> None:
    place = file(studio)
    item = studio.get(f"{place}/next", annotator="ann")["item"]["id"]
    studio.post(f"{place}/vote", 400, annotator="ann", item=item, choice=choice)
    assert studio.get(f"{place}/next", annotator="ann")["done"] == 0


def test_a_vote_counts_once_and_can_be_undone(studio: Studio) -> None:
    place = file(studio)
    item = studio.get(f"{place}/next", annotator="ann")["item"]["id"]
    sent = {"annotator": "ann", "item": item, "choice": [0], "nonce": "n1"}
    studio.post(f"{place}/vote", 201, **sent)
    studio.post(f"{place}/vote", 201, **sent)  # sent again because the answer was lost
    studio.post(f"{place}/vote", 400, **{**sent, "nonce": "n2", "choice": [1]})
    studio.post(f"{place}/vote", 400, annotator="ann", item="0" * 16, choice=[0])
    studio.post(f"{place}/vote", 400, annotator=" ", item=item, choice=[0])
    assert studio.get(f"{place}/next", annotator="ann")["done"] == 1
    assert studio.post(f"{place}/undo", annotator="ann")["undone"] == item
    assert studio.get(f"{place}/next", annotator="ann")["item"]["id"] == item
    assert studio.post(f"{place}/undo", annotator="ann")["undone"] is None


def test_annotators_at_once_lose_no_vote(studio: Studio) -> None:
    place, errors = file(studio), []

    def work(who: str) -> None:
        mine = Studio(studio.root)  # a server of its own over the same files
        try:
            for _ in range(30):
                item = mine.get(f"{place}/next", annotator=who)["item"]["id"]
                mine.post(f"{place}/vote", 201, annotator=who, item=item, choice="tie" if who == "a2" else [0])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[f"a{n}"]) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert studio.get("/api/label")[0]["report"]["annotators"] == {"a0": 30, "a1": 30, "a2": 30}


def test_answers_alone_in_their_step_are_paired_with_those_of_earlier_steps(tmp_path: Path) -> None:
    """As PPO with one answer to each prompt writes them."""
    with RunWriter.create(tmp_path / "run", {"format": 2, "name": "ppo", "stages": STAGES}) as writer:
        for step, texts in enumerate([["a1", "b1"], ["a2", "same"], ["a3", "same"]], 1):
            rows = [rollout(place, 0, text) for place, text in enumerate(texts)]
            writer.rollouts("rl", step, rows, None, arrays(rows))
    studio, run = Studio(tmp_path), path_id(tmp_path / "run")
    assert studio.post("/api/label", 201, run=run, stage="rl", name="first", count=9)["rows"] == 2
    lines = (tmp_path / "labels" / "first.jsonl").read_text().splitlines()
    assert [json.loads(line)["responses"] for line in lines] == [["a3", "a2"], ["same", "b1"]]


def test_comparisons_are_made_of_a_runs_rollouts(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    studio, run = Studio(tmp_path), path_id(tmp_path / "run")
    made = studio.post("/api/label", 201, run=run, stage="rl", name="first", count=3)
    assert made["rows"] == 3
    row = json.loads((tmp_path / "labels" / "first.jsonl").read_text().splitlines()[0])
    assert len(set(row["responses"])) == 2 and row["prompt"].startswith("what is")
    assert "already" in studio.post("/api/label", 400, run=run, stage="rl", name="first", count=3)["error"]
    for name in ("../x", "a/b", "", "a" * 61, ".hidden"):
        studio.post("/api/label", 400, run=run, stage="rl", name=name, count=3)
    studio.post("/api/label", 404, run=run, stage="../..", name="x", count=3)


def test_the_votes_of_a_name_with_spaces_are_counted(studio: Studio) -> None:
    place = file(studio)
    item = studio.get(f"{place}/next", annotator=" ann  b ")["item"]["id"]
    assert studio.post(f"{place}/vote", 201, annotator=" ann  b ", item=item, choice=[0])["done"] == 1


def test_a_vote_that_waits_for_another_writer_holds_up_no_other_page(studio: Studio) -> None:
    place = file(studio)
    item = studio.get(f"{place}/next", annotator="ann")["item"]["id"]
    vote = {"annotator": "ann", "item": item, "choice": [0]}

    async def both() -> None:
        transport = httpx.ASGITransport(app=studio.client.app)
        async with httpx.AsyncClient(transport=transport, base_url=HERE, headers={"x-studio-token": "secret"}) as client:
            voting = asyncio.ensure_future(client.post(f"{place}/vote", json=vote))
            await asyncio.sleep(0.2)
            assert (await client.get("/api/recipes")).status_code == 200 and not voting.done()
            other.execute("ROLLBACK")
            assert (await voting).status_code == 201

    with closing(sqlite3.connect(studio.root / "labels" / "pairs.labels.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # as `posttrain label` in a terminal
        began = time.monotonic()
        asyncio.run(both())
        assert time.monotonic() - began < 20
