"""The watchdog: who hangs is written down while it hangs, here and in the processes that work for the run; nobody is harmed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from sampler_for_tests import completion

from posttrain.engine.forked import EngineWorkers
from posttrain.engine.scheduler import Work
from posttrain.monitor import watchdog as watchdog_module
from posttrain.monitor.watchdog import WRITING, Watchdog, forks
from posttrain.system import wire
from posttrain.system.workers import WorkerPool
from posttrain.tasks.base import Task
from posttrain.types import Problem, Request, Sampling, Score, Statistics

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes as Linux shows them")


def until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is late on a busy machine does not write into the stacks of the next."""
    monkeypatch.setattr(watchdog_module, "INTERVAL", 1.0)
    monkeypatch.setattr(watchdog_module, "WRITING", 0.5)


class Hanging(Task):
    """A reward that waits for a file."""

    isolated = True  # type: ignore[assignment]
    seconds = 30.0  # type: ignore[assignment]

    def __init__(self, gate: Path):
        self.gate = gate

    def score(self, problem: Problem, response: str) -> Score:
        self.wait_for_the_gate()
        return Score(1.0)

    def wait_for_the_gate(self) -> None:
        assert until(self.gate.exists)

    def problems(self, split: str, level: int | None = None) -> list[Problem]:
        return []


@pytest.mark.usefixtures("apart")
def test_a_step_that_hangs_shows_its_threads_and_its_workers(tmp_path: Path) -> None:
    path, gate = tmp_path / "alarms" / "rl-stacks.txt", tmp_path / "gate"
    with WorkerPool([Hanging(gate)], count=2) as workers, closing(Watchdog(path)) as watchdog:

        async def scored() -> list[Score]:
            jobs = [asyncio.create_task(workers.score(workers.tasks[0], Problem("p", ""), r)) for r in "ab"]
            await asyncio.sleep(0.1)
            with watchdog.step(0.2):
                assert until(lambda: path.read_text().count("in wait_for_the_gate") == 2), path.read_text()
            gate.touch()
            return await asyncio.gather(*jobs)

        assert [score.value for score in asyncio.run(scored())] == [1.0, 1.0], "they go on as before"
        pids = [worker.pid for worker in workers.workers]
    said = path.read_text()
    assert "in until" in said and "test_watchdog.py" in said
    assert all(f"process {pid}, a worker of process {os.getpid()}" in said for pid in pids)


def test_programs_are_not_asked_for_they_would_end(tmp_path: Path) -> None:
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        with closing(Watchdog(tmp_path / "x-stacks.txt")) as watchdog:
            assert program.pid not in forks()
            with watchdog.step(0.05):
                time.sleep(1.0)
        assert program.poll() is None
    finally:
        program.kill()
        program.wait(10)


def test_a_step_in_time_leaves_nothing(tmp_path: Path) -> None:
    threads = threading.active_count()
    with closing(Watchdog(tmp_path / "alarms" / "x-stacks.txt")) as watchdog:
        for limit in (None, 5.0, 5.0):
            with watchdog.step(limit):
                pass
    assert not (tmp_path / "alarms").exists()
    assert threading.active_count() == threads
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_handler_of_somebody_else_stays(tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        with closing(Watchdog(tmp_path / "x-stacks.txt")):
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert until(lambda: len(received) == 2)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "x-stacks.txt"
    with closing(Watchdog(path)):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert "in test_by_hand" in path.read_text()


class Waiting:
    """Stands for a scheduler in a worker that waits until a file is there."""

    def __init__(self, gate: Path):
        self.gate, self.works, self.statistics = gate, list[Work](), Statistics()

    @property
    def busy(self) -> bool:
        return bool(self.works)

    def submit(self, works: Sequence[Work]) -> None:
        self.works += works

    def poll(self) -> wire.Finished:
        assert until(self.gate.exists)
        works, self.works = self.works, []
        return [(r, completion([r.seed])) for work in works for r in work.requests]


@pytest.mark.usefixtures("apart")
def test_generation_workers_are_asked_too(tmp_path: Path) -> None:
    path, gate = tmp_path / "rl-stacks.txt", tmp_path / "gate"

    def open_the_gate() -> None:
        until(lambda: path.read_text().count(", a worker of process") == 2)
        time.sleep(5 * WRITING)
        gate.touch()

    def answers() -> list[int]:
        works = [Work(n, (Request((1,), n, Sampling(4), n),), np.array([1])) for n in range(4)]
        pool.submit(works, 2, lambda: Waiting(gate))  # type: ignore[arg-type, return-value]
        found: list[int] = []
        while pool.busy:
            found += [int(c.ids[0]) for _, c in pool.poll(None)]
        return sorted(found)

    pool, opener = EngineWorkers(), threading.Thread(target=open_the_gate)
    with closing(Watchdog(path)) as watchdog, closing(pool):
        gate.touch()
        assert answers() == [0, 1, 2, 3], "they are there"
        gate.unlink()
        opener.start()
        with watchdog.step(0.5):
            found = answers()
        opener.join(30)
    assert found == [0, 1, 2, 3] and pool.past.failed_workers == 0
    asked = path.read_text().split("\nprocess ")[1:]
    assert len(asked) == 2 and all("forked.py" in stacks and "in _work" in stacks for stacks in asked), asked
