"""Rejection sampling (RAFT): imitate the best quarter of what the policy itself says, again and again."""

from __future__ import annotations

from posttrain.algorithms.raft import RAFT
from posttrain.recipes._reviews import imitating
from posttrain.recipes.base import Recipe


def rejection_sampling(size: str = "nano", group: int = 8, steps: int = 100) -> Recipe:
    """Dong et al. 2023, on tiny reviews, judged by the simulated annotator itself. Nothing but SFT, and hard to break."""
    stages = tuple(imitating(size, RAFT(group=group), steps))
    return Recipe(stages, next_command="posttrain run rejection_sampling group=32")
