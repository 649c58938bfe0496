"""Kahneman-Tversky optimisation: single answers labelled good or bad train the policy, without pairs and without a reward model."""

from __future__ import annotations

from posttrain.algorithms.kto import KTO
from posttrain.errors import require
from posttrain.recipes._feedback import prefer, prefer_real
from posttrain.recipes._reviews import SAMPLING, TASK, beginning, versus
from posttrain.recipes.base import Recipe, given
from posttrain.stages.sample import SampleStage

LIKED = 0.6  # the simulated annotator likes a review from this score on


def kto(
    size: str = "nano",
    beta: float | None = None,
    desirable: float = 1.0,
    undesirable: float = 1.0,
    steps: int | None = None,
    model: str = "",
    data: str = "",
    lr: float | None = None,
) -> Recipe:
    """Ethayarajh et al. 2024, on tiny reviews, one per prompt, and binary feedback of a simulated annotator (the rules of
    tasks/reviews.py), with a toy model. `desirable` and `undesirable` are the weights of the two labels: the paper gives the
    rarer one more weight.

    With a `model` (a hub name, a directory, a GGUF file) and `data` (a JSONL file of rows with prompt, completion and label, or
    of pairs) a real model learns from this feedback, and is measured on a quarter of the prompts, which are held out.
    """
    require(bool(model) == bool(data), "kto: model and data, a file of feedback, go together")
    beta = given(beta, 0.1 if model else 0.3)
    algorithm = KTO(beta=beta, desirable=desirable, undesirable=undesirable)
    if model:
        return prefer_real(algorithm, data, steps, lr, model)
    stages = [
        *beginning(size),
        SampleStage(
            name="feedback",
            model="sft",
            task=TASK,
            prompts=2500,
            samples=1,
            labels=True,
            min_score=LIKED,
            sampling=SAMPLING,
        ),
        prefer(algorithm, "feedback", given(steps, 150), given(lr, 1e-4)),
        versus("versus_sft", "kto"),
    ]
    return Recipe(tuple(stages), next_command="posttrain run kto beta=0.1")
