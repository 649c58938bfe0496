"""A task whose episode is two rollouts of two roles: groups, baselines and metrics keep them apart, and both are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from posttrain import pipeline
from posttrain.algorithms.grpo import GRPO
from posttrain.collect import Collected, Rollouts
from posttrain.config import Settings
from posttrain.recipes.base import Recipe
from posttrain.runs.read import Run
from posttrain.stages.rl import RLStage
from posttrain.tasks.base import Generate, Task
from posttrain.types import Message, Problem, Rollout, Sampling, Score


@dataclass(frozen=True)
class Debate(Task):
    """A writer answers; a critic, who reads the answer, is paid for the letters that the writer was not."""

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return [Problem(f"{split}-{n}", f"say {n}") for n in range(8)]

    async def run(self, problem: Problem, generate: Generate) -> list[Rollout]:
        writer, critic = generate.session("writer"), generate.session("critic")
        answer = await writer(last=True)
        await critic([Message("user", f"judge {len(answer.text)}")], last=True)
        share = sum(c < "m" for c in answer.text) / max(1, len(answer.text))
        rollouts = [writer.rollout(), critic.rollout(Score(1 - share))]
        return rollouts if problem.id != "train-0" else rollouts[:1]

    def score(self, problem: Problem, response: str) -> Score:
        return Score(sum(c < "m" for c in response) / max(1, len(response)))


def test_both_roles_are_trained_on_with_baselines_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Collected] = []
    collect = Rollouts.collect
    monkeypatch.setattr(Rollouts, "collect", lambda *given: steps.append(collect(*given)) or steps[-1])
    stage = RLStage(
        name="rl", model="tiny:nano", task=Debate(), steps=4, prompts=4, algorithm=GRPO(group=3, beta=0.0), sampling=Sampling(6),
        evaluate_every=0, rollouts_every=1,
    )  # fmt: skip
    pipeline.start(Settings(Recipe((stage,)), "roles", device="cpu", threads=1, out=str(tmp_path / "run")))
    run, batch = Run(tmp_path / "run"), steps[0].batch
    sizes = {len([g for g in step.groups if g.role == "critic"]) for step in steps}
    assert sizes == {3, 4}, "where the problem without a critic is drawn, there is one group less"
    assert batch.sequences == sum(len(g.rollouts) for g in steps[0].groups)
    rewards = torch.tensor([r.score.value for g in steps[0].groups for r in g.rollouts])
    assert torch.equal(batch.reward_N, rewards)
    prepared = stage.algorithm.prepare(batch, {})
    ends = torch.tensor(batch.starts[1:]) - 1
    assert prepared.advantage_T is not None
    for number, group in enumerate(steps[0].groups):
        own = batch.group_N == number
        assert own.sum() == 3 and prepared.advantage_T[ends][own].sum().abs() < 1e-4, "each group has its own mean"
        assert {r.role for r in group.rollouts} == {group.role}
    figures = run.metrics("rl")[0].figures
    for role in ("writer", "critic"):
        values = [v for g in steps[0].groups if g.role == role for v in g.rewards]
        assert figures[f"role/{role}/reward"] == pytest.approx(sum(values) / len(values))
    rows, arrays = run.rollouts("rl", 1), run.arrays("rl", 1)
    assert [row.role for row in rows] == [r.role for g in steps[0].groups for r in g.rollouts]  # type: ignore[attr-defined]
    assert arrays is not None and all(len(arrays.sequence(n)["ids"]) for n in range(len(rows))), "all were trained on"
