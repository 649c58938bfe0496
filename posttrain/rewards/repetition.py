"""Repetition: the share of a response's word n-grams that occurred earlier in it."""

from __future__ import annotations

import re

from posttrain.errors import require
from posttrain.types import Score

WORD = re.compile(r"\w+|[^\w\s]")
LIMIT = 200_000  # characters that are read


def repeated(text: str, n: int = 4) -> float:
    """1 - distinct n-grams / all n-grams, in [0, 1); 0 with fewer than two n-grams.

    >>> repeated("a b a b a b", 2), repeated("one two three four", 2), repeated("a", 2)
    (0.6, 0.0, 0.0)
    """
    require(n >= 1, f"repetition: n must be at least 1, not {n}")
    words = WORD.findall(text[:LIMIT].lower())
    grams = list(zip(*(words[i:] for i in range(n)), strict=False))
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def repetition(prompt: str, response: str, answer: str, n: int = 4, free: float = 0.1) -> Score:
    """The reward: 0 while at most `free` of the n-grams are repeated, then linearly down to -1 if all are."""
    require(0 <= free < 1, f"repetition: free is a share in [0, 1), not {free}")
    value = -max(0.0, repeated(response, n) - free) / (1.0 - free)
    return Score(value, parts={"repetition": value})
