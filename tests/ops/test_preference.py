"""Preference losses: properties, and numbers by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.ops.preference import (
    ipo_loss,
    kto_loss,
    log_odds,
    pair_members,
    sigmoid_loss,
)

WIDE = torch.float64
MARGINS = st.floats(-50, 50)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=WIDE)


def test_the_preferred_is_the_one_with_the_higher_reward() -> None:
    better, worse = pair_members((7, 7, 9, 9), torch.tensor([0.0, 1.0, 3.0, -2.0]))
    assert better.tolist() == [1, 2] and worse.tolist() == [0, 3]


@pytest.mark.parametrize("units", [(0, 0, 0), (0, 1), (0, 0, 1), (0, 0, 0, 0), (0, 1, 1, 0)])
def test_what_is_not_pairs_is_refused(units: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not pairs"):
        pair_members(units, torch.zeros(len(units)))


def test_no_margin_costs_log_2() -> None:
    assert float(sigmoid_loss(scalar(0.0))) == pytest.approx(math.log(2), abs=1e-15)
    assert float(sigmoid_loss(scalar(0.0), 0.3)) == pytest.approx(math.log(2), abs=1e-15)


@given(margin=MARGINS)
def test_exchanged_labels_change_the_loss_by_the_margin(margin: float) -> None:
    """L(m) - L(-m) = -m."""
    assert float(sigmoid_loss(scalar(margin)) - sigmoid_loss(scalar(-margin))) == pytest.approx(-margin, abs=1e-12)


@given(margin=st.floats(-30, 30), more=st.floats(1e-3, 10))
def test_the_loss_falls_as_the_margin_grows(margin: float, more: float) -> None:
    point = scalar(margin).requires_grad_()
    loss = sigmoid_loss(point)
    assert float(sigmoid_loss(scalar(margin + more))) < float(loss.detach())
    (slope,) = torch.autograd.grad(loss.sum(), point)
    assert float(slope) == pytest.approx(-1 / (1 + math.exp(margin)), rel=1e-9)


@given(margin=MARGINS, smoothing=st.floats(0, 0.5))
def test_label_smoothing_is_a_mixture_of_both_labels(margin: float, smoothing: float) -> None:
    mixed = (1 - smoothing) * sigmoid_loss(scalar(margin)) + smoothing * sigmoid_loss(scalar(-margin))
    assert float(sigmoid_loss(scalar(margin), smoothing)) == pytest.approx(float(mixed), abs=1e-12)


@pytest.mark.parametrize(("smoothing", "least"), [(0.5, 0.0), (0.1, math.log(9)), (0.25, math.log(3))])
def test_label_smoothing_has_its_minimum_at_the_log_odds(smoothing: float, least: float) -> None:
    point = scalar(least).requires_grad_()
    (slope,) = torch.autograd.grad(sigmoid_loss(point, smoothing).sum(), point)
    assert float(slope) == pytest.approx(0.0, abs=1e-14)


@pytest.mark.parametrize("tau", [0.1, 0.5, 2.0])
def test_ipo_has_its_minimum_at_its_target(tau: float) -> None:
    point = scalar(1 / (2 * tau)).requires_grad_()
    loss = ipo_loss(point, tau)
    (slope,) = torch.autograd.grad(loss.sum(), point)
    assert float(loss.detach()) == 0.0 and float(slope) == 0.0
    assert float(ipo_loss(scalar(0.0), tau)) == pytest.approx(1 / (4 * tau**2))


@given(ratio=MARGINS, baseline=st.floats(0, 20), beta=st.floats(0.01, 2), good=st.booleans())
def test_kto_against_numpy(ratio: float, baseline: float, beta: float, good: bool) -> None:
    """lambda - value, as the paper writes it: value = lambda sigma(beta (r - z)) of the good, lambda sigma(beta (z - r)) of the bad."""
    found = kto_loss(scalar(ratio), torch.tensor([good]), torch.tensor([baseline], dtype=WIDE), beta, 1.5, 0.5)
    gain = ratio - baseline if good else baseline - ratio
    weight = 1.5 if good else 0.5
    assert float(found) == pytest.approx(weight - weight * float(1 / (1 + np.exp(-beta * gain))), abs=1e-12)


@given(probability=st.floats(1e-6, 0.999))
def test_odds_against_numpy(probability: float) -> None:
    found = log_odds(torch.tensor([math.log(probability)], dtype=WIDE))
    assert float(found) == pytest.approx(math.log(probability / (1 - probability)), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, WIDE])
@pytest.mark.parametrize("logprob", [0.0, -1e-12, -1e4])
def test_odds_of_what_is_certain_or_impossible_are_finite(logprob: float, dtype: torch.dtype) -> None:
    point = torch.tensor([logprob], dtype=dtype, requires_grad=True)
    odds = log_odds(point)
    (slope,) = torch.autograd.grad(odds.sum(), point)
    assert math.isfinite(float(odds.detach())) and math.isfinite(float(slope))
