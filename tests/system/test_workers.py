"""Rewards in worker processes: whole, in parallel, in bounded time, and no process left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children_for_tests import children, no_child_left
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.errors import GuardStop, UserError
from posttrain.system import workers
from posttrain.system.workers import WorkerPool
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Task
from posttrain.tasks.jsonl import Jsonl
from posttrain.types import Problem, Score

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


class Isolated(Task):
    isolated = True  # type: ignore[assignment]

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return [PROBLEM]


class Obedient(Isolated):
    """Does what the response says."""

    def __init__(self, folder: Path | None = None, seconds: float = 10.0):
        self.folder, self.limit = folder, seconds

    @property
    def seconds(self) -> float:
        return self.limit

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


class Later(Isolated):
    async def score(self, problem: Problem, response: str) -> Score:  # type: ignore[override]
        await asyncio.sleep(0.01)
        return Score(1.0)


PROBLEM = Problem("p", "q", "correct", facts={"n": [1, 2]})


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    with no_child_left():
        yield


def scores(pool: WorkerPool, jobs: Sequence[tuple[Problem, str]], task: Task | None = None) -> list[Score]:
    """Scores of responses, all asked for at once, in their order."""

    async def gathered() -> list[Score]:
        return await asyncio.gather(*(pool.score(task or pool.tasks[0], problem, response) for problem, response in jobs))

    return asyncio.run(gathered())


def of(responses: Sequence[str]) -> list[tuple[Problem, str]]:
    return [(PROBLEM, response) for response in responses]


def test_scores_come_back_whole_and_in_order() -> None:
    with WorkerPool([Obedient()], 3) as pool:
        responses = [f"sleep {0.05 * (i % 3)}" for i in range(6)] + ["ä" * 70_000]
        found = scores(pool, of(responses))
        assert [s.value for s in found] == [float(len(r)) for r in responses]
        assert all(s.parts == {"a": 0.5} and s.steps == ((3, 1.0),) and s.outcome == "correct" for s in found)
        processes = {worker.pid for worker in pool.workers}
        assert scores(pool, of(["again"]))[0].value == 5.0
        assert {worker.pid for worker in pool.workers} == processes, "the same workers serve a later step"


def test_workers_score_in_parallel() -> None:
    with WorkerPool([Obedient()], 4) as pool:
        scores(pool, of(["sleep 0"] * 4))  # all are started
        began = time.monotonic()
        assert all(s.valid for s in scores(pool, of(["sleep 2"] * 4)))
        assert time.monotonic() - began < 6


def test_a_score_that_hangs_fails_alone_and_in_time() -> None:
    began = time.monotonic()
    with WorkerPool([Obedient(seconds=2.0)], 2) as pool:
        found = scores(pool, of(["ok", "sleep 60", "fine", "child", "good"]))
    assert [s.valid for s in found] == [True, False, True, False, True]
    assert found[1].failure == "timeout: no score within 2 s" and found[1].value is None
    assert time.monotonic() - began < 20


SLOW = """import time
time.sleep({seconds})


def right(response):
    time.sleep(60 if response == "hang" else 0)
    return 1.0
"""


def slow(folder: Path, seconds: float) -> Jsonl:
    (folder / "slow.py").write_text(SLOW.format(seconds=seconds))
    (folder / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    return Jsonl(str(folder / "rows.jsonl"), reward=f"{folder}/slow.py:right", held_out=0, score_seconds=2.0)


def test_the_import_of_a_reward_does_not_count_as_its_time(tmp_path: Path) -> None:
    began = time.monotonic()
    with WorkerPool([slow(tmp_path, 3)], 1) as pool:
        found = scores(pool, of(["first", "hang", "last"]))
    assert [s.value for s in found] == [1.0, None, 1.0]
    assert found[1].failure == "timeout: no score within 2 s"
    assert time.monotonic() - began < 40


def test_an_import_that_hangs_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "IMPORT_SECONDS", 1.0)
    with WorkerPool([slow(tmp_path, 60)], 1) as pool:
        (found,) = scores(pool, of(["first"]))
    assert found.failure == "timeout: the import of a file took more than 1 s"


def test_a_score_that_came_while_this_process_was_busy_does_not_end_the_next_one() -> None:
    with WorkerPool([Obedient(seconds=5.0)], 1) as pool:
        scores(pool, of(["started"]))

        async def busy() -> list[Score]:
            both = [asyncio.create_task(pool.score(pool.tasks[0], PROBLEM, text)) for text in ("first", "sleep 0.5")]
            await asyncio.sleep(0)
            time.sleep(1.0)  # the first is done, and nobody has looked
            pool._timeout(pool.workers[0])  # as where its time is over just then
            return await asyncio.gather(*both)

        assert all(score.valid for score in asyncio.run(busy()))


def test_an_error_is_named_and_a_death_is_retried(tmp_path: Path) -> None:
    with WorkerPool([Obedient(tmp_path)], 2) as pool:
        found = scores(pool, of(["raise no such file", "die", "die-once mark", "ok"]))
    assert str(found[0].failure).startswith(f"ValueError: no such file at {__file__} line ")
    assert found[1].failure == "the process that computed the reward died"
    assert found[2].valid and found[3].valid


def test_an_idle_worker_that_was_killed_is_replaced() -> None:
    with WorkerPool([Obedient()], 1) as pool:
        scores(pool, of(["one"]))
        os.kill(pool.workers[0].pid, signal.SIGKILL)
        time.sleep(0.1)
        assert scores(pool, of(["two"]))[0].valid


def test_asynchronous_rewards_are_awaited_in_a_worker() -> None:
    with WorkerPool([Later()], 1) as pool:
        assert scores(pool, of(["x"]))[0] == Score(1.0)


def test_without_forks_rewards_are_computed_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with WorkerPool([Obedient()], 2) as pool:
        assert [s.valid for s in scores(pool, of(["ok", "raise x"]))] == [True, False] and not pool.workers


def test_a_stopped_worker_is_replaced_in_time() -> None:
    """It was stopped while idle: a response larger than a pipe holds would wait for it without end."""
    with WorkerPool([Obedient(seconds=1.0)], count=1) as pool:
        scores(pool, of(["first"]))
        (stopped,) = (worker.pid for worker in pool.workers)
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        (score,) = scores(pool, of(["second " + 500_000 * "x"]))
        assert score.valid and time.monotonic() - began < 20
        assert [worker.pid for worker in pool.workers] != [stopped]


def test_a_step_that_is_given_up_frees_its_workers() -> None:
    with WorkerPool([Obedient()], 1) as pool:

        async def given_up() -> None:
            await asyncio.wait_for(pool.score(pool.tasks[0], PROBLEM, "sleep 60"), 0.3)

        with pytest.raises(TimeoutError):
            asyncio.run(given_up())
        began = time.monotonic()
        assert scores(pool, of(["ok"]))[0].valid and time.monotonic() - began < 5


def test_one_pool_serves_the_tasks_of_all_stages() -> None:
    first, second = Obedient(), Given(lambda p, r: 7.0)
    with WorkerPool([first, second, first], 2) as pool:
        assert len(pool.tasks) == 2
        assert scores(pool, of(["abc"]), first)[0].value == 3.0
        assert scores(pool, of(["abc"]), second)[0].value == 7.0
        with pytest.raises(UserError, match="were started without the task"):
            scores(pool, of(["abc"]), Obedient())


def test_a_task_that_is_not_isolated_starts_no_process() -> None:
    class InProcess(Obedient):
        isolated = False  # type: ignore[assignment]

    with no_child_left(), WorkerPool([InProcess()]) as pool:
        assert pool.tasks == []


def test_without_its_fork_server_a_run_ends_with_one_line() -> None:
    with WorkerPool([Obedient()], 1) as pool:
        scores(pool, of(["one"]))
        assert pool._server is not None
        worker = pool.workers[0].pid
        os.kill(pool._server._pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and Path(f"/proc/{worker}").exists():
            time.sleep(0.01)  # it ends with the fork server
        with pytest.raises(UserError, match="the process that starts reward workers died; resume the run"):
            scores(pool, of(["two"]))


ORPHANS = """
import asyncio, os, time
from posttrain.system.workers import WorkerPool
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Task
from posttrain.types import Problem, Score

class Slow(Task):
    isolated = True
    def problems(self, split, level=None): return []
    def score(self, problem, response):
        print(os.getpid(), os.getppid(), flush=True)
        time.sleep(600)
        return Score(1.0)

pool = WorkerPool([Slow()], 1)
asyncio.run(pool.score(pool.tasks[0], Problem("p", "q"), "r"))
"""


def test_workers_end_with_a_parent_that_is_killed() -> None:
    run = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    processes = [int(word) for word in run.stdout.readline().split()]
    assert len(processes) == 2 and run.pid not in processes
    run.kill()
    run.wait(10)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    run.stdout.close()


class Given(Isolated):
    """Scores by a function of the problem and the response."""

    def __init__(self, function: Callable[[Problem, str], Any]):
        self.function = function

    def score(self, problem: Problem, response: str) -> Any:
        return self.function(problem, response)


def both_ways(
    function: Callable[[Problem, str], Any], problems: list[Problem], response: str = "r"
) -> list[tuple[Score, Score]]:
    """Each problem's score in this process and in a worker."""
    task = Given(function)
    here = [asyncio.run(task.scored(problem, response)) for problem in problems]
    with WorkerPool([task], 1) as pool:
        return list(zip(here, scores(pool, [(problem, response) for problem in problems]), strict=True))


class Name(str, Enum):  # noqa: UP042 - whose str() is not its text
    LEFT = "left"


class Odd:
    """A user's own type, which no encoding knows."""

    def __init__(self, n: int):
        self.n = n


FACTS: list[Any] = [
    {"k": {"3": [4]}}, [[1, 2], [1, [2]]], float("nan"), float("inf"), -0.0, 0.1 + 0.2, 10**400, -(2**63) - 1, True, None,
    "\ud83d half", "\ud83d\ude00 in halves", "\u2028 \n\0", "x" * 300_000, {}, [],
]  # fmt: skip


def described(value: Any) -> str:
    """A value with the types of everything in it."""
    if isinstance(value, dict):
        return f"dict({sorted((described(k), described(v)) for k, v in value.items())})"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({[described(item) for item in value]})"
    return f"{type(value).__qualname__}:{value!r}"


def test_facts_that_json_can_carry_arrive_as_they_are() -> None:
    problems = [Problem(f"p{n}", "q", facts={"value": fact, "n": n}) for n, fact in enumerate(FACTS)]
    found = both_ways(lambda p, r: Score(1.0, outcome=described(dict(p.facts))), problems)
    assert [there.outcome for _, there in found] == [here.outcome for here, _ in found]
    assert [here.outcome for here, _ in found] == [described(dict(p.facts)) for p in problems]


CHANGED: list[tuple[Any, str]] = [
    ({1: "a"}, "facts.value has the key 1 (int)"), ({"k": [{None: 1}]}, "facts.value.k[0] has the key None (NoneType)"),
    ((1, 2), "facts.value is a tuple"), ([0, [(1,)]], "facts.value[1][0] is a tuple"), ({1, 2}, "facts.value is a set"),
    (b"x", "facts.value is a bytes"), (np.arange(3), "facts.value is a ndarray"), (np.float64(0.1), "facts.value is a float64"),
    (Decimal("0.10"), "facts.value is a Decimal"), (Name.LEFT, "facts.value is a Name"), (Odd(3), "facts.value is a Odd"),
]  # fmt: skip


@pytest.mark.parametrize(("fact", "words"), CHANGED, ids=lambda value: type(value).__name__)
def test_facts_that_json_would_change_are_refused_in_one_line(fact: Any, words: str) -> None:
    problem = Problem("p7", "q", facts={"value": fact})
    with WorkerPool([Given(lambda p, r: 1.0)], 1) as pool, pytest.raises(UserError) as error:
        scores(pool, [(problem, "r")])
    assert str(error.value).startswith(f"problem p7: {words}, which JSON cannot carry") and "\n" not in str(error.value)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(plain, min_size=1, max_size=5), st.text(st.characters(), max_size=20))
def test_any_facts_and_response_score_the_same_in_a_worker(facts: list[Any], response: str) -> None:
    problems = [Problem(f"p{n}", "q", facts={"value": fact}) for n, fact in enumerate(facts)]
    for here, there in both_ways(
        lambda p, r: Score(1.0, {r: len(r)}, outcome=described(dict(p.facts)) + r), problems, response
    ):
        assert here == there


NUMBERS: list[Any] = [
    0.25, 1, True, np.float32(0.25), np.float64(0.25), np.float16(0.25), np.int64(3), np.uint8(3), np.bool_(True), np.array(0.25),
    np.array(3), torch.tensor(0.25), torch.tensor(True), torch.tensor(2, dtype=torch.bfloat16), Fraction(1, 4), Decimal("0.25"), -0.0,
]  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: f"{type(n).__module__}.{type(n).__name__}")
def test_every_kind_of_number_is_a_float_both_ways(number: Any) -> None:
    for made in (
        lambda p, r: number,
        lambda p, r: Score(number, {"a": number, np.str_("b"): 1}, ((np.int64(3), number),), np.str_("ok")),
    ):
        ((here, there),) = both_ways(made, [PROBLEM])
        assert here == there and here.value == float(number), (here, there)
        for score in (here, there):
            assert type(score.value) is float and all(type(v) is float and type(k) is str for k, v in score.parts.items())
            assert (
                all(type(place) is int and type(value) is float for place, value in score.steps) and type(score.outcome) is str
            )


NOT_NUMBERS: list[Any] = [
    None, "1.0", b"1", 1j, [1.0], (1.0, {}), {"score": 1}, np.array([1.0]), np.array([1.0, 2.0]), torch.tensor([1.0]), np.str_("1"),
    np.complex64(1), np.datetime64(1, "s"), object(),
]  # fmt: skip


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda v: type(v).__name__)
def test_what_is_no_number_is_named_by_its_type(value: Any) -> None:
    ((here, there),) = both_ways(lambda p, r: value, [PROBLEM])
    assert here == there and not here.valid and here.failure is not None
    assert "must be a number" in here.failure and type(value).__name__ in here.failure
    assert ("of shape (" in here.failure) == (getattr(value, "ndim", 0) > 0), "a tensor of no dimensions is a number"
    ((here, there),) = both_ways(lambda p, r: Score(1.0, {"a": value}), [PROBLEM])
    assert here == there and not here.valid and type(value).__name__ in str(here.failure)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raising(error: BaseException) -> Callable[[Problem, str], Any]:
    def score(problem: Problem, response: str) -> Any:
        raise error

    return score


@pytest.mark.parametrize(
    "error", [ValueError("x\n\ud83d"), SystemExit(3), Unspeakable(), RecursionError("deep"), OSError(2, "gone")]
)
def test_errors_are_the_same_failure_both_ways(error: BaseException) -> None:
    ((here, there),) = both_ways(raising(error), [PROBLEM])
    assert here == there and not here.valid and str(here.failure).startswith(type(error).__name__)


@pytest.mark.parametrize("error", [UserError("reward: give the option url"), GuardStop("the judge fell for a canary")])
def test_an_error_of_the_settings_stops_the_run_with_its_line(error: Exception) -> None:
    task = Given(raising(error))
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(task.scored(PROBLEM, "a"))
    with WorkerPool([task], 2) as pool, pytest.raises(type(error), match=f"^{error}$"):
        scores(pool, of(["a", "b", "c"]))


def test_a_run_starts_its_workers_before_it_asks_for_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain import pipeline
    from posttrain.config import Settings
    from posttrain.recipes.base import Recipe
    from posttrain.stages.evaluate import EvaluateStage

    class Sums(Arithmetic):
        isolated = True  # type: ignore[assignment]

    before, started = children(), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(started.append(children() - before)))
    stages = tuple(EvaluateStage(name=f"e{n}", model="tiny:nano", task=Sums(level=1), problems=4) for n in range(2))
    forks: list[WorkerPool] = []
    make = WorkerPool.__init__
    monkeypatch.setattr(WorkerPool, "__init__", lambda self, *given: forks.append(self) or make(self, *given))
    pipeline.start(Settings(Recipe(stages), "workers", threads=1, out=str(tmp_path / "run")))
    assert len(started[0]) == 1, "the fork server, and nothing else"
    assert len(forks) == 1, "one pool for both stages"
