"""Rejection sampling (RAFT): repeatedly imitate the best quarter of the policy's own samples."""

from __future__ import annotations

from posttrain.algorithms.raft import RAFT
from posttrain.recipes._reviews import best_samples
from posttrain.recipes.base import Recipe


def rejection_sampling(size: str = "nano", group: int = 8, steps: int = 100) -> Recipe:
    """Dong et al. 2023, on tiny reviews, scored by the simulated annotator itself. It uses only SFT, and is robust."""
    stages = tuple(best_samples(size, RAFT(group=group), steps))
    return Recipe(stages, next_command="posttrain run rejection_sampling group=32")
