"""Direct preference optimisation: the comparisons themselves train the policy, without a reward model."""

from __future__ import annotations

from posttrain.algorithms.dpo import DPO
from posttrain.recipes._reviews import beginning, comparisons, versus
from posttrain.recipes.base import Recipe
from posttrain.stages.preference import PreferenceStage
from posttrain.train.optimizer import Optimization


def dpo(size: str = "nano", beta: float = 1.0, steps: int = 150) -> Recipe:
    """Rafailov et al. 2023, on tiny reviews and comparisons by an annotator whose taste is known, on a CPU."""
    stages = [
        *beginning(size),
        comparisons("comparisons", "sft", 2500),
        PreferenceStage(
            name="dpo", model="sft", data=("comparisons",), steps=steps, batch=32, algorithm=DPO(beta=beta),
            optimizer=Optimization(lr=1e-4, warmup=10, schedule="cosine"),
        ),
        versus("versus_sft", "dpo"),
    ]  # fmt: skip
    return Recipe(tuple(stages), next_command="posttrain run dpo beta=0.1")
