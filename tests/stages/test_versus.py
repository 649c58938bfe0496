"""Two models side by side: a model against itself, and against one that was trained to please."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from material_for_tests import group, rollout, segment

from posttrain.errors import UserError
from posttrain.runs.write import RunWriter
from posttrain.stages._material import Data
from posttrain.stages.base import Context, run_stages
from posttrain.stages.sft import SFTStage
from posttrain.stages.versus import VersusStage, _win
from posttrain.tasks.reviews import Reviews
from posttrain.train.optimizer import Optimization
from posttrain.types import Group, Sampling


def scored(value: float | None) -> Group:
    return group([rollout([segment([1], False), segment([2], True)], value)])


def test_wins_ties_and_failures() -> None:
    assert [_win(scored(a), scored(b)) for a, b in ((1.0, 0.5), (0.5, 1.0), (0.5, 0.5), (None, 1.0), (1.0, None))] == [
        1.0, 0.0, 0.5, None, None,
    ]  # fmt: skip


def test_a_model_against_itself_and_against_a_kinder_one(tmp_path: Path) -> None:
    task, fast = Reviews(), Optimization(lr=5e-3, warmup=5)
    kind, plain = Data(task=Reviews(), counts={0: 200}), Data(task=Reviews("any"), counts={0: 200})
    common = {"task": task, "problems": 40, "sampling": Sampling(60)}
    stages = [
        SFTStage(name="plain", model="tiny:nano", data=(plain,), steps=40, batch=16, optimizer=fast),
        SFTStage(name="kind", model="plain", data=(kind,), steps=40, batch=16, optimizer=fast),
        VersusStage(name="same", model="plain", against="plain", **common),
        VersusStage(name="kinder", model="kind", against="plain", text=(plain,), **common),
    ]
    with RunWriter.create(tmp_path / "run", {}) as writer:
        context = Context(writer, seed=0, say=False)
        run_stages(stages, context)
        same, kinder = context.result("same"), context.result("kinder")
    assert same is not None and kinder is not None
    assert same["win_rate"][0] == 0.5 and same["ties"] == 40 and abs(same["kl"]) < 1e-3
    assert kinder["win_rate"][1] > 0.5 and kinder["reward"][0] > kinder["reward_against"][0]
    assert kinder["kl"] > 0.5 and math.isfinite(kinder["kl"])
    assert kinder["perplexity"] > kinder["perplexity_against"] > 1.0  # what it paid
    assert len((tmp_path / "run" / "stages" / "kinder" / "problems.jsonl").read_text().splitlines()) == 40


def test_one_problem_is_too_few() -> None:
    with pytest.raises(UserError, match="at least 2"):
        VersusStage(name="v", model="a", against="b", task=Reviews(), problems=1)
