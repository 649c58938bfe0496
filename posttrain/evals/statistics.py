"""Statistics of evaluations: confidence intervals, pass@k, majority votes, and paired comparisons of models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import comb, cos, exp, fsum, isfinite, isnan, pi, sin, sqrt, tan

import numpy as np

from posttrain.errors import require

Values = Sequence[float]
Clusters = Sequence[Hashable] | None  # values with the same key are one observation
LEVEL, Z = 0.95, 1.96  # the level of all intervals, and its normal quantile
# a sum below this share of its terms counts as 0, because thirds do not add up to 1
ROUNDING = 1e-9
# precision of both coefficients, so that a model that always wins has finite ones
LENGTH_PRIOR = 1 / 25
NEWTON_STEPS = 100


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its bounds."""

    value: float
    low: float
    high: float

    def row(self) -> list[float]:
        """The interval as a stage's result stores it."""
        return [self.value, self.low, self.high]

    def figures(self, name: str) -> dict[str, float]:
        """The interval as a row of metrics stores it."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def wilson(successes: float, n: int, z: float = Z) -> Interval:
    """Wilson's interval of a proportion. Unlike the normal interval, it is valid at 0 and at n successes, where the normal one has no
    width.

    centre = (p + z^2/2n) / (1 + z^2/n), half-width = z sqrt(p(1-p)/n + z^2/4n^2) / (1 + z^2/n).

    >>> print(wilson(8, 10))
    0.800 [0.490, 0.943]
    """
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"{successes} successes in {n} trials")
    p, shrink = successes / n, 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / shrink
    # At 0 and n the bound is exactly 0 or 1; rounding would miss it, and may exceed it nearby.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    return Interval(p, low, 1.0 if successes == n else min(1.0, centre + half))


def mean_interval(values: Values, clusters: Clusters = None) -> Interval:
    """The mean of real-valued scores with Student's interval, mean +- t s / sqrt(n), s with n - 1 and t of n - 1 degrees of freedom.

    Values with the same key in `clusters` are one observation. If all have the same key, the interval is over that cluster's own
    values. One value gives no estimate of the spread, so its interval is infinite. Equal values give an interval of no width, so use
    `share_interval` for values in [0, 1].

    >>> print(mean_interval([1.0, 2.0, 3.0]))
    2.000 [-0.484, 4.484]
    """
    found = clustered(values, clusters)
    array = np.asarray(found if len(found) > 1 else values, dtype=np.float64)
    if array.size == 0 or not np.isfinite(array).all():
        raise ValueError("a mean needs at least one value, all of them finite")
    mean = float(array.mean())
    if array.size == 1:
        return Interval(mean, float("-inf"), float("inf"))
    half = student(array.size - 1) * float(array.std(ddof=1)) / sqrt(array.size)
    return Interval(mean, mean - half, mean + half)


@lru_cache(maxsize=256)
def student(freedom: int) -> float:
    """The t with P(|T| <= t) = 0.95 of Student's distribution with a whole number v of degrees of freedom.

    With t = sqrt(v) tan a, P is a finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4), which is solved for a by bisection:

        v even: P = sin a (1 + 1/2 cos^2 a + 1*3/(2*4) cos^4 a + ... up to cos^(v-2) a)
        v odd:  P = 2/pi (a + sin a cos a (1 + 2/3 cos^2 a + 2*4/(3*5) cos^4 a + ... up to cos^(v-3) a))

    >>> [round(student(v), 3) for v in (1, 2, 4, 30, 1000)]
    [12.706, 4.303, 2.776, 2.042, 1.962]
    """
    freedom = min(freedom, 10_000)  # from there on it equals the normal quantile to four digits
    odd, k = freedom % 2, np.arange(1, (freedom + 1) // 2 - (freedom % 2))
    ratios = (2 * k) / (2 * k + 1) if odd else (2 * k - 1) / (2 * k)
    factors = np.cumprod([1.0, *ratios])[: (freedom - odd) // 2]
    powers = np.arange(len(factors))
    low, high = 0.0, pi / 2
    for _ in range(60):
        a = (low + high) / 2
        total = float((factors * cos(a) ** (2 * powers)).sum()) * sin(a)
        inside = 2 / pi * (a + total * cos(a)) if odd else total
        low, high = (a, high) if inside < LEVEL else (low, a)
    return sqrt(freedom) * tan(low)


def clustered(values: Values, clusters: Clusters) -> list[float]:
    """One value for each cluster, such as the pairs of one ranking or several answers to one prompt. Clusters are independent of each
    other; values within a cluster are not. With C clusters, N values, m their mean, and n_c values with sum S_c in cluster c:

        y_c = m + (S_c - m n_c) C / N

    The mean of y is m, and its variance over C is the cluster-robust variance of m. For clusters of equal size, y_c is the cluster's
    mean.

    >>> clustered([1.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"]), clustered([1.0, 0.0], None)
    ([0.5, 1.0], [1.0, 0.0])
    """
    if clusters is None or len(set(clusters)) == len(values):
        return list(values)
    members = _by_cluster(values, clusters).values()
    mean, share = fsum(values) / len(values), len(members) / len(values)
    return [mean + (fsum(own) - mean * len(own)) * share for own in members]


def _by_cluster(values: Values, clusters: Sequence[Hashable]) -> dict[Hashable, list[float]]:
    members: dict[Hashable, list[float]] = {}
    for value, key in zip(values, clusters, strict=True):
        members.setdefault(key, []).append(value)
    return members


def share_interval(values: Values, clusters: Clusters = None, means: bool = False) -> Interval:
    """The mean of values in [0, 1]. `clusters` has the keys of values that belong together.

    Single outcomes get Wilson's interval of their mean m. A value in [0, 1] has a variance of at most m (1 - m), so the interval also
    holds for partial credit. Clusters of several outcomes, and `means` of several outcomes each, vary less. They get the interval of
    Agresti and Coull with the measured variance: z^2/2 values of 0 and z^2/2 values of 1 are added to the n clusters y_c.

        m = (sum_c y_c + z^2/2) / (n + z^2),    v = (sum_c (y_c - m)^2 + z^2/2 (m^2 + (1 - m)^2)) / (n + z^2)
        m +- z sqrt(v / (n + z^2)),  within [0, 1]

    For y of 0 and 1 this is Agresti and Coull's own interval, which contains Wilson's. The added values give a width even if all y
    are equal.

    >>> print(share_interval([0.0, 0.0]), share_interval([0.0, 0.5]), share_interval([0.5] * 30, means=True))
    0.000 [0.000, 0.658] 0.250 [0.027, 0.802] 0.500 [0.443, 0.557]
    """
    if not values or not all(0 <= value <= 1 for value in values):
        raise ValueError("shares are numbers in [0, 1], at least one")
    found = clustered(values, clusters)
    n = len(found)
    if set(found) <= {0.0, 1.0} or not (means or n < len(values)):
        return wilson(min(fsum(found), n), n)
    added, y_C = Z * Z, np.asarray(found)
    centre = (float(y_C.sum()) + added / 2) / (n + added)
    squares = float(((y_C - centre) ** 2).sum()) + added / 2 * (centre**2 + (1 - centre) ** 2)
    half = Z * sqrt(squares / (n + added) / (n + added))
    return Interval(fsum(values) / len(values), max(0.0, centre - half), min(1.0, centre + half))


def score_interval(values: Values, clusters: Clusters = None, means: bool = False) -> Interval:
    """The mean of a task's scores: as shares if all lie in [0, 1], otherwise as real numbers.

    >>> print(score_interval([1.0, 1.0]), score_interval([1.0, 2.0, 3.0]))
    1.000 [0.342, 1.000] 2.000 [-0.484, 4.484]
    """
    bounded = bool(values) and all(0 <= value <= 1 for value in values)
    return share_interval(values, clusters, means) if bounded else mean_interval(values, clusters)


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that at least one of k samples is right, from c right ones among n: 1 - C(n-c, k) / C(n, k), unbiased
    (Chen 2021).

    >>> pass_at_k(8, 1, 8), pass_at_k(4, 2, 1), round(pass_at_k(4, 2, 2), 4)
    (1.0, 0.5, 0.8333)
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    return float(1 - Fraction(comb(n - c, k), comb(n, k)))


def majority_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """Whether the most frequent of the first k answers is right. None (unparseable) has no vote; m tied answers count 1/m each.

    >>> majority_at_k(["7", "8", "7", None], [True, False, True, False], 4), majority_at_k(["7", "8"], [True, False], 2)
    (1.0, 0.5)
    """
    if len(answers) != len(correct) or not 1 <= k <= len(answers):
        raise ValueError(f"majority@{k} of {len(answers)} answers with {len(correct)} verdicts")
    verdict: dict[Hashable, bool] = {}
    for given, right in zip(answers[:k], correct[:k], strict=True):
        if given is not None and verdict.setdefault(given, right) != right:
            raise ValueError(f"answer {given!r} is called both right and wrong")
    votes = Counter(given for given in answers[:k] if given is not None)
    highest = max(votes.values(), default=0)
    leaders = [given for given, count in votes.items() if count == highest]
    return sum(verdict[given] for given in leaders) / len(leaders) if leaders else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on the same problems. In `wins` problems the second is better, in `losses` the first; `p_value` is exact. Problems
    with the same prompt count once."""

    wins: int
    losses: int
    ties: int
    difference: Interval
    p_value: float
    left_out: int = 0  # problems without a score on at least one side

    def __str__(self) -> str:
        more = f"; {self.left_out} left out, which could not be scored" if self.left_out else ""
        return f"{self.difference}, p = {self.p_value:.3g} ({self.wins} better, {self.losses} worse, {self.ties} equal{more})"


def compare(first: Values, second: Values, clusters: Clusters = None) -> Comparison:
    """Compare the second model with the first on paired scores, by an exact sign test. On scores of 0 and 1 it is McNemar's exact
    test.

    If the models are equal, each of the w + l problems on which they differ is a fair coin, so the two-sided
    p = min(1, 2 P[Binomial(w + l, 1/2) <= min(w, l)]). The interval is that of `paired_interval`. Both lists must have the same order
    of problems. A pair with a NaN, which is a problem without a score, is counted and left out. Problems with the same key in
    `clusters` are one observation.

    >>> result = compare([0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1])
    >>> result.wins, result.losses, result.p_value
    (5, 0, 0.0625)
    """
    if len(first) != len(second):
        counts = f"{len(first)} and {len(second)}"
        raise ValueError(f"a paired comparison needs scores of the same problems, not {counts}")
    rows = zip(first, second, range(len(first)) if clusters is None else clusters, strict=True)
    scored = [(a, b, key) for a, b, key in rows if not (isnan(a) or isnan(b))]
    needs = "a paired comparison needs a problem that was scored on both sides, and there is none"
    require(scored, needs)
    if not all(isfinite(a) and isfinite(b) for a, b, _ in scored):
        raise ValueError("scores must be finite")
    differences, kept = [b - a for a, b, _ in scored], [key for _, _, key in scored]
    shares = all(0 <= a <= 1 and 0 <= b <= 1 for a, b, _ in scored)
    interval = paired_interval(differences, kept) if shares else mean_interval(differences, kept)
    sums = []
    for own in _by_cluster(differences, kept).values():
        total = fsum(own)
        sums.append(total if abs(total) > ROUNDING * fsum(map(abs, own)) else 0.0)
    wins, losses = sum(total > 0 for total in sums), sum(total < 0 for total in sums)
    ties, left_out = len(sums) - wins - losses, len(first) - len(scored)
    return Comparison(wins, losses, ties, interval, sign_test(wins, losses), left_out)


def paired_interval(differences: Values, clusters: Clusters = None) -> Interval:
    """The mean difference of paired shares, within [-1, 1].

    Half a problem is added to each of the four cells of a table of pairs: two that differ, by 1 and by -1, and two that do not, each
    with weight 1/2. For n differences d:

        centre = sum d / (n + 2),    half-width = z sqrt(sum d^2 + 1 - (sum d)^2 / (n + 2)) / (n + 2)

    If each d is -1, 0 or 1, this is the interval of Agresti and Min (2005). For shares of several samples it uses their own squares
    in the same way. So equal results also have an interval with a width.

    >>> print(paired_interval([0.0] * 20), paired_interval([1.0] * 5 + [0.0]))
    0.000 [-0.089, 0.089] 0.833 [0.210, 1.000]
    """
    d_C = np.asarray(clustered(differences, clusters), dtype=np.float64)
    more, total = len(d_C) + 2, float(d_C.sum())
    half = Z * sqrt(float((d_C**2).sum()) + 1 - total**2 / more) / more
    low, high = max(-1.0, total / more - half), min(1.0, total / more + half)
    return Interval(fsum(differences) / len(differences), low, high)


def sign_test(wins: int, losses: int) -> float:
    """The exact two-sided p-value of this many wins and losses if both models are equal.

    >>> sign_test(1, 9), sign_test(3, 3), sign_test(0, 0)
    (0.021484375, 1.0, 1.0)
    """
    n, ways, total = wins + losses, 1, 0
    for i in range(min(wins, losses) + 1):
        total += ways
        ways = ways * (n - i) // (i + 1)  # C(n, i+1) from C(n, i)
    return min(1.0, float(Fraction(2 * total, 2**n)))


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
    prior, fitted = LENGTH_PRIOR * np.eye(2), np.zeros(2)
    for _ in range(NEWTON_STEPS):
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
