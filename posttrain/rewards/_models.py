"""Scores of reward models: the combination of several, and the implicit reward of a model trained on preferences.

A policy that is optimised strongly against one reward model finds inputs on which that model is wrong. Models trained on the
same data with other seeds agree where the data decides and differ elsewhere, so their disagreement shows where not to trust the
score.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, sqrt

from posttrain.errors import require

KINDS = ("mean", "worst", "mean_minus")


def check(kind: str, k: float) -> None:
    """Raise an error for invalid settings of an ensemble."""
    require(kind in KINDS, f"ensemble: combine must be one of {', '.join(KINDS)}, not {kind!r}")
    fine = 0 <= k < float("inf")
    require(fine, f"ensemble: k must be 0 or a positive number of deviations, not {k}")


def mean(values: Sequence[float], weights: Sequence[float] = ()) -> float:
    """sum_m w_m r_m / sum_m w_m; equal weights by default.

    >>> mean([1.0, 3.0]), mean([1.0, 3.0], [3.0, 1.0])
    (2.0, 1.5)
    """
    if not weights:
        return fsum(values) / len(values)
    return fsum(w * value for w, value in zip(weights, values, strict=True)) / fsum(weights)


def disagreement(values: Sequence[float], weights: Sequence[float] = ()) -> float:
    """std = sqrt(mean_m (r_m - mean)^2) over all members of the ensemble, so the divisor is M and not M - 1.

    >>> disagreement([1.0, 3.0]), disagreement([0.1, 0.1, 0.1]), disagreement([1.0, 5.0], [3.0, 1.0])
    (1.0, 0.0, 1.7320508075688772)
    """
    if max(values) == min(values):  # exactly 0; rounding of the mean would give a small number
        return 0.0
    middle = mean(values, weights)
    return sqrt(mean([(value - middle) ** 2 for value in values], weights))


def combine(
    values: Sequence[float], kind: str = "mean", k: float = 1.0, weights: Sequence[float] = ()
) -> float:
    """Combine the members' scores of the same response into one number (Coste et al. 2023, arXiv:2310.02743).

        mean         r = mean_m r_m
        worst        r = min_m r_m
        mean_minus   r = mean_m r_m - k * std_m r_m

    With `weights`, mean and std are weighted; worst ignores them.

    >>> combine([1.0, 3.0]), combine([1.0, 3.0], "worst"), combine([1.0, 3.0], "mean_minus", k=0.5)
    (2.0, 1.0, 1.5)
    """
    if not values:
        raise ValueError("an ensemble has at least one member")
    if kind == "worst":
        return min(values)
    if kind == "mean":
        return mean(values, weights)
    if kind == "mean_minus":
        return mean(values, weights) - k * disagreement(values, weights)
    raise ValueError(f"unknown combination {kind!r}: one of {', '.join(KINDS)}")


def implicit_reward(logprob: float, reference: float, beta: float) -> float:
    """r(x, y) = beta [ log pi(y | x) - log ref(y | x) ], up to a term that depends only on the prompt (Rafailov et al. 2023,
    eq. 5).

    That term is the same for all responses to a prompt: differences within a group are rewards, values across prompts are not.

    >>> implicit_reward(-3.0, -5.0, beta=0.5)
    1.0
    """
    return beta * (logprob - reference)
