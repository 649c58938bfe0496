"""Best of n at inference: the proxy reward, the gold reward and the KL of choosing the best of n samples by a proxy reward.

The curve over n is a baseline for policy optimisation: it needs no training, and its KL is known. If the proxy keeps rising while the
gold falls, the reward model is being exploited (Gao et al. 2022, arXiv:2210.10760).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from posttrain.evals.evaluate import prompts
from posttrain.evals.statistics import Interval, mean_interval, score_interval
from posttrain.ops.kl import best_of_n_kl
from posttrain.types import Group

GOLD = "task"  # the part of a score that is the gold reward


@dataclass(frozen=True, slots=True)
class Point:
    """The point of one n: the upper bound of KL(best-of-n || policy), and the expected rewards with intervals over prompts."""

    n: int
    kl: float
    proxy: Interval
    gold: Interval


def expected_best(proxy: Sequence[float], value: Sequence[float]) -> np.ndarray:
    """[N]: for n = 1..N, the expected `value` of the sample with the highest `proxy` among n of the N samples, drawn without
    replacement.

    With the samples sorted by proxy, sample (i) is the best of the draw if the other n - 1 come from the i - 1 below it:

        E_n = sum_i C(i-1, n-1) / C(N, n) * value_(i)

    The estimate is unbiased for n fresh samples, and uses all samples for every n; the best of the first n would use one draw of
    many. Samples with equal proxy are equally likely to be chosen, so they share the mean of their values.

    >>> expected_best([1.0, 3.0, 2.0], [1.0, 3.0, 2.0]).round(4).tolist()
    [2.0, 2.6667, 3.0]
    """
    proxy_N, value_N = np.asarray(proxy, dtype=np.float64), np.asarray(value, dtype=np.float64)
    if proxy_N.shape != value_N.shape or proxy_N.ndim != 1 or not len(proxy_N):
        raise ValueError(f"{proxy_N.shape} proxy rewards for {value_N.shape} values")
    if not (np.isfinite(proxy_N).all() and np.isfinite(value_N).all()):
        raise ValueError("rewards must be finite: leave out what could not be scored")
    order = np.argsort(proxy_N, kind="stable")
    proxy_N, value_N = proxy_N[order], value_N[order].copy()
    changes = [0, *(np.flatnonzero(np.diff(proxy_N)) + 1).tolist(), len(proxy_N)]
    for begin, end in pairwise(changes):
        value_N[begin:end] = value_N[begin:end].mean()
    return np.array([chances(len(proxy_N), n) @ value_N for n in range(1, len(proxy_N) + 1)])


@lru_cache(maxsize=1024)
def chances(samples: int, n: int) -> np.ndarray:
    """[N]: the probability C(i-1, n-1) / C(N, n) that the i-th smallest of N samples is the largest of n drawn without replacement.

    Computed from the top: p_N = n / N, and p_i = p_(i+1) (i - n + 1) / i, so that no binomial overflows.
    """
    chance_N = np.zeros(samples)
    chance_N[-1] = n / samples
    for i in range(samples - 1, n - 1, -1):
        chance_N[i - 1] = chance_N[i] * (i - n + 1) / i
    return chance_N


def frontier(groups: Sequence[Group], ns: Sequence[int] | None = None) -> list[Point]:
    """The reward-KL curve of best of n, from groups of N rated samples. The value of a score is the proxy, and its part `task` is the
    gold reward (as `rate_groups` leaves them). If no score has such a part, the value is both.

    Each problem has its own curve, and the figures are means over problems. Samples without a proxy or a gold reward are left out.
    The largest n is the size of the smallest group.
    """
    both = any(GOLD in r.score.parts for group in groups for r in group.rollouts)
    curves, asked = [], []
    for group, key in zip(groups, prompts(groups), strict=True):
        scores = [r.score for r in group.rollouts if r.score.value is not None]
        scores = [score for score in scores if not both or GOLD in score.parts]
        proxy = [float(s.value or 0.0) for s in scores]
        if proxy:
            true = [s.parts[GOLD] for s in scores] if both else proxy
            asked.append(key)
            curves.append((expected_best(proxy, proxy), expected_best(proxy, true)))
    if not curves:
        raise ValueError("no sample has a score")
    largest = min(len(proxy) for proxy, _ in curves)
    points = []
    for n in ns if ns is not None else range(1, largest + 1):
        if not 1 <= n <= largest:
            raise ValueError(f"the best of {n} cannot be estimated from {largest} samples")
        proxies, golds = [float(c[0][n - 1]) for c in curves], [float(c[1][n - 1]) for c in curves]
        gold_interval = score_interval(golds, asked, means=largest > 1)
        points.append(Point(n, best_of_n_kl(n), mean_interval(proxies, asked), gold_interval))
    return points
