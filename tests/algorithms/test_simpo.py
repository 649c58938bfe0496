"""Simple preference optimisation: numbers by hand, length and margin, and a preference learned without a reference."""

from __future__ import annotations

import math

import pytest
from pairs_for_tests import BOTH_WAYS, figures, gain, hand_batch, hand_pairs, loss_and_slope

from posttrain.algorithms.simpo import SimPO
from posttrain.errors import UserError


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


@pytest.mark.proves("value")
def test_by_hand() -> None:
    """Per token -1.5 against -1, and -2 against -8/3: margins 2 * -0.5 - 1 = -2 and 2 * 2/3 - 1 = 1/3."""
    loss, slope = loss_and_slope(SimPO(), *hand_pairs())
    assert loss == pytest.approx((softplus(2.0) + softplus(-1 / 3)) / 2)
    first, second = (2 / (1 + math.exp(m)) / 2 for m in (-2.0, 1 / 3))  # beta w sigma(-m)
    assert slope == pytest.approx([-first / 2] * 2 + [first] + [second / 3] * 3 + [-second])


def test_the_reference_plays_no_part() -> None:
    batch, outputs = hand_pairs()
    assert loss_and_slope(SimPO(), batch, outputs) == loss_and_slope(SimPO(), batch.replace(reference_T=None), outputs)


def test_length_alone_does_not_lower_the_loss() -> None:
    """Twice as many tokens of the same log-prob leave the loss as it was."""
    short = hand_batch([[-1.0], [-2.0]], [[0.0], [0.0]], [1, 0], [0, 0])
    long = hand_batch([[-1.0] * 2, [-2.0] * 3], [[0.0] * 2, [0.0] * 3], [1, 0], [0, 0])
    assert loss_and_slope(SimPO(), *short)[0] == pytest.approx(loss_and_slope(SimPO(), *long)[0])


def test_exchanged_labels_change_the_loss_by_the_difference_of_means() -> None:
    one, other = (loss_and_slope(SimPO(gamma=0.0), *hand_pairs(r))[0] for r in ([1, 0, 0, 1], [0, 1, 1, 0]))
    assert one - other == pytest.approx(-(2 * -0.5 + 2 * 2 / 3) / 2)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 3.0])
def test_the_margin_asks_for_more(gamma: float) -> None:
    """The loss with gamma is that without at a margin smaller by gamma."""
    loss, _ = loss_and_slope(SimPO(gamma=gamma, beta=1.0), *hand_batch([[-1.0], [-2.0]], [[0.0], [0.0]], [1, 0], [0, 0]))
    assert loss == pytest.approx(softplus(gamma - 1.0))


def test_figures() -> None:
    found = figures(SimPO(), *hand_pairs())
    assert found["accuracy"] == 0.5 and found["margin"] == pytest.approx((-1 + 4 / 3) / 2)  # rewards, without gamma


@pytest.mark.proves("refusals")
def test_refusals_and_what_it_is() -> None:
    with pytest.raises(UserError, match="^simpo: beta must be above 0, not 0$"):
        SimPO(beta=0)
    with pytest.raises(UserError, match="^simpo: gamma must be at least 0, not -1.0$"):
        SimPO(gamma=-1.0)
    assert SimPO.learns_from == "pairs" and SimPO.unit == "pair" and SimPO().roles == frozenset()


@pytest.mark.proves("learns")
@pytest.mark.parametrize(("seed", "up"), BOTH_WAYS)
def test_it_learns_what_is_preferred(seed: int, up: bool) -> None:
    """On starts it has not seen, by more than 6 nats in twenty steps; the other way round where the labels are."""
    assert gain(SimPO(), up, seed) > 6
