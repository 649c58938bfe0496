"""PPO: numbers by hand, every refusal, an independent NumPy PPO, the controllers, and a small thing learned with a critic."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from material_for_tests import (
    group,
    material,
    plain_batch,
    roles_for,
    rollout,
    segment,
    shared_policy,
    shared_scorer,
    small_policy,
    trainer_for,
)
from torch import Tensor

from posttrain import config
from posttrain.algorithms.base import Algorithm, Reuse, State
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ppo import PPO
from posttrain.algorithms.sft import SFT
from posttrain.collect import Prompt, generate_groups
from posttrain.engine.engine import Engine
from posttrain.errors import UserError
from posttrain.models.policy import Policy
from posttrain.models.scorer import from_policy
from posttrain.train.forward import forward
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import mini_batches, pack_examples, pack_groups
from posttrain.train.roles.critic import Critic, values
from posttrain.train.roles.reference import Reference
from posttrain.train.trainer import Trainer
from posttrain.types import Batch, Example, Metric, Outputs, Sampling, Terms

WIDE = torch.float64
REFUSALS = [
    ({"group": 0}, "ppo: group must be at least 1 and at most 65,536, not 0"),
    ({"clip": 0.0}, "ppo: clip must be in (0, 1), not 0.0"),
    ({"clip": 1.0}, "ppo: clip must be in (0, 1), not 1.0"),
    ({"clip_value": -0.1}, "ppo: clip_value must be at least 0, not -0.1"),
    ({"lam": 1.1}, "ppo: lam must be in [0, 1], not 1.1"),
    ({"gamma": 0.0}, "ppo: gamma must be in (0, 1], not 0.0"),
    ({"beta": -0.1}, "ppo: beta must be at least 0, not -0.1"),
    ({"beta": math.nan}, "ppo: beta must be at least 0, not nan"),
    ({"entropy": math.inf}, "ppo: entropy must be finite and at least 0, not inf"),
    ({"missing_eos": -1.0}, "ppo: missing_eos must be at least 0, not -1.0"),
    ({"ptx": -1.0}, "ppo: ptx must be at least 0, not -1.0"),
    ({"kl_target": 6.0, "beta": 0.0}, "ppo: kl_target needs beta > 0 to start from: the controller multiplies it"),
    ({"kl_horizon": 0}, "ppo: kl_horizon must be at least 1, not 0"),
    ({"target_kl": 0.1, "epochs": 1}, "ppo: target_kl stops the reuse of a rollout, and one epoch of one mini-batch has none"),
    ({"epochs": 0}, "ppo: epochs must be at least 1"),
    ({"mini_batches": 0}, "ppo: mini_batches must be at least 1"),
    ({"critic_warmup": -1}, "ppo: critic_warmup must be at least 0, not -1"),
    ({"reduction": "constant_mean"}, "ppo: reduction must be token_mean or sequence_mean, not 'constant_mean'"),
    ({"supervision": "steps"}, "ppo: supervision must be outcome, process or both, not 'steps'"),
    ({"correction": "tis"}, "ppo: correction must be none, proximal, token, sequence or decoupled, not 'tis'"),
    ({"cap": 3.0}, "ppo: cap cuts the weights of correction=token and sequence; there are none"),
    ({"drop": "mean"}, "ppo: drop=mean or sequence and a bound above 0 go together"),
    ({"dual_clip": 0.5}, "ppo: dual_clip must be above 1"),
    ({"kl_in": "loss", "beta": 0.0}, "ppo: kl_in=loss has a fixed beta above 0: kl_target moves the one of the reward"),
    ({"kl_in": "loss", "kl_target": 6.0}, "ppo: kl_in=loss has a fixed beta above 0"),
    ({"kl": "k2"}, "ppo: kl is the estimator of kl_in=loss; in the reward the KL is log mu - log ref"),
    ({"lam_alpha": 0.05, "credit": "turn"}, "ppo: lam_alpha is by the length in tokens"),
]


@pytest.mark.proves("refusals")
@pytest.mark.parametrize(("settings", "message"), REFUSALS)
def test_refusals(settings: dict, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        PPO(**settings)
    assert str(refusal.value).startswith(message)


def test_contract() -> None:
    assert PPO().roles == {"reference", "critic"}
    assert PPO(beta=0.0, ptx=0.1).roles == {"critic", "pretraining"}
    assert PPO(correction="token").roles == PPO(drop="mean", bound=0.1).roles == {"reference", "critic", "proximal"}
    assert PPO(ptx=0.1).additions == {"pretraining": 0.1}
    assert PPO().reuse == Reuse(epochs=4) and PPO(epochs=2, mini_batches=3).reuse == Reuse(epochs=2, mini_batches=3)
    assert PPO().group_size == 1
    assert "value" not in {f.name for f in fields(PPO)}, "a coefficient that the critic's own Adam would undo"
    assert (PPO().clip, PPO().lam, PPO().gamma, PPO().beta) == (0.2, 0.95, 1.0, 0.2)


def test_a_setting_that_was_removed_is_named_with_what_to_use() -> None:
    """On the command line, by its path and by its name alone, and in the configuration of a run of an earlier version."""
    hint = "an earlier version had it, use critic_optimizer.lr: .* has no effect$"
    for key in ("rl.algorithm.value", "rl.value"):
        with pytest.raises(UserError, match=f"^unknown key '{key}': no 'value'; {hint}"):
            config.parse("instructgpt", [f"{key}=0.1"])
    stage = {"stage": "rl", "name": "rl", "model": "tiny:nano", "task": {"name": "arithmetic"}}
    tree = {"stages": [{**stage, "algorithm": {"name": "ppo", "value": 0.1}}]}
    with pytest.raises(UserError, match=rf"^unknown key in stages\[0\].algorithm: 'value'; {hint}"):
        config.from_config(tree, "config.yaml")
    with pytest.raises(UserError, match="did you mean"):
        config.parse("quickstart", ["rl.algorithm.value=0.1"])


# --- rewards and advantages ------------------------------------------------------------------------------------------------


def hand_step() -> Batch:
    """Two responses of two tokens, scores 1 and -1, the second cut off; then one that could not be scored."""
    step = plain_batch([1.0, -1.0, None], [0, 1, 2], [2, 2, 2])
    return step.replace(
        behaviour_T=torch.tensor([math.nan, -1.0, -2.0, math.nan, -0.5, -0.5, 0.0, -1.0, -1.0], dtype=WIDE),
        reference_T=torch.tensor([7.0, -1.5, -1.0, 7.0, -0.5, -2.5, 0.0, -9.0, -9.0], dtype=WIDE),
        value_T=torch.tensor([9.0, 0.5, 0.25, 9.0, 0.0, -0.5, 0.0, 5.0, 5.0], dtype=WIDE),
        truncated_N=torch.tensor([False, True, False]),
    )


@pytest.mark.proves("value")
def test_the_reward_of_each_token_by_hand() -> None:
    """-beta (log mu - log ref) everywhere, the score on the last token, less the penalty where it was cut off."""
    algorithm = PPO(beta=0.1, missing_eos=0.5)
    step = hand_step()
    mask_T = step.mask_T & step.valid_N[step.sequence_T]
    found = algorithm.rewards(step, mask_T, 0.1)
    assert found.tolist() == pytest.approx([0, -0.1 * 0.5, 0.1 * 1.0 + 1.0, 0, 0.0, -0.1 * 2.0 - 1.5, 0, 0, 0])
    assert algorithm.rewards(step, mask_T, 0.2).tolist() == pytest.approx([0, -0.1, 1.2, 0, 0, -1.9, 0, 0, 0])
    plain = PPO(beta=0.0).rewards(step, mask_T, 0.0)
    assert plain.tolist() == pytest.approx([0, 0, 1, 0, 0, -1, 0, 0, 0])


def test_the_price_of_being_cut_off_does_not_depend_on_the_offset_of_scores() -> None:
    """Scores of a reward model are known up to a constant. `truncated=zero` is for rewards that have a zero."""
    step, prices, unpaid = hand_step(), [], []
    mask_T = step.mask_T & step.valid_N[step.sequence_T]
    group = plain_batch([1.0, -1.0], [0, 0], [1, 1]).replace(truncated_N=torch.tensor([False, True]))
    for offset in (-10.0, 0.0, 10.0):
        moved = step.replace(reward_N=step.reward_N + offset)
        cut, whole = (PPO(beta=0.0, missing_eos=price).rewards(moved, mask_T, 0.0) for price in (0.5, 0.0))
        prices.append((cut - whole).tolist())
        both = [GRPO(scale="none", beta=0.0, truncated=how) for how in ("zero", "keep")]
        zero, keep = (one.prepare(group.replace(reward_N=group.reward_N + offset), {}).advantage_T for one in both)
        unpaid.append(float((zero - keep)[-1]))
    assert prices == [pytest.approx([0, 0, 0, 0, 0, -0.5, 0, 0, 0])] * 3
    assert unpaid == pytest.approx([0.0, 0.0, -4.5])


@pytest.mark.proves("value")
def test_kl_in_the_loss_by_hand() -> None:
    """The reward is the score alone; beta / 2 times the squared log-ratio to the reference (k2) is a term, over 4 tokens."""
    algorithm, step = PPO(beta=0.1, kl_in="loss", kl="k2"), hand_step()
    mask_T = step.mask_T & step.valid_N[step.sequence_T]
    assert algorithm.rewards(step, mask_T, 0.1).tolist() == pytest.approx([0, 0, 1, 0, 0, -1, 0, 0, 0])
    prepared = algorithm.prepare(step, {})
    outputs = Outputs(step.behaviour_T, torch.zeros(9), value_T=step.value_T)
    terms = {t.name: float((t.weight * t.loss).sum()) for t in algorithm.terms(outputs, prepared).terms}
    assert terms["kl"] == pytest.approx(0.1 / 4 * (0.5**2 + 1.0**2 + 0 + 2.0**2) / 2)
    assert "kl" not in [t.name for t in PPO().terms(outputs, PPO().prepare(step, {})).terms]


@pytest.mark.proves("value")
def test_a_lambda_by_length_is_for_the_advantages_alone() -> None:
    """Responses of two tokens and alpha = 1: lambda = 1/2. The critic's returns are those of lam."""
    step, plain = hand_step(), {"beta": 0.0, "whiten_advantages": False}
    found, half, whole = (
        PPO(**plain, **s).prepare(step, {}) for s in ({"lam_alpha": 1.0, "lam": 1.0}, {"lam": 0.5}, {"lam": 1.0})
    )
    assert torch.equal(found.advantage_T, half.advantage_T) and torch.equal(found.return_T, whole.return_T)
    assert not torch.equal(half.return_T, whole.return_T)


STEPS_T = [math.nan, 0.3, math.nan, math.nan, math.nan, 0.8, math.nan, 5.0, math.nan]  # a step of each; the last was not scored


@pytest.mark.proves("value")
@pytest.mark.parametrize(
    ("supervision", "expected"),
    [
        ("outcome", [0, 0, 1.0, 0, 0, -1.5, 0, 0, 0]),
        ("process", [0, 0.3, 0, 0, 0, 0.8 - 0.5, 0, 0, 0]),  # in place of the score; the price of being cut off stays
        ("both", [0, 0.3, 1.0, 0, 0, 0.8 - 1.5, 0, 0, 0]),
    ],
)
def test_the_rewards_of_steps_by_hand(supervision: str, expected: list[float]) -> None:
    """Each at the token its step ends in; scores 1 and -1, the second cut off, at 0.5; then one that could not be scored."""
    algorithm = PPO(beta=0.0, missing_eos=0.5, supervision=supervision)
    step = hand_step().replace(step_T=torch.tensor(STEPS_T))
    mask_T = step.mask_T & step.valid_N[step.sequence_T]
    assert algorithm.rewards(step, mask_T, 0.0).tolist() == pytest.approx(expected)
    assert algorithm.learns_steps == (supervision != "outcome")
    plain = PPO(beta=0.0, missing_eos=0.5, supervision=supervision, lam=1.0, whiten_advantages=False)
    found = plain.prepare(step.replace(value_T=torch.zeros(9, dtype=WIDE)), {}).advantage_T
    assert found is not None and found.tolist() == pytest.approx(
        [0, expected[1] + expected[2], expected[2], 0, expected[4] + expected[5], expected[5], 0, 0, 0]
    ), "a token is credited with the steps that end at it or later"


def test_process_supervision_needs_steps() -> None:
    for supervision in ("process", "both"):
        with pytest.raises(UserError, match=f"^ppo: supervision={supervision} needs a reward that scores steps"):
            PPO(supervision=supervision).prepare(hand_step(), {})


@pytest.mark.parametrize("algorithm", [PPO(supervision="process"), PPO(supervision="both"), GRPO(supervision="process")])
def test_a_step_in_which_nothing_was_scored_is_skipped(algorithm: Algorithm) -> None:
    """There are no values of steps then, which is no fault of the reward."""
    step = plain_batch([None, None], [0, 0], [2, 2])
    zero_T = torch.zeros(step.tokens, dtype=WIDE)
    prepared = algorithm.prepare(step.replace(value_T=zero_T, reference_T=zero_T, behaviour_T=zero_T), algorithm.start())
    assert not prepared.mask_T.any() and prepared.advantage_T is not None and not prepared.advantage_T.any()


@pytest.mark.proves("value")
def test_prepare_by_hand() -> None:
    """gamma 1, lam 0.5, no whitening: deltas of the first 1.1 - 0.25 and -0.05 + 0.25 - 0.5; of the second -1.2 + 0.5 and -0.5."""
    algorithm = PPO(beta=0.1, lam=0.5, whiten_advantages=False)
    prepared = algorithm.prepare(hand_step(), {})
    first, second = 0.85, -0.7
    advantages = [0, -0.3 + 0.5 * first, first, 0, -0.5 + 0.5 * second, second, 0, 0, 0]
    assert prepared.advantage_T is not None and prepared.return_T is not None and prepared.weight_T is not None
    assert prepared.advantage_T.tolist() == pytest.approx(advantages)
    assert prepared.return_T.tolist() == pytest.approx([0, 0.2 + 0.5 * first, 1.1, 0, -0.5 + 0.5 * second, -1.2, 0, 0, 0])
    assert prepared.mask_T.tolist() == [False, True, True, False, True, True, False, False, False]
    assert prepared.weight_T.tolist() == [0, 0.25, 0.25, 0, 0.25, 0.25, 0, 0, 0]  # what failed is in no denominator


def test_whitening_of_advantages_and_rewards() -> None:
    step = hand_step()
    plain = PPO(whiten_advantages=False).prepare(step, {})
    white = PPO().prepare(step, {})
    assert plain.advantage_T is not None and white.advantage_T is not None
    inside = plain.advantage_T[plain.mask_T].numpy()
    expected = (inside - inside.mean()) / np.sqrt(inside.var() + 1e-8)
    np.testing.assert_allclose(white.advantage_T[white.mask_T].numpy(), expected, rtol=1e-12)
    assert torch.equal(plain.return_T, white.return_T)  # the critic learns returns as they are
    algorithm = PPO(whiten_rewards=True, whiten_advantages=False, gamma=1.0, lam=1.0)
    scaled = algorithm.prepare(step, {})
    reward_T = algorithm.rewards(step, plain.mask_T, 0.2)
    mean, scale = float(reward_T[plain.mask_T].mean()), 1 / np.sqrt(reward_T[plain.mask_T].numpy().var() + 1e-8)
    assert scaled.return_T is not None
    # two tokens, each (r - mean) scale + mean
    assert float(scaled.return_T[1]) == pytest.approx(scale * float(reward_T[1] + reward_T[2] - 2 * mean) + 2 * mean)
    assert abs(mean) > 0.01


def test_kl_in_the_reward_is_the_penalty_of_the_whole_response() -> None:
    """With gamma = lam = 1 and no values, every token's advantage is the score minus beta times the KL still to come."""
    algorithm = PPO(beta=0.3, lam=1.0, whiten_advantages=False)
    step = material(algorithm)
    prepared = algorithm.prepare(step.replace(value_T=torch.zeros(step.tokens, dtype=WIDE)), {})
    assert prepared.advantage_T is not None and step.reference_T is not None
    for n in range(step.sequences):
        inside = prepared.mask_T & (step.sequence_T == n)
        if bool(inside.any()):
            penalty = 0.3 * float((step.behaviour_T - step.reference_T)[inside].sum())
            first = int(inside.nonzero()[0])
            assert float(prepared.advantage_T[first]) == pytest.approx(float(step.reward_N[n]) - penalty, rel=1e-6)


def test_figures_leave_out_what_could_not_be_scored() -> None:
    algorithm = PPO()
    prepared = algorithm.prepare(hand_step(), {})
    outputs = Outputs(prepared.behaviour_T, torch.zeros(9), value_T=prepared.value_T)
    figures = {m.name: m for m in algorithm.terms(outputs, prepared).metrics}
    assert figures["kl"].value == pytest.approx((0.5 - 1.0 + 0.0 + 2.0) / 4)
    assert figures["kl/response"].value == pytest.approx((0.5 - 1.0 + 0.0 + 2.0) / 2)


# --- the loss --------------------------------------------------------------------------------------------------------------


def sums(terms: Terms) -> dict[str, float]:
    return {t.name: float((t.weight * t.loss).detach().sum()) for t in terms.terms}


@pytest.mark.proves("value")
def test_terms_by_hand() -> None:
    """Advantages 1 and -1, ratios 1.5 and 1.5, clip 0.2; values 1.0 and 0.3 from 0.5 and 0.2, returns 2 and 0, clip_value 0.2."""
    algorithm = PPO(entropy=0.1, beta=0.0)
    prepared = plain_batch([2.0, 0.0], [0, 1]).replace(
        weight_T=torch.tensor([0, 0.5, 0, 0.5]),
        advantage_T=torch.tensor([0.0, 1.0, 0.0, -1.0], dtype=WIDE),
        return_T=torch.tensor([0.0, 2.0, 0.0, 0.0], dtype=WIDE),
        value_T=torch.tensor([math.nan, 0.5, math.inf, 0.2], dtype=WIDE),
        behaviour_T=torch.tensor([math.nan, math.log(0.2), math.inf, math.log(0.4)], dtype=WIDE),
    )
    outputs = Outputs(
        torch.tensor([math.nan, math.log(0.3), 5.0, math.log(0.6)], dtype=WIDE),
        torch.tensor([9.0, 1.0, 9.0, 2.0], dtype=WIDE),
        value_T=torch.tensor([math.nan, 1.0, math.inf, 0.3], dtype=WIDE),
    )
    terms = algorithm.terms(outputs, prepared)
    found = sums(terms)
    assert found["policy"] == pytest.approx((-1.2 + 1.5) / 2)  # clipped at 1.2 going up; not clipped going down
    assert found["entropy"] == pytest.approx(-0.1 * (1.0 + 2.0) / 2)
    # the first moved by 0.5 towards its return: held at 0.7, (0.7 - 2)^2 is the larger; the second moved by 0.1, free
    assert found["value"] == pytest.approx(0.5 * (1.3**2 + 0.3**2) / 2)
    metrics = {m.name: (float(m.total), float(m.count or 0)) for m in terms.metrics}
    assert metrics["clip_fraction"] == (1.0, 2.0)
    assert (metrics["ratio/min"][0], metrics["ratio/max"][0]) == pytest.approx((1.0, 1.5))
    assert metrics["value/clip_fraction"] == (1.0, 2.0)
    assert metrics["value/error"] == pytest.approx((1.0 + 0.09, 2.0))
    assert metrics["value/mean"] == pytest.approx((1.3, 2.0))
    assert metrics["return/mean"] == pytest.approx((2.0, 2.0))
    assert metrics["kl/update"] == pytest.approx((2 * (1.5 - 1 - math.log(1.5)), 2.0))
    free = PPO(beta=0.0, clip_value=0.0).terms(outputs, prepared)
    assert sums(free)["value"] == pytest.approx(0.5 * (1.0 + 0.09) / 2)


@pytest.mark.proves("value")
@pytest.mark.parametrize(
    ("settings", "policy", "slopes", "figures"),
    [
        ({}, [-1.2, -1.2, 1.4], [0, 0, 1.4], {}),  # pi / mu = 2.2, 4.4 and 1.4: what learns up is beyond the clip
        ({"correction": "decoupled"}, [-2.2, -4.4, 1.4], [-2.2, -4.4, 1.4], {"correction": 7 / 3}),
        ({"correction": "token", "cap": 3.0}, [-2.2, -3.3, 1.4], [-2.2, -3.3, 1.4], {"correction": 6 / 3}),
        ({"correction": "sequence", "cap": 7.0}, [-7.7, -7.7, 1.4], [-7.7, -7.7, 1.4], {"correction": 15 / 3}),
        ({"drop": "mean", "bound": 1.0}, [0, 0, 1.4], [0, 0, 1.4], {"dropped": 1 / 2}),  # log 8 / 2 = 1.04
        ({"drop": "mean", "bound": 1.1}, [-1.2, -1.2, 1.4], [0, 0, 1.4], {"dropped": 0.0}),
        ({"drop": "sequence", "bound": 2.0}, [0, 0, 1.4], [0, 0, 1.4], {"dropped": 1 / 2}),  # log 8 = 2.08
        (
            {"correction": "token", "cap": 3.0, "drop": "sequence", "bound": 2.1},
            [-2.2, -3.3, 1.4],
            [-2.2, -3.3, 1.4],
            {"correction": 6 / 3, "dropped": 0.0},
        ),
    ],
)
def test_corrections_by_hand(settings: dict, policy: list[float], slopes: list[float], figures: dict[str, float]) -> None:
    """A response of two tokens with pi_prox / mu = 2 and 4, pi / pi_prox = 1.1 and A = 1; one of a token with 1, 1.4 and A = -1."""
    algorithm = PPO(beta=0.0, **settings)
    prepared = plain_batch([1.0, 0.0], [0, 1], [2, 1]).replace(
        weight_T=torch.tensor([0, 0.25, 0.25, 0, 0.5], dtype=WIDE),
        advantage_T=torch.tensor([0, 1.0, 1.0, 0, -1.0], dtype=WIDE),
        return_T=torch.tensor([0, 1.0, 1.0, 0, 0], dtype=WIDE),
        value_T=torch.zeros(5, dtype=WIDE),
        behaviour_T=torch.tensor([math.nan, 0.1, 0.1, math.inf, 0.5], dtype=WIDE).log(),
        proximal_T=torch.tensor([math.nan, 0.2, 0.4, math.inf, 0.5], dtype=WIDE).log(),
    )
    logprob_T = torch.tensor([0.3, 0.22, 0.44, 0.3, 0.7], dtype=WIDE).log().requires_grad_()
    terms = algorithm.terms(Outputs(logprob_T, torch.zeros(5), value_T=torch.zeros(5, dtype=WIDE)), prepared)
    first = terms.terms[0]
    assert first.name == "policy" and first.loss[prepared.mask_T].tolist() == pytest.approx(policy)
    (slope,) = torch.autograd.grad((first.weight * first.loss).sum(), logprob_T)
    weighted = [weight * s for weight, s in zip([0.25, 0.25, 0.5], slopes, strict=True)]
    assert slope.tolist() == pytest.approx([0, *weighted[:2], 0, weighted[2]])
    assert sums(terms)["value"] == pytest.approx(0.5 * 0.5)  # the critic learns from all, whoever sampled it
    shown = {m.name: m.value for m in terms.metrics if m.name in ("correction", "dropped")}
    assert shown == pytest.approx(figures)


@pytest.mark.parametrize(
    ("value", "before", "target", "slope"),
    [
        (1.0, 0.5, 2.0, 0.0),  # beyond the clip, on the way to its return: no more pull
        (1.0, 0.5, 0.2, 0.8),  # beyond the clip on the wrong side: pulled back in full
        (0.6, 0.5, 2.0, -1.4),  # within the clip: plain regression
        (0.0, 0.5, -1.0, 0.0),  # the same downwards
        (0.5, 0.5, 0.5, 0.0),  # right already
    ],
)
def test_the_value_clip_stops_the_gradient_beyond_its_bounds(value: float, before: float, target: float, slope: float) -> None:
    step = plain_batch([0.0], [0]).replace(
        weight_T=torch.tensor([0.0, 1.0], dtype=WIDE),
        return_T=torch.tensor([0.0, target], dtype=WIDE),
        value_T=torch.tensor([0.0, before], dtype=WIDE),
        resting=frozenset({"policy"}),
    )
    value_T = torch.tensor([0.0, value], dtype=WIDE, requires_grad=True)
    outputs = Outputs(torch.zeros(2), torch.zeros(2), value_T=value_T)
    clipped, free = (PPO(beta=0.0, clip_value=c).terms(outputs, step).terms[0] for c in (0.2, 0.0))
    assert float(clipped.loss[1].detach()) >= float(free.loss[1].detach())  # never below the plain loss
    (found,) = torch.autograd.grad((clipped.weight * clipped.loss).sum(), value_T)
    assert found.tolist() == pytest.approx([0.0, slope])


def numpy_ppo(
    p: PPO, step: Batch, logprob: np.ndarray, entropy: np.ndarray, value: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss and its slopes by every log-prob and value, from the formulas, one token at a time in float64."""
    valid, sequence = step.valid_N.numpy(), step.sequence_T.numpy()
    mask = step.mask_T.numpy() & valid[sequence]
    mu, before = step.behaviour_T.double().numpy(), step.value_T.double().numpy()
    reward, advantage, target = np.zeros(len(mask)), np.zeros(len(mask)), np.zeros(len(mask))
    for n in np.flatnonzero(valid):
        tokens = np.flatnonzero(mask & (sequence == n))
        if p.beta:
            reward[tokens] = -p.beta * (mu[tokens] - step.reference_T.double().numpy()[tokens])
        reward[tokens[-1]] += float(step.reward_N[n]) - p.missing_eos * bool(step.truncated_N[n])
    if p.whiten_rewards:
        reward[mask] = (reward[mask] - reward[mask].mean()) / np.sqrt(reward[mask].var() + 1e-8) + reward[mask].mean()
    for n in np.flatnonzero(valid):
        ahead_value = ahead = 0.0
        for t in np.flatnonzero(mask & (sequence == n))[::-1]:
            ahead = reward[t] + p.gamma * ahead_value - before[t] + p.gamma * p.lam * ahead
            ahead_value = before[t]
            advantage[t], target[t] = ahead, ahead + before[t]
    if p.whiten_advantages:
        advantage[mask] = (advantage[mask] - advantage[mask].mean()) / np.sqrt(advantage[mask].var() + 1e-8)
    lengths = np.array([(mask & (sequence == n)).sum() for n in range(step.sequences)])
    loss, by_logprob, by_value = 0.0, np.zeros(len(mask)), np.zeros(len(mask))
    for t in np.flatnonzero(mask):
        weight = 1 / mask.sum() if p.reduction == "token_mean" else 1 / ((lengths > 0).sum() * lengths[sequence[t]])
        ratio = np.exp(logprob[t] - mu[t])
        clipped = min(max(ratio, 1 - p.clip), 1 + p.clip)
        loss -= weight * (min(ratio * advantage[t], clipped * advantage[t]) + p.entropy * entropy[t])
        if ratio * advantage[t] <= clipped * advantage[t]:
            by_logprob[t] -= weight * advantage[t] * ratio
        near = min(max(value[t], before[t] - p.clip_value), before[t] + p.clip_value) if p.clip_value else value[t]
        free, held = (value[t] - target[t]) ** 2, (near - target[t]) ** 2
        loss += weight * 0.5 * max(free, held)
        if free >= held:
            by_value[t] += weight * (value[t] - target[t])
    return loss, by_logprob, by_value


@pytest.mark.proves("value")
@pytest.mark.parametrize(
    "algorithm",
    [
        PPO(),
        PPO(beta=0.0, whiten_advantages=False, clip_value=0.0, reduction="sequence_mean", gamma=0.99),
        PPO(beta=0.05, whiten_rewards=True, missing_eos=1.0, entropy=0.02, lam=0.5, clip=0.1, clip_value=0.05),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_parity_with_an_independent_ppo(algorithm: PPO, seed: int) -> None:
    step = material(algorithm, seed, noise=0.4)
    with torch.no_grad():
        outputs = forward(shared_policy(), step)
        value_T = values(shared_scorer(), step)
    leaves = outputs.logprob_T.clone().requires_grad_(), value_T.clone().requires_grad_()
    terms = algorithm.terms(Outputs(leaves[0], outputs.entropy_T, value_T=leaves[1]), algorithm.prepare(step, {}))
    loss = sum((t.weight * t.loss).sum() for t in terms.terms)
    assert isinstance(loss, Tensor)
    slopes = torch.autograd.grad(loss, leaves)
    expected = numpy_ppo(algorithm, step, outputs.logprob_T.numpy(), outputs.entropy_T.numpy(), value_T.numpy())
    assert float(loss.detach()) == pytest.approx(expected[0], rel=1e-6, abs=1e-7)  # weights are float32
    for found, wanted in zip(slopes, expected[1:], strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6, atol=1e-8)
        assert np.abs(wanted).max() > 1e-3


def test_the_value_loss_by_finite_differences() -> None:
    algorithm = PPO()
    prepared = algorithm.prepare(material(algorithm, noise=0.4), {})
    with torch.no_grad():
        outputs, value_T = forward(shared_policy(), prepared), values(shared_scorer(), prepared)

    def loss(value_T: Tensor) -> Tensor:
        terms, _ = algorithm.value_terms(Outputs(outputs.logprob_T, outputs.entropy_T, value_T=value_T), prepared)
        return (terms[0].weight * terms[0].loss).sum()

    assert torch.autograd.gradcheck(loss, (value_T.requires_grad_(),), eps=1e-6, atol=1e-7)


COEFFICIENTS = {
    "clip": 0.05, "clip_value": 0.01, "lam": 0.3, "gamma": 0.5, "beta": 0.9, "entropy": 0.3, "whiten_rewards": True,
    "whiten_advantages": False, "missing_eos": 1.0, "reduction": "sequence_mean",
}  # fmt: skip


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_every_coefficient_changes_the_gradient(name: str) -> None:
    def slopes(algorithm: PPO) -> Tensor:
        step = material(PPO(), noise=0.4)
        with torch.no_grad():
            outputs, value_T = forward(shared_policy(), step), values(shared_scorer(), step)
        leaves = [t.clone().requires_grad_() for t in (outputs.logprob_T, outputs.entropy_T, value_T)]
        terms = algorithm.terms(Outputs(leaves[0], leaves[1], value_T=leaves[2]), algorithm.prepare(step, {}))
        loss = torch.stack([(t.weight * t.loss).sum() for t in terms.terms]).sum()
        return torch.cat(
            [torch.zeros(step.tokens) if g is None else g for g in torch.autograd.grad(loss, leaves, allow_unused=True)]
        )

    assert float((slopes(PPO()) - slopes(PPO(**{name: COEFFICIENTS[name]}))).abs().max()) > 1e-4


# --- controllers ------------------------------------------------------------------------------------------------------------


def after(algorithm: PPO, beta: float, kl: float, responses: int = 50) -> float:
    """Beta after a step of 50 responses, in two updates of 2 and 3 micro-batched sequences whose mean KL is `kl`."""
    measured = [Metric("kl/response", 2 * kl + 1, 2), Metric("kl/response", 3 * kl - 1, 3)]
    state = algorithm.finish({"beta": beta, "steps": 3}, [Metric("responses", responses, None), *measured])
    assert state["steps"] == 4
    return state["beta"]


@pytest.mark.proves("value")
def test_the_kl_controller_by_hand() -> None:
    algorithm = PPO(beta=0.2, kl_target=6.0, kl_horizon=1000)
    assert algorithm.start() == {"beta": 0.2, "steps": 0}
    assert after(algorithm, 0.2, 6.0) == pytest.approx(0.2)
    assert after(algorithm, 0.2, 6.6) == pytest.approx(0.2 * (1 + 0.1 * 50 / 1000))
    assert after(algorithm, 0.2, 600.0) == pytest.approx(0.2 * (1 + 0.2 * 50 / 1000))  # the error is clipped at 0.2
    assert after(algorithm, 0.1, 0.0) == pytest.approx(0.1 * (1 - 0.2 * 50 / 1000))
    assert after(algorithm, 0.1, -3.0) == pytest.approx(0.1 * (1 - 0.2 * 50 / 1000))
    betas = [after(algorithm, 0.2, kl) for kl in (1.0, 4.0, 5.5, 6.0, 6.5, 8.0, 70.0)]
    assert betas == sorted(betas) and len(set(betas)) == 5
    assert after(algorithm, 0.1, 0.0, responses=10**6) == pytest.approx(0.1 * 0.8)  # a step beyond the horizon keeps its sign
    assert after(PPO(beta=0.2), 0.2, 600.0) == 0.2  # fixed
    assert algorithm.finish({"beta": 0.3, "steps": 0}, [Metric("responses", 8, None)])["beta"] == 0.3  # nothing was trained on


def test_the_controller_counts_responses_once_and_reports_its_beta() -> None:
    members = [rollout([segment([3], False), segment([4], True)], 1.0) for _ in range(3)]
    metrics = PPO().select([group(members), group(members[:1])], {"beta": 0.7, "steps": 0}).metrics
    assert {m.name: (m.total, m.count) for m in metrics} == {"responses": (4, None), "beta": (0.7, 1)}


def test_the_state_decides_the_price_of_kl() -> None:
    algorithm = PPO(beta=0.1, whiten_advantages=False)
    one, other = (algorithm.prepare(hand_step(), {"beta": b, "steps": 0}) for b in (0.1, 0.2))
    assert one.return_T is not None and other.return_T is not None
    assert float(one.return_T[2] - other.return_T[2]) == pytest.approx(-0.1 * 1.0)  # k1 of that token is -1


@pytest.mark.proves("value")
def test_early_stop_by_hand() -> None:
    algorithm = PPO(target_kl=0.1)
    below, above = [Metric("kl/update", 0.3, 4), Metric("kl/update", 0.1, 1)], [Metric("kl/update", 0.6, 4)]
    assert not algorithm.reuse.stop(below)  # 0.4 / 5
    assert algorithm.reuse.stop([*below, *above])  # 1.0 / 9
    assert not PPO().reuse.stop(above)  # never, without target_kl
    assert not algorithm.reuse.stop([Metric("skipped", 1, 1)])


def test_a_rollout_is_left_when_the_policy_has_gone_far_enough() -> None:
    """As the loop does it: the same frozen rollout again and again, at a rate that moves the policy far."""

    def updates(algorithm: PPO) -> int:
        trainer = trainer_for(algorithm, small_policy(), Optimization(lr=3e-2))
        step = material(algorithm, noise=0.0)
        for count in range(1, algorithm.epochs + 1):
            if algorithm.reuse.stop(trainer.update(algorithm.prepare(step, {}), 3e-2).metrics):
                return count
        return algorithm.epochs

    assert updates(PPO(beta=0.0, epochs=6)) == 6
    assert updates(PPO(beta=0.0, epochs=6, target_kl=0.02)) == 2  # the second update sees where the first one went


# --- critic warm-up and the pretraining mix ------------------------------------------------------------------------------------


def snapshot(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights().items()}


@pytest.mark.proves("learns")
def test_while_the_critic_warms_up_it_alone_learns() -> None:
    algorithm = PPO(critic_warmup=2, entropy=0.1, ptx=1.0)
    policy, settings = small_policy(), Optimization(lr=1e-2, weight_decay=0.1)
    text = [Example(np.array([3, 4, 5, 6]), np.arange(4) > 0)]
    trainer = Trainer(policy, algorithm, settings, roles_for(algorithm, policy, settings, text=text))
    state: State = algorithm.start()
    for _ in range(2):
        before = snapshot(trainer)
        update = trainer.update(algorithm.prepare(material(algorithm), state), 1e-2)
        after = snapshot(trainer)
        moved = {name for name in after if not torch.equal(before[name], after[name])}
        assert moved and all(name.startswith("critic.") for name in moved)
        assert update.grad_norm == 0.0 and {m.name for m in update.metrics} >= {"loss/value", "grad_norm/critic", "kl"}
        assert not any(m.name.startswith(("loss/policy", "pretraining/")) for m in update.metrics)
        state = algorithm.finish(state, update.metrics)
    assert not [name for name in trainer.moments() if not name.startswith("critic.")], "the policy's optimizer took a step"
    before = snapshot(trainer)
    update = trainer.update(algorithm.prepare(material(algorithm), state), 1e-2)
    assert all(not torch.equal(before[name], tensor) for name, tensor in trainer.weights().items())
    assert {m.name for m in update.metrics} >= {"loss/policy", "loss/value", "loss/entropy", "pretraining/nll"}


def test_the_pretraining_mix_is_added_to_the_policys_gradient() -> None:
    """The gradient with the mix is the sum of the two; the critic's is untouched."""
    algorithm = PPO(ptx=0.5)
    prepared = algorithm.prepare(material(algorithm), {})
    plain = SFT()
    text = plain.prepare(pack_examples([Example(np.array([3, 4, 5, 6]), np.arange(4) > 0)]), {})
    text = text.replace(weight_T=algorithm.additions["pretraining"] * text.weight_T)

    def slopes(own: bool, mixed: bool) -> dict[str, Tensor]:
        trainer = trainer_for(algorithm, small_policy(), Optimization())
        if own:
            trainer.forward_backward(prepared)
        if mixed:
            trainer.forward_backward(text, plain)
        models = {learner.prefix: learner.network.model for learner in trainer.learners}
        return {k + n: p.grad for k, m in models.items() for n, p in m.named_parameters() if p.grad is not None}

    both, alone, mix = slopes(True, True), slopes(True, False), slopes(False, True)
    for name, slope in both.items():
        torch.testing.assert_close(slope, alone[name] + mix.get(name, torch.zeros_like(slope)), rtol=1e-10, atol=1e-12)
    assert not any(name.startswith("critic.") for name in mix)


# --- learning ---------------------------------------------------------------------------------------------------------------

PROMPTS = [(5, 6, 7), (9, 4), (11, 12, 13, 14)]
LENGTH = 3


def good(prompt: tuple[int, ...]) -> range:
    """A third of the vocabulary is right; which third depends on the prompt."""
    return range(8 * (prompt[0] % 3), 8 * (prompt[0] % 3) + 8)


def train(policy: Policy, algorithm: PPO, steps: int, seed: int, sign: float = 1.0) -> tuple[list[float], list[float]]:
    """The loop in small: rewards by step, and the critic's mean squared error by step. A response scores its share of right tokens."""
    engine = Engine(policy)
    reference = small_policy(dtype=torch.float32)
    trainer = Trainer(
        policy, algorithm, Optimization(lr=1e-2), [Reference(reference), Critic(from_policy(policy), Optimization(lr=2e-2))]
    )
    state, rewards, errors = algorithm.start(), [], []
    for step in range(steps):
        requests = [Prompt(p, algorithm.group, 10_000 * seed + 10 * step + i, Sampling(LENGTH)) for i, p in enumerate(PROMPTS)]
        groups = []
        for request, completions in zip(requests, generate_groups(engine, requests), strict=True):
            prompt = request.ids
            shares = [sum(int(i) in good(prompt) for i in c.ids) / LENGTH for c in completions]
            members = [
                rollout([segment(prompt, False), segment(c.ids, True, c.logprobs, c.finish)], sign * share)
                for c, share in zip(completions, shares, strict=True)
            ]
            rewards.append(sum(shares) / len(shares))
            groups.append(group(members))
        filled = trainer.fill(pack_groups(groups, 1.0))
        metrics = list(algorithm.select(groups, state).metrics)
        for piece in [p for epoch in range(algorithm.epochs) for p in mini_batches(filled, algorithm.mini_batches, epoch)]:
            update = trainer.update(algorithm.prepare(piece, state), 1e-2)
            metrics += update.metrics
            if algorithm.reuse.stop(update.metrics):
                break
        errors.append(next(m.value for m in metrics if m.name == "value/error"))
        state = algorithm.finish(state, metrics)
    return [sum(rewards[3 * i : 3 * i + 3]) / 3 for i in range(steps)], errors


@pytest.mark.proves("learns")
@pytest.mark.parametrize("settings", [{"beta": 0.0}, {"beta": 0.02, "target_kl": 0.2, "mini_batches": 2, "critic_warmup": 3}])
@pytest.mark.parametrize("seed", [0, 1])
def test_it_learns_from_rewards(settings: dict, seed: int) -> None:
    """From a third of right tokens to nearly all of them, and the critic learns to foresee the score."""
    policy = small_policy(dtype=torch.float32)
    rewards, errors = train(policy, PPO(group=12, epochs=2, clip_value=0.0, **settings), 30, seed)
    assert np.mean(rewards[:3]) < 0.55
    assert np.mean(rewards[-3:]) > 0.9
    assert np.mean(errors[-3:]) < 0.25 * np.mean(errors[:3])


@pytest.mark.proves("flipped")
def test_with_the_reward_flipped_it_goes_the_other_way() -> None:
    rewards, _ = train(small_policy(dtype=torch.float32), PPO(group=12, epochs=2, beta=0.0), 20, 0, sign=-1.0)
    assert np.mean(rewards[-3:]) < 0.05


def test_a_high_price_of_kl_holds_the_policy() -> None:
    """With beta at 20 the score is worth nothing beside the KL: the policy stays near its reference."""
    policy = small_policy(dtype=torch.float32)
    rewards, _ = train(policy, PPO(group=12, epochs=2, beta=20.0), 20, 0)
    assert abs(np.mean(rewards[-5:]) - np.mean(rewards[:5])) < 0.15


def paid_by_turn() -> Batch:
    """A return of 3 in two turns, of which the first was paid 2: prompt, two tokens, observation, two tokens."""
    turns = [segment([5], False), replace(segment([6, 7], True), reward=2.0), segment([8], False), segment([9, 10], True)]
    step = pack_groups([group([rollout(turns, 3.0)])], 1.0)
    return step.replace(value_T=torch.tensor([9.0, 0.5, 0.0, 9.0, 0.25, 0.0]))


def test_what_a_turn_was_paid_comes_with_its_last_token_and_the_rest_with_the_last_of_all() -> None:
    step = paid_by_turn()
    assert PPO(beta=0.0).rewards(step, step.mask_T, 0.0).tolist() == [0, 0, 2, 0, 0, 1]
    prepared = PPO(beta=0.0, lam=1.0, whiten_advantages=False).prepare(step, {})
    assert prepared.advantage_T.tolist() == [0, 2.5, 3, 0, 0.75, 1] and prepared.return_T.tolist() == [0, 3, 3, 0, 1, 1]


def test_with_credit_by_turn_all_tokens_of_a_turn_have_its_advantage() -> None:
    """delta_1 = 1 - 0.25, delta_0 = 2 + 0.25 - 0.5; with lam 0.5 A_0 = 1.75 + 0.5 * 0.75."""
    prepared = PPO(beta=0.0, lam=0.5, credit="turn", whiten_advantages=False).prepare(paid_by_turn(), {})
    assert prepared.advantage_T.tolist() == [0, 2.125, 2.125, 0, 0.75, 0.75]
    assert prepared.return_T.tolist() == [0, 2.625, 2.625, 0, 1, 1]
