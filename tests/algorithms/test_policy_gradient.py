"""What the policy gradients share: where the KL goes, truncated responses, other samplers' samples, refusals, a user's own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from material_for_tests import gradients, material, plain_batch, shared_policy
from numpy_for_tests import Response, clipped, parity, relative

from posttrain.algorithms._policy_gradient import PolicyGradient
from posttrain.algorithms.base import Reuse
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.gspo import GSPO
from posttrain.algorithms.rloo import RLOO
from posttrain.errors import UserError
from posttrain.train.forward import forward
from posttrain.types import Batch, Outputs

REFUSALS = [
    ({"kl_in": "advantage"}, "kl_in must be loss, reward or both, not 'advantage'"),
    ({"kl_in": "both", "beta": 0.0}, "kl_in=both needs a beta above 0"),
    ({"entropy": math.nan}, "entropy must be a finite number, not nan"),
    ({"truncated": "drop"}, "truncated must be keep, mask or zero, not 'drop'"),
    ({"correction": "tis"}, "correction must be none, proximal, token, sequence or decoupled, not 'tis'"),
    ({"correction": "token", "cap": 0.0}, "cap must be above 0, not 0.0"),
    ({"cap": 3.0}, "cap cuts the weights of correction=token and sequence; there are none"),
    ({"correction": "decoupled", "cap": 3.0}, "cap cuts the weights of correction=token and sequence; there are none"),
    ({"drop": "mean"}, "drop=mean or sequence and a bound above 0 go together"),
    ({"bound": 0.1}, "drop=mean or sequence and a bound above 0 go together"),
    ({"drop": "token", "bound": 0.1}, "drop must be none, mean or sequence, not 'token'"),
    ({"dual_clip": 1.0}, "dual_clip must be above 1 (3 in the paper; 0: none), not 1.0"),
    ({"mask_low": 0.5}, "mask_low must lie in [0, 1) and mask_high above 1 (both 0: no mask), not 0.5 and 0.0"),
    ({"mask_high": 0.9}, "mask_low must lie in [0, 1) and mask_high above 1 (both 0: no mask), not 0.0 and 0.9"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSALS)
def test_refusals(settings: dict, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        GRPO(**settings)
    assert str(refusal.value) == f"grpo: {message}"


def test_needs_are_what_the_settings_use() -> None:
    assert GRPO(beta=0.0).roles == frozenset()
    assert GRPO(beta=0.0, correction="token", epochs=2).roles == {"proximal"}
    assert GRPO(drop="mean", bound=0.1, mini_batches=2).roles == {"proximal", "reference"}
    assert GRPO(beta=0.0, correction="token").roles == GRPO(drop="mean", bound=0.1, beta=0.0).roles == frozenset()


def test_a_users_own_is_called_by_its_class() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(PolicyGradient):
        pass

    with pytest.raises(UserError, match="^Mine: beta must be at least 0"):
        Mine(beta=-1.0)


# --- KL -------------------------------------------------------------------------------------------------------------------


def test_kl_in_the_loss_in_the_reward_or_in_both() -> None:
    """In the loss it is a term and advantages are those of the task; in the reward it is no term; both only by name."""
    names, advantages = {}, {}
    for kl_in in ("loss", "reward", "both"):
        algorithm = GRPO(kl_in=kl_in, beta=0.5)
        prepared = algorithm.prepare(material(algorithm), {})
        names[kl_in] = [t.name for t in algorithm.terms(outputs(prepared), prepared).terms]
        advantages[kl_in] = prepared.advantage_T
    plain = GRPO(beta=0.0)
    free = plain.prepare(material(plain), {}).advantage_T
    assert names == {"loss": ["policy", "kl"], "reward": ["policy"], "both": ["policy", "kl"]}
    assert torch.equal(advantages["loss"], free) and not torch.equal(advantages["reward"], free)
    assert torch.equal(advantages["reward"], advantages["both"])


def outputs(batch: Batch) -> Outputs:
    return Outputs(torch.full((batch.tokens,), -1.0, dtype=torch.float64, requires_grad=True), torch.ones(batch.tokens))


def test_kl_in_the_reward_by_hand() -> None:
    """Two right answers; the second is 1 + 2 nats from the reference. R = 1 and 1 - 0.1 * 3; the KL trained on is shown."""
    algorithm = GRPO(kl_in="reward", beta=0.1, scale="none")
    step = plain_batch([1.0, 1.0], [0, 0], [1, 2]).replace(
        behaviour_T=torch.tensor([9.0, -1.0, 9.0, -1.0, -1.0]), reference_T=torch.tensor([math.nan, -1.0, math.nan, -2.0, -3.0])
    )
    prepared = algorithm.prepare(step, {})
    assert prepared.advantage_T.tolist() == pytest.approx([0, 0.15, 0, -0.15, -0.15])
    shown = {m.name: (float(m.total), float(m.count or 0)) for m in algorithm.terms(outputs(prepared), prepared).metrics}
    assert shown["kl"] == (3.0, 3.0)


@pytest.mark.parametrize("seed", range(2))
def test_parity_with_kl_in_the_reward(seed: int) -> None:
    def formula(members: list[Response]) -> tuple[float, list[np.ndarray]]:
        rewards = [one.reward - 0.2 * (one.behaviour - one.reference).sum() for one in members]
        loss, slopes = 0.0, []
        for advantage, one in zip(relative(rewards, members), members, strict=True):
            value, slope = clipped(np.exp(one.log_ratio), advantage, 0.2, 0.2)
            loss += value.mean() / len(members)
            slopes.append(slope / (one.length * len(members)))
        return loss, slopes

    parity(GRPO(kl_in="reward", beta=0.2), formula, seed)


# --- truncated responses --------------------------------------------------------------------------------------------------


def test_truncated_responses_can_be_masked() -> None:
    """Out of the loss and of its denominators, but not out of the baseline."""
    step = plain_batch([1.0, 0.0, 0.0], [0] * 3, [2, 1, 4]).replace(truncated_N=torch.tensor([False, False, True]))
    prepared = GRPO(scale="none", truncated="mask", beta=0.0).prepare(step, {})
    assert prepared.advantage_T.tolist() == pytest.approx([0, 2 / 3, 2 / 3, 0, -1 / 3, 0, 0, 0, 0, 0])
    assert prepared.weight_T.tolist() == pytest.approx([0, 1 / 4, 1 / 4, 0, 1 / 2, 0, 0, 0, 0, 0])
    assert prepared.mask_T.tolist() == [False, True, True, False, True] + [False] * 5


def test_truncated_responses_can_be_paid_nothing() -> None:
    """Rewards 1, 1 (cut off), 0, -1 (cut off) count as 1, 0, 0, -1: the mean is 0, and the one that ended is alone above it."""
    step = plain_batch([1.0, 1.0, 0.0, -1.0], [0] * 4, [1] * 4)
    step = step.replace(truncated_N=torch.tensor([False, True, False, True]))
    prepared = GRPO(scale="none", truncated="zero", beta=0.0).prepare(step, {})
    assert prepared.advantage_T.tolist() == pytest.approx([0, 1, 0, 0, 0, 0, 0, -1])
    assert prepared.weight_T.tolist() == pytest.approx([0, 1 / 4] * 4)  # all of them count
    assert torch.equal(prepared.reward_N, step.reward_N)  # what was scored stays what is shown


@pytest.mark.parametrize("given", [{"supervision": "process"}, {"parts": ("answer",)}])
def test_unpaid_truncation_needs_the_reward_as_a_whole(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="truncated=zero .* take truncated=mask"):
        GRPO(truncated="zero", **given)


# --- samples of another policy --------------------------------------------------------------------------------------------


def test_corrections_by_hand() -> None:
    """One response of two tokens with pi_prox / mu = 2 and 4, and the policy where the step began; A is 1/2, weights are 1/4. IcePop
    leaves the second token out."""
    slopes = {}
    for name, settings in {
        "none": {},
        "decoupled": {"correction": "decoupled"},
        "token": {"correction": "token", "cap": 3.0},
        "sequence": {"correction": "sequence", "cap": 7.0},
        "icepop": {"correction": "decoupled", "mask_low": 0.5, "mask_high": 3.0},
    }.items():
        algorithm = GRPO(beta=0.0, scale="none", clip_high=9.0, **settings)
        step = plain_batch([1.0, 0.0], [0, 0], [2, 1]).replace(
            behaviour_T=torch.tensor([0, -3.0, -3.0, 0, -1.0], dtype=torch.float64),
            proximal_T=torch.tensor([0, -3 + math.log(2), -3 + math.log(4), 0, -1.0], dtype=torch.float64),
        )
        prepared = algorithm.prepare(step, {})
        logprob_T = step.proximal_T.clone().requires_grad_()
        terms = algorithm.terms(Outputs(logprob_T, torch.zeros(5)), prepared)
        (slope,) = torch.autograd.grad((terms.terms[0].weight * terms.terms[0].loss).sum(), logprob_T)
        slopes[name] = [-8 * float(slope[1]), -8 * float(slope[2])]
        shown = {m.name: m.value for m in terms.metrics}
        if name != "none":
            assert shown["correction"] == pytest.approx(7 / 3 if name == "icepop" else (sum(slopes[name]) + 1) / 3)
        assert shown.get("masked") == (pytest.approx(1 / 3) if name == "icepop" else None)
    assert slopes == {
        "none": pytest.approx([2, 4]),  # the ratio to mu itself
        "decoupled": pytest.approx([2, 4]),  # the same at the start of the step, but clipped from there
        "token": pytest.approx([2, 3]),
        "sequence": pytest.approx([7, 7]),
        "icepop": pytest.approx([2, 0]),
    }


def test_the_decoupled_clip_is_about_the_proximal_policy() -> None:
    """A stale sample (pi_prox / mu = 2) is beyond the clip of the ratio to mu before anything has moved; decoupled, it learns."""
    step = plain_batch([1.0, 0.0], [0, 0]).replace(
        behaviour_T=torch.tensor([0, -2.0, 0, -1.0]), proximal_T=torch.tensor([0, -2.0 + math.log(2), 0, -1.0])
    )
    found = {}
    for correction in ("none", "decoupled"):
        algorithm = GRPO(beta=0.0, scale="none", correction=correction)
        logprob_T = step.proximal_T.clone().requires_grad_()
        terms = algorithm.terms(Outputs(logprob_T, torch.zeros(4)), algorithm.prepare(step, {}))
        (slope,) = torch.autograd.grad((terms.terms[0].weight * terms.terms[0].loss).sum(), logprob_T)
        found[correction] = float(slope[1])
    assert found == {"none": 0.0, "decoupled": pytest.approx(-0.5)}


@pytest.mark.parametrize(
    ("settings", "dropped"),
    [({"drop": "mean", "bound": 0.4}, [0]), ({"drop": "sequence", "bound": 0.9}, [1]), ({"drop": "mean", "bound": 0.6}, [])],
)
def test_far_responses_are_dropped(settings: dict, dropped: list[int]) -> None:
    """|log pi_prox / mu|: a response of one token 0.5 away, and one of three tokens 1.2 away in all, 0.4 a token. Weights stay."""
    step = plain_batch([1.0, 0.0], [0, 0], [1, 3]).replace(
        behaviour_T=torch.tensor([0, -1.0, 0, -1.0, -1.0, -1.0]),
        proximal_T=torch.tensor([0, -1.5, 0, -0.61, -0.61, -0.61]),
    )
    algorithm = GRPO(beta=0.0, epochs=2, **settings)
    prepared = algorithm.prepare(step, {})
    logprob_T = step.behaviour_T.clone().requires_grad_()
    terms = algorithm.terms(Outputs(logprob_T, torch.zeros(6)), prepared)
    (slope,) = torch.autograd.grad((terms.terms[0].weight * terms.terms[0].loss).sum(), logprob_T)
    assert [n for n in range(2) if not slope[step.sequence_T == n].any()] == dropped
    assert {m.name: (float(m.total), float(m.count or 0)) for m in terms.metrics}["dropped"] == (len(dropped), 2)
    assert torch.equal(prepared.weight_T, GRPO(beta=0.0).prepare(step, {}).weight_T)


@pytest.mark.parametrize("correction", ["token", "sequence", "decoupled"])
@pytest.mark.parametrize("drop", ["none", "mean", "sequence"])
def test_parity_of_corrections(correction: str, drop: str) -> None:
    cap, bound = 1.1, {"none": 0.0, "mean": 0.05, "sequence": 0.3}[drop]

    def formula(members: list[Response]) -> tuple[float, list[np.ndarray]]:
        loss, slopes, left_out = 0.0, [], 0
        for advantage, one in zip(relative([m.reward for m in members], members), members, strict=True):
            apart = one.proximal - one.behaviour
            factor = {"decoupled": np.exp(apart), "token": np.minimum(np.exp(apart), cap)}.get(correction)
            if factor is None:
                factor = np.full(one.length, min(np.exp(apart.sum()), cap))
            far = {"none": False, "mean": abs(apart.mean()) > bound, "sequence": abs(apart.sum()) > bound}[drop]
            left_out += far
            value, slope = clipped(np.exp(one.logprob - one.proximal), advantage, 0.1, 0.1)
            share = 0.0 if far else factor / (one.length * len(members))
            loss += (share * value).sum()
            slopes.append(share * slope)
        assert drop == "none" or 0 < left_out < len(members)
        return loss, slopes

    settings = {"cap": cap} if correction != "decoupled" else {}
    algorithm = GRPO(beta=0.0, clip_low=0.1, clip_high=0.1, correction=correction, drop=drop, bound=bound, epochs=2, **settings)
    parity(algorithm, formula, 0, noise=0.2)


@pytest.mark.parametrize("make", [GRPO, GSPO, RLOO])
def test_corrections_do_nothing_to_a_sampler_that_is_the_policy(make: type[PolicyGradient]) -> None:
    plain = make(beta=0.0, clip_low=0.2, clip_high=0.2, correction="none")
    step = material(plain, noise=0.0)
    step = step.replace(proximal_T=step.behaviour_T)
    expected = gradients(plain, plain.prepare(step, {}))
    for settings in (
        {"correction": "token"},
        {"correction": "sequence"},
        {"correction": "decoupled"},
        {"correction": "proximal"},
        {"correction": "none", "drop": "mean", "bound": 1e-6},
    ):
        algorithm = make(beta=0.0, clip_low=0.2, clip_high=0.2, epochs=2, **settings)
        found = gradients(algorithm, algorithm.prepare(step, {}))
        assert all(torch.equal(expected[1][name], gradient) for name, gradient in found[1].items())


@pytest.mark.parametrize("settings", [{"correction": "token"}, {"correction": "sequence"}, {"drop": "mean", "bound": 0.05},
                                      {"correction": "decoupled", "mask_low": 0.5, "mask_high": 1.1}])  # fmt: skip
def test_one_update_a_rollout_has_the_policy_that_learns_as_its_start(settings: dict) -> None:
    """What a forward pass before the update would give, without it."""
    once, twice = (GRPO(beta=0.0, epochs=epochs, **settings) for epochs in (1, 2))
    step = material(once, noise=0.2)
    assert "proximal_T" not in step.columns
    logprob_T = forward(shared_policy(), step).logprob_T.detach()
    found, expected = (
        gradients(once, once.prepare(step, {})),
        gradients(twice, twice.prepare(step.replace(proximal_T=logprob_T), {})),
    )
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-9, atol=1e-12)


def test_an_algorithm_of_ones_own_that_would_never_update_is_refused() -> None:
    with pytest.raises(UserError, match="epochs must be at least 1"):
        Reuse(epochs=0)
