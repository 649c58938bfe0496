"""A mixture of tasks: shares, names, and that each response is judged by its own task."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from sampler_for_tests import ScriptedSampler, completion

from posttrain import config_tree
from posttrain.errors import UserError
from posttrain.models.tiny import character_tokenizer
from posttrain.system.workers import WorkerPool
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Task, validate
from posttrain.tasks.mixed import Mixed, Source
from posttrain.tasks.reviews import Reviews
from posttrain.types import Message, Problem, Sampling, Score

SUMS, REVIEWS = Arithmetic(level=2), Reviews()
BOTH = Mixed((Source(name="sums", task=SUMS, weight=2), Source(name="reviews", task=REVIEWS)))


@dataclass(frozen=True)
class Longest(Task):
    """The longest response of a group wins; 7 problems; scored in other processes."""

    isolated = True
    seconds = 3.0

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return [Problem(f"{split}/{n}", f"{n}?") for n in range(7)]

    def prompt(self, problem: Problem) -> tuple[Message, ...]:
        return (Message("system", problem.id), Message("user", problem.question))

    def score(self, problem: Problem, response: str) -> Score:
        return Score.failed("alone")

    def score_group(self, problem: Problem, responses: Sequence[str]) -> Sequence[Score]:
        return [Score(float(len(r) == max(map(len, responses)))) for r in responses]


def test_problems_come_in_their_shares_and_none_twice() -> None:
    problems = BOTH.problems("train")
    ids = [p.id for p in problems[:9]]
    own = SUMS.problems("train"), REVIEWS.problems("train")
    assert ids[:3] == [f"sums/{own[0][0].id}", f"sums/{own[0][1].id}", f"reviews/{own[1][0].id}"]
    assert len(set(ids)) == 9 and sum(i.startswith("sums/") for i in ids) == 6
    assert problems[3].question == own[0][2].question and problems[5].question == own[1][1].question
    tests = BOTH.problems("test")
    assert len(tests) == 3 * min(len(SUMS.problems("test")) // 2, len(REVIEWS.problems("test")))
    assert len({p.id for p in tests}) == len(tests)


def test_each_is_judged_by_its_own_task() -> None:
    validate(BOTH)
    a_sum, a_review = BOTH.problems("test")[0], BOTH.problems("test")[2]
    kind = "the plot was very great and the cast was very warm."
    assert BOTH.score(a_review, kind).parts == {"grammar": 1.0, "clauses": 2.0, "praise": 3.0, "reviews": 1.0}
    assert BOTH.score(a_sum, kind).outcome == "unparseable" and BOTH.score(a_sum, kind).parts["sums"] == 0.0
    assert BOTH.score(a_sum, BOTH.demonstration(a_sum)).parts["sums"] == 1.0
    assert BOTH.prompt(a_sum) == (Message("user", a_sum.question),)
    assert set(BOTH.alphabet or "") == set(SUMS.alphabet) | set(REVIEWS.alphabet)
    with pytest.raises(UserError, match=r"poems/1 comes from none of sums, reviews"):
        BOTH.score(Problem("poems/1", "?"), "x")


def test_groups_processes_and_prompts_are_those_of_the_source() -> None:
    task = Mixed((Source(name="long", task=Longest(), weight=3), Source(name="sums", task=SUMS)))
    assert len(task.problems("train")) == 8, "two blocks of four: three problems of seven, twice"
    long, a_sum = task.problems("train")[0], task.problems("train")[3]
    assert [s.parts for s in task.score_group(long, ["a", "bc"]) or ()] == [{"long": 0.0}, {"long": 1.0}]
    assert task.score_group(a_sum, ["#1"]) is None
    assert task.score(long, "a").failure == "alone"
    assert task.prompt(long)[0].content == "train/0"
    assert task.isolated and task.seconds == 10.0 and not BOTH.isolated
    assert task.alphabet is None


def test_settings_are_checked_and_travel_as_plain_data() -> None:
    for sources, words in (
        ((), "at least one source"),
        ((Source(name="a", task=SUMS), Source(name="a", task=REVIEWS)), "different names"),
        ((Source(name="a/b", task=SUMS),), "may not hold"),
        ((Source(name="a", task=SUMS, weight=0),), "positive"),
    ):
        with pytest.raises(UserError, match=words):
            Mixed(sources)
    assert config_tree.from_tree(config_tree.to_tree(BOTH), Task, "task") == BOTH


@dataclass(frozen=True)
class Later(Longest):
    """Scored one by one, by a coroutine, in this process."""

    isolated = False

    async def score(self, problem: Problem, response: str) -> Score:  # type: ignore[override]
        return Score(float(len(response)))

    def score_group(self, problem: Problem, responses: Sequence[str]) -> None:  # type: ignore[override]
        return None


@dataclass(frozen=True)
class Here(Longest):
    """Compared within the group, in this process."""

    isolated = False


def test_each_source_is_scored_where_and_how_it_would_be_alone() -> None:
    from posttrain.episodes import rollout_groups

    mixture = Mixed((Source(name="code", task=SUMS), Source(name="judge", task=Here()), Source(name="later", task=Later())))
    problems = [mixture.problems("train")[n] for n in range(6)]
    assert [mixture.isolates(p) for p in problems] == [False] * 6
    assert asyncio.run(mixture.scored(problems[2], "abc")) == Score(3.0, {"later": 3.0})

    class Apart(Arithmetic):
        isolated = True  # type: ignore[assignment]

    mixture = Mixed((Source(name="code", task=Apart(level=1)), Source(name="judge", task=Here())))
    problems = [mixture.problems("train")[n] for n in range(4)]
    assert mixture.isolated and [mixture.isolates(p) for p in problems] == [True, False, True, False]

    # answers the first sample of a group in one token, the second in two
    sampler = ScriptedSampler(lambda request: completion(np.arange(1 + request.session % 2)))

    class Letters:
        tokenizer = character_tokenizer("0123456789+=?x/train ")

        def decode(self, ids: Sequence[int]) -> tuple[str, np.ndarray]:
            return "x" * len(ids), np.arange(len(ids) + 1)

    with WorkerPool([mixture], 1) as workers:
        groups = rollout_groups(mixture, sampler, Letters(), problems, 2, Sampling(2), 0, workers)  # type: ignore[arg-type]
    assert [[r.score.parts.get("judge") for r in g.rollouts] for g in groups[1::2]] == [[0.0, 1.0]] * 2
    assert [[r.score.value for r in g.rollouts] for g in groups[::2]] == [[0.0, 0.0]] * 2
