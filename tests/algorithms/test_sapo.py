"""SAPO: the gate by hand, an independent NumPy one, and a small thing learned."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from bandit_for_tests import chance_of_good, train
from material_for_tests import plain_batch, small_policy
from numpy_for_tests import Response, parity, relative

from posttrain.algorithms.sapo import SAPO
from posttrain.errors import UserError
from posttrain.types import Outputs


@pytest.mark.proves("refusals")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tau_positive": 0.0}, "sapo: tau_positive must be above 0, not 0.0"),
        ({"tau_negative": math.nan}, "sapo: tau_negative must be above 0, not nan"),
        ({"clip_high": 0.2}, "sapo: clip_low and clip_high must be 0: the gate is the trust region"),
        ({"dual_clip": 3.0}, "sapo: dual_clip must be 0: it bounds the clipped objective, and this is another"),
    ],
)
def test_refusals(settings: dict, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        SAPO(**settings)
    assert str(refusal.value) == message


@pytest.mark.proves("value")
@pytest.mark.parametrize(
    ("ratio", "sign", "share"), [(1.0, 1, 1 / 2), (2.0, 1, 3 / 4), (2.0, -1, 9 / 10), (0.5, 1, 1 / (1 + 3**0.5))]
)
def test_the_gate_by_hand(ratio: float, sign: int, share: float) -> None:
    """tau = log 3 where A > 0, so that sigmoid(tau (2 - 1)) = 3 / 4, and log 9 where A < 0. The loss is -4 / tau share A, its slope by
    the log-prob -4 share (1 - share) rho A: -A at a ratio of 1, and -3/2 A at 2, where the ratio itself would give -2 A."""
    tau = math.log(3) if sign > 0 else math.log(9)
    algorithm = SAPO(tau_positive=math.log(3), tau_negative=math.log(9))
    prepared = algorithm.prepare(plain_batch([float(sign), 0.0], [0, 0]), {})
    prepared = prepared.replace(behaviour_T=torch.tensor([0, -1.0 - math.log(ratio), 0, -1.0], dtype=torch.float64))
    logprob_T = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True)
    terms = algorithm.terms(Outputs(logprob_T, torch.zeros(4)), prepared)
    term = terms.terms[0]
    (slope,) = torch.autograd.grad((term.weight * term.loss).sum(), logprob_T)
    advantage = sign * 0.5 / (math.sqrt(0.5) + 1e-4)
    assert float(term.loss[1].detach()) == pytest.approx(-4 / tau * share * advantage)
    assert float(slope[1]) == pytest.approx(-4 * share * (1 - share) * ratio * advantage / 2)
    halved = 4 * share * (1 - share) < 0.5
    assert {m.name: float(m.total) for m in terms.metrics}["clip_fraction"] == float(halved)


@pytest.mark.proves("value")
@pytest.mark.parametrize("seed", range(2))
def test_parity_with_an_independent_one(seed: int) -> None:
    def formula(members: list[Response]) -> tuple[float, list[np.ndarray]]:
        loss, slopes = 0.0, []
        for advantage, one in zip(relative([m.reward for m in members], members), members, strict=True):
            tau, ratio = 3.0 if advantage > 0 else 5.0, np.exp(one.log_ratio)
            share, weight = 1 / (1 + np.exp(-tau * (ratio - 1))), one.length * len(members)
            loss -= (4 / tau * share * advantage).sum() / weight
            slopes.append(-4 * share * (1 - share) * ratio * advantage / weight)
        return loss, slopes

    parity(SAPO(tau_positive=3.0, tau_negative=5.0), formula, seed)


@pytest.mark.proves("learns")
def test_it_learns_from_rewards() -> None:
    """From at most 0.43 of the mass on right tokens to above 0.95 in 30 steps."""
    policy = small_policy(0, torch.float32)
    assert chance_of_good(policy) < 0.6
    train(policy, SAPO(group=16), 30)
    assert chance_of_good(policy) > 0.95
