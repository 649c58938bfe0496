"""Iterative DPO: rounds of fresh comparisons of the present policy, each with the reference moved to where the last one ended."""

from __future__ import annotations

from posttrain.algorithms.dpo import DPO
from posttrain.recipes._reviews import beginning, comparisons, versus
from posttrain.recipes.base import Recipe, best_round, repeat
from posttrain.stages.preference import PreferenceStage
from posttrain.train.optimizer import Optimization

PROMPTS = 1000  # a round


def iterative_dpo(
    size: str = "nano", rounds: int = 3, beta: float = 1.0, steps: int = 80
) -> Recipe:
    """Each round sees prompts that no round before has seen, answered by the policy as it is: the data stays on-policy."""
    stages = [
        *beginning(size),
        *repeat(
            [
                comparisons("comparisons", "previous dpo", PROMPTS),
                PreferenceStage(
                    name="dpo",
                    model="previous dpo",
                    data=("comparisons",),
                    steps=steps,
                    algorithm=DPO(beta=beta),
                    optimizer=Optimization(lr=1e-4, warmup=10, schedule="cosine"),
                ),
                versus("versus_sft", "dpo"),
            ],
            rounds,
            first={"dpo": "sft"},
            advance={"comparisons.skip": PROMPTS},
        ),
        best_round("dpo", "versus_sft", rounds, "win_rate"),
    ]
    return Recipe(tuple(stages), next_command="posttrain run iterative_dpo rounds=5")
