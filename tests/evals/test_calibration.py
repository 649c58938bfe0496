"""Accuracy and calibration of a reward model, by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from posttrain.evals.calibration import accuracy_by, calibration, pair_accuracy


def test_accuracy_counts_equal_scores_half() -> None:
    assert pair_accuracy([1.0, 2.0, -3.0]) == pytest.approx(2 / 3)
    assert pair_accuracy([0.0]) == 0.5
    for bad in ([], [1.0, float("nan")], [float("inf")]):
        with pytest.raises(ValueError, match="at least one pair, and finite"):
            pair_accuracy(bad)


def test_calibration_by_hand() -> None:
    """log 3 is a confidence of 3/4, log 9 of 9/10. In bins of a tenth: {3/4: right, right, wrong}, {9/10: wrong}, {1/2: a tie}."""
    three, nine = math.log(3), math.log(9.0001)
    found = calibration([three, three, -three, -nine, 0.0], bins=5)
    assert [b.pairs for b in found.bins] == [1, 3, 1]
    assert [b.confidence for b in found.bins] == pytest.approx([0.5, 0.75, 0.9], abs=1e-4)
    assert [b.accuracy for b in found.bins] == pytest.approx([0.5, 2 / 3, 0.0])
    assert found.error == pytest.approx((0 + 3 * (0.75 - 2 / 3) + 0.9) / 5, abs=1e-4)


def test_bins_are_of_equal_width_from_one_half() -> None:
    """0.62 and 0.68 are in [0.6, 0.7), 0.72 in the next."""
    found = calibration([math.log(p / (1 - p)) for p in (0.62, 0.68, 0.72)], bins=5)
    assert [(b.pairs, round(b.confidence, 6)) for b in found.bins] == [(2, 0.65), (1, 0.72)]


def test_a_model_that_tells_the_truth_is_calibrated() -> None:
    """Pairs drawn from Bradley-Terry itself: the error vanishes; with scores three times too large it does not."""
    generator = np.random.default_rng(0)
    difference = generator.normal(0, 1.5, 40_000)
    won = generator.random(40_000) < 1 / (1 + np.exp(-difference))
    margins = np.where(won, difference, -difference)
    assert calibration(margins.tolist()).error < 0.01
    assert calibration((3 * margins).tolist()).error > 0.1


def test_certainty_falls_in_the_last_bin() -> None:
    found = calibration([1000.0, -1000.0])
    assert len(found.bins) == 1 and found.error == pytest.approx(0.5)


def test_accuracy_by_margin_of_labels() -> None:
    """Five keys in three buckets of about a third; the two that are equal stay together."""
    found = accuracy_by([3.0, 1.0, 2.0, 2.0, 5.0], [1.0, -1.0, 1.0, -1.0, 1.0], buckets=3)
    assert [(b.low, b.high, b.pairs, b.accuracy) for b in found] == [(1.0, 1.0, 1, 0.0), (2.0, 2.0, 2, 0.5), (3.0, 5.0, 2, 1.0)]
    assert [b.pairs for b in accuracy_by([1.0] * 7, [1.0] * 7)] == [7]
    assert [b.pairs for b in accuracy_by([1.0, 2.0], [1.0, 1.0], buckets=5)] == [1, 1]
    with pytest.raises(ValueError, match="2 keys for 1 margins"):
        accuracy_by([1.0, 2.0], [1.0])


def test_buckets_hold_every_pair_once() -> None:
    generator = np.random.default_rng(1)
    for size in (1, 4, 13, 50):
        keys, margins = generator.integers(0, 6, size).astype(float), generator.normal(size=size)
        found = accuracy_by(keys.tolist(), margins.tolist())
        assert sum(b.pairs for b in found) == size
        assert all(a.high < b.low for a, b in pairwise(found))
        assert sum(b.pairs * b.accuracy for b in found) / size == pytest.approx(pair_accuracy(margins.tolist()))
