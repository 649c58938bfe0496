"""A small model learns bisection: SFT on a careless player of "guess the number", then RL."""

from __future__ import annotations

from typing import Literal

from posttrain.recipes._episodes import Name, episodes
from posttrain.recipes.base import Recipe
from posttrain.tasks.guess import Guess


def guess(
    size: str = "nano", pay: Literal["turn", "end"] = "turn", algorithm: Name = "grpo"
) -> Recipe:
    """Numbers from 1 to 20, five guesses. The player that SFT imitates ignores the hints every other time. With `pay=turn` a
    guess also earns the information it gained; with `pay=end` only the number itself is rewarded. `algorithm=ppo` uses a critic
    as its baseline in place of groups."""
    task = Guess(numbers=20, pay=pay)
    return episodes(
        "guess", size, task, 4, algorithm=algorithm, lr=2e-3, steps=60, prompts=32, sft_steps=500
    )
