"""Best of N, learned: imitate the best of N samples of each prompt, at a KL of about log N - (N - 1) / N a round."""

from __future__ import annotations

from posttrain.algorithms.best_of_n import BestOfN
from posttrain.recipes._reviews import best_samples
from posttrain.recipes.base import Recipe


def best_of_n(size: str = "nano", n: int = 8, steps: int = 100) -> Recipe:
    """Trains on tiny reviews, scored by the simulated annotator itself."""
    stages = tuple(best_samples(size, BestOfN(group=n), steps))
    return Recipe(stages, next_command="posttrain run best_of_n n=32")
