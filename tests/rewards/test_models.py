"""Several scores as one: numbers by hand, and NumPy's. The implicit reward: its formula."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain.errors import UserError
from posttrain.rewards._models import check, combine, disagreement, implicit_reward


@pytest.mark.parametrize(
    ("kind", "k", "expected"),
    [("mean", 1.0, 1.0), ("worst", 1.0, -1.0), ("mean_minus", 1.0, 1.0 - 8 / 3 / (8 / 3) ** 0.5), ("mean_minus", 0.0, 1.0)],
)
def test_by_hand(kind: str, k: float, expected: float) -> None:
    """Of -1, 1 and 3: the mean is 1, the squares of the deviations add up to 8, the variance is 8/3."""
    assert combine([-1.0, 1.0, 3.0], kind, k) == pytest.approx(expected, abs=1e-15)


def test_disagreement_is_the_deviation_of_all_members() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 7)
    assert disagreement(values.tolist()) == pytest.approx(values.std(), rel=1e-14)
    assert disagreement([0.1] * 3) == 0.0  # exactly: 0.1 added up three times and divided by 3 is not 0.1
    assert disagreement([5.0]) == 0.0


def test_order() -> None:
    """A member who dissents lowers all but the mean, and the worst is never above the mean less one deviation of two members."""
    assert combine([1.0, 1.0], "mean_minus") == combine([1.0, 1.0], "worst") == 1.0
    assert combine([0.0, 2.0], "mean_minus", 1.0) == combine([0.0, 2.0], "worst") == 0.0


def test_refusals() -> None:
    check("worst", 0.0)
    with pytest.raises(UserError, match="^ensemble: combine must be one of mean, worst, mean_minus, not 'min'$"):
        check("min", 1.0)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="number of deviations"):
            check("mean", bad)
    with pytest.raises(ValueError):
        combine([], "mean")
    with pytest.raises(ValueError):
        combine([1.0], "median")


@pytest.mark.parametrize(("logprob", "reference", "beta", "reward"), [(-3, -5, 0.5, 1.0), (-5, -3, 0.1, -0.2), (-4, -4, 2, 0)])
def test_the_implicit_reward_by_hand(logprob: float, reference: float, beta: float, reward: float) -> None:
    assert implicit_reward(logprob, reference, beta) == pytest.approx(reward)
    assert implicit_reward(reference, logprob, beta) == -implicit_reward(logprob, reference, beta)


def test_with_weights_mean_and_deviation_are_weighted_ones() -> None:
    """Three of the first and one of the second, by hand: mean 2, std sqrt((3 * 1 + 9) / 4)."""
    assert combine([1.0, 5.0], "mean", 1.0, [3.0, 1.0]) == 2.0
    assert disagreement([1.0, 5.0], [3.0, 1.0]) == pytest.approx(3**0.5)
    assert combine([1.0, 5.0], "mean_minus", 0.5, [3.0, 1.0]) == pytest.approx(2.0 - 0.5 * 3**0.5)
    assert combine([1.0, 1.0, 1.0, 5.0], "mean_minus", 0.5) == pytest.approx(2.0 - 0.5 * 3**0.5)
