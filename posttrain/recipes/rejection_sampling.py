"""Rejection sampling (RAFT): imitate the best quarter of what the policy itself says, again and again."""

from __future__ import annotations

from posttrain.algorithms.raft import RAFT
from posttrain.recipes._reviews import SAMPLING, TASK, beginning, versus
from posttrain.recipes.base import Recipe
from posttrain.stages.rl import RLStage
from posttrain.train.optimizer import Optimization


def rejection_sampling(size: str = "nano", group: int = 8, steps: int = 100) -> Recipe:
    """Dong et al. 2023, on tiny reviews, judged by the annotator itself. Nothing but SFT, and hard to break."""
    stages = [
        *beginning(size),
        RLStage(
            name="rl", model="sft", task=TASK, steps=steps, prompts=16, algorithm=RAFT(group=group), sampling=SAMPLING,
            optimizer=Optimization(lr=3e-4, warmup=5), watch_kl=True, evaluate_every=0,
        ),
        versus("versus_sft", "rl"),
    ]  # fmt: skip
    return Recipe(tuple(stages), next_command="posttrain run rejection_sampling group=32")
