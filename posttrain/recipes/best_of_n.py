"""Best of N, learned: imitate the best of N samples of each prompt, at a KL of about log N - (N - 1) / N a round."""

from __future__ import annotations

from posttrain.algorithms.best_of_n import BestOfN
from posttrain.recipes._reviews import SAMPLING, TASK, beginning, versus
from posttrain.recipes.base import Recipe
from posttrain.stages.rl import RLStage
from posttrain.train.optimizer import Optimization


def best_of_n(size: str = "nano", n: int = 8, steps: int = 100) -> Recipe:
    """On tiny reviews, judged by the annotator itself."""
    stages = [
        *beginning(size),
        RLStage(
            name="rl", model="sft", task=TASK, steps=steps, prompts=16, algorithm=BestOfN(group=n), sampling=SAMPLING,
            optimizer=Optimization(lr=3e-4, warmup=5), watch_kl=True, evaluate_every=0,
        ),
        versus("versus_sft", "rl"),
    ]  # fmt: skip
    return Recipe(tuple(stages), next_command="posttrain run best_of_n n=32")
