"""Preference units in the shape that an algorithm learns from: pairs, or single examples, each with a mismatched one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from posttrain.data.stream import philox
from posttrain.errors import require
from posttrain.types import Example

Unit = tuple[Example, ...]
TRIES = 256  # other examples that are looked at for one of another prompt that fits


def as_pairs(units: Sequence[Unit]) -> list[Unit]:
    """Pairs as they are; a ranking of K as all of its pairs in which one response is preferred, K (K - 1) / 2 without ties."""
    return [(a, b) for unit in units for a in unit for b in unit if a.reward > b.reward]


def as_singles(units: Sequence[Unit]) -> list[Unit]:
    """Labelled examples as they are; the two of a pair apart, the preferred as good (1) and the other as bad (0)."""
    ranking = (
        "a ranking says which response is better, not which are good; make pairs or labels of it"
    )
    require(all(len(unit) < 3 for unit in units), ranking)
    singles: list[Unit] = []
    for unit in units:
        best = max(example.reward for example in unit)
        apart = [replace(example, reward=float(example.reward == best)) for example in unit]
        singles += [unit] if len(unit) == 1 else [(example,) for example in apart]
    return singles


def with_mismatched(
    singles: Sequence[Unit], pool: Sequence[Unit], max_length: int, seed: int
) -> list[Unit]:
    """Each example with a second one: its prompt and, out of `pool`, the response to another prompt; without a label (NaN).

    Which response is a matter of the seed and the example's place alone. One that no response of another prompt fits to stands alone.
    """
    others = [unit[0] for unit in pool]
    begins = [prompt_length(other) for other in others]
    prompts = [other.ids[:begin].tobytes() for other, begin in zip(others, begins, strict=True)]
    several = len(set(prompts)) > 1
    require(several, "mismatched examples need at least two different prompts in the data")
    starts = philox("mismatched", seed).random_raw(len(singles))
    units: list[Unit] = []
    for (example,), start in zip(singles, starts, strict=True):
        begin = prompt_length(example)
        own = example.ids[:begin].tobytes()
        for step in range(min(TRIES, len(others))):
            n = (int(start) + step) % len(others)
            response, mask = others[n].ids[begins[n] :], others[n].mask[begins[n] :]
            if prompts[n] != own and begin + len(response) <= max_length:
                ids = np.concatenate([example.ids[:begin], response])
                masks = np.concatenate([example.mask[:begin], mask])
                units.append((example, Example(ids, masks, reward=math.nan)))
                break
        else:
            units.append((example,))
    return units


def prompt_length(example: Example) -> int:
    """Tokens before the first that carries loss."""
    return int(example.mask.argmax())
