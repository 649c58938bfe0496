"""Iterative DPO: rounds of fresh comparisons of the present policy, each with the reference moved to where the last one ended."""

from __future__ import annotations

from posttrain.algorithms.dpo import DPO
from posttrain.recipes._reviews import beginning, comparisons, versus
from posttrain.recipes.base import Recipe
from posttrain.stages.base import Stage
from posttrain.stages.preference import PreferenceStage
from posttrain.train.optimizer import Optimization


def iterative_dpo(size: str = "nano", rounds: int = 3, beta: float = 0.1, steps: int = 80) -> Recipe:
    """Each round sees prompts that no round before has seen, answered by the policy as it is: the data stays on-policy."""
    stages: list[Stage] = [*beginning(size)]
    model = "sft"
    for number in range(1, rounds + 1):
        name = f"dpo_{number}"
        stages += [
            comparisons(f"comparisons_{number}", model, 1000, skip=1000 * (number - 1)),
            PreferenceStage(
                name=name, model=model, data=(f"comparisons_{number}",), steps=steps, batch=32, algorithm=DPO(beta=beta),
                optimizer=Optimization(lr=2e-4, warmup=10, schedule="cosine"),
            ),
            versus(f"versus_sft_{number}", name),
        ]  # fmt: skip
        model = name
    return Recipe(tuple(stages), next_command="posttrain run iterative_dpo rounds=5")
