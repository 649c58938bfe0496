"""The implicit reward of rollouts: against the models' own log-probs one by one, and against DPO's margins."""

from __future__ import annotations

import math

import pytest
import torch
from material_for_tests import rollout, segment, shared_policy, small_policy

from posttrain.algorithms.dpo import DPO
from posttrain.errors import UserError
from posttrain.train.forward import forward
from posttrain.train.pack import pack_groups
from posttrain.train.rating import ImplicitRating
from posttrain.types import Group, Rollout


def rollouts() -> list[Rollout]:
    """With a shared prompt, a tool's answer in the middle, and a different prompt."""
    prompt = segment([5, 6, 7, 8, 9], False)
    tool = [prompt, segment([10, 11], True), segment([12, 13, 14], False), segment([15], True)]
    return [
        rollout([prompt, segment([3, 4], True)], 1.0),
        rollout(tool, None, sample=1),
        rollout([segment([20], False), segment([21, 22, 23], True)], 0.0, "q"),
    ]


@pytest.mark.parametrize("budget", [1, 10_000])
def test_against_each_models_log_softmax(budget: int) -> None:
    policy, reference = shared_policy(0), shared_policy(1)
    scores = ImplicitRating(policy, reference, beta=0.25, token_budget=budget).rate(rollouts())
    for score, one in zip(scores, rollouts(), strict=True):
        sums = []
        for model in (policy, reference):
            ids = torch.from_numpy(one.ids)
            logprob = model.model(ids[None]).logits[0].log_softmax(-1)
            sampled = [s.sampled for s in one.segments for _ in s.ids]
            sums.append(float(sum(logprob[t - 1, ids[t]] for t in range(1, len(ids)) if sampled[t]).detach()))
        assert score.value == pytest.approx(0.25 * (sums[0] - sums[1]), abs=1e-6)
        assert score.parts == pytest.approx({"logprob": sums[0], "reference": sums[1]}, abs=1e-6)


def test_a_difference_of_two_is_the_margin_that_dpo_learns() -> None:
    policy, reference = shared_policy(0), shared_policy(1)
    pair = [rollout([segment([5, 6], False), segment(ids, True)], r) for ids, r in (([7, 8, 9], 1.0), ([10], 0.0))]
    batch = pack_groups([Group(pair[0].problem, tuple(pair))], 1.0, together=True)
    with torch.no_grad():
        batch = batch.replace(reference_T=forward(reference, batch).logprob_T)
        terms = DPO(beta=0.4).terms(forward(policy, batch), DPO(beta=0.4).prepare(batch, {}))
    margin = {m.name: m.value for m in terms.metrics}["margin"]
    better, worse = ImplicitRating(policy, reference, 0.4).rate(pair)
    assert better.value is not None and worse.value is not None
    assert better.value - worse.value == pytest.approx(margin, abs=1e-9) and margin != 0


def test_a_model_against_itself_rewards_nothing() -> None:
    scores = ImplicitRating(shared_policy(), shared_policy(), 0.1).rate(rollouts())
    assert [s.value for s in scores] == [0.0] * 3


def test_what_is_not_finite_is_a_failure() -> None:
    broken = small_policy()
    with torch.no_grad():
        next(broken.model.parameters()).fill_(math.nan)
    score = ImplicitRating(broken, shared_policy(), 0.1).rate(rollouts()[:1])[0]
    assert not score.valid and score.failure is not None and "nan" in score.failure


def test_a_checkpoint_can_name_both_models() -> None:
    policy, reference = shared_policy(0), shared_policy(1)
    assert ImplicitRating(policy, reference, 0.1).models == (policy.model, reference.model)


def test_refusals() -> None:
    with pytest.raises(UserError, match="beta must be positive, not 0"):
        ImplicitRating(shared_policy(), shared_policy(), 0)
    with pytest.raises(UserError, match="another vocabulary .*30 tokens against 24.*the reference must be the model that"):
        ImplicitRating(shared_policy(), small_policy(vocab_size=30), 0.1)
    assert ImplicitRating(shared_policy(), shared_policy(), 0.1).rate([]) == []
