"""Votes of people: what becomes of them as data, what is kept, and how far annotators agree."""

from __future__ import annotations

import errno
import json
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from posttrain.data import labels as labels_module
from posttrain.data.labels import BAD, SKIP, TIE, Choice, Labels
from posttrain.data.preferences import read_preferences
from posttrain.errors import UserError
from posttrain.evals.agreement import report
from posttrain.models.tiny import character_tokenizer


def labels(tmp_path: Path, count: int = 4, responses: int = 2) -> Labels:
    file = tmp_path / "asked.jsonl"
    rows = [{"prompt": f"p{n}", "responses": [f"r{n}{k}" for k in range(responses)]} for n in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Labels.read(file)


def say(found: Labels, who: str, prompt: str, choice: Choice) -> None:
    """A vote by what is said, not by the side on which it was shown: `choice` names responses by their last digit."""
    item = next(item for item in found.items.values() if item.prompt == prompt)
    shown = [str(item.responses[place])[-1] for place in item.order(who)]
    found.vote(who, item.id, choice if isinstance(choice, str) else [shown.index(str(k)) for k in choice])


def test_the_majority_decides_and_what_nobody_prefers_is_left_out(tmp_path: Path) -> None:
    found = labels(tmp_path, 5)
    for who, choices in {
        "a": [[0], [0], TIE, BAD, SKIP],
        "b": [[0], [1], TIE, [1], SKIP],
        "c": [[1], TIE, [0], BAD, SKIP],
    }.items():
        for number, choice in enumerate(choices):
            say(found, who, f"p{number}", choice)
    rows = {row["prompt"]: row for row in found.rows()}
    assert {prompt: row["chosen"] for prompt, row in rows.items()} == {"p0": "r00", "p2": "r20", "p3": "r31"}
    said = report(found)
    assert (said.labelled, said.usable, said.annotators) == (4, 3, {"a": 4, "b": 4, "c": 4})


def test_two_who_write_at_once_lose_no_vote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, other = labels(tmp_path, 2), labels(tmp_path, 2)
    say(slow, "a", "p0", [0])
    written, began = labels_module.atomic_write, threading.Event()

    def wait(path: Path, text: str) -> None:
        if not began.is_set():
            began.set()
            time.sleep(0.5)
        written(path, text)

    monkeypatch.setattr(labels_module, "atomic_write", wait)
    thread = threading.Thread(target=slow.write)
    thread.start()
    assert began.wait(10)
    say(other, "b", "p1", [0])
    assert other.write() == 2
    thread.join()
    assert len(slow.out.read_text().splitlines()) == 2


def test_rankings_become_scores_that_training_reads(tmp_path: Path) -> None:
    found = labels(tmp_path, 2, responses=3)
    say(found, "a", "p0", [2, 0, 1])
    say(found, "a", "p1", [1])  # the best alone: the others are equal
    first, second = found.rows()
    assert dict(zip(first["responses"], first["scores"], strict=True)) == {"r02": 1.0, "r00": 0.5, "r01": 0.0}
    assert dict(zip(second["responses"], second["scores"], strict=True)) == {"r11": 1.0, "r10": 0.0, "r12": 0.0}
    assert found.write() == 2
    read = read_preferences(found.out, character_tokenizer("pr0123456789"), 100)
    assert read.kind == "ranking" and len(read.units) == 2 and not read.skipped


def test_nothing_is_ever_removed_from_the_log(tmp_path: Path) -> None:
    found = labels(tmp_path)
    say(found, "a", "p0", [0])
    found.undo("a")
    say(found, "a", "p0", [1])
    with sqlite3.connect(found.store) as store:
        assert [kind for (kind,) in store.execute("SELECT kind FROM log ORDER BY id")] == ["vote", "undo", "vote"]
    (vote,) = found.votes()
    assert vote.choice == [next(n for n, r in enumerate(found.items[vote.item].responses) if str(r)[-1] == "1")]
    assert sorted(vote.shown) == [0, 1]


def test_a_bias_for_a_side_shows(tmp_path: Path) -> None:
    found = labels(tmp_path, 40)
    for item in found.items.values():
        found.vote("lazy", item.id, [0])
    side = report(found).first_side
    assert side is not None and side.value == 1.0 and side.low > 0.9
    for other in range(9):  # the same prompts, shown to more people
        for item in found.items.values():
            found.vote(f"lazy{other}", item.id, [0])
    assert report(found).first_side == side
    shown = [item.order("lazy")[0] for item in found.items.values()]
    assert 10 < sum(shown) < 30  # so that it costs nothing but noise


def test_what_was_answered_survives_a_kill(tmp_path: Path) -> None:
    labels(tmp_path, 200)
    program = (
        f"from posttrain.data.labels import Labels\nfound = Labels.read({str(tmp_path / 'asked.jsonl')!r})\n"
        "for item in found.items.values():\n    found.vote('a', item.id, [0])\n    print(item.id, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as voter:
        assert voter.stdout
        answered = [voter.stdout.readline().strip() for _ in range(20)]
        voter.send_signal(signal.SIGKILL)
        answered += voter.stdout.read().split()
        voter.wait(10)
    kept = {vote.item for vote in Labels.read(tmp_path / "asked.jsonl").votes()}
    assert set(answered) <= kept and len(kept) <= len(answered) + 1


@pytest.mark.parametrize("name", ["", "  ", "x" * 61, "a\x00b", "a\u202eb"])
def test_an_annotator_has_a_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="give a name"):
        labels(tmp_path).next(name)


def test_a_full_disk_is_one_line_and_keeps_the_votes_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = labels(tmp_path, 9)
    found.votes()
    connection = found._local.connection
    connection.execute(f"PRAGMA max_page_count={connection.execute('PRAGMA page_count').fetchone()[0] + 2}")
    full = r"^labels cannot be written to .*asked.labels.jsonl and asked.labels.sqlite: database or disk is full; check space"

    def vote(items: list[str]) -> None:
        for item in items:
            found.vote("ann", item, [0], comment="x" * 4000)

    vote([*found.items][:1])
    with pytest.raises(UserError, match=full):
        vote([*found.items][1:])
    given = len(found.votes())
    connection.execute("PRAGMA max_page_count=1000")
    found.vote("ann", [*found.items][given], [0])

    def nowhere(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("posttrain.data.labels.atomic_write", nowhere)
        with pytest.raises(UserError, match="No space left on device; check space and rights there; earlier votes are kept"):
            found.write()
    assert found.write() == given + 1
