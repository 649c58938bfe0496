"""Pairs that models take part in: sampled on the spot through the model server, and asked next where reward models disagree."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from runs_for_tests import make_run
from studio_for_tests import Studio

from posttrain.studio import models
from posttrain.studio.library import path_id
from posttrain.studio.models import Server


class Handler(BaseHTTPRequestHandler):
    """A model that answers with its seed, and two reward models: one counts letters a, the other letters b."""

    asked: list[dict[str, Any]] = []  # noqa: RUF012
    scorers: list[str] = ["reward", "other"]  # noqa: RUF012
    slow = 0.0

    def do_GET(self) -> None:
        cards = [{"id": "rl", "kind": "policy"}, *({"id": n, "kind": "reward_model"} for n in self.scorers)]
        self.answer(cards if self.path.endswith("/score") else [{"id": "rl"}])

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(sent)
        if self.path.endswith("/score"):
            letter = "a" if sent["model"] == "reward" else "b"
            counts = [float(item["answer"].count(letter)) for item in sent["items"]]
            self.answer([{"reward": count, "parts": {}} for count in counts])
            return
        time.sleep(self.slow)
        same = sent["messages"][0]["content"] == "same"
        texts = ["one", "one"] if same else [f"{sent['seed']} <b>left", f"{sent['seed']} right"]
        self.answer([{"message": {"content": text}} for text in texts], "choices")

    def answer(self, found: object, key: str = "data") -> None:
        body = json.dumps({key: found}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def studio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Studio]:
    make_run(tmp_path / "run", 10)
    Handler.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/v1"
        monkeypatch.setattr(models, "_start", lambda directory: Server(address))
        yield Studio(tmp_path)
        server.shutdown()


def test_pairs_are_sampled_from_a_stage_for_typed_prompts_and_shown_blind(studio: Studio) -> None:
    model = f"{path_id(studio.root / 'run')}/rl"
    typed = {"prompts": ["first?", "second?"], "temperature": 0.5}
    made = studio.post("/api/label", 201, name="now", model=model, count=6, **typed)
    assert made["rows"] == 6 and {sent["temperature"] for sent in Handler.asked} == {0.5}
    rows = [json.loads(line) for line in (studio.root / "labels" / "now.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["first?", "second?"] * 3
    assert len({json.dumps(row["responses"]) for row in rows}) == 6  # a prompt that comes again has other answers
    place = f"/api/label/{made['id']}"
    found = studio.get(f"{place}/next", annotator="ann")
    assert found["items"] == 6 and "rl" not in json.dumps(found["item"]) and found["sampled"]["running"] is False
    studio.post(f"{place}/vote", 201, annotator="ann", item=found["item"]["id"], choice=[0])
    assert len(studio.get(f"{place}/labels.jsonl").splitlines()) == 1


def test_the_prompts_of_the_run_are_used_where_none_are_typed(studio: Studio) -> None:
    model = f"{path_id(studio.root / 'run')}/rl"
    studio.get(f"/api/runs/{path_id(studio.root / 'run')}/rollouts")  # makes the index
    studio.post("/api/label", 201, name="own", model=model, count=2)
    rows = [json.loads(line) for line in (studio.root / "labels" / "own.jsonl").read_text().splitlines()]
    assert all(row["prompt"].startswith("what is") for row in rows)


def test_the_first_pairs_can_be_labelled_while_others_are_sampled(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "slow", 0.06)
    monkeypatch.setattr("posttrain.studio.pages_label.WAIT_SECONDS", 0.1)
    model = f"{path_id(studio.root / 'run')}/rl"
    made = studio.post("/api/label", 201, name="long", model=model, count=20, prompts=["same", "other?"])
    assert 0 < made["rows"] < 10
    seen: set[int] = set()
    for _ in range(200):
        now = studio.get(f"/api/label/{made['id']}/next", annotator="ann")
        seen.add(now["items"])
        if not now["sampled"]["running"]:
            break
        time.sleep(0.05)
    # the prompt whose answers are always the same gives none, and is not counted on
    assert now["items"] == 10 and now["sampled"]["total"] == 10 and len(seen) > 1


def test_what_cannot_be_sampled_is_refused_in_words(studio: Studio) -> None:
    model = f"{path_id(studio.root / 'run')}/rl"

    def refused(**sent: Any) -> str:
        return str(
            studio.post("/api/label", 400, **{"name": "x", "model": model, "count": 2, "prompts": ["a"], **sent})["error"]
        )

    assert "temperature" in refused(temperature=0) and "temperature" in refused(temperature="hot")
    assert "at most 2000" in refused(prompts=["a"] * 2001) and "4000" in refused(prompts=["a" * 4001])
    assert "is served" in refused(model=f"{path_id(studio.root / 'run')}/../../etc")
    assert "no model server" in refused(model="elsewhere")
    assert "raise the temperature" in refused(prompts=["same"])
    assert not (studio.root / "labels" / "x.jsonl").exists()


def ordered(studio: Studio, place: str, run: str) -> list[str]:
    found = []
    while (item := studio.get(f"{place}/next", annotator="ann", order="disagreement", run=run)["item"]) is not None:
        found.append(item["prompt"])
        studio.post(f"{place}/vote", 201, annotator="ann", item=item["id"], choice="tie")
    return found


def test_the_next_pair_is_where_the_runs_reward_models_disagree_most(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"agree": ["aabb", ""], "differ": ["aaa", "bbb"], "little": ["a", "b"]}
    (studio.root / "labels").mkdir()
    rows = [{"prompt": prompt, "responses": two} for prompt, two in texts.items()]
    for name in ("several", "one"):
        (studio.root / "labels" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = {one["name"]: f"/api/label/{one['id']}" for one in studio.get("/api/label")}
    run = path_id(studio.root / "run")
    # differences a - b: agree 2 and 2, differ 3 and -3, little 1 and -1
    assert ordered(studio, places["several"], run) == ["differ", "little", "agree"]
    monkeypatch.setattr(Handler, "scorers", ["reward"])
    # one reward model: least sure first; it gives 1 against 0, 2 against 0, 3 against 0
    assert ordered(studio, places["one"], run) == ["little", "agree", "differ"]
    assert sum(sent["model"] == "reward" for sent in Handler.asked) == 2  # a file is scored once
    studio.get(f"{places['one']}/next", 404, annotator="bob", order="disagreement", run="../..")


def test_a_run_without_reward_models_says_so(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    (studio.root / "labels").mkdir()
    (studio.root / "labels" / "a.jsonl").write_text(json.dumps({"prompt": "p", "responses": ["a", "b"]}) + "\n")
    monkeypatch.setattr(Handler, "scorers", [])
    place = f"/api/label/{studio.get('/api/label')[0]['id']}"
    wanted = {"annotator": "ann", "order": "disagreement", "run": path_id(studio.root / "run")}
    assert "no reward model" in studio.get(f"{place}/next", 400, **wanted)["error"]
    assert studio.get(f"{place}/next", annotator="ann", order="random")["item"] is not None
    assert studio.get("/api/label/scorers") == []
    monkeypatch.setattr(Handler, "scorers", ["reward"])  # the run has gone on
    assert studio.get(f"{place}/next", **wanted)["item"] is not None
