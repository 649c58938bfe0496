"""Identity preference optimisation: numbers by hand for both conventions of length, its known optimum, a margin that stops."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from pairs_for_tests import (
    BOTH_WAYS,
    LENGTHS,
    LOGPROBS,
    RATIOS,
    REFERENCE,
    REWARD,
    divergence,
    figures,
    gain,
    hand_batch,
    hand_pairs,
    loss_and_slope,
    tabular_optimum,
)

from posttrain.algorithms.ipo import IPO
from posttrain.errors import UserError


@pytest.mark.proves("value")
@pytest.mark.parametrize(("length", "differences"), [("mean", (0.5 + 0.5, 2 + 2 / 3)), ("sum", (1.5, 4.0))])
def test_by_hand(length: str, differences: tuple[float, float]) -> None:
    """Log-ratios 1 and -0.5 over 2 and 1 tokens; then 2 and -2 over 1 and 3. The target is 1 / (2 * 0.25) = 2."""
    loss, slope = loss_and_slope(IPO(tau=0.25, length=length), *hand_pairs())
    assert loss == pytest.approx(sum((h - 2) ** 2 for h in differences) / 2)
    first, second = (h - 2 for h in differences)  # w * 2 (h - 2), with w = 1/2
    by = LENGTHS if length == "mean" else [1] * 4
    expected = [first / by[0]] * 2 + [-first / by[1]] + [-second / by[2]] * 3 + [second / by[3]]
    assert slope == pytest.approx(expected)


def test_a_policy_that_is_its_reference_is_at_distance_of_the_target() -> None:
    loss, _ = loss_and_slope(IPO(tau=0.1), *hand_batch(LOGPROBS, LOGPROBS, [1, 0, 0, 1], [0, 0, 1, 1]))
    assert loss == pytest.approx(25.0)


@pytest.mark.proves("value")
def test_exchanged_labels_change_the_loss_as_computed_by_hand() -> None:
    """(h - c)^2 - (-h - c)^2 = -4 c h, with c = 5 for tau = 0.1."""
    one, _ = loss_and_slope(IPO(length="sum"), *hand_pairs())
    other, _ = loss_and_slope(IPO(length="sum"), *hand_pairs([0, 1, 1, 0]))
    assert one - other == pytest.approx(-4 * 5 * (1.5 + 4) / 2)


def test_figures() -> None:
    found = figures(IPO(tau=0.5, length="sum"), *hand_pairs())
    assert found["margin"] == pytest.approx(0.5 * (1.5 + 4) / 2) and found["accuracy"] == 1.0
    assert found["reward/preferred"] == pytest.approx(0.5 * (RATIOS[0] + RATIOS[3]) / 2)


@pytest.mark.proves("refusals")
@pytest.mark.parametrize(
    ("settings", "words"), [({"tau": 0.0}, "tau must be above 0"), ({"length": "long"}, "length must be mean or sum")]
)
def test_refusals(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"^ipo: {words}"):
        IPO(**settings)


def test_what_it_is() -> None:
    assert IPO.learns_from == "pairs" and IPO.unit == "pair" and IPO().roles == {"reference"}


@pytest.mark.proves("optimum")
def test_its_optimum_is_the_least_squares_one() -> None:
    """Every ordered pair as often as it is preferred. An independent solution: log-ratios by linear least squares, whose answer the
    paper gives as ref exp(p / tau), with p the chance to win against a response drawn at random: bounded, unlike DPO's."""
    tau, copies = 0.5, 20
    pairs, targets, rows = [], [], []
    for a, b in permutations(range(5), 2):
        count = round(copies / (1 + np.exp(REWARD[b] - REWARD[a])))
        pairs += [(a, b)] * count
        rows += [np.eye(5)[a] - np.eye(5)[b]] * count
        targets += [1 / (2 * tau)] * count
    ratio, *_ = np.linalg.lstsq(np.array(rows), np.array(targets), rcond=None)
    expected = REFERENCE * np.exp(ratio)
    found = tabular_optimum(IPO(tau=tau, length="sum"), pairs, [(1.0, 0.0)] * len(pairs))
    assert divergence(found, expected / expected.sum()) < 1e-10
    wins = np.array([np.mean([1 / (1 + np.exp(REWARD[b] - REWARD[a])) for b in range(5)]) for a in range(5)])
    paper = REFERENCE * np.exp(wins / tau)
    assert divergence(found, paper / paper.sum()) < 1e-3  # copies are whole numbers


def test_certain_preferences_stop_at_the_target() -> None:
    found = tabular_optimum(IPO(tau=0.25, length="sum"), [(0, 1)], [(1.0, 0.0)])
    assert np.log(found[0] / found[1]) - np.log(REFERENCE[0] / REFERENCE[1]) == pytest.approx(2.0, abs=1e-6)


@pytest.mark.proves("learns")
@pytest.mark.parametrize(("seed", "up"), BOTH_WAYS)
def test_it_learns_what_is_preferred(seed: int, up: bool) -> None:
    """On starts it has not seen, by more than 8 nats in twenty steps; with sums it stays near its target of 5, 1 / (2 tau)."""
    assert gain(IPO(), up, seed) > 8
    assert 2 < gain(IPO(length="sum"), up, seed) < 7
