"""GRPO: numbers by hand, every refusal, an independent NumPy GRPO, and a small thing learned."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from bandit_for_tests import chance_of_good, train
from material_for_tests import (
    assert_same_gradients,
    gradients,
    group,
    material,
    plain_batch,
    rollout,
    segment,
    shared_policy,
    small_policy,
)
from numpy_for_tests import Response, clipped, parity

from posttrain.algorithms.base import Reuse
from posttrain.algorithms.grpo import GRPO
from posttrain.errors import UserError
from posttrain.train.forward import forward
from posttrain.train.pack import pack_groups
from posttrain.types import Batch, Outputs, Score

REFUSALS = [
    ({"group": 1}, "grpo: group must be at least 2, not 1: a group of one is its own baseline, every advantage is 0"),
    ({"clip_low": 0.0}, "grpo: clip_low must lie in (0, 1), not 0.0"),
    ({"clip_low": 1.0}, "grpo: clip_low must lie in (0, 1), not 1.0"),
    ({"clip_high": 0.0}, "grpo: clip_high must be positive, not 0.0"),
    ({"beta": -0.1}, "grpo: beta must be at least 0, not -0.1"),
    ({"beta": float("nan")}, "grpo: beta must be at least 0, not nan"),
    ({"kl": "k1"}, "grpo: kl must be k2, k3 or corrected, not 'k1': as a loss, k1 has no gradient on average"),
    ({"kl": "k4"}, "grpo: kl must be k2, k3 or corrected, not 'k4'"),
    ({"scale": "std"}, "grpo: scale must be group, batch or none, not 'std'"),
    ({"ddof": 2}, "grpo: ddof must be 0 or 1, not 2"),
    ({"epsilon": -1.0}, "grpo: epsilon must be at least 0, not -1.0"),
    ({"supervision": "steps"}, "grpo: supervision must be outcome or process, not 'steps'"),
    ({"supervision": "process", "kl_in": "reward"}, "grpo: with supervision=process the KL belongs in the loss"),
    ({"epochs": 0}, "grpo: epochs must be at least 1"),
    ({"mini_batches": 0}, "grpo: mini_batches must be at least 1"),
    (
        {"reduction": "mean"},
        "grpo: reduction must be token_mean, sequence_mean, sequence_sum or constant_mean, not 'mean'",
    ),
    ({"reduction": "constant_mean"}, "grpo: constant (a length, in tokens) and reduction=constant_mean go together"),
    ({"pass_k": 9}, "grpo: pass_k must be at most the group of 8, not 9"),
    ({"pass_k": 2, "scale": "none"}, "grpo: pass_k goes with scale=group, supervision=outcome and the KL in the loss"),
    ({"parts": ("a",), "kl_in": "reward"}, "grpo: parts goes with scale=group, supervision=outcome and the KL in the loss"),
    ({"pass_k": 2, "parts": ("a",)}, "grpo: pass_k counts right answers, and parts has several rewards: choose one"),
    ({"solved": 0.5}, "grpo: solved says what pass_k counts as right; pass_k=1 takes the reward as it is"),
    ({"parts": ("a", "b"), "part_weights": (1.0,)}, "grpo: part_weights has 1 numbers for 2 parts"),
    ({"constant": 5.0}, "grpo: constant (a length, in tokens) and reduction=constant_mean go together"),
]


@pytest.mark.proves("refusals")
@pytest.mark.parametrize(("settings", "message"), REFUSALS)
def test_refusals(settings: dict, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        GRPO(**settings)
    assert str(refusal.value).startswith(message)


def test_contract() -> None:
    assert GRPO().roles == {"reference"}
    assert GRPO(beta=0.0).roles == frozenset()
    assert GRPO(epochs=3, mini_batches=2).reuse == Reuse(epochs=3, mini_batches=2)
    assert GRPO(group=5).group_size == 5


def test_selection_keeps_all_and_counts_groups_that_teach_nothing() -> None:
    """Equality is exact; a group whose scores all failed teaches nothing either."""
    rewards = [[0.7] * 7, [0.1] * 8, [None, None], [None, 0.3], [0.3, 0.3 + 1e-9]]
    groups = [group([rollout([segment([3], False), segment([4], True)], r) for r in values]) for values in rewards]
    selection = GRPO().select(groups, {})
    assert selection.groups == tuple(groups) and selection.refill == 0
    assert [(m.name, m.total, m.count) for m in selection.metrics] == [("groups/zero_variance", 4, 5)]


@pytest.mark.proves("value")
def test_prepare_by_hand() -> None:
    """Group of rewards 1, 0, 0 with a fourth that failed: mean 1/3, std (ddof 1) sqrt(1/3); lengths 2, 1, 3, 4."""
    step = plain_batch([1.0, 0.0, 0.0, None], [0, 0, 0, 0], [2, 1, 3, 4])
    prepared = GRPO(epsilon=0.0).prepare(step, {})
    high, low = (2 / 3) / math.sqrt(1 / 3), (-1 / 3) / math.sqrt(1 / 3)
    assert prepared.advantage_T is not None and prepared.weight_T is not None
    assert prepared.advantage_T.tolist() == pytest.approx([0, high, high, 0, low, 0, low, low, low, 0, 0, 0, 0, 0])
    sixth, third, ninth = 1 / 6, 1 / 3, 1 / 9  # 1 / (3 sequences * length): the one that failed is not counted
    assert prepared.weight_T.tolist() == pytest.approx([0, sixth, sixth, 0, third, 0, ninth, ninth, ninth, 0, 0, 0, 0, 0])
    assert prepared.mask_T.tolist() == [False, True, True, False, True, False, True, True, True] + [False] * 5


@pytest.mark.proves("value")
@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"reduction": "sequence_mean"}, [0, 1 / 2, 0, 1 / 6, 1 / 6, 1 / 6]),
        ({"reduction": "token_mean"}, [0, 1 / 4, 0, 1 / 4, 1 / 4, 1 / 4]),
        ({"reduction": "constant_mean", "constant": 10.0}, [0, 1 / 20, 0, 1 / 20, 1 / 20, 1 / 20]),
    ],
)
def test_length_bias_by_hand(settings: dict, weights: list[float]) -> None:
    """`sequence_mean` favours short right answers (and long wrong ones); the other two weigh every token the same."""
    prepared = GRPO(**settings).prepare(plain_batch([1.0, 0.0], [0, 0], [1, 3]), {})
    assert prepared.weight_T is not None and prepared.weight_T.tolist() == pytest.approx(weights)


@pytest.mark.proves("value")
def test_terms_by_hand() -> None:
    """Two sequences of one token, advantages 1 and -1 (std 0, scale none: rewards 2 and 0), ratios 1.5 and 1.5, clip 0.2."""
    algorithm = GRPO(scale="none", kl="k3", beta=0.5, entropy=0.1)
    prepared = algorithm.prepare(plain_batch([2.0, 0.0], [0, 0]), {})
    log = math.log
    prepared = prepared.replace(
        behaviour_T=torch.tensor([float("nan"), log(0.2), float("inf"), log(0.4)], dtype=torch.float64),
        reference_T=torch.tensor([float("nan"), log(0.15), -1.0, log(0.6)], dtype=torch.float64),
    )
    outputs = Outputs(
        torch.tensor([float("nan"), log(0.3), 5.0, log(0.6)], dtype=torch.float64), torch.tensor([9.0, 1.0, 9.0, 2.0])
    )
    terms = algorithm.terms(outputs, prepared)
    sums = {t.name: float((t.weight * t.loss).sum()) for t in terms.terms}
    assert sums["policy"] == pytest.approx((-1.2 + 1.5) / 2)  # clipped at 1.2 going up; not clipped going down
    assert sums["kl"] == pytest.approx(0.5 * (0.5 + log(2) - 1) / 2)  # q/p is 1/2 and 1
    assert sums["entropy"] == pytest.approx(-0.1 * (1.0 + 2.0) / 2)
    metrics = {m.name: (float(m.total), float(m.count or 0)) for m in terms.metrics}
    assert metrics["clip_fraction"] == (1.0, 2.0)
    assert metrics["ratio/min"][0] == 1.0 and metrics["ratio/max"][0] == pytest.approx(1.5), "what is masked does not count"
    assert metrics["kl"] == pytest.approx((0.5 + log(2) - 1, 2.0))


def numpy_grpo(algorithm: GRPO, step: Batch, logprob: np.ndarray, entropy: np.ndarray) -> tuple[float, np.ndarray]:
    """Loss and its gradient by every log-prob, from the formulas of the paper, in float64 and one token at a time."""
    rewards, groups, valid = step.reward_N.double().numpy(), step.group_N.numpy(), step.valid_N.numpy()
    mask, sequence = step.mask_T.numpy() & valid[step.sequence_T.numpy()], step.sequence_T.numpy()
    behaviour = step.behaviour_T.double().numpy()
    lengths = np.array([mask[sequence == n].sum() for n in range(step.sequences)])
    loss, slope = 0.0, np.zeros_like(logprob)
    for t in np.flatnonzero(mask):
        n = sequence[t]
        members = rewards[(groups == groups[n]) & valid]
        std = {"group": np.std(members, ddof=algorithm.ddof), "batch": np.std(rewards[valid], ddof=algorithm.ddof)}
        advantage = rewards[n] - members.mean()
        if algorithm.scale != "none":
            advantage /= std[algorithm.scale] + algorithm.epsilon
        weight = {
            "token_mean": 1 / mask.sum(),
            "sequence_mean": 1 / ((lengths > 0).sum() * lengths[n]),
            "constant_mean": 1 / ((lengths > 0).sum() * max(algorithm.constant, 1e-9)),
        }[algorithm.reduction]
        ratio = np.exp(logprob[t] - behaviour[t])
        clipped = min(max(ratio, 1 - algorithm.clip_low), 1 + algorithm.clip_high)
        loss -= weight * min(ratio * advantage, clipped * advantage)
        if ratio * advantage <= clipped * advantage:
            slope[t] -= weight * advantage * ratio
        if algorithm.beta:
            d = float(step.reference_T[t]) - logprob[t]
            k3, k3_slope = np.exp(d) - d - 1, 1 - np.exp(d)
            value, by = {
                "k2": (d * d / 2, -d),
                "k3": (k3, k3_slope),
                "corrected": (ratio * k3, ratio * (k3 + k3_slope)),
            }[algorithm.kl]
            loss += algorithm.beta * weight * value
            slope[t] += algorithm.beta * weight * by
        loss -= algorithm.entropy * weight * entropy[t]
    return loss, slope


@pytest.mark.proves("value")
@pytest.mark.parametrize(
    "algorithm",
    [
        GRPO(),
        GRPO(beta=0.0, reduction="token_mean", clip_low=0.1, clip_high=0.3),
        GRPO(beta=0.1, kl="k2", scale="none", reduction="constant_mean", constant=6.0),
        GRPO(beta=0.1, kl="corrected", scale="batch", ddof=0, entropy=0.02),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_parity_with_an_independent_grpo(algorithm: GRPO, seed: int) -> None:
    step = material(algorithm, seed, noise=0.4)
    with torch.no_grad():
        outputs = forward(shared_policy(), step)
    logprob_T = outputs.logprob_T.clone().requires_grad_()
    prepared = algorithm.prepare(step, {})
    terms = algorithm.terms(Outputs(logprob_T, outputs.entropy_T), prepared)
    loss = sum((t.weight * t.loss).sum() for t in terms.terms)
    (slope,) = torch.autograd.grad(loss, logprob_T)
    expected, expected_slope = numpy_grpo(algorithm, step, logprob_T.detach().numpy(), outputs.entropy_T.numpy())
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6, abs=1e-7)  # advantages and weights are float32
    np.testing.assert_allclose(slope.numpy(), expected_slope, rtol=1e-6, atol=1e-8)
    assert np.abs(expected_slope).max() > 0.01


@pytest.mark.parametrize("reduction", ["sequence_mean", "token_mean"])
def test_tokens_without_advantage_can_be_skipped(reduction: str) -> None:
    """With beta = entropy = 0 they are left out of the forward pass, yet keep their place in every denominator."""
    algorithm = GRPO(beta=0.0, reduction=reduction)
    step = material(algorithm)
    prepared = algorithm.prepare(step, {})
    everything = prepared.replace(mask_T=step.mask_T & step.valid_N[step.sequence_T])
    assert int(prepared.mask_T.sum()) < int(everything.mask_T.sum())
    assert torch.equal(prepared.weight_T, GRPO(beta=0.1, reduction=reduction).prepare(step, {}).weight_T)
    assert_same_gradients(gradients(algorithm, prepared), gradients(algorithm, everything), 1e-12)


@pytest.mark.parametrize("settings", [{"beta": 0.04}, {"beta": 0.0, "entropy": 0.01}])
def test_tokens_without_advantage_stay_where_another_term_needs_them(settings: dict) -> None:
    algorithm = GRPO(**settings)
    step = material(algorithm)
    assert torch.equal(algorithm.prepare(step, {}).mask_T, step.mask_T & step.valid_N[step.sequence_T])


def test_the_kl_term_has_a_gradient_and_the_right_sign() -> None:
    """Minimising +beta KL moves the policy towards the reference."""
    algorithm = GRPO(beta=1.0, kl="k2")
    prepared = algorithm.prepare(plain_batch([0.0, 0.0], [0, 0]), {})
    prepared = prepared.replace(reference_T=torch.full((4,), -2.0), behaviour_T=torch.full((4,), -1.0))
    logprob_T = torch.full((4,), -1.0, requires_grad=True)
    terms = algorithm.terms(Outputs(logprob_T, torch.zeros(4)), prepared)
    (slope,) = torch.autograd.grad(sum((t.weight * t.loss).sum() for t in terms.terms), logprob_T)
    assert slope.tolist() == [0.0, 0.5, 0.0, 0.5]  # log p - log q = 1, weight 1/2: descent lowers log p


def test_truncated_responses_stay_in_loss_and_baseline() -> None:
    """A response cut off by the length limit is a response like any other, judged by its reward."""

    def step(finish: str) -> Batch:
        members = [rollout([segment([3], False), segment([4, 5], True, finish=finish)], reward) for reward in (1.0, 0.0)]
        return GRPO(beta=0.0).prepare(pack_groups([group(members)], 1.0), {})

    stopped, cut = step("stop"), step("length")
    for name in ("mask_T", "weight_T", "advantage_T"):
        assert torch.equal(getattr(stopped, name), getattr(cut, name))
    assert bool(cut.mask_T.any())


# --- process supervision --------------------------------------------------------------------------------------------------


@pytest.mark.proves("value")
def test_process_supervision_by_hand() -> None:
    """Two responses of 3 tokens; the first has steps worth 1 at its first token and 0 at its last, the second one of 1/2 at its second.
    The three have mean 1/2 and std 1/2, so they count 1, -1 and 0."""
    nan = math.nan
    step = plain_batch([9.0, 9.0, 9.0], [0, 0, 0], [3, 3, 1]).replace(
        step_T=torch.tensor([5.0, 1.0, nan, 0.0, nan, nan, 0.5, nan, nan, nan])  # what a prompt's token holds is not a step
    )
    prepared = GRPO(epsilon=0.0, supervision="process").prepare(step, {})
    assert prepared.advantage_T.tolist() == pytest.approx([0, 0, -1, -1, 0, 0, 0, 0, 0, 0])
    assert bool(prepared.mask_T[9])  # a response without steps has no advantage, and stays for the KL


def test_process_supervision_needs_steps() -> None:
    with pytest.raises(UserError, match="^grpo: supervision=process needs a reward that scores steps"):
        GRPO(supervision="process").prepare(plain_batch([1.0, 0.0], [0, 0]), {})


@pytest.mark.proves("value")
@pytest.mark.parametrize("seed", range(3))
def test_parity_with_independent_process_supervision(seed: int) -> None:
    def formula(members: list[Response]) -> tuple[float, list[np.ndarray]]:
        loss, slopes = 0.0, []
        for one in members:
            steps = np.concatenate([m.steps for m in members if m.group == one.group])
            every = steps[np.isfinite(steps)]
            value, slope = np.zeros(one.length), np.zeros(one.length)
            for t in range(one.length):
                later = one.steps[t:][np.isfinite(one.steps[t:])]
                advantage = ((later - every.mean()) / (every.std(ddof=1) + 1e-4)).sum()
                value[t], slope[t] = clipped(np.exp(one.log_ratio[t]), advantage, 0.2, 0.2)
            loss += value.mean() / len(members)
            slopes.append(slope / (one.length * len(members)))
        return loss, slopes

    parity(GRPO(beta=0.0, supervision="process"), formula, seed)


# --- learning -------------------------------------------------------------------------------------------------------------


@pytest.mark.proves("learns")
@pytest.mark.parametrize("settings", [{}, {"scale": "none", "reduction": "token_mean"}])
def test_it_learns_from_rewards(settings: dict) -> None:
    """A contextual bandit: from a third of the mass on right tokens to nearly all of it."""
    policy = small_policy(dtype=torch.float32)
    before = chance_of_good(policy)
    train(policy, GRPO(group=16, beta=0.0, **settings), 40)
    after = chance_of_good(policy)
    assert before < 0.6
    assert after > 0.95


@pytest.mark.proves("learns")
def test_it_learns_nothing_from_equal_rewards() -> None:
    policy = small_policy(dtype=torch.float32)
    weights = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    train(policy, GRPO(group=16, beta=0.0), 3, lambda prompt, token: 0.5)
    assert all(torch.equal(p, weights[name]) for name, p in policy.model.named_parameters())


def test_a_task_that_pays_by_turn_is_learned_from_by_turn() -> None:
    """Returns 2 (1 of it paid for the first turn) and 1 (of one turn): A of turn 0 is 0.5, of turn 1 (1 - 1) / std = 0."""
    first = [segment([5], False), replace(segment([6], True), reward=1.0), segment([8], False), segment([9], True)]
    other = [segment([5], False), segment([7], True)]
    step = pack_groups([group([rollout(first, 2.0), rollout(other, 1.0, sample=1)])], 1.0)
    prepared = GRPO(beta=0.0, scale="none").prepare(step, {})
    assert prepared.advantage_T.tolist() == [0, 0.5, 0, 0, 0, -0.5]
    assert GRPO(beta=0.0, scale="none").prepare(step.replace(paid_T=None), {}).advantage_T.tolist() == [0, 0.5, 0, 0.5, 0, -0.5]


@pytest.mark.parametrize(("paid", "total", "advantage"), [((1.0, 0.0), 1.0, 0.0), ((-3.0, 2.0), -1.0, -0.5)])
def test_no_turn_of_an_episode_that_was_cut_off_is_paid(paid: tuple[float, float], total: float, advantage: float) -> None:
    """The other episode of the group has the return 0. Both turns of this one have min(total, 0): the second turn is neither paid its
    own 2 nor charged for the 1 of the first."""
    turns = [replace(segment([n], True), reward=reward) for n, reward in zip((6, 9), paid, strict=True)]
    cut = [segment([5], False), turns[0], segment([8], False), turns[1]]
    other = [segment([5], False), segment([7], True)]
    step = pack_groups([group([rollout(cut, total), rollout(other, 0.0, sample=1)])], 1.0)
    step = step.replace(truncated_N=torch.tensor([True, False]))
    prepared = GRPO(beta=0.0, scale="none", truncated="zero").prepare(step, {})
    assert prepared.advantage_T.tolist() == [0, advantage, 0, advantage, 0, -advantage]
    assert torch.equal(prepared.paid_T, step.paid_T)  # what was paid stays what is shown


@pytest.mark.proves("value")
def test_pass_at_k_advantages_are_those_of_whole_responses() -> None:
    """One of four is right: 1 and -1/3 (ops/advantages.py has the formula), at every token."""
    step = plain_batch([0.9, 0.0, 0.1, 0.0], [0] * 4, [1, 2, 1, 1])
    found = GRPO(pass_k=2, solved=0.5, group=4, epsilon=0.0).prepare(step, {}).advantage_T
    assert found.tolist() == pytest.approx([0, 1, 0, -1 / 3, -1 / 3, 0, -1 / 3, 0, -1 / 3])


def scored(*parts: dict[str, float] | None) -> Batch:
    """A group with scores of these parts, whose values say nothing; None could not be scored."""
    made = [rollout([segment([3], False), segment([4], True)], None if one is None else 7.0) for one in parts]
    members = [r if one is None else replace(r, score=Score(7.0, one)) for r, one in zip(made, parts, strict=True)]
    return pack_groups([group(members)], 1.0, parts=("answer", "format"))


@pytest.mark.proves("value")
def test_parts_of_a_reward_are_normalised_one_by_one() -> None:
    """Rewards 1, 0 and 0, 10: each is +-sqrt(1/2), so that they cancel; with weights of 1 and 3 the second leads, and is divided by its
    own size. What could not be scored has no part."""
    step = scored({"answer": 1.0, "format": 0.0}, {"answer": 0.0, "format": 10.0}, None)
    algorithm = GRPO(parts=("answer", "format"), epsilon=0.0)
    assert not algorithm.prepare(step, {}).advantage_T.any()
    weighed = GRPO(parts=("answer", "format"), part_weights=(1.0, 3.0)).prepare(step, {})
    assert weighed.advantage_T.tolist() == pytest.approx([0, -1, 0, 1, 0, 0], abs=1e-3)
    assert algorithm.learns_parts == ("answer", "format")


def test_a_part_that_the_reward_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match="^parts: 'format' is no part of the reward; it has answer$"):
        scored({"answer": 1.0}, {"answer": 0.0})
