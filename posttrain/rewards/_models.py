"""Scores of reward models: several of them as one, and the implicit reward of a model that was trained on preferences.

A policy that is trained hard against one reward model finds where that model is wrong. Members that learned from the same data
with other seeds agree where the data speaks and differ elsewhere, so their disagreement says where not to trust the score.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, sqrt

from posttrain.errors import require

KINDS = ("mean", "worst", "mean_minus")


def check(kind: str, k: float) -> None:
    """Refuse settings that no ensemble has."""
    require(kind in KINDS, f"ensemble: combine must be one of {', '.join(KINDS)}, not {kind!r}")
    require(
        0 <= k < float("inf"), f"ensemble: k must be 0 or a positive number of deviations, not {k}"
    )


def disagreement(values: Sequence[float]) -> float:
    """std = sqrt(sum_m (r_m - mean)^2 / M): of these members, who are all there are, so the divisor is M and not M - 1.

    >>> disagreement([1.0, 3.0]), disagreement([0.1, 0.1, 0.1])
    (1.0, 0.0)
    """
    if max(values) == min(values):  # exactly 0, which the rounded mean would not give
        return 0.0
    mean = fsum(values) / len(values)
    return sqrt(fsum((value - mean) ** 2 for value in values) / len(values))


def combine(values: Sequence[float], kind: str = "mean", k: float = 1.0) -> float:
    """One number from the members' scores of the same response (Coste et al. 2023, arXiv:2310.02743).

        mean         r = mean_m r_m
        worst        r = min_m r_m
        mean_minus   r = mean_m r_m - k * std_m r_m

    >>> combine([1.0, 3.0]), combine([1.0, 3.0], "worst"), combine([1.0, 3.0], "mean_minus", k=0.5)
    (2.0, 1.0, 1.5)
    """
    if not values:
        raise ValueError("an ensemble has at least one member")
    if kind == "worst":
        return min(values)
    mean = fsum(values) / len(values)
    if kind == "mean":
        return mean
    if kind == "mean_minus":
        return mean - k * disagreement(values)
    raise ValueError(f"unknown combination {kind!r}: one of {', '.join(KINDS)}")


def implicit_reward(logprob: float, reference: float, beta: float) -> float:
    """r(x, y) = beta [ log pi(y | x) - log ref(y | x) ], up to a term that depends on the prompt alone (Rafailov et al. 2023, eq. 5).

    That term is the same for all responses to a prompt: differences within a group are rewards, values across prompts are not.

    >>> implicit_reward(-3.0, -5.0, beta=0.5)
    1.0
    """
    return beta * (logprob - reference)
