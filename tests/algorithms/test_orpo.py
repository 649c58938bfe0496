"""Odds ratio preference optimisation: numbers by hand, gradients, and a preference learned without a reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
from pairs_for_tests import BOTH_WAYS, figures, gain, hand_pairs, loss_and_slope

from posttrain.algorithms.orpo import ORPO
from posttrain.errors import UserError

MEANS = [-1.5, -1.0, -8 / 3, -2.0]  # log-probs per token of the hand-made pairs; 0 and 3 are preferred


def odds(logprob: float) -> float:
    return math.log(math.exp(logprob) / (1 - math.exp(logprob)))


@pytest.mark.proves("value")
def test_by_hand() -> None:
    loss, _ = loss_and_slope(ORPO(lam=0.25), *hand_pairs())
    ratios = [odds(MEANS[0]) - odds(MEANS[1]), odds(MEANS[3]) - odds(MEANS[2])]
    expected = [1.5 + 0.25 * np.log1p(np.exp(-ratios[0])), 2.0 + 0.25 * np.log1p(np.exp(-ratios[1]))]
    assert loss == pytest.approx(sum(expected) / 2)


def test_slopes_against_the_closed_form() -> None:
    """d log odds / d log p = 1 / (1 - p), and each token has a share 1 / |y| of log p."""
    _, slope = loss_and_slope(ORPO(lam=0.25), *hand_pairs())
    expected = []
    for better, worse, size in ((0, 1, (2, 1)), (3, 2, (1, 3))):
        ratio = odds(MEANS[better]) - odds(MEANS[worse])
        pull = 0.25 / (1 + math.exp(ratio))
        up = -(1 + pull / (1 - math.exp(MEANS[better]))) / size[0] / 2
        down = pull / (1 - math.exp(MEANS[worse])) / size[1] / 2
        expected.append(([up] * size[0], [down] * size[1]))
    assert slope == pytest.approx([*expected[0][0], *expected[0][1], *expected[1][1], *expected[1][0]])


def test_exchanged_labels_change_the_preference_by_the_log_odds() -> None:
    def preference(rewards: list[float]) -> float:
        batch, outputs = hand_pairs(rewards)
        terms = {t.name: t for t in ORPO(lam=1.0).terms(outputs, ORPO(lam=1.0).prepare(batch, {})).terms}
        assert set(terms) == {"nll", "preference"}
        return float((terms["preference"].weight * terms["preference"].loss).sum().detach())

    mean_ratio = (odds(MEANS[0]) - odds(MEANS[1]) + odds(MEANS[3]) - odds(MEANS[2])) / 2
    assert preference([1, 0, 0, 1]) - preference([0, 1, 1, 0]) == pytest.approx(-mean_ratio)


def test_figures() -> None:
    found = figures(ORPO(lam=0.5), *hand_pairs())
    assert found["accuracy"] == 0.5  # -1.5 against -1, -2 against -8/3
    assert found["logprob/preferred"] == pytest.approx(-1.75)
    assert found["margin"] == pytest.approx(0.5 * (-0.5 + 2 / 3) / 2)


@pytest.mark.proves("refusals")
def test_refusal_and_what_it_is() -> None:
    with pytest.raises(UserError, match=r"^orpo: lam must be above 0 \(without it this is sft\), not 0.0$"):
        ORPO(lam=0.0)
    assert ORPO.learns_from == "pairs" and ORPO.unit == "pair" and ORPO().roles == frozenset()


@pytest.mark.proves("learns")
@pytest.mark.parametrize(("seed", "up"), BOTH_WAYS)
def test_it_learns_what_is_preferred(seed: int, up: bool) -> None:
    """On starts it has not seen, by more than 6 nats in twenty steps; the other way round where the labels are."""
    assert gain(ORPO(), up, seed) > 6
