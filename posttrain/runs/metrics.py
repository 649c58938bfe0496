"""Figures that merge: totals over counts, summed over micro-batches and ranks before they are divided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from posttrain.types import Metric


@dataclass(frozen=True, slots=True, eq=False)
class Figures(Mapping[str, float]):
    """Merged metrics, read like a mapping from name to value; `metrics()` merges further without loss.

    >>> figures = merge([Metric("kl", 6.0, 3), Metric("kl", 2.0, 1)])
    >>> figures["kl"]  # (6 + 2) / (3 + 1), not the mean of 2 and 2
    2.0
    >>> merge([Metric("clip", 1.0, 10), Metric("clip", 3.0, 2)])["clip"]  # 4 / 12, not the mean of 0.1 and 1.5
    0.3333333333333333
    >>> merge([Metric("worst", 1.0, None, largest=True), Metric("worst", 0.5, None, largest=True)])["worst"]
    1.0
    """

    merged: Mapping[str, Metric]

    def __getitem__(self, name: str) -> float:
        return self.merged[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self.merged)

    def __len__(self) -> int:
        return len(self.merged)

    def metrics(self) -> tuple[Metric, ...]:
        """The same, as metrics that merge with others."""
        return tuple(self.merged.values())


def merge(metrics: Iterable[Metric]) -> Figures:
    """Sum totals and counts by name, in double precision, names in order of first appearance.

    A count of None marks a plain sum. A name whose counts are all 0 is NaN: nothing was measured, which is not a
    measurement of 0.
    """
    merged: dict[str, Metric] = {}
    for metric in metrics:
        total, count = float(metric.total), None if metric.count is None else float(metric.count)
        before = merged.get(metric.name)
        if before is not None:
            if (before.count is None) != (count is None) or before.largest != metric.largest:
                raise ValueError(
                    f"metric {metric.name!r} is a sum in one place and a mean or a maximum in another"
                )
            both = float(before.total) + total
            total = (
                max(float(before.total), total) if metric.largest and both == both else both
            )  # NaN stays NaN
            count = None if count is None or before.count is None else float(before.count) + count
        merged[metric.name] = Metric(metric.name, total, count, metric.largest)
    return Figures(merged)


SCORES = {
    "accuracy/test": 1.0,
    "accuracy/held_out": 1.0,
    "loss/held_out": -1.0,
}  # the first one measured; -1: lower is better


@dataclass(frozen=True, slots=True)
class Best:
    """The best held-out score of a stage, and the step after which it was measured."""

    figure: str
    score: float
    step: int


def best_score(best: Best | None, step: int, figures: Mapping[str, float]) -> Best | None:
    """The better of what was best and what was measured now; the earlier one where they are equal.

    >>> first = best_score(None, 10, {"accuracy/test": 0.4, "accuracy/test_low": 0.3})
    >>> best_score(best_score(first, 20, {"accuracy/test": 0.6}), 30, {"accuracy/test": 0.6})
    Best(figure='accuracy/test', score=0.6, step=20)
    """
    name = next((name for name in SCORES if name in figures), "")
    value = float(figures.get(name, float("nan")))
    if value != value or (
        best is not None and best.figure == name and SCORES[name] * (value - best.score) <= 0
    ):
        return best
    return Best(name, value, step)
