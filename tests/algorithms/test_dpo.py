"""Direct preference optimisation: numbers by hand, its algebra, its known optimum, and a preference learned."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from pairs_for_tests import (
    BOTH_WAYS,
    LENGTHS,
    LOGPROBS,
    RATIOS,
    REWARD,
    boltzmann,
    divergence,
    figures,
    gain,
    hand_batch,
    hand_pairs,
    loss_and_slope,
    tabular_optimum,
)

from posttrain.algorithms.dpo import DPO
from posttrain.errors import UserError


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.proves("value")
def test_by_hand() -> None:
    """Margins 0.1 (1 + 0.5) = 0.15 and, the second pair written worse first, 0.1 (2 + 2) = 0.4."""
    loss, slope = loss_and_slope(DPO(), *hand_pairs())
    assert loss == pytest.approx((math.log(1 + math.exp(-0.15)) + math.log(1 + math.exp(-0.4))) / 2)
    first, second = 0.05 * sigmoid(-0.15), 0.05 * sigmoid(-0.4)  # beta w sigma(-m)
    assert slope == pytest.approx([-first, -first, first, second, second, second, -second])


@pytest.mark.proves("value")
@pytest.mark.parametrize(
    "settings", [{}, {"beta": 0.7}, {"label_smoothing": 0.2, "alpha": 0.3}, {"labels": "soft", "beta": 0.4}, {"alpha": 2.0}]
)
def test_against_numpy(settings: dict[str, Any]) -> None:
    rewards = [2.0, 0.5, -1.0, 0.0]
    algorithm = DPO(**settings)
    loss, _ = loss_and_slope(algorithm, *hand_pairs(rewards))
    expected = 0.0
    for better, worse in ((0, 1), (3, 2)):
        margin = algorithm.beta * (RATIOS[better] - RATIOS[worse])
        wrong = algorithm.label_smoothing
        if algorithm.labels == "soft":
            wrong = 1 / (1 + np.exp(rewards[better] - rewards[worse]))
        expected += (1 - wrong) * np.logaddexp(0, -margin) + wrong * np.logaddexp(0, margin)
        expected -= algorithm.alpha * sum(LOGPROBS[better]) / LENGTHS[better]
    assert loss == pytest.approx(expected / 2, rel=1e-7)


@pytest.mark.proves("value")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # margins 1.5 and 4 (the second pair is written worse first); implicit rewards 1, -0.5 and 2, -2
        (
            {"form": "robust", "label_smoothing": 0.2},
            [(0.8 * math.log1p(math.exp(-m)) - 0.2 * math.log1p(math.exp(m))) / 0.6 for m in (1.5, 4)],
        ),
        ({"form": "hinge"}, [0.0, 0.0]),
        ({"form": "hinge", "beta": 0.2}, [0.7, 0.2]),
        ({"form": "apo_zero"}, [1 - sigmoid(1) + sigmoid(-0.5), 1 - sigmoid(2) + sigmoid(-2)]),
        ({"form": "apo_down"}, [sigmoid(1) + 1 - sigmoid(1.5), sigmoid(2) + 1 - sigmoid(4)]),
    ],
)
def test_other_forms_by_hand(settings: dict[str, Any], expected: list[float]) -> None:
    loss, _ = loss_and_slope(DPO(**{"beta": 1.0} | settings), *hand_pairs())
    assert loss == pytest.approx(sum(expected) / 2, rel=1e-7)


@pytest.mark.proves("slope")
@pytest.mark.parametrize("form", ["apo_zero", "apo_down", "hinge"])
def test_where_each_form_pushes(form: str) -> None:
    """From the reference on: apo_zero raises the preferred, apo_down lowers both, and a hinge rests where the margin is 1."""
    batch, outputs = hand_batch(LOGPROBS, LOGPROBS, [1, 0, 0, 1], [0, 0, 1, 1])
    _, slope = loss_and_slope(DPO(form=form), batch, outputs)  # of tokens 0 and 1 (preferred) and 2 (rejected), and so on
    better = {"apo_zero": -0.0125, "apo_down": 0.0, "hinge": -0.05}[form]  # beta w: 0.05, times a quarter or 1
    worse = {"apo_zero": 0.0125, "apo_down": 0.0125, "hinge": 0.05}[form]
    assert slope == pytest.approx([better, better, worse, worse, worse, worse, better])
    _, slope = loss_and_slope(DPO(form=form, beta=1.0), *hand_pairs())
    assert {"apo_zero": slope[0] < 0, "apo_down": slope[0] > 0, "hinge": slope == [0.0] * 7}[form]


def test_robust_dpo_learns_what_labels_said_before_a_share_of_them_was_exchanged() -> None:
    """Exactly: its expectation over the exchanges is the loss without them, which conservative DPO's is not."""
    clean = loss_and_slope(DPO(), *hand_pairs())
    found = {}
    for form in ("robust", "sigmoid"):
        algorithm = DPO(form=form, label_smoothing=0.3)
        kept, exchanged = (loss_and_slope(algorithm, *hand_pairs(r)) for r in ([1.0, 0, 0, 1], [0.0, 1, 1, 0]))
        found[form] = 0.7 * np.array([kept[0], *kept[1]]) + 0.3 * np.array([exchanged[0], *exchanged[1]])
    assert found["robust"] == pytest.approx(np.array([clean[0], *clean[1]]), rel=1e-9)
    assert found["sigmoid"] != pytest.approx(np.array([clean[0], *clean[1]]), rel=1e-2)


def test_a_policy_that_is_its_reference_costs_log_2() -> None:
    batch, outputs = hand_batch(LOGPROBS, LOGPROBS, [1, 0, 0, 1], [0, 0, 1, 1])
    loss, slope = loss_and_slope(DPO(), batch, outputs)
    assert loss == pytest.approx(math.log(2))
    assert slope == pytest.approx([-0.025, -0.025, 0.025, 0.025, 0.025, 0.025, -0.025])
    found = figures(DPO(), batch, outputs)
    assert found["margin"] == 0.0 and found["accuracy"] == 0.5  # equal rewards are half right


def test_exchanged_labels_change_the_loss_by_the_margin() -> None:
    one, slope = loss_and_slope(DPO(), *hand_pairs())
    other, opposite = loss_and_slope(DPO(), *hand_pairs([0.0, 1.0, 1.0, 0.0]))
    assert one - other == pytest.approx(-(0.15 + 0.4) / 2)
    assert [a * b < 0 for a, b in zip(slope, opposite, strict=True)] == [True] * 7
    mine, theirs = figures(DPO(), *hand_pairs()), figures(DPO(), *hand_pairs([0.0, 1.0, 1.0, 0.0]))
    assert mine["margin"] == pytest.approx(-theirs["margin"])
    assert mine["reward/preferred"] == pytest.approx(theirs["reward/rejected"])


def test_the_likelihood_term_is_added() -> None:
    plain, _ = loss_and_slope(DPO(), *hand_pairs())
    with_nll, _ = loss_and_slope(DPO(alpha=0.5), *hand_pairs())
    assert with_nll - plain == pytest.approx(0.5 * (3 / 2 + 2 / 1) / 2)


@pytest.mark.proves("value")
def test_figures_by_hand() -> None:
    found = figures(DPO(beta=1.0), *hand_pairs([1.0, 0.0, 1.0, 0.0]))  # margins 1.5 and -4
    assert found == pytest.approx(
        {
            "accuracy": 0.5,
            "margin": -1.25,
            "reward/preferred": (1 - 2) / 2,
            "reward/rejected": (-0.5 + 2) / 2,
            "logprob/preferred": (-3 / 2 - 8 / 3) / 2,
            "logprob/rejected": (-1 - 2) / 2,
        }
    )


@pytest.mark.parametrize("rewards", [[1, 0, 0.5, 0.5], [1, 0, math.nan, 0], [1, 0, math.nan, math.nan]])
def test_a_pair_that_prefers_nothing_is_not_counted(rewards: list[float]) -> None:
    batch, outputs = hand_pairs(rewards)
    loss, slope = loss_and_slope(DPO(), batch, outputs)
    assert loss == pytest.approx(math.log(1 + math.exp(-0.15)))
    assert slope[3:] == [0.0] * 4
    prepared = DPO().prepare(batch, {})
    assert prepared.weight_N is not None and prepared.weight_N.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert figures(DPO(), batch, outputs)["margin"] == pytest.approx(0.15)
    soft, _ = loss_and_slope(DPO(labels="soft"), batch, outputs)
    assert math.isfinite(soft)


def test_order_and_units_are_what_make_a_pair() -> None:
    batch, outputs = hand_pairs()
    with pytest.raises(UserError, match="^dpo learns from pairs; rankings and single examples must be made into pairs first$"):
        DPO().prepare(batch.replace(unit_N=(0, 0, 0, 0)), {})
    with pytest.raises(UserError, match="dpo learns from pairs"):
        DPO().prepare(batch.replace(unit_N=(0, 1, 2, 3)), {})
    assert outputs.logprob_T.requires_grad


@pytest.mark.proves("refusals")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"beta": 0.0}, "beta must be above 0"),
        ({"label_smoothing": 0.5}, "label_smoothing must be in"),
        ({"label_smoothing": -0.1}, "label_smoothing must be in"),
        ({"alpha": -1.0}, "alpha must be at least 0"),
        ({"labels": "firm"}, "labels must be hard or soft, not 'firm'"),
        ({"labels": "soft", "label_smoothing": 0.1}, "soft labels have their own smoothing"),
        ({"form": "sharp"}, "form must be sigmoid, robust, hinge, apo_zero or apo_down, not 'sharp'"),
        ({"form": "robust"}, "form=robust needs the share of wrong labels as label_smoothing, above 0"),
        ({"form": "hinge", "label_smoothing": 0.1}, "form=hinge has no label_smoothing"),
        ({"form": "apo_zero", "labels": "soft"}, "form=apo_zero has no soft labels"),
    ],
)
def test_refusals(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"^dpo: {words}"):
        DPO(**settings)


def test_what_it_is() -> None:
    assert DPO.learns_from == "pairs" and DPO.unit == "pair" and DPO().roles == {"reference"}


@pytest.mark.proves("optimum")
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_its_optimum_is_that_of_rl_with_a_kl_penalty(beta: float) -> None:
    """All pairs of five responses, labelled by a Bradley-Terry model of the reward: pi* = ref exp(reward / beta) / Z."""
    pairs = list(combinations(range(5), 2))
    rewards = [(float(REWARD[a]), float(REWARD[b])) for a, b in pairs]
    found = tabular_optimum(DPO(beta=beta, labels="soft"), pairs, rewards)
    assert divergence(found, boltzmann(beta)) < 1e-10
    flipped = tabular_optimum(DPO(beta=beta, labels="soft"), pairs, [(-a, -b) for a, b in rewards])
    assert flipped.argmax() != found.argmax() and divergence(flipped, boltzmann(beta)) > 0.1


@pytest.mark.proves("optimum")
def test_drawn_labels_come_near_the_same_optimum() -> None:
    """20,000 pairs with labels drawn from the reward's odds: within the noise of the draw."""
    generator = np.random.default_rng(0)
    pairs = [tuple(generator.choice(5, 2, replace=False).tolist()) for _ in range(20_000)]
    wins = [generator.random() < sigmoid(REWARD[a] - REWARD[b]) for a, b in pairs]
    found = tabular_optimum(DPO(beta=1.0), pairs, [(float(w), float(not w)) for w in wins])
    assert divergence(found, boltzmann(1.0)) < 0.01  # seen: 0.0005


@pytest.mark.proves("optimum")
def test_robust_dpo_on_exchanged_labels_ends_at_the_same_optimum() -> None:
    """A third of the labels of a Bradley-Terry model exchanged: still pi*. Each pair stands both ways, as often as it is labelled."""
    share, pairs, rewards = 1 / 3, [], []
    for a, b in combinations(range(5), 2):
        wins = round(600 * (sigmoid(REWARD[a] - REWARD[b]) * (1 - 2 * share) + share))
        pairs += [(a, b)] * 600
        rewards += [(1.0, 0.0)] * wins + [(0.0, 1.0)] * (600 - wins)
    found = tabular_optimum(DPO(beta=1.0, form="robust", label_smoothing=share), pairs, rewards)
    assert divergence(found, boltzmann(1.0)) < 1e-5
    plain = tabular_optimum(DPO(beta=1.0), pairs, rewards)
    assert divergence(plain, boltzmann(1.0)) > 0.02


@pytest.mark.proves("learns")
@pytest.mark.parametrize("form", ["robust", "hinge", "apo_zero", "apo_down"])
def test_every_form_learns_what_is_preferred(form: str) -> None:
    assert gain(DPO(form=form, label_smoothing=0.1 if form == "robust" else 0.0), True, 0) > 8


@pytest.mark.proves("learns")
@pytest.mark.parametrize(("seed", "up"), BOTH_WAYS)
def test_it_learns_what_is_preferred(seed: int, up: bool) -> None:
    """On starts it has not seen, by more than 8 nats in twenty steps; the other way round where the labels are."""
    assert gain(DPO(), up, seed) > 8


def test_gradients_by_finite_differences() -> None:
    batch, outputs = hand_pairs()
    algorithm = DPO(label_smoothing=0.1, alpha=0.5)
    _, slope = loss_and_slope(algorithm, batch, outputs)
    at = batch.mask_T.nonzero()[:, 0].tolist()
    measured = []
    for t in at:
        sides = []
        for step in (1e-6, -1e-6):
            moved = outputs.logprob_T.detach().clone()
            moved[t] += step
            sides.append(loss_and_slope(algorithm, batch, type(outputs)(moved.requires_grad_(), outputs.entropy_T))[0])
        measured.append((sides[0] - sides[1]) / 2e-6)
    assert slope == pytest.approx(measured, abs=1e-8)
    assert torch.isfinite(torch.tensor(slope)).all()
