"""Sources of rewards: what each refuses, how a mix adds up, and which answers of a mixed task are rated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain import catalogue, config, config_tree
from posttrain.errors import RENAMED, UserError
from posttrain.events import Event, Events
from posttrain.rewards._functions import Function, Mix
from posttrain.runs.read import Run
from posttrain.stages import reward_sources
from posttrain.stages.reward_sources import (
    FunctionReward,
    ImplicitReward,
    JudgeReward,
    MixedRating,
    MixedReward,
    ProcessRewardModels,
    RewardModels,
    RewardSource,
    SourceRating,
    TaskReward,
    Weighted,
)
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Task
from posttrain.tasks.mixed import Mixed, Source
from posttrain.tasks.reviews import Reviews
from posttrain.types import Problem, Rollout, Score, Segment
from tests.stages.test_rl import reward_model, run, stage

SUMS = Arithmetic(level=2)
BOTH = Mixed((Source(name="sums", task=SUMS, weight=2), Source(name="reviews", task=Reviews())))


class Louder:
    """Rates a response by its length, and remembers what it was asked."""

    models = ("network",)

    def __init__(self, factor: float = 1.0) -> None:
        self.asked: list[str] = []
        self.factor = factor

    def rate(self, rollouts: Sequence[Rollout]) -> list[Score]:
        self.asked += [r.problem.id for r in rollouts]
        return [Score(self.factor * len(r.response), {"letters": len(r.response)}) for r in rollouts]


class Broken:
    def rate(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score.failed("timeout: no score") for _ in rollouts]


def rollout(problem: Problem, text: str, score: Score) -> Rollout:
    return Rollout(problem, 0, (Segment(np.array([1]), text, True),), score)


def test_a_model_rates_one_source_and_the_others_keep_their_own_score() -> None:
    problems = BOTH.problems("train")[:6]
    texts = ("#1", BOTH.demonstration(problems[1]), "abc", "", "", "x")
    rollouts = [rollout(p, text, BOTH.score(p, text)) for p, text in zip(problems, texts, strict=True)]
    louder = Louder()
    rating = SourceRating("reviews", louder)
    assert [s.value for s in rating.rate(rollouts)] == [0.0, 1.0, 3.0, 0.0, 0.0, 1.0]
    assert louder.asked == [rollouts[2].problem.id, rollouts[5].problem.id]
    assert rating.models == ("network",), "a checkpoint names them"


def test_a_mix_is_the_weighted_sum_of_its_parts() -> None:
    parts = (
        Weighted(reward=TaskReward(), weight=0.5),
        Weighted(reward=RewardModels(models=("a",)), weight=2.0),
        Weighted(reward=RewardModels(models=("b",)), weight=-1.0, label="b"),
    )
    own = rollout(Problem("p", "?"), "abcd", Score(1.0, outcome="correct"))
    rating = MixedRating(parts, (None, Louder(), Louder(0.25)))
    (score,) = rating.rate([own])
    assert score.value == 0.5 * 1.0 + 2.0 * 4.0 - 1.0 * 1.0
    assert score.parts == {"letters": 4.0, "task": 1.0, "models": 4.0, "b": 1.0} and score.outcome == "correct"
    assert rating.models == ("network", "network")


def test_a_part_without_a_score_leaves_the_mix_without_one() -> None:
    parts = (Weighted(reward=TaskReward()), Weighted(reward=JudgeReward(model="j")))
    (score,) = MixedRating(parts, (None, Broken())).rate([rollout(Problem("p", "?"), "a", Score(1.0))])
    assert score.value is None and score.failure == "judge: timeout: no score"


def test_a_run_on_a_mix_reports_every_part_and_resumes(tmp_path: Path) -> None:
    saved = reward_model(tmp_path / "rm", 1)
    parts = (
        Weighted(reward=TaskReward(), weight=0.5),
        Weighted(reward=RewardModels(models=(saved,), device="cpu"), weight=2.0),
    )
    figures = Run(run(tmp_path / "run", stage(reward=MixedReward(parts=parts), steps=1))).metrics("rl")[0].figures
    assert figures["reward"] == pytest.approx(0.5 * figures["reward/task"] + 2.0 * figures["reward/models"], rel=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RewardModels(models=("a",), device="gpu"), "device must be same or cpu, not 'gpu'"),  # type: ignore[arg-type]
        (lambda: RewardModels(models=("a",), combine="best"), "combine must be mean, worst or mean_minus, not 'best'"),  # type: ignore[arg-type]
        (lambda: RewardModels(models=("a",), k=-1.0), "k must be at least 0, not -1.0"),
        (lambda: RewardModels(models=()), "models: name at least one reward model"),
        (lambda: ProcessRewardModels(models=("a",), steps="pattern:("), r"steps: .* is no regular expression: missing \)"),
        (lambda: ImplicitReward(model="a", reference="b", beta=0.0), "beta must be above 0, not 0.0"),
        (lambda: JudgeReward(model="a", mode="x"), "mode must be points, group or tournament, not 'x'"),  # type: ignore[arg-type]
        (lambda: MixedReward(parts=()), "parts: give at least one"),
        (lambda: MixedReward(parts=(Weighted(reward=TaskReward()),) * 2), "parts: task, task must differ; give each a label"),
        (lambda: MixedReward(parts=(Weighted(reward=RewardModels(models=("a",), rated="x")),)), "set rated of the mix"),
        (lambda: Weighted(reward=TaskReward(), weight=float("nan")), "weight must be a finite number, not nan"),
    ],
)
def test_settings_that_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("task", "reward", "rated"),
    [
        (BOTH, RewardModels(models=("a",), rated="poems"), "poems"),
        (SUMS, RewardModels(models=("a",), rated="sums"), "sums"),
        (BOTH, TaskReward(rated="reviews"), "reviews"),
    ],
)
def test_a_rated_source_must_be_there_and_a_model_must_rate_it(task: Task, reward: RewardSource, rated: str) -> None:
    RLStage(name="rl", model="tiny:nano", task=BOTH, reward=RewardModels(models=("a",), rated="reviews"))
    with pytest.raises(UserError, match=rf"rl: reward.rated is a source of a mixed task that models score, not '{rated}'"):
        RLStage(name="rl", model="tiny:nano", task=task, reward=reward)


def test_each_is_found_by_name_and_travels_as_plain_data() -> None:
    made = [
        TaskReward(),
        FunctionReward(reward="mine.py:reward"),
        RewardModels(models=("a", "b"), combine="worst"),
        ProcessRewardModels(models=("a",), steps="token:+"),
        ImplicitReward(model="a", reference="b"),
        JudgeReward(model="a", mode="group"),
        MixedReward(parts=(Weighted(reward=TaskReward()), Weighted(reward=JudgeReward(model="a"), weight=0.5))),
    ]
    assert [one.name for one in made] == catalogue.names("reward_source")
    for one in made:
        assert config_tree.from_tree(config_tree.to_tree(one), RewardSource, "reward") == one


def test_models_are_known_before_they_are_loaded() -> None:
    mix = MixedReward(
        parts=(
            Weighted(reward=TaskReward()),
            Weighted(reward=RewardModels(models=("a",), device="cpu")),
            Weighted(reward=ImplicitReward(model="b", reference="c")),
            Weighted(reward=JudgeReward(model="d")),
        )
    )
    assert sorted(mix.loads()) == ["a", "b", "c", "d"]
    assert mix.reads_ids() == ("a", "b", "c"), "a judge reads text"
    assert mix.on_device() == ("b", "c", "d"), "a rests on the CPU"
    assert mix.offloaded() is None and RewardModels(models=("a",)).offloaded() == RewardModels(models=("a",), device="cpu")


def test_a_function_that_takes_long_is_named_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted: list[Event] = []
    events = Events()
    events.subscribe(emitted.append)
    events.show = lambda event: None

    def sluggish(prompt: str, response: str) -> float:
        if response == "slow":
            deadline = time.monotonic() + 20
            while not emitted and time.monotonic() < deadline:
                time.sleep(0.01)
        return 1.0

    rating = reward_sources.FunctionRating(Mix((Function.of(sluggish, "sluggish"),), (1.0,)), events)
    for response, limit, warned in (("quick", 20.0, 0), ("slow", 0.05, 1)):
        monkeypatch.setattr(reward_sources, "SLOW", limit)
        rollout = Rollout(Problem("p", "q", "a"), 0, (Segment(np.array([1]), response, True),), Score(0.0))
        assert [score.value for score in rating.rate([rollout])] == [1.0]
        assert len(emitted) == warned
    assert (
        emitted[0].level == "warning" and "the reward sluggish has not returned for 1 response after 0.05 s" in emitted[0].text
    )


MOVED = [key.removeprefix("rl.") for key, new in RENAMED.items() if key.startswith("rl.") and new.startswith("reward")]


@pytest.mark.parametrize("key", MOVED)
def test_a_key_of_an_earlier_version_is_refused_with_the_new_one(key: str) -> None:
    """On the command line, and in the configuration of a run."""
    said = r"an earlier version had it, use reward[.:]"
    with pytest.raises(UserError, match=rf"^unknown key 'rl.{key}': no '{key}'; {said}"):
        config.parse("quickstart", [f"rl.{key}=1"])
    tree = {"stage": "rl", "name": "rl", "model": "tiny:nano", "task": {"name": "arithmetic"}, key: 1}
    with pytest.raises(UserError, match=rf"^unknown key 'stages\[0\].{key}': no '{key}'; {said}"):
        config.from_config({"stages": [tree]}, "config.yaml")
