"""Length control of a win rate: the win rate that answers of equal length would have (Stiennon et al. 2020, appendix F)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import exp

import numpy as np

from posttrain.evals.statistics import Interval, Z

PRIOR = 1 / 25  # precision of both coefficients, so that a model that always wins has finite ones
STEPS = 100


def win_rate_at_equal_length(
    won: Sequence[float], lengths: Sequence[tuple[int, int]], asked: Sequence[Hashable]
) -> Interval:
    """sigmoid(a) of the logistic regression P(win) = sigmoid(a + b log(our length / their length)), fitted to wins (1), ties (1/2) and
    losses (0), with a normal prior of standard deviation 5 on a and b. Its variance is the cluster-robust one of the prompts `asked`:
    with X = (1, log ratio), H = X' diag(p (1 - p)) X + prior, S = sum over prompts of the outer products of their gradients,
    V = H^-1 S H^-1.

    If the longer answer wins 9 times of 10, and ours is the longer one 8 times of 10, the win rate is 0.74 by length alone:

    >>> lengths, won = [(20, 10)] * 80 + [(10, 20)] * 20, [1.0] * 72 + [0.0] * 8 + [1.0] * 2 + [0.0] * 18
    >>> print(sum(won) / 100, win_rate_at_equal_length(won, lengths, range(100)))
    0.74 0.505 [0.316, 0.693]
    """
    y_N = np.asarray(won, dtype=np.float64)
    ratio_N = np.log([(1 + ours) / (1 + theirs) for ours, theirs in lengths])
    x_N2 = np.stack([np.ones_like(ratio_N), ratio_N], axis=1)
    prior, fitted = PRIOR * np.eye(2), np.zeros(2)
    for _ in range(STEPS):
        p_N = 1 / (1 + np.exp(-x_N2 @ fitted))
        hessian = x_N2.T @ (x_N2 * (p_N * (1 - p_N))[:, None]) + prior
        step = np.linalg.solve(hessian, x_N2.T @ (y_N - p_N) - prior @ fitted)
        fitted = fitted + step * min(1.0, 2 / float(np.abs(step).max() + 1e-12))
        if np.abs(step).max() < 1e-9:
            break
    gradients: dict[Hashable, np.ndarray] = {}
    for key, row in zip(asked, x_N2 * (y_N - p_N)[:, None], strict=True):
        gradients[key] = gradients.get(key, 0.0) + row
    # add half a win and half a loss at equal length, so that the interval has a width even if all outcomes are the same
    scores = np.stack([*gradients.values(), np.array([0.5, 0.0])])
    inverse = np.linalg.inv(hessian)
    half = Z * float((inverse @ scores.T @ scores @ inverse)[0, 0]) ** 0.5
    return Interval(*(1 / (1 + exp(-v)) for v in (fitted[0], fitted[0] - half, fitted[0] + half)))
