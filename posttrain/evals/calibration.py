"""Measures how far a reward model can be trusted: which pairs it orders as people did, and whether its confidence matches its
accuracy.

A margin is the score of the preferred response minus that of the other, so a positive margin is a pair in the right order. By
Bradley-Terry, the model's confidence in its order is sigmoid(|margin|), between 0.5 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

BUCKETS = 5
BINS = 10


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pairs whose key (for example the distance between the labels) lies in [low, high], and the share of them in the right order."""

    low: float
    high: float
    pairs: int
    accuracy: float


@dataclass(frozen=True, slots=True)
class Bin:
    """Pairs with similar confidence of the model: their mean confidence, and their accuracy."""

    pairs: int
    confidence: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """`error` is the expected calibration error: sum_b n_b / n |accuracy_b - confidence_b|."""

    bins: tuple[Bin, ...]
    error: float


def pair_accuracy(margins: Sequence[float]) -> float:
    """Share of pairs in the right order; equal scores are half right.

    >>> pair_accuracy([2.0, -1.0, 0.0, 0.5])
    0.625
    """
    margin_K = _finite(margins)
    return float(np.mean((margin_K > 0) + 0.5 * (margin_K == 0)))


def accuracy_by(
    keys: Sequence[float], margins: Sequence[float], buckets: int = BUCKETS
) -> tuple[Bucket, ...]:
    """Accuracy over pairs that are sorted by `keys` and divided into `buckets` of about equal size. Equal keys stay together.

    With the distance between labels as the key, it shows whether the errors are in pairs that people also found close. Few different
    keys give fewer buckets.

    >>> accuracy_by([1, 1, 2, 2], [0.5, -0.5, 1.0, 2.0], buckets=2)
    (Bucket(low=1.0, high=1.0, pairs=2, accuracy=0.5), Bucket(low=2.0, high=2.0, pairs=2, accuracy=1.0))
    """
    key_K, margin_K = _finite(keys), _finite(margins)
    if len(key_K) != len(margin_K) or buckets < 1:
        raise ValueError(f"{len(key_K)} keys for {len(margin_K)} margins in {buckets} buckets")
    order = np.argsort(key_K, kind="stable")
    key_K, margin_K = key_K[order], margin_K[order]
    wanted = {len(key_K) * b // buckets for b in range(1, buckets + 1)} - {0}
    ends = [int(np.searchsorted(key_K, key_K[end - 1], side="right")) for end in wanted]
    found = []
    for a, b in pairwise(sorted({0, *ends})):
        accuracy = pair_accuracy(margin_K[a:b].tolist())
        found.append(Bucket(float(key_K[a]), float(key_K[b - 1]), b - a, accuracy))
    return tuple(found)


def calibration(margins: Sequence[float], bins: int = BINS) -> Calibration:
    """Confidence sigmoid(|margin|) against accuracy, in bins of equal width over [0.5, 1]; empty bins are left out.

    >>> calibration([100.0, 100.0, 100.0, -100.0], bins=2)  # quite sure, and right three times in four
    Calibration(bins=(Bin(pairs=4, confidence=1.0, accuracy=0.75),), error=0.25)
    """
    margin_K = _finite(margins)
    confidence_K = 1 / (1 + np.exp(-np.abs(margin_K)))
    place_K = np.minimum(((confidence_K - 0.5) * 2 * bins).astype(int), bins - 1)
    found = []
    for place in range(bins):
        inside = place_K == place
        if inside.any():
            accuracy = pair_accuracy(margin_K[inside].tolist())
            found.append(Bin(int(inside.sum()), float(confidence_K[inside].mean()), accuracy))
    error = sum(b.pairs * abs(b.accuracy - b.confidence) for b in found) / len(margin_K)
    return Calibration(tuple(found), float(error))


def _finite(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0 or not np.isfinite(array).all():
        raise ValueError("needs at least one pair, and finite numbers")
    return array
