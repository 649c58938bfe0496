"""Rewards in worker processes: in order, in parallel, in bounded time, and nobody left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from children_for_tests import no_child_left

from posttrain.scoring import Workers, score_one
from posttrain.types import Problem, Score

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


class Told:
    """Does what the response says."""

    def __init__(self, folder: Path | None = None):
        self.folder = folder

    def score(self, problem: Problem, response: str) -> Score:
        kind, _, rest = response.partition(" ")
        if kind == "sleep":
            time.sleep(float(rest))
        if kind == "raise":
            raise ValueError(rest)
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "die-once":
            assert self.folder is not None
            mark = self.folder / rest
            if not mark.exists():
                mark.write_text("")
                os._exit(3)
        if kind == "child":
            if os.fork() == 0:
                time.sleep(60)
            time.sleep(60)
        return Score(float(len(response)), {"a": 0.5}, ((3, 1.0),), problem.answer)


class Later:
    async def score(self, problem: Problem, response: str) -> Score:
        return Score(1.0)


PROBLEM = Problem("p", "q", "correct", facts={"n": [1, 2]})


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    with no_child_left():
        yield


def test_scores_come_back_whole_and_in_order() -> None:
    with Workers(Told(), 3) as workers:
        responses = [f"sleep {0.05 * (i % 3)}" + "x" * 0 for i in range(6)] + ["ä" * 70_000]
        workers.submit(PROBLEM, responses)
        found = workers.results()
        assert [s.value for s in found] == [float(len(r)) for r in responses]
        assert all(s.parts == {"a": 0.5} and s.steps == ((3, 1.0),) and s.outcome == "correct" for s in found)
        assert workers.results() == []
        workers.submit(PROBLEM, ["again"])
        assert workers.results()[0].value == 5.0


def test_they_work_side_by_side() -> None:
    with Workers(Told(), 4) as workers:
        workers.submit(PROBLEM, ["sleep 0"] * 4)
        workers.results()  # everyone is up
        began = time.monotonic()
        workers.submit(PROBLEM, ["sleep 0.4"] * 4)
        assert all(s.valid for s in workers.results())
        assert time.monotonic() - began < 1.2


def test_one_that_hangs_fails_alone_and_in_time() -> None:
    began = time.monotonic()
    with Workers(Told(), 2, seconds=0.5) as workers:
        workers.submit(PROBLEM, ["ok", "sleep 60", "fine", "child", "good"])
        found = workers.results()
    assert [s.valid for s in found] == [True, False, True, False, True]
    assert found[1].failure == "timeout: no score within 0.5 s" and found[1].value is None
    assert time.monotonic() - began < 8


def test_an_error_is_shown_and_a_death_is_retried(tmp_path: Path) -> None:
    with Workers(Told(tmp_path), 2) as workers:
        workers.submit(PROBLEM, ["raise no such file", "die", "die-once mark", "ok"])
        found = workers.results()
    assert found[0].failure == "ValueError: no such file"
    assert found[1].failure == "the process that computed the reward died"
    assert found[2].valid and found[3].valid


def test_an_idle_worker_that_was_killed_is_replaced() -> None:
    with Workers(Told(), 1) as workers:
        workers.submit(PROBLEM, ["one"])
        workers.results()
        os.kill(workers.workers[0].pid, signal.SIGKILL)
        time.sleep(0.1)
        workers.submit(PROBLEM, ["two"])
        assert workers.results()[0].valid


def test_asynchronous_rewards_are_awaited() -> None:
    assert score_one(Later(), PROBLEM, "x").value == 1.0  # type: ignore[arg-type]


def test_without_forks_rewards_are_computed_here() -> None:
    workers = Workers(Told(), 2)
    workers.able = False
    workers.submit(PROBLEM, ["ok", "raise x"])
    assert [s.valid for s in workers.results()] == [True, False] and not workers.workers


def test_a_worker_that_does_not_listen_is_replaced_in_time() -> None:
    """It was stopped while idle: a response larger than a pipe holds would wait for it without end."""
    with Workers(Told(), count=1, seconds=1.0) as workers:
        workers.submit(Problem("p", ""), ["first"])
        workers.results()
        (stopped,) = (worker.pid for worker in workers.workers)
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        workers.submit(Problem("p", ""), ["second " + 500_000 * "x"])
        (score,) = workers.results()
        assert score.valid and time.monotonic() - began < 20
        assert [worker.pid for worker in workers.workers] != [stopped]
