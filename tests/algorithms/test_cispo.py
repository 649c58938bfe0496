"""CISPO: the clipped weight by hand, tokens that keep their gradient, an independent NumPy one, and a small thing learned."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from bandit_for_tests import chance_of_good, train
from material_for_tests import plain_batch, small_policy
from numpy_for_tests import Response, parity, relative

from posttrain.algorithms.cispo import CISPO
from posttrain.algorithms.grpo import GRPO
from posttrain.errors import UserError
from posttrain.types import Outputs


@pytest.mark.proves("refusals")
def test_refusals_and_contract() -> None:
    with pytest.raises(UserError, match=r"^cispo: clip_high must be positive, not -1.0 \(0: no clip\)$"):
        CISPO(clip_high=-1.0)
    assert CISPO().roles == frozenset() and CISPO().clip == (1.0, 4.0)


@pytest.mark.proves("value")
def test_the_loss_by_hand() -> None:
    """Probabilities 0.6 and 0.5 that were 0.1 and 0.5: ratios 6, cut to 5, and 1. L = -w A ratio log p, and the slope is -w A ratio."""
    algorithm = CISPO()
    prepared = algorithm.prepare(plain_batch([1.0, 0.0], [0, 0]), {})
    prepared = prepared.replace(behaviour_T=torch.tensor([0, math.log(0.1), 0, math.log(0.5)], dtype=torch.float64))
    logprob_T = torch.tensor([0, math.log(0.6), 0, math.log(0.5)], dtype=torch.float64, requires_grad=True)
    terms = algorithm.terms(Outputs(logprob_T, torch.zeros(4)), prepared)
    loss = (terms.terms[0].weight * terms.terms[0].loss).sum()
    (slope,) = torch.autograd.grad(loss, logprob_T)
    advantage = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert float(loss.detach()) == pytest.approx(advantage * (-5 * math.log(0.6) + math.log(0.5)) / 2)
    assert slope.tolist() == pytest.approx([0, -5 * advantage / 2, 0, advantage / 2])
    assert {m.name: (float(m.total), float(m.count or 0)) for m in terms.metrics}["clip_fraction"] == (1.0, 2.0)


def test_a_token_that_grpo_silences_keeps_pulling() -> None:
    slopes = []
    for algorithm in (GRPO(beta=0.0), CISPO(clip_high=0.2, reduction="sequence_mean")):
        prepared = algorithm.prepare(plain_batch([1.0, 0.0], [0, 0]), {})
        logprob_T = torch.tensor([0.0, 1.0, 0.0, 0.0], requires_grad=True)
        terms = algorithm.terms(Outputs(logprob_T, torch.zeros(4)), prepared)
        slopes.append(torch.autograd.grad((terms.terms[0].weight * terms.terms[0].loss).sum(), logprob_T)[0])
    assert float(slopes[0][1]) == 0 and float(slopes[1][1]) == pytest.approx(1.2 * -float(slopes[1][3]))


@pytest.mark.proves("value")
@pytest.mark.parametrize(("low", "high"), [(0.0, 4.0), (0.3, 0.2), (0.0, 0.0)])
@pytest.mark.parametrize("seed", range(2))
def test_parity_with_an_independent_one(low: float, high: float, seed: int) -> None:
    def formula(members: list[Response]) -> tuple[float, list[np.ndarray]]:
        tokens = sum(one.length for one in members)
        loss, slopes = 0.0, []
        for advantage, one in zip(relative([m.reward for m in members], members), members, strict=True):
            weight = np.clip(np.exp(one.log_ratio), 1 - low if low else 0.0, 1 + high if high else np.inf) * advantage / tokens
            loss -= (weight * one.logprob).sum()
            slopes.append(-weight)
        return loss, slopes

    parity(CISPO(clip_low=low, clip_high=high), formula, seed)


@pytest.mark.proves("learns")
@pytest.mark.parametrize("seed", range(3))
def test_it_learns_from_rewards(seed: int) -> None:
    """From at most 0.43 of the mass on right tokens to above 0.95 in 30 steps (0.99 was measured with each seed)."""
    policy = small_policy(seed, torch.float32)
    assert chance_of_good(policy) < 0.6
    train(policy, CISPO(group=16), 30, seed=seed)
    assert chance_of_good(policy) > 0.95
