"""Dry runs: what is cut down, how a whole run follows from it, and that nothing of it stays."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain import config
from posttrain.algorithms.grpo import GRPO
from posttrain.commands import plan
from posttrain.runs.layout import Row
from posttrain.stages._material import Data
from posttrain.stages._plan import NEVER, DryRun
from posttrain.stages.evaluate import EvaluateStage
from posttrain.stages.reward_model import RewardModelStage
from posttrain.stages.rl import RLStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.types import Sampling

TASK = Arithmetic(level=1)
SFT = SFTStage(name="sft", model="tiny:nano", data=(Data(task=TASK, counts={1: 12}),), steps=50, batch=4)
RL = RLStage(
    name="rl", model="sft", task=TASK, steps=40, prompts=2, algorithm=GRPO(group=2), sampling=Sampling(40), evaluate_every=15,
    evaluate_problems=3,
)  # fmt: skip
AFTER = EvaluateStage(name="after", model="rl", task=TASK, problems=64, sampling=Sampling(4, temperature=0.0))


def row(step: int, time: float, seconds: float) -> Row:
    return Row("rl", step, 1, time, {"seconds/total": seconds} if step else {})


def test_a_whole_run_by_hand() -> None:
    """Steps of 5, 2 and 2.2 s, an evaluation of 1.5 s before the first and after the last. 40 steps of median 2.1 s, 2.9 s more for
    the first, evaluations before, after 15, 30 and 40."""
    rows = [row(0, 100.0, 0.0), row(1, 105.0, 5.0), row(2, 107.0, 2.0), row(3, 110.7, 2.2)]
    whole, step, evaluation, small = plan.loop_seconds(rows, RL.steps, RL.evaluate_every)
    assert (step, evaluation) == pytest.approx((2.1, 1.5))
    assert whole == pytest.approx(40 * 2.1 + 2.9 + 4 * 1.5)
    assert small == pytest.approx(9.2 + 2 * 1.5)
    quiet = plan.loop_seconds(rows[1:], RL.steps, 0)
    assert quiet[0] == pytest.approx(40 * 2.1 + 2.9) and quiet[2] == 0.0


def test_what_is_cut_down() -> None:
    small = RL.dry_run()
    assert (small.stage.steps, small.stage.evaluate_every) == (3, NEVER)  # type: ignore[attr-defined]
    assert (small.steps, small.evaluate_every, small.factor, small.limit) == (40, 15, 1.0, 40)
    assert AFTER.dry_run() == DryRun(replace(AFTER, problems=32), factor=2.0)
    judge = RewardModelStage(name="reward", model="tiny:nano", data=("x.jsonl",), min_accuracy=0.6)
    assert judge.dry_run().stage.min_accuracy == 0.0, "after three steps no gate can be passed"  # type: ignore[attr-defined]


def test_the_stages_of_a_recipe_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    try:
        found = plan.estimate([SFT, RL, AFTER, replace(SFT, name="control", as_long_as="rl")], 0, "cpu", threads=1)
    finally:
        torch.set_num_threads(threads)
    assert list(found) == ["sft", "rl", "after", "control"]
    assert found["rl"].length == 8.0, "as long as the examples that its model has learned from"
    assert found["rl"].longest >= found["rl"].seconds > 40 * found["rl"].step > 0 and found["rl"].evaluation > 0
    assert found["sft"].step > 0 and found["after"].seconds > 0
    assert found["control"].seconds == found["rl"].seconds
    assert os.listdir(tmp_path) == [] and capsys.readouterr().out == ""


def test_the_words_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = plan.Estimate(100.0, 230.0, 0.5, 1.25, 3 * 2**20, 18.0)
    line = plan.dry_run_line(seen)
    assert line == (
        "dry run: about 1m40s with responses of 18 tokens, as in its examples, at most 3m50s where every response reaches its limit; "
        "a step takes 0.5 s, an evaluation 1.25 s, memory 3.0 MiB at its peak"
    )
    monkeypatch.setattr(plan, "estimate", lambda stages, *rest: {s.name: seen for s in stages})
    lines = plan.describe(config.parse("quickstart", []), dry=True)
    assert (
        lines[-1]
        == "the whole run: about 6m40s, at most 15m20s where every response reaches its limit, by a dry run on this machine"
    )
    assert sum("dry run:" in one for one in lines) == 4


def test_memory_is_what_came_on_top() -> None:
    peak = plan.Peak("cpu")
    torch.ones(30_000_000).sum()
    assert 100e6 < peak.bytes() < 300e6


def test_a_model_of_a_few_steps_need_not_pass_the_gates() -> None:
    from posttrain.monitor.rules import MonitorSettings
    from posttrain.stages._judged import JudgeSettings
    from posttrain.stages.agreement import AgreementStage
    from posttrain.stages.sample import SampleStage

    small: Any = SampleStage(name="sampled", model="rl", task=TASK, prompts=20, min_score=1.0).dry_run().stage
    assert small.min_score == 0.0
    asked = AgreementStage(
        name="agree", judge=JudgeSettings(model="rl"), data="pairs.jsonl", pairs=320, min_agreement=0.9
    ).dry_run()
    assert asked == DryRun(replace(asked.stage, min_agreement=0.0, pairs=32), factor=10.0)  # type: ignore[call-arg]
    rl: Any = replace(RL, monitor=MonitorSettings(stop=("length",))).dry_run().stage
    assert rl.monitor.stop == () and "repetition" in rl.monitor.off and "nonfinite" not in rl.monitor.off
