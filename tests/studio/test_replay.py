"""Replays from the page: who may start one, what the command is asked, how far it is, and what it found."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs_for_tests import make_run
from studio_for_tests import Studio

from posttrain import cli
from posttrain.runs.lock import Lock
from posttrain.studio import jobs, pages_replay
from posttrain.studio.library import path_id

MEMBER = {"number": 3, "prompt": "p" * 5000, "text": "<img src=x>", "before": -1.0, "after": -0.5}
FOUND = {"stage": "rl", "found": {"items": [{"number": n, "share": 0.5, "members": [dict(MEMBER)]} for n in range(3)]}}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[list[str], Path]]]:
    """The commands that were started, in place of which a process waits until it is ended."""
    found: list[tuple[list[str], Path]] = []
    processes: list[subprocess.Popen[bytes]] = []

    def run_apart(words: list[str], log: Path) -> subprocess.Popen[bytes]:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("recomputes rl\nstep 3 of 10\n")
        found.append((words, log))
        processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return processes[-1]

    monkeypatch.setattr(jobs, "_run_apart", run_apart)
    yield found
    for process in processes:
        process.kill()
        process.wait(10)


@pytest.fixture
def studio(tmp_path: Path) -> Studio:
    make_run(tmp_path / "one", 10)
    return Studio(tmp_path)


def place(studio: Studio) -> str:
    return f"/api/runs/{path_id(studio.root / 'one')}/replay"


def ended(studio: Studio, **query: Any) -> Any:
    for _ in range(100):
        found = studio.get(place(studio), **query)
        if found["state"] != "running":
            return found
        time.sleep(0.05)
    pytest.fail("it is still running")


def test_a_replay_runs_in_the_background_and_its_result_is_shown(
    studio: Studio, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"stage": "rl", "step": 10, "without": 2, "prompt": "--json", "answer": "$(x)"}
    assert studio.get(place(studio), **asked)["state"] == "none"
    assert studio.post(place(studio), 201, **asked) == {"state": "running"}
    assert studio.get(place(studio), **asked) == {"state": "running", "said": "step 3 of 10", "found": None}
    studio.post(place(studio), 201, **asked)
    [(words, log)] = started  # it was under way
    options = cli.parse(words)
    assert (options.command, options.run, options.place) == ("replay", studio.root / "one", "rl/10")
    assert (options.without, options.update, options.prompt, options.answer) == (2, 1, "--json", "$(x)")
    assert not options.allow_code and options.save == log.with_suffix(".json")
    assert studio.get(place(studio), stage="rl", step=10)["state"] == "none", "another question"
    options.save.write_text(json.dumps(FOUND))
    studio.post(f"{place(studio)}/stop", **asked)
    monkeypatch.setattr(pages_replay, "ITEMS", 2)
    found = ended(studio, **asked)
    assert found["state"] == "done" and found["found"]["found"]["left"] == 1
    assert len(found["found"]["found"]["items"][0]["members"][0]["prompt"]) == 2000


def test_one_that_fails_or_is_stopped_says_why(studio: Studio, started: Any) -> None:
    studio.post(place(studio), 201, stage="rl", step=3)
    studio.post(f"{place(studio)}/stop", stage="rl", step=3)
    found = ended(studio, stage="rl", step=3)
    assert (found["state"], found["said"]) == ("failed", "stopped from the page")
    assert studio.post(f"{place(studio)}/stop", 400, stage="rl", step=3)["error"] == "no such replay is running"
    studio.post(place(studio), 201, stage="rl", step=3)
    assert len(started) == 2, "it can be asked again"


def test_the_command_itself_refuses_what_it_cannot_do(studio: Studio) -> None:
    """The run of this test was never trained: its configuration cannot be read."""
    studio.post(place(studio), 201, stage="rl", step=3)
    for _ in range(600):
        found = studio.get(place(studio), stage="rl", step=3)
        if found["state"] != "running":
            break
        time.sleep(0.1)
    assert found["state"] == "failed" and found["said"].startswith("posttrain: ")


def test_a_change_needs_the_token_and_an_origin_of_ours(studio: Studio, started: Any) -> None:
    sent = {"stage": "rl", "step": 3}
    for verb in ("", "/stop"):
        for headers, code in (
            ({}, 401),
            ({"x-studio-token": "wrong"}, 401),
            ({"x-studio-token": "secret", "origin": "http://evil.example"}, 403),
            ({"x-studio-token": "secret", "host": "evil.example"}, 421),
        ):
            answer = studio.client.post(place(studio) + verb, json=sent, headers=headers)
            assert answer.status_code == code
    assert not started


@pytest.mark.parametrize(
    ("sent", "code", "line"),
    [
        ({"stage": "other", "step": 3}, 404, "no such stage in this run"),
        ({"stage": "../rl", "step": 3}, 404, "no such stage in this run"),
        ({"stage": "rl"}, 400, "step must be a whole number"),
        ({"stage": "rl", "step": "3"}, 400, "step must be a whole number"),
        ({"stage": "rl", "step": 3, "without": -1}, 400, "without must be a whole number"),
        ({"stage": "rl", "step": 3, "prompt": 7}, 400, "prompt must be a text of at most 10000 characters, none of them NUL"),
    ],
)
def test_bad_questions_are_refused(studio: Studio, started: Any, sent: dict[str, Any], code: int, line: str) -> None:
    assert studio.post(place(studio), code, **sent)["error"] == line
    assert not started


def test_a_live_run_is_not_replayed(studio: Studio, started: Any) -> None:
    lock = Lock(studio.root / "one" / "lock")
    try:
        line = "one is running; replay it when it has ended or was stopped"
        assert studio.post(place(studio), 400, stage="rl", step=3)["error"] == line
    finally:
        lock.release()
    assert not started
