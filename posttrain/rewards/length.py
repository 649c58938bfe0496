"""Length rewards: distance to a target, DeepSeek-style cosine by correctness, and DAPO's soft punishment of overlong responses.

Lengths are in characters, because a reward sees text. (DAPO's own punishment, in tokens, is in algorithms/dapo.py.)
"""

from __future__ import annotations

import math

from posttrain.errors import require
from posttrain.rewards.math import MathReward, grade
from posttrain.types import Score

KINDS = ("near", "cosine", "overlong")


def near(length: int, target: int, tolerance: int) -> float:
    """1 at the target, falling linearly to 0 at `tolerance` characters from it.

    >>> near(100, 100, 50), near(125, 100, 50), near(10, 100, 50)
    (1.0, 0.5, 0.0)
    """
    fine = target >= 0 and tolerance > 0
    require(fine, f"length: target and tolerance must be positive, not {target} and {tolerance}")
    return max(0.0, 1.0 - abs(length - target) / tolerance)


def cosine(length: int, limit: int, correct: bool) -> float:
    """Half a cosine from the first value, at length 0, to the second, at `limit` (Yeo et al. 2025, arXiv:2502.03373):
    v(l) = end + (begin - end) (1 + cos(pi l / limit)) / 2. A right answer is worth more when short, a wrong one costs less when long.

    >>> cosine(0, 100, True), cosine(50, 100, True), cosine(100, 100, False), cosine(900, 100, True)
    (1.0, 0.75, -0.5, 0.5)
    """
    require(limit > 0, f"length: limit must be positive, not {limit}")
    begin, end = (1.0, 0.5) if correct else (-1.0, -0.5)
    return end + (begin - end) * 0.5 * (1 + math.cos(math.pi * min(length, limit) / limit))


def overlong(length: int, limit: int, margin: int) -> float:
    """0 up to limit - margin, then linearly down to -1 at the limit and beyond (Yu et al. 2025, DAPO, eq. 13).

    >>> overlong(60, 100, 20), overlong(90, 100, 20), overlong(100, 100, 20), overlong(500, 100, 20)
    (0.0, -0.5, -1.0, -1.0)
    """
    require(0 < margin <= limit, f"length: margin must lie between 1 and limit, not {margin}")
    return 0.0 if length <= limit - margin else max(-1.0, (limit - margin - length) / margin)


def length(
    prompt: str,
    response: str,
    answer: str,
    kind: str = "near",
    target: int = 400,
    tolerance: int = 400,
    limit: int = 4000,
    margin: int = 400,
    marker: str = "",
) -> Score:
    """The reward: how `near` the length is to a target, `cosine` by whether the answer is right (the last box, or the text
    after a marker, as in the reward `math`), or the punishment of an `overlong` response."""
    require(kind in KINDS, f"length: kind is one of {', '.join(KINDS)}, not {kind!r}")
    if kind == "cosine":
        judged = grade(response, answer, MathReward(marker=marker), prompt)
        if not judged.valid:
            return judged
        value = cosine(len(response), limit, judged.value == 1.0)
        return Score(value, parts={"length": value}, outcome=judged.outcome)
    if kind == "near":
        value = near(len(response), target, tolerance)
    else:
        value = overlong(len(response), limit, margin)
    return Score(value, parts={"length": value})
