"""The token arrays of a step's rollouts: those of the right rollout, and as they were trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.online_dpo import OnlineDPO
from posttrain.algorithms.ppo import PPO
from posttrain.algorithms.raft import RAFT
from posttrain.collect import Collected, Rollouts
from posttrain.commands import show
from posttrain.runs.read import Run
from posttrain.stages.reward_sources import RewardModels
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Generate
from posttrain.train.trainer import Trainer
from posttrain.types import Batch, Problem, Rollout, Score
from tests.stages.test_rl import judges, run, stage  # noqa: F401  (judges is a fixture)

WATCHED = PPO(group=2, epochs=2, mini_batches=2, kl_target=1.0, kl_horizon=1)
CASES = [
    pytest.param(OnlineDPO(group=2), id="every pair, chosen before rejected"),
    pytest.param(OnlineDPO(group=4), id="two of four"),
    pytest.param(RAFT(group=4, share=0.5), id="the accepted"),
    pytest.param(GRPO(group=4, beta=0.0, truncated="mask", mini_batches=3), id="mini-batches of groups"),
    pytest.param(WATCHED, id="whitened by mini-batch, with a beta that moves"),
]


@pytest.mark.parametrize("algorithm", CASES)
def test_arrays_are_those_of_their_rollout_and_of_its_training(
    algorithm: Algorithm,
    judges: tuple[str, str],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collect, update = Rollouts.collect, Trainer.update
    steps: list[tuple[Collected, list[Batch]]] = []

    def collecting(*arguments: Any) -> Collected:
        steps.append((collect(*arguments), []))
        return steps[-1][0]

    def updating(self: Trainer, batch: Batch, *more: Any) -> Any:
        steps[-1][1].append(batch)
        return update(self, batch, *more)

    monkeypatch.setattr(Rollouts, "collect", collecting)
    monkeypatch.setattr(Trainer, "update", updating)
    directory = run(tmp_path / "run", stage(algorithm=algorithm, reward=RewardModels(models=judges), steps=3))
    for number, (collected, trained) in enumerate(steps, 1):
        rollouts = [r for g in collected.groups for r in g.rollouts]
        first = trained[: algorithm.reuse.mini_batches]
        seen = [(piece, n) for piece in first for n in range(piece.sequences)]
        rows, arrays = Run(directory).rollouts("rl", number), Run(directory).arrays("rl", number)
        assert arrays is not None and arrays.sequences == len(rows) == len(rollouts)
        found = [arrays.sequence(n) for n in range(len(rows))]
        assert sum(len(one["ids"]) > 0 for one in found) == len(seen) > 0
        for row, rollout, one in zip(rows, rollouts, found, strict=True):
            assert row.response == rollout.response
            if not len(one["ids"]):
                assert row.advantage is None
                continue
            assert one["ids"].tolist() == rollout.ids.tolist()
            assert one["logprob"][-row.length :].tolist() == rollout.segments[1].logprobs.tolist()
            spans = [(p, slice(p.starts[n], p.starts[n + 1])) for p, n in seen]
            own = [(p, s) for p, s in spans if p.ids_T[s].tolist() == one["ids"].tolist()]
            advantages = [p.columns.get("advantage_T", torch.zeros(p.tokens))[s].numpy() for p, s in own]
            assert any(np.array_equal(one["advantage"], advantage) for advantage in advantages)
            assert row.advantage == pytest.approx(one["advantage"][-row.length :].mean(), abs=1e-6)


def test_what_was_left_out_is_shown_as_text(
    judges: tuple[str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    """Of a rollout that was not selected there are no figures by token; it is not shown with those of another."""
    one = stage(algorithm=RAFT(group=4, share=0.25), reward=RewardModels(models=judges), steps=1, prompts=1)
    directory = run(tmp_path / "run", one)
    arrays = Run(directory).arrays("rl", 1)
    assert arrays is not None
    lengths = np.diff(arrays.starts).tolist()
    assert sum(length > 0 for length in lengths) == 1
    for number, length in enumerate(lengths):
        shown = "\n".join(show.show(directory, f"rl/1/{number}"))
        assert ("s_0 = " in shown) == (length > 0) and ("was not trained on" in shown) == (length == 0)
        row = Run(directory).rollouts("rl", 1)[number]
        assert length or f"reward: {row.reward}" in shown


class PaidAtOnce(Arithmetic):
    """Two turns; all that is paid is paid for the first."""

    async def run(self, problem: Problem, generate: Generate) -> Rollout:
        first = await generate(max_new_tokens=2)
        generate.reward(sum(map(ord, first.text)) / 100)
        await generate("+", max_new_tokens=3)
        return generate.rollout(Score(0.0))


def test_the_advantage_of_a_rollout_is_the_mean_of_its_sampled_tokens(tmp_path: Path) -> None:
    directory = run(tmp_path / "run", stage(task=PaidAtOnce(level=1), algorithm=GRPO(group=4, beta=0.0), steps=1, prompts=2))
    arrays, rows = Run(directory).arrays("rl", 1), Run(directory).rollouts("rl", 1)
    assert arrays is not None
    for number, row in enumerate(rows):
        one = arrays.sequence(number)
        sampled = one["advantage"][one["sampled"]]
        assert sampled[-1] == 0.0 and row.advantage == pytest.approx(sampled.mean()) and one["sampled"].sum() == row.length
    assert len({row.advantage for row in rows}) > 2
