"""A small model learns to ask for what it must know: SFT on random sales conversations, then RL with a simulated customer."""

from __future__ import annotations

from posttrain.recipes._episodes import episodes
from posttrain.recipes.base import Recipe
from posttrain.tasks.shop import Shop


def shop(size: str = "nano") -> Recipe:
    """A customer has three wishes and states some of them. SFT shows questions and sales at random; a right sale is worth 1,
    minus 0.1 for each question whose answer was known."""
    return episodes("shop", size, Shop(), tokens=28, steps=120, sft_steps=600)
