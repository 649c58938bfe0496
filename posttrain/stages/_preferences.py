"""What stages that learn from preferences share: units cut where a rollout would end, and prompts kept apart for judging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from posttrain.data.stream import permutation
from posttrain.errors import require
from posttrain.types import Example

Unit = tuple[Example, ...]


def until_end(example: Example) -> Example:
    """The example up to its last token that carries loss. What a template writes after it is never sampled, and the score of a rollout
    is read where the rollout ends."""
    end = int(np.flatnonzero(example.mask)[-1]) + 1
    steps = None if example.steps is None else example.steps[:end]
    return replace(example, ids=example.ids[:end], mask=example.mask[:end], steps=steps)


def split_by_prompt(units: Sequence[Unit], share: float, seed: int, where: str) -> tuple[list[Unit], list[Unit]]:
    """(to train on, held out): `share` of the prompts, at least one, are held out with all that was said of them."""
    if share == 0:
        return list(units), []
    prompts = [unit[0].ids[: int(unit[0].mask.argmax())].tobytes() for unit in units]
    different = list(dict.fromkeys(prompts))
    count = max(1, round(share * len(different)))
    require(count < len(different), f"{where}: {len(different)} different prompts are too few to hold some out; add data, or set "
            "held_out=0")  # fmt: skip
    aside = {different[i] for i in permutation(len(different), "held_out", seed)[:count]}
    train = [unit for unit, prompt in zip(units, prompts, strict=True) if prompt not in aside]
    return train, [unit for unit, prompt in zip(units, prompts, strict=True) if prompt in aside]
