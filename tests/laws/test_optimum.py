"""The methods share one objective, E[r] - beta KL(pi || ref), whose optimum is pi* = ref exp(r / beta) / Z. These tests check where
each method converges.

Problems are enumerated (tabular_for_tests), so there is no sampling noise, and the limit of a method shows its bias. The biases are
derived here: each has a closed form, and the method must converge to that one and not to pi*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from material_for_tests import WIDE, algorithm_class
from tabular_for_tests import (
    BANDIT,
    TREE,
    Enumeration,
    Policy,
    Table,
    divergence,
    every_group,
    every_label,
    every_pair,
    train,
)

from posttrain import catalogue
from posttrain.algorithms._policy_gradient import PolicyGradient
from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.distillation import Distillation
from posttrain.algorithms.dpo import DPO
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ipo import IPO
from posttrain.algorithms.kto import KTO
from posttrain.algorithms.online_dpo import OnlineDPO
from posttrain.algorithms.orpo import ORPO
from posttrain.algorithms.ppo import PPO
from posttrain.algorithms.process_reward_model import ProcessRewardModel
from posttrain.algorithms.reinforce import Reinforce
from posttrain.algorithms.reward_model import RewardModel
from posttrain.algorithms.rloo import RLOO
from posttrain.algorithms.sft import SFT
from posttrain.algorithms.simpo import SimPO
from posttrain.types import Outputs

BETA = 0.5
CLOSE = 1e-3  # KL in nats; a bias is told from rest at five times this and more
signs = pytest.mark.parametrize("flip", [False, True], ids=["reward", "flipped"])


def named(*algorithms: Algorithm) -> list[Any]:
    """Cases whose ids begin with the catalogue's name, and go on with the settings that are not the defaults."""
    cases = []
    for one in algorithms:
        settings = [
            f"{f.name}={getattr(one, f.name)}" for f in fields(one) if getattr(one, f.name) != getattr(type(one)(), f.name)
        ]
        plain = [s for s in settings if len(s) < 24]
        cases.append(pytest.param(one, id="-".join([catalogue.name_of(one), *plain])))
    return cases


def policy_gradients(**settings: Any) -> list[Algorithm]:
    """Every policy gradient of the catalogue that is about the reward, in groups as small as it allows: their number is that of
    responses to its power."""
    classes = [algorithm_class(name) for name in catalogue.names("algorithm")]
    found = [cls for cls in classes if issubclass(cls, PolicyGradient) and "teacher" not in cls().roles]
    return [cls(group=cls.min_group, **settings) for cls in found]


# --- the KL in the reward -------------------------------------------------------------------------------------------------------

REWARDED = named(
    *policy_gradients(beta=BETA, kl_in="reward"),
    PPO(beta=BETA),
    PPO(beta=BETA, lam=1.0, whiten_advantages=False, epochs=1),
    Reinforce(beta=BETA, baseline="none"),
    Reinforce(beta=BETA, baseline="running"),
)


@pytest.mark.proves("optimum", "flipped")
@signs
@pytest.mark.parametrize("algorithm", REWARDED)
def test_kl_in_the_reward_ends_at_the_shared_optimum(algorithm: Algorithm, flip: bool) -> None:
    """Responses of one and two tokens, with every method's own scale, reduction and clip: at pi* all rewards less KL are equal, so
    all advantages are 0, and nothing that multiplies them can move the optimum."""
    table = TREE.flipped if flip else TREE
    found = train(algorithm, every_group(table, algorithm), steps=60 if algorithm.reuse.epochs > 1 else 160, rate=0.12)
    assert divergence(found, table.optimum(BETA)) < CLOSE
    assert divergence(found, TREE.optimum(BETA) if flip else TREE.flipped.optimum(BETA)) > 0.5


@pytest.mark.proves("optimum")
@pytest.mark.parametrize("algorithm", named(*(a for a in policy_gradients(beta=BETA, kl_in="reward") if a.name != "remax")))
def test_at_the_shared_optimum_advantages_are_zero(algorithm: Algorithm) -> None:
    """On the bandit, and up to a constant where the baseline is not the group's; one step away they are not. ReMax's constant is
    the reward of the greedy answer, which in an enumeration of groups is every response in turn."""
    step = every_group(BANDIT, algorithm)
    spread = []
    for logits in (BANDIT.start, torch.from_numpy(np.log(BANDIT.optimum(BETA)))[None]):
        prepared = algorithm.prepare(step.filled(logits, torch.zeros(1), algorithm), algorithm.start())
        assert prepared.advantage_T is not None
        inside = prepared.advantage_T[step.batch.mask_T]
        spread.append(float(inside.max() - inside.min()))
    assert spread[0] > 0.1 and spread[1] < 1e-6


# --- the KL in the loss ---------------------------------------------------------------------------------------------------------


def group_share(algorithm: GRPO | Any) -> float:
    """E[(r_i - mean of the group) grad log pi(y_i)] = (G - 1) / G grad E[r]: a sample is part of its own baseline."""
    return (algorithm.group - 1) / algorithm.group


FAILED = named(
    GRPO(group=2, beta=BETA, kl="corrected", scale="none"),
    GRPO(group=2, beta=BETA, kl="k2", scale="none"),
    GRPO(group=3, beta=BETA, kl="corrected", scale="none"),
    algorithm_class("dr_grpo")(group=2, beta=BETA, kl="corrected", constant=1.0),
)


@pytest.mark.proves("optimum", "flipped")
@signs
@pytest.mark.parametrize("algorithm", FAILED)
def test_kl_in_the_loss_with_the_right_gradient_ends_at_the_optimum_of_a_larger_beta(algorithm: Any, flip: bool) -> None:
    """GRPO's mean includes the sample itself, which shrinks the reward's gradient and not the KL's: beta acts as beta G / (G - 1).
    With the paper's groups of 64 that is 1.6%; with beta (G - 1) / G it would be pi* itself."""
    table = BANDIT.flipped if flip else BANDIT
    found = train(algorithm, every_group(table, algorithm), steps=160)
    assert divergence(found, table.optimum(BETA / group_share(algorithm))) < CLOSE / 10
    assert divergence(found, table.optimum(BETA)) > 10 * CLOSE


UNSHRUNK = named(
    GRPO(group=2, beta=BETA / 2, kl="corrected", scale="none"),
    RLOO(group=2, beta=BETA, kl_in="loss", kl="corrected"),
    RLOO(group=2, beta=BETA, kl_in="loss", kl="k2"),
    Reinforce(beta=BETA, kl_in="loss", kl="corrected", baseline="none"),
    algorithm_class("remax")(beta=BETA, kl_in="loss", kl="corrected"),
    algorithm_class("vineppo")(group=2, beta=BETA, kl="corrected"),
    PPO(beta=BETA, kl_in="loss", kl="corrected", whiten_advantages=False, epochs=1),
)


@pytest.mark.proves("optimum", "flipped")
@signs
@pytest.mark.parametrize("algorithm", UNSHRUNK)
def test_kl_in_the_loss_with_an_unbiased_baseline_ends_at_the_shared_optimum(algorithm: Algorithm, flip: bool) -> None:
    """RLOO's baseline leaves the sample out, REINFORCE's does not depend on it; and GRPO with beta (G - 1) / G."""
    table = BANDIT.flipped if flip else BANDIT
    assert divergence(train(algorithm, every_group(table, algorithm), steps=160), table.optimum(BETA)) < CLOSE / 10


def solve(share: Callable[[float], Policy], low: float, high: float) -> Policy:
    """The policy at which the probabilities sum to 1, as a constant that they fall with is sought by halving."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle).sum() > 1 else (low, middle)
    return share((low + high) / 2)


def forward_kl_optimum(table: Table, beta: float, gain: Policy) -> Policy:
    """Where E[gain] - beta KL(ref || pi) stands still: pi_a (gain_a - c) = beta (pi_a - ref_a), so pi_a = beta ref_a / (beta + c -
    gain_a), with c such that they sum to 1."""
    reference = np.array(table.reference[0])
    top = float(gain.max()) - beta
    return solve(lambda c: beta * reference / (beta + c - gain), top + 1e-9, top + 1e3)


@pytest.mark.proves("optimum")
def test_grpo_with_the_papers_kl_ends_elsewhere() -> None:
    """k3 as a loss has the gradient of the forward KL, whose optimum has heavier tails: bad arms are kept, not forgotten."""
    algorithm = GRPO(group=2, beta=BETA, kl="k3", scale="none")
    found = train(algorithm, every_group(BANDIT, algorithm), steps=160)
    predicted = forward_kl_optimum(BANDIT, BETA, group_share(algorithm) * np.array(BANDIT.reward))
    reverse = BANDIT.optimum(BETA / group_share(algorithm))
    assert divergence(found, predicted) < CLOSE / 10
    assert divergence(found, reverse) > 5 * CLOSE
    assert found[np.argmin(BANDIT.reward)] > 1.05 * reverse[np.argmin(BANDIT.reward)]


def sign_gain(policy: Policy, reward: np.ndarray) -> Policy:
    """What a group of two divided by its std pays arm a: (P(better than the other) - P(worse)) / sqrt(2), however small the lead."""
    return (np.sign(reward[:, None] - reward[None, :]) * policy[None, :]).sum(1) / np.sqrt(2)


@pytest.mark.proves("optimum")
@pytest.mark.parametrize("kl", ["corrected", "k3"])
def test_grpo_divided_by_the_std_optimises_ranks(kl: str) -> None:
    """Dividing by the group's std forgets by how much one is better. The optimum is a fixed point: gains depend on the policy."""
    algorithm = GRPO(group=2, beta=BETA, kl=kl, epsilon=0.0)
    found = train(algorithm, every_group(BANDIT, algorithm), steps=200)
    reward, predicted = np.array(BANDIT.reward), np.array(BANDIT.reference[0])
    for _ in range(500):
        gain = sign_gain(predicted, reward)
        there = BANDIT.optimum(BETA, gain) if kl == "corrected" else forward_kl_optimum(BANDIT, BETA, gain)
        predicted = 0.8 * predicted + 0.2 * there
    assert divergence(found, predicted) < CLOSE / 10
    assert divergence(found, BANDIT.optimum(BETA)) > 10 * CLOSE
    scaled = GRPO(group=2, beta=BETA, kl=kl, epsilon=0.0)
    larger = Table(BANDIT.responses, tuple(7 * r for r in BANDIT.reward), BANDIT.reference)
    assert divergence(train(scaled, every_group(larger, scaled), steps=200), found) < 1e-9, (
        "a reward 7 times as large changes nothing"
    )


def test_a_kl_loss_of_tokens_does_not_see_what_comes_after() -> None:
    """Per token, KL in the loss charges a token for its own divergence but not for that of the states it leads to: at each state the
    policy is optimal for E[r] of what follows, where pi* counts E[r] - beta KL of what follows. In the reward it is exact."""
    algorithm = RLOO(group=2, beta=BETA, kl_in="loss", kl="corrected")
    found = train(algorithm, every_group(TREE, algorithm), steps=200)
    reference, reward = np.array(TREE.reference), dict(zip(TREE.responses, TREE.reward, strict=True))
    later, gain = {}, [reward[(0,)]]
    for first in (1, 2):
        own = np.array([reward[(first, v)] for v in range(3)])
        weight = reference[first] * np.exp(own / BETA)
        later[first] = weight / weight.sum()
        gain.append(float(later[first] @ own))
    root = reference[0] * np.exp(np.array(gain) / BETA)
    root /= root.sum()
    predicted = np.array([root[0], *(root[1] * later[1]), *(root[2] * later[2])])
    assert divergence(found, predicted) < CLOSE / 10
    assert divergence(found, TREE.optimum(BETA)) > 10 * CLOSE


# --- pairs ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.proves("optimum", "flipped")
@signs
@pytest.mark.parametrize("table", [BANDIT, TREE], ids=["bandit", "tree"])
@pytest.mark.parametrize("algorithm", named(DPO(beta=BETA)))
def test_dpo_on_bradley_terry_pairs_ends_at_the_shared_optimum(algorithm: Algorithm, table: Table, flip: bool) -> None:
    table = table.flipped if flip else table
    assert divergence(train(algorithm, every_pair(table), steps=160), table.optimum(BETA)) < CLOSE


@pytest.mark.proves("optimum", "flipped")
@signs
@pytest.mark.parametrize("algorithm", named(OnlineDPO(group=2, loss=DPO(beta=BETA, labels="soft"))))
def test_online_dpo_with_soft_labels_ends_at_the_shared_optimum(algorithm: Algorithm, flip: bool) -> None:
    table = TREE.flipped if flip else TREE
    assert divergence(train(algorithm, every_group(table, algorithm), steps=200), table.optimum(BETA)) < CLOSE


@pytest.mark.proves("optimum", "flipped")
@signs
@pytest.mark.parametrize("table", [BANDIT, TREE], ids=["bandit", "tree"])
@pytest.mark.parametrize("algorithm", named(IPO(tau=BETA, length="sum")))
def test_ipo_ends_where_win_rates_are_the_reward(algorithm: IPO, table: Table, flip: bool) -> None:
    """Its optimum is ref exp(p / tau) / Z with p the chance to beat a response of the data (theorem 1 of the paper): the same form,
    with win rates for rewards. They differ by at most 1, so the same tau holds nearer to the reference."""
    table = table.flipped if flip else table
    reward = np.array(table.reward)
    beats = 1 / (1 + np.exp(reward[None, :] - reward[:, None]))
    win_rate = (beats.sum(1) - 0.5) / len(reward)  # nobody meets itself: a constant is missing from each sum
    found = train(algorithm, every_pair(table), steps=160)
    assert divergence(found, table.optimum(algorithm.tau, win_rate)) < CLOSE / 10
    assert divergence(found, table.optimum(BETA)) > 10 * CLOSE
    assert np.argmax(found / table.policy(table.start)) == table.best


@pytest.mark.proves("optimum")
def test_ipo_by_length_ends_elsewhere_where_lengths_differ() -> None:
    """`length = mean` (the default) asks for the margin per token: two-token responses move twice as far."""
    by_sum, by_mean = (train(IPO(tau=BETA, length=kind), every_pair(TREE), steps=160) for kind in ("sum", "mean"))
    assert divergence(by_mean, by_sum) > 10 * CLOSE
    by_sum, by_mean = (train(IPO(tau=BETA, length=kind), every_pair(BANDIT), steps=20) for kind in ("sum", "mean"))
    assert divergence(by_mean, by_sum) < 1e-12


# --- without an anchor ----------------------------------------------------------------------------------------------------------

FREE = named(
    *policy_gradients(beta=0.0),
    PPO(beta=0.0),
    algorithm_class("best_of_n")(group=2),
    algorithm_class("raft")(group=2, share=0.5),
    OnlineDPO(group=2),
)


@pytest.mark.proves("optimum", "flipped")
@signs
@pytest.mark.parametrize("algorithm", FREE)
def test_without_an_anchor_the_best_response_takes_all(algorithm: Algorithm, flip: bool) -> None:
    """Also online DPO with hard labels, anchored as it is: verdicts without noise ask for infinite margins."""
    table = TREE.flipped if flip else TREE
    found = train(algorithm, every_group(table, algorithm), steps=40 if algorithm.reuse.epochs > 1 else 120, rate=0.2)
    assert found[table.best] > 0.99


@pytest.mark.proves("optimum", "flipped")
@signs
@pytest.mark.parametrize("algorithm", named(DPO(beta=BETA), SimPO()))
def test_verdicts_without_noise_leave_only_the_best(algorithm: Algorithm, flip: bool) -> None:
    """DPO has no finite optimum here (IPO's remedy is a finite margin); SimPO has no reference at all."""
    table = BANDIT.flipped if flip else BANDIT
    assert train(algorithm, every_pair(table, noisy=False), steps=150, rate=0.6)[table.best] > 0.95


@pytest.mark.proves("optimum", "flipped")
@signs
def test_ipo_does_not_run_away_without_noise(flip: bool) -> None:
    table = BANDIT.flipped if flip else BANDIT
    reward = np.array(table.reward)
    win_rate = ((reward[:, None] > reward[None, :]).sum(1)) / len(reward)
    found = train(IPO(tau=BETA, length="sum"), every_pair(table, noisy=False), steps=160)
    assert divergence(found, table.optimum(BETA, win_rate)) < CLOSE / 10


@pytest.mark.proves("optimum", "flipped")
@signs
@pytest.mark.parametrize("algorithm", named(ORPO(lam=1.0)))
def test_orpo_orders_responses_by_the_reward(algorithm: Algorithm, flip: bool) -> None:
    """Its likelihood term imitates all preferred responses, so none takes all: the best is first, the worst is forgotten."""
    table = BANDIT.flipped if flip else BANDIT
    found = train(algorithm, every_pair(table, noisy=False), steps=200, rate=0.2)
    assert list(np.argsort(found)) == list(np.argsort(table.reward))
    assert found.min() < 1e-3 < found[np.argsort(found)[-2]]


@pytest.mark.proves("optimum", "flipped")
@signs
@pytest.mark.parametrize("algorithm", named(KTO(beta=BETA)))
def test_kto_keeps_what_is_good(algorithm: Algorithm, flip: bool) -> None:
    """Labels say no more than good or bad: the good share what the bad lose."""
    table = BANDIT.flipped if flip else BANDIT
    good = np.array(table.reward) > 0.1
    before = float(table.policy(table.start)[good].sum())
    found = train(algorithm, every_label(table, 0.1), steps=200, rate=0.2)
    assert before < 0.6 and found[good].sum() > 0.97


# --- a teacher ------------------------------------------------------------------------------------------------------------------

TAUGHT = named(
    Distillation(),
    Distillation(divergence="forward"),
    Distillation(divergence="jensen_shannon", jsd_beta=0.3),
    Distillation(divergence="sampled"),
)


@pytest.mark.proves("optimum")
@pytest.mark.parametrize("table", [BANDIT, TREE], ids=["bandit", "tree"])
@pytest.mark.parametrize("algorithm", TAUGHT)
def test_distillation_ends_at_the_teacher(algorithm: Algorithm, table: Table) -> None:
    """Whatever the divergence: all are 0 there alone, and a student that is a table can be the teacher. The rewards play no part."""
    taught = table.policy(table.teacher)
    assert divergence(table.policy(table.start), taught) > 0.1
    assert divergence(train(algorithm, every_group(table, algorithm), steps=160, rate=0.2), taught) < CLOSE


@pytest.mark.proves("optimum")
@pytest.mark.parametrize("algorithm", TAUGHT)
def test_a_student_that_is_its_teacher_has_no_gradient(algorithm: Algorithm) -> None:
    """Not even with samples in place of expectations: every token's own term is 0."""
    step = every_group(TREE, algorithm)
    logits_SV = TREE.teacher.clone().requires_grad_()
    prepared = algorithm.prepare(step.filled(logits_SV, torch.zeros(1), algorithm), {})
    logprob_T = step.logprobs(logits_SV)
    terms = algorithm.terms(Outputs(logprob_T, torch.zeros_like(logprob_T), step.predictions(logits_SV)), prepared).terms
    (slope,) = torch.autograd.grad(torch.stack([(t.weight * t.loss).sum() for t in terms]).sum(), logits_SV)
    assert float(slope.abs().max()) < 1e-12


@pytest.mark.proves("optimum", "flipped")
@signs
@pytest.mark.parametrize("kind", ["reverse", "sampled"])
def test_distillation_with_a_reward_ends_at_the_teacher_weighted_by_it(kind: str, flip: bool) -> None:
    """E[reward_weight r] - KL(p || q) has its optimum at q exp(reward_weight r) / Z: the teacher takes the reference's place."""
    table, algorithm = BANDIT.flipped if flip else BANDIT, Distillation(divergence=kind, reward_weight=2.0, group=2)
    weight = table.policy(table.teacher) * np.exp(2 * np.array(table.reward))
    found = train(algorithm, every_group(table, algorithm), steps=160)
    assert divergence(found, weight / weight.sum()) < CLOSE
    assert divergence(found, table.policy(table.teacher)) > 0.2


# --- those that imitate and those that judge ------------------------------------------------------------------------------------


@pytest.mark.proves("optimum")
@pytest.mark.parametrize("algorithm", named(SFT()))
def test_sft_ends_at_the_frequencies_of_its_demonstrations(algorithm: Algorithm) -> None:
    """Whatever the reward says of them."""
    frequency = TREE.optimum(-1.0)
    step = every_label(TREE, 0.0)
    step = Enumeration(TREE, step.batch, step.drawn, step.draws, lambda draws, policy: frequency[draws[:, 0]])
    assert divergence(train(algorithm, step, steps=160), frequency) < CLOSE


def scores(algorithm: Algorithm, step: Enumeration) -> np.ndarray:
    """The scores, one for each response, that a scorer ends at."""
    score_N = torch.zeros(len(step.table.responses), dtype=WIDE, requires_grad=True)
    whose = {response: n for n, response in enumerate(step.table.responses)}
    starts = step.batch.starts
    ids = [tuple(step.batch.ids_T[a + 1 : b].tolist()) for a, b in pairwise(starts)]
    owner_T = torch.tensor([whose[i] for i in ids])[step.batch.sequence_T]
    uniform = np.full(len(whose), 1 / len(whose))
    prepared = step.weighted(algorithm.prepare(step.batch, algorithm.start()), uniform)
    optimizer = torch.optim.LBFGS(
        [score_N], max_iter=300, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        nothing_T = torch.zeros(step.batch.tokens, dtype=WIDE)
        terms = algorithm.terms(Outputs(nothing_T, nothing_T, score_T=score_N[owner_T]), prepared)
        loss = torch.stack([(t.weight * t.loss).sum() for t in terms.terms]).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return score_N.detach().numpy()


@pytest.mark.proves("optimum", "flipped")
@signs
@pytest.mark.parametrize("algorithm", named(RewardModel(), RewardModel(centring=1e-4)))
def test_a_reward_model_recovers_the_reward_behind_the_pairs(algorithm: RewardModel, flip: bool) -> None:
    """Up to a constant; with centring, around 0."""
    table = TREE.flipped if flip else TREE
    found, reward = scores(algorithm, every_pair(table)), np.array(table.reward)
    assert found - found.mean() == pytest.approx(reward - reward.mean(), abs=2e-3)
    if algorithm.centring:
        assert abs(found.mean()) < 1e-3


@pytest.mark.proves("optimum")
@pytest.mark.parametrize("algorithm", named(ProcessRewardModel()))
def test_a_process_reward_model_ends_at_the_log_odds_of_its_labels(algorithm: Algorithm) -> None:
    share = np.array([0.1, 0.25, 0.5, 0.8, 0.6])  # Monte-Carlo labels: how often completions from here were right
    step = every_label(BANDIT, 0.0)
    step.batch = step.batch.replace(step_T=torch.tensor([v for s in share for v in (np.nan, s)], dtype=WIDE))
    assert scores(algorithm, step) == pytest.approx(np.log(share / (1 - share)), abs=1e-4)
