"""Rewards in worker processes: in order, in parallel, in bounded time, and nobody left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children_for_tests import no_child_left
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.errors import GuardStop, UserError
from posttrain.scoring import Workers, score_group, score_one
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
        workers.submit(PROBLEM, ["first"])
        workers.results()
        (stopped,) = (worker.pid for worker in workers.workers)
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        workers.submit(PROBLEM, ["second " + 500_000 * "x"])
        (score,) = workers.results()
        assert score.valid and time.monotonic() - began < 20
        assert [worker.pid for worker in workers.workers] != [stopped]


class Given:
    """Scores by a function of the problem and the response."""

    def __init__(self, function: Callable[[Problem, str], Any]):
        self.function = function

    def score(self, problem: Problem, response: str) -> Any:
        return self.function(problem, response)

    def score_group(self, problem: Problem, responses: Any) -> Any:
        return None


def both_ways(
    function: Callable[[Problem, str], Any], problems: list[Problem], response: str = "r"
) -> list[tuple[Score, Score]]:
    """Each problem's score in this process and in a worker."""
    task: Any = Given(function)
    here = [score_group(task, problem, [response])[0] for problem in problems]
    with Workers(task, 1, problems=problems) as workers:
        for problem in problems:
            workers.submit(problem, [response])
        return list(zip(here, workers.results(), strict=True))


class Name(str, Enum):  # noqa: UP042 - whose str() is not its text
    LEFT = "left"


class Odd:
    """A user's own type, which no encoding knows."""

    def __init__(self, n: int):
        self.n = n


FACTS: list[Any] = [
    {1: "a", 2: "b"}, {"k": {3: [4]}}, {None: 1, True: 2, 2.5: 3, (1, 2): 4}, [(1, 2), [1, 2]], (1, (2,)), {1, 2}, frozenset({3}),
    b"\xff\x00", float("nan"), float("inf"), -0.0, 0.1 + 0.2, 10**400, -(2**63) - 1, True, None, "\ud83d half", "\u2028 \n\0",
    "x" * 300_000, 1 + 2j, np.arange(3), np.float32(0.1), np.int64(7), Decimal("0.10"), Fraction(1, 3), Name.LEFT, Odd(3), range(3),
]  # fmt: skip


def described(value: Any) -> str:
    """A value with the types of everything in it."""
    if isinstance(value, dict):
        return f"dict({sorted((described(k), described(v)) for k, v in value.items())})"
    if isinstance(value, list | tuple | set | frozenset):
        items = [described(item) for item in value]
        return f"{type(value).__name__}({sorted(items) if isinstance(value, set | frozenset) else items})"
    return f"{type(value).__qualname__}:{value.n if isinstance(value, Odd) else value!r}"


def test_facts_of_every_kind_arrive_as_they_are() -> None:
    problems = [Problem(f"p{n}", "q", facts={"value": fact, n: n}) for n, fact in enumerate(FACTS)]
    found = both_ways(lambda p, r: Score(1.0, outcome=described(dict(p.facts))), problems)
    assert [there.outcome for _, there in found] == [here.outcome for here, _ in found]
    assert [here.outcome for here, _ in found] == [described(dict(p.facts)) for p in problems]


def test_a_score_by_an_integer_key_is_the_same_in_a_worker() -> None:
    ((here, there),) = both_ways(
        lambda p, r: float(p.facts["grades"].get(1, 0.0)), [Problem("p", "q", facts={"grades": {1: 1.0}})]
    )
    assert here == there == Score(1.0)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(), max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(max_size=3) | st.booleans() | st.none(), inner, max_size=3)
    ),
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
    task: Any = Given(raising(error))
    with pytest.raises(type(error), match=str(error)):
        score_group(task, PROBLEM, ["a"])

    def isolated() -> list[Score]:
        with Workers(task, 2) as workers:
            workers.submit(PROBLEM, ["a", "b", "c"])
            return workers.results()

    with pytest.raises(type(error), match=f"^{error}$"):
        isolated()


def test_a_problem_that_comes_later_is_known_to_the_workers() -> None:
    with Workers(Given(lambda p, r: float(p.facts["n"])), 2) as workers:  # type: ignore[arg-type]
        for n in range(3):
            workers.submit(Problem(f"p{n}", "", facts={"n": n}), ["a", "b"])
        assert [s.value for s in workers.results()] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
