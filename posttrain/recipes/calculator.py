"""A small model learns when to call a calculator: only for sums that it cannot do alone."""

from __future__ import annotations

from posttrain.recipes._episodes import episodes
from posttrain.recipes.base import Recipe
from posttrain.tasks.calculator import CalculatorSums


def calculator(size: str = "nano") -> Recipe:
    """Half of the sums need only be copied, half have three digits that carry. SFT shows calls and answers at random; a call
    costs 0.1, so RL keeps only useful calls."""
    return episodes("calculator", size, CalculatorSums(), tokens=16, shown=20_000, sft_steps=1000)
