"""Direct preference optimisation: the comparisons themselves train the policy, without a reward model."""

from __future__ import annotations

from posttrain.algorithms.dpo import DPO
from posttrain.errors import require
from posttrain.recipes._feedback import prefer, prefer_real
from posttrain.recipes._reviews import beginning, comparisons, versus
from posttrain.recipes.base import Recipe, given


def dpo(
    size: str = "nano",
    beta: float | None = None,
    steps: int | None = None,
    model: str = "",
    data: str = "",
    lr: float | None = None,
) -> Recipe:
    """Rafailov et al. 2023, on tiny reviews and comparisons by a simulated annotator (the rules of tasks/reviews.py), with a
    toy model.

    With a `model` (a hub name, a directory, a GGUF file) and `data` (a JSONL file of pairs; data/preferences.py has the
    conventions) a real model learns from these preferences, and is measured on a quarter of the prompts, which are held out.
    """
    require(bool(model) == bool(data), "dpo: model and data, a file of preferences, go together")
    if model:
        return prefer_real(DPO(beta=given(beta, 0.1)), data, steps, lr, model)
    stages = [
        *beginning(size),
        comparisons("comparisons", "sft", 2500),
        prefer(DPO(beta=given(beta, 1.0)), "comparisons", given(steps, 150), given(lr, 1e-4)),
        versus("versus_sft", "dpo"),
    ]
    return Recipe(tuple(stages), next_command="posttrain run dpo beta=0.1")
