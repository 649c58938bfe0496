"""What a number of right answers says: intervals, pass@k, majority votes, and whether one model beats another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb, isfinite, isnan, sqrt

import numpy as np

from posttrain.errors import require


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its bounds."""

    value: float
    low: float
    high: float

    def row(self) -> list[float]:
        """As a stage's result keeps it."""
        return [self.value, self.low, self.high]

    def figures(self, name: str) -> dict[str, float]:
        """As a row of metrics keeps it."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def wilson(successes: float, n: int, z: float = 1.96) -> Interval:
    """Wilson's interval of a proportion: it holds at 0 and at n, where the normal interval has no width.

    centre = (p + z^2/2n) / (1 + z^2/n), half-width = z sqrt(p(1-p)/n + z^2/4n^2) / (1 + z^2/n).

    >>> print(wilson(8, 10))
    0.800 [0.490, 0.943]
    """
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"{successes} successes in {n} trials")
    p, shrink = successes / n, 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / shrink
    # At the ends the bound is exactly the end; rounding alone would miss it.
    return Interval(p, 0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)


def mean_interval(values: Sequence[float], z: float = 1.96) -> Interval:
    """The mean of real-valued scores with its normal interval, mean +- z s / sqrt(n), s with n - 1.

    Scores of several samples of one problem are not independent: pass the mean of each problem. One value says
    nothing of the spread and gives an infinite interval; equal values give one of no width, so use `wilson` for 0 and 1.

    >>> print(mean_interval([1.0, 2.0, 3.0]))
    2.000 [0.868, 3.132]
    """
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0 or not np.isfinite(array).all():
        raise ValueError("a mean needs at least one value, all of them finite")
    mean = float(array.mean())
    if array.size == 1:
        return Interval(mean, float("-inf"), float("inf"))
    half = z * float(array.std(ddof=1)) / sqrt(array.size)
    return Interval(mean, mean - half, mean + half)


def share_interval(values: Sequence[float], z: float = 1.96) -> Interval:
    """The mean of shares, one a problem: Wilson's interval where each is 0 or 1, which holds at 0% and 100%, and where all are equal;
    else the normal one within [0, 1].

    >>> print(share_interval([0.0, 0.0]), share_interval([0.0, 0.5]))
    0.000 [0.000, 0.658] 0.250 [0.000, 0.740]
    """
    if values and (set(values) <= {0.0, 1.0} or len(set(values)) == 1):
        return wilson(min(sum(values), len(values)), len(values), z)
    found = mean_interval(values, z)
    return Interval(found.value, max(0.0, found.low), min(1.0, found.high))


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k samples is right, from c right ones among n: 1 - C(n-c, k) / C(n, k), unbiased (Chen 2021).

    >>> pass_at_k(8, 1, 8), pass_at_k(4, 2, 1), round(pass_at_k(4, 2, 2), 4)
    (1.0, 0.5, 0.8333)
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    return float(1 - Fraction(comb(n - c, k), comb(n, k)))


def majority_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """Whether the most frequent of the first k answers is right. None (unparseable) has no vote; m tied ones share 1/m each.

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
    most = max(votes.values(), default=0)
    leaders = [given for given, count in votes.items() if count == most]
    return sum(verdict[given] for given in leaders) / len(leaders) if leaders else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on the same problems: `wins` only the second solves, `losses` only the first, and the exact p-value."""

    wins: int
    losses: int
    ties: int
    difference: Interval
    p_value: float
    left_out: int = 0  # that could not be scored on one side at least

    def __str__(self) -> str:
        more = f"; {self.left_out} left out, which could not be scored" if self.left_out else ""
        return f"{self.difference}, p = {self.p_value:.3g} ({self.wins} better, {self.losses} worse, {self.ties} equal{more})"


def compare(first: Sequence[float], second: Sequence[float], z: float = 1.96) -> Comparison:
    """The second against the first on paired scores: an exact sign test, which on scores of 0 and 1 is McNemar's exact test.

    Without a difference each of the w + l problems that tell them apart is a fair coin, so the two-sided
    p = min(1, 2 P[Binomial(w + l, 1/2) <= min(w, l)]). The interval is `paired_interval`'s. The order of problems must be the
    same in both; a pair with a NaN, which is a problem that could not be scored, is left out and counted.

    >>> result = compare([0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1])
    >>> result.wins, result.losses, result.p_value
    (5, 0, 0.0625)
    """
    if len(first) != len(second):
        raise ValueError(f"a paired comparison needs scores of the same problems, not {len(first)} and {len(second)}")
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if not (isnan(a) or isnan(b))]
    require(bool(pairs), "a paired comparison needs a problem that was scored on both sides, and there is none")
    if not all(isfinite(a) and isfinite(b) for a, b in pairs):
        raise ValueError("scores must be finite")
    differences = [b - a for a, b in pairs]
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    shares = all(0 <= a <= 1 and 0 <= b <= 1 for a, b in pairs)
    interval = paired_interval(differences, z) if shares else mean_interval(differences, z)
    ties = len(pairs) - wins - losses
    return Comparison(wins, losses, ties, interval, sign_test(wins, losses), len(first) - len(pairs))


def paired_interval(differences: Sequence[float], z: float = 1.96) -> Interval:
    """The mean difference of paired shares, within [-1, 1].

    Where each is -1, 0 or 1 (w problems won, l lost of n), half a problem is added to each of the four cells (Agresti and Min 2005):

        d = (w - l) / (n + 2),    half-width = z sqrt((w + l + 1) - (w - l)^2 / (n + 2)) / (n + 2)

    so that equal results have a width too; likewise where all differences are equal. Other shares of several samples have the normal
    interval.

    >>> print(paired_interval([0.0] * 20), paired_interval([1.0] * 5 + [0.0]))
    0.000 [-0.089, 0.089] 0.833 [0.210, 1.000]
    """
    n, mean = len(differences), sum(differences) / len(differences)
    if set(differences) <= {-1.0, 0.0, 1.0} or len(set(differences)) == 1:
        more = n + 2
        centre = n * mean / more
        half = z * sqrt(sum(abs(d) for d in differences) + 1 - (n * mean) ** 2 / more) / more
    else:
        found = mean_interval(differences, z)
        centre, half = found.value, found.high - found.value
    return Interval(mean, max(-1.0, centre - half), min(1.0, centre + half))


def sign_test(wins: int, losses: int) -> float:
    """The exact two-sided p-value of so many wins and losses between equals.

    >>> sign_test(1, 9), sign_test(3, 3), sign_test(0, 0)
    (0.021484375, 1.0, 1.0)
    """
    n, ways, total = wins + losses, 1, 0
    for i in range(min(wins, losses) + 1):
        total += ways
        ways = ways * (n - i) // (i + 1)  # C(n, i+1) from C(n, i)
    return min(1.0, float(Fraction(2 * total, 2**n)))
