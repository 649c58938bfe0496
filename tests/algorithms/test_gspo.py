"""GSPO: the ratio of a response by hand, both forms, an independent NumPy one, and a small thing learned."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from bandit_for_tests import chance_of_good, train
from material_for_tests import assert_same_gradients, gradients, material, plain_batch, small_policy
from numpy_for_tests import Response, clipped, parity, relative

from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.gspo import GSPO
from posttrain.errors import UserError
from posttrain.types import Outputs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "word"}, "gspo: form must be one of sequence, token, not 'word'"),
        ({"reduction": "token_mean"}, "gspo: reduction must be sequence_mean, not 'token_mean': the loss is one of responses"),
        ({"supervision": "process"}, "gspo: supervision=process gives each token its own advantage, which need"),
        ({"supervision": "steps"}, "gspo: supervision must be one of outcome, process, not 'steps'"),
    ],
)
def test_refusals(settings: dict, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        GSPO(**settings)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize("form", ["sequence", "token"])
def test_the_ratio_of_a_response_by_hand(form: str) -> None:
    """Token ratios 1/2, 2, 8 have the geometric mean 2: with advantage A and wide clips each log-prob has the slope -2 A / (2 * 3)."""
    algorithm = GSPO(form=form, clip_low=0.9, clip_high=9.0)
    step = plain_batch([1.0, 0.0], [0, 0], [3, 1])
    prepared = algorithm.prepare(step, {})
    logprob_T = torch.tensor([math.nan, math.log(0.5), math.log(2), math.log(8), 0, 0], dtype=torch.float64, requires_grad=True)
    terms = algorithm.terms(Outputs(logprob_T, torch.zeros(6)), prepared)
    loss = (terms.terms[0].weight * terms.terms[0].loss).sum()
    (slope,) = torch.autograd.grad(loss, logprob_T)
    advantage = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert float(loss.detach()) == pytest.approx((-2 * advantage + advantage) / 2)
    assert slope.tolist() == pytest.approx([0, *[-2 * advantage / 6] * 3, 0, advantage / 2])


def test_a_response_is_clipped_whole() -> None:
    """Its tokens' ratios are all within 0.2 of 1, its own is beyond 1 + 4e-4: no token has a gradient, and all count as clipped."""
    algorithm = GSPO()
    prepared = algorithm.prepare(plain_batch([1.0, 0.0], [0, 0], [2, 1]), {})
    logprob_T = torch.tensor([0.0, 0.002, -0.001, 0.0, 0.0], requires_grad=True)
    terms = algorithm.terms(Outputs(logprob_T, torch.zeros(5)), prepared)
    (slope,) = torch.autograd.grad((terms.terms[0].weight * terms.terms[0].loss).sum(), logprob_T)
    assert slope[:3].tolist() == [0, 0, 0] and float(slope[4]) > 0
    assert {m.name: (float(m.total), float(m.count)) for m in terms.metrics}["clip_fraction"] == (2.0, 3.0)


def test_the_two_forms_agree_where_a_response_has_one_advantage() -> None:
    one, other = GSPO(clip_low=0.1, clip_high=0.1), GSPO(form="token", clip_low=0.1, clip_high=0.1)
    step = material(one, noise=0.4)
    assert_same_gradients(gradients(one, one.prepare(step, {})), gradients(other, other.prepare(step, {})), 1e-12)


def test_i17_with_one_token_it_is_grpo() -> None:
    gspo, grpo = GSPO(clip_low=0.2, clip_high=0.2), GRPO(beta=0.0)
    step = plain_batch([1.0, 0.0, 0.5], [0] * 3).replace(behaviour_T=torch.tensor([0, -3.0, 0, -2.5, 0, -4.0]))
    assert_same_gradients(gradients(gspo, gspo.prepare(step, {})), gradients(grpo, grpo.prepare(step, {})), 1e-12)


@pytest.mark.parametrize("form", ["sequence", "token"])
@pytest.mark.parametrize("seed", range(2))
def test_parity_with_an_independent_one(form: str, seed: int) -> None:
    def formula(members: list[Response]) -> tuple[float, list[np.ndarray]]:
        loss, slopes = 0.0, []
        for advantage, one in zip(relative([m.reward for m in members], members), members, strict=True):
            ratio = np.exp(one.log_ratio.mean())
            value, slope = clipped(np.array(ratio), advantage, 0.05, 0.1)
            loss += float(value) / len(members)
            slopes.append(np.full(one.length, float(slope) / (len(members) * one.length)))
        return loss, slopes

    parity(GSPO(form=form, clip_low=0.05, clip_high=0.1), formula, seed)


def test_parity_of_the_token_form_with_process_supervision() -> None:
    """Advantages differ along a response, the ratio does not."""

    def formula(members: list[Response]) -> tuple[float, list[np.ndarray]]:
        loss, slopes = 0.0, []
        for one in members:
            steps = np.concatenate([m.steps for m in members if m.group == one.group])
            every = steps[np.isfinite(steps)]
            normal = np.nan_to_num((one.steps - every.mean()) / (every.std(ddof=1) + 1e-4), nan=0.0)
            advantage = np.array([normal[t:].sum() for t in range(one.length)])
            value, slope = clipped(np.full(one.length, np.exp(one.log_ratio.mean())), advantage, 0.05, 0.1)
            loss += value.sum() / (len(members) * one.length)
            slopes.append(slope / (len(members) * one.length))
        return loss, slopes

    parity(GSPO(form="token", supervision="process", clip_low=0.05, clip_high=0.1), formula, 0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", ["sequence", "token"])
def test_it_learns_from_rewards(form: str, seed: int) -> None:
    """From at most 0.43 of the mass on right tokens to above 0.95 in 30 steps (0.99 was measured with each seed)."""
    policy = small_policy(seed, torch.float32)
    assert chance_of_good(policy) < 0.6
    train(policy, GSPO(group=16, form=form), 30, seed=seed)
    assert chance_of_good(policy) > 0.95
