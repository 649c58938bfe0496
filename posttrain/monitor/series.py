"""Series of metrics of a stage, and their changes.

A change is measured in standard errors of window means,

    z = (mean_now - mean_then) / (s sqrt(2)),    s = the larger of  sd(differences) / sqrt(2 W)  and  the spread of block means,

so that noise of single steps, and slow noise, both widen it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from posttrain.runs.metrics import GOLD

START = 5  # steps that define what is normal
KEPT = 400  # values of a series
HELD_OUT = ("accuracy/test", "accuracy/test_low", "accuracy/test_high")
SYMPTOMS = ("length", "reward/format", "repetition", "distinct", "keyword", "reward/disagreement")
TRACKED = ("reward", *GOLD, *HELD_OUT, "kl", "entropy", "groups/zero_variance", *SYMPTOMS)
# compared with the mean of the first steps
COMPARED = ("entropy", "length", "truncated", "reward_spread", "mismatch")


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """The means of a window then and now. `z`, the standard errors between them, is computed on first use: most are never read."""

    then: float
    now: float
    values: np.ndarray
    window: int

    @property
    def z(self) -> float:
        return (self.now - self.then) / (math.sqrt(2) * spread(self.values, self.window))

    def __str__(self) -> str:
        return f"{self.then:.3g} -> {self.now:.3g}"


def spread(values: np.ndarray, window: int) -> float:
    """The standard error of the mean of `window` values of a noisy, slowly moving series."""
    steps = np.diff(values)
    fast = math.sqrt(float(steps @ steps) / len(steps) / (2 * window))
    half = window // 2
    blocks = values[len(values) % half :].reshape(-1, half).mean(1)
    if len(blocks) <= 3:
        return max(fast, 1e-9)
    # the median step between blocks: slow noise is in it, a single jump is not; half a window's mean has sqrt(2) the error of a whole's
    between = np.sort(np.abs(np.diff(blocks)))
    return max(fast, float(between[(len(blocks) - 1) // 2]) / 0.6745 / 2, 1e-9)


def change(values: np.ndarray, window: int, back: int) -> Change | None:
    """The last window of a series compared with the one that ended `back` points ago; None if there are too few points."""
    end = len(values) - back
    if end < window or back < 0:
        return None
    then, now = values[end - window : end], values[-window:]
    return Change(float(then.sum()) / window, float(now.sum()) / window, values, window)


def since_best(values: np.ndarray, window: int) -> tuple[int, Change] | None:
    """(end of the best window of the series, the change since)."""
    if len(values) < 2 * window:
        return None
    sums = np.concatenate([[0.0], np.cumsum(values)])
    totals = (sums[window:] - sums[:-window])[: len(values) - 2 * window + 1]
    place = int(np.argmax(totals))
    now = float(values[-window:].sum()) / window
    return place + window, Change(float(totals[place]) / window, now, values, window)


@dataclass(eq=False)
class History:
    """The last values of tracked metrics with their steps, and sums over the first steps."""

    series: dict[str, list[float]] = field(default_factory=dict)
    steps: dict[str, list[int]] = field(default_factory=dict)
    first: dict[str, list[float]] = field(default_factory=dict)  # total and count
    level: float | None = None  # of the curriculum

    def add(self, step: int, figures: Mapping[str, float]) -> bool:
        """Add the metrics of a step. Returns True if the series start over, because problems of another level are not comparable
        with those before."""
        found = figures.get("level", math.nan)
        level = None if math.isnan(found) else found
        anew = self.level is not None and level != self.level
        if anew:
            self.series, self.steps = {}, {}
        self.level = level
        for name in TRACKED:
            if math.isfinite(value := figures.get(name, math.nan)):
                self.series[name] = [*self.series.get(name, []), round(float(value), 6)][-KEPT:]
                self.steps[name] = [*self.steps.get(name, []), step][-KEPT:]
        for name in COMPARED:
            total, count = self.first.get(name, (0.0, 0))
            if math.isfinite(value := figures.get(name, math.nan)) and count <= START:
                self.first[name] = [total + value if count < START else total, count + 1]
        return anew

    def values(self, name: str) -> np.ndarray:
        return np.array(self.series.get(name, []), dtype=np.float64)

    def mean_of_first(self, name: str) -> float | None:
        """The mean over the first steps; None until they are over."""
        total, count = self.first.get(name, (0.0, 0))
        return float(total / START) if count > START else None

    def gold(self) -> str:
        """The metric of the gold reward, if one was measured at every step."""
        count = len(self.series.get("reward", []))
        return next((name for name in GOLD if len(self.series.get(name, [])) == count > 0), "")
