"""Kahneman-Tversky optimisation: numbers by hand, the baseline of the whole step, and labels learned."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pairs_for_tests import BOTH_WAYS, JUNK, WIDE, figures, gain, hand_batch, loss_and_slope

from posttrain.algorithms.kto import KTO
from posttrain.errors import UserError
from posttrain.train.pack import micro_batches, with_loss
from posttrain.types import Batch, Outputs

# good, bad, good, and two mismatched ones; log-ratios 1, -0.5, -2 now. At the start of the step the mismatched had 3 and 1.
LOGPROBS = [[-1.0, -2.0], [-1.0], [-3.0, -4.0, -1.0], [-2.0], [-5.0, -5.0]]
REFERENCES = [[-2.0, -2.0], [-0.5], [-1.0, -2.0, -3.0], [-4.0], [-6.0, -6.0]]
PROXIMAL = [[-9.0, -9.0], [-9.0], [-9.0, -9.0, -9.0], [-1.0], [-5.5, -5.5]]
LABELS = [1.0, 0.0, 1.0, math.nan, math.nan]
RATIOS = [1.0, -0.5, -2.0]


def hand(proximal: list[list[float]] = PROXIMAL, labels: list[float] = LABELS) -> tuple[Batch, Outputs]:
    batch, outputs = hand_batch(LOGPROBS, REFERENCES, labels, list(range(5)))
    flat = [value for row in proximal for value in (JUNK, *row)]
    return batch.replace(proximal_T=torch.tensor(flat, dtype=WIDE)), outputs


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


@pytest.mark.proves("value")
def test_by_hand() -> None:
    """z = (3 + 1) / 2 = 2. Good: sigma(-beta (r - 2)), bad: sigma(-beta (2 - r)); each counts a third."""
    loss, slope = loss_and_slope(KTO(beta=0.5), *hand())
    losses = [sigmoid(-0.5 * (1 - 2)), sigmoid(-0.5 * (2 + 0.5)), sigmoid(-0.5 * (-2 - 2))]
    assert loss == pytest.approx(sum(losses) / 3, rel=1e-7)
    each = [0.5 * p * (1 - p) / 3 for p in losses]
    expected = [-each[0]] * 2 + [each[1]] + [-each[2]] * 3 + [0.0, 0.0, 0.0]
    assert slope == pytest.approx(expected, rel=1e-6)


@pytest.mark.proves("value")
def test_against_numpy_with_weights() -> None:
    loss, _ = loss_and_slope(KTO(beta=0.3, desirable=1.25, undesirable=0.75), *hand())
    values = [1.25 * sigmoid(0.3 * (1 - 2)), 0.75 * sigmoid(0.3 * (2 + 0.5)), 1.25 * sigmoid(0.3 * (-2 - 2))]
    assert loss == pytest.approx((1.25 + 0.75 + 1.25 - sum(values)) / 3, rel=1e-7)


def test_the_baseline_is_not_below_zero_and_comes_from_the_mismatched_alone() -> None:
    low = [*PROXIMAL[:3], [-9.0], [-9.0, -9.0]]
    batch, _ = hand(low)
    prepared = KTO().prepare(batch, {})
    assert prepared.baseline_N is not None and prepared.baseline_N.tolist() == [0.0] * 5
    other, _ = hand([[50.0, 50.0], [50.0], [50.0] * 3, *PROXIMAL[3:]])
    prepared = KTO().prepare(other, {})
    assert prepared.baseline_N is not None and prepared.baseline_N.tolist() == [2.0] * 5


def test_the_baseline_is_one_number_for_the_whole_step() -> None:
    """However it is cut: the micro-batches hold no mismatched example any more, and still know z."""
    batch, outputs = hand()
    prepared = KTO(beta=0.5).prepare(batch, {})
    whole, _ = loss_and_slope(KTO(beta=0.5), batch, outputs)
    pieces = micro_batches(with_loss(prepared), 1)
    assert [p.sequences for p in pieces] == [1, 1, 1]
    starts = [0, 3, 5]
    parts = 0.0
    for start, piece in zip(starts, pieces, strict=True):
        assert piece.baseline_N is not None and piece.baseline_N.tolist() == [2.0]
        window = slice(start, start + piece.tokens)
        terms = KTO(beta=0.5).terms(Outputs(outputs.logprob_T[window], outputs.entropy_T[window]), piece)
        parts += float((terms.terms[0].weight * terms.terms[0].loss).sum().detach())
    assert parts == pytest.approx(whole, rel=1e-12)


def test_the_baseline_has_no_gradient() -> None:
    batch, outputs = hand()
    logprob_T = torch.zeros_like(outputs.logprob_T).requires_grad_()
    prepared = KTO().prepare(batch.replace(proximal_T=batch.proximal_T + logprob_T), {})
    loss, _ = loss_and_slope(KTO(), *hand())
    terms = KTO().terms(outputs, prepared)
    assert float((terms.terms[0].weight * terms.terms[0].loss).sum().detach()) == pytest.approx(loss)
    assert terms.terms[0].weight.requires_grad is False
    assert not prepared.baseline_N.requires_grad  # type: ignore[union-attr]


def test_without_mismatched_examples_the_baseline_is_zero() -> None:
    batch, _ = hand(labels=[1.0, 0.0, 1.0, 0.0, 1.0])
    prepared = KTO().prepare(batch, {})
    assert prepared.baseline_N is not None and prepared.baseline_N.tolist() == [0.0] * 5
    assert prepared.weight_N is not None and prepared.weight_N.tolist() == pytest.approx([0.2] * 5)


@pytest.mark.proves("value")
def test_figures_by_hand() -> None:
    """Only the bad one is on its side of z: -0.5 < 2, while 1 and -2 should be above it."""
    found = figures(KTO(beta=0.5), *hand())
    assert found == pytest.approx(
        {"kl": 2.0, "accuracy": 1 / 3, "reward/desirable": 0.5 * (1 - 2) / 2, "reward/undesirable": -0.25}
    )


@pytest.mark.proves("refusals")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"beta": 0.0}, "beta must be above 0"),
        ({"desirable": -1.0}, "desirable must be at least 0"),
        ({"undesirable": -1.0}, "undesirable must be at least 0"),
        ({"desirable": 0.0, "undesirable": 0.0}, "desirable and undesirable cannot both be 0"),
    ],
)
def test_refusals(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"^kto: {words}"):
        KTO(**settings)


def test_what_it_is() -> None:
    assert KTO.learns_from == "labels" and KTO.unit == "sequence" and KTO().roles == {"reference", "proximal"}


@pytest.mark.proves("learns")
@pytest.mark.parametrize(("seed", "up"), BOTH_WAYS)
def test_it_learns_what_is_good(seed: int, up: bool) -> None:
    """On starts it has not seen, by more than 8 nats in twenty steps; the other way round where the labels are."""
    assert gain(KTO(), up, seed, single=True) > 8
