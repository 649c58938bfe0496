"""Proximal policy optimisation with a critic, as InstructGPT ran it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from posttrain.algorithms._corrections import ReusedSamples, ratio_range, step_kl
from posttrain.algorithms.base import Algorithm, Reuse, State, mean_of
from posttrain.errors import Count, NotNegative, Range, Several, Share, Whole
from posttrain.ops import advantages
from posttrain.ops.advantages import generalised_advantages, turn_generalised_advantages, whiten
from posttrain.ops.kl import kl_estimate
from posttrain.ops.policy import clip_binds, clipped_surrogate, importance_ratio
from posttrain.ops.weights import reduction, sequence_lengths, sequence_sums
from posttrain.types import Batch, Group, Metric, Outputs, Selection, Term, Terms

STEP_LIMIT = 0.2  # the KL controller clips its relative error to this


@dataclass(frozen=True, kw_only=True)
class PPO(ReusedSamples, Algorithm):
    """Each token is an action. Every token pays a KL penalty to the reference. The last token also receives the score s, and the token
    e_j at the end of a step, if `supervision` asks for it, the value v_j of the step:

        r_t = -beta (log mu(y_t) - log ref(y_t)) + [t last] (s - missing_eos [cut off]) + sum_j [t = e_j] v_j
        A, R = GAE(r, V; gamma, lam)
        L   = sum_t w_t [ -c_t min(rho_t A_t, clip(rho_t, 1 - clip, 1 + clip) A_t) - entropy H_t
                          + 1/2 max((V_t - R_t)^2, (clip(V_t, V_t^old - clip_value, V_t^old + clip_value) - R_t)^2) ]
              - ptx E_pretraining[log pi],    rho_t = pi(y_t) / mu(y_t),    c_t = 1,    w_t = 1 / T (token_mean)

    with mu the policy that sampled and V^old the critic before the step.

    `kl_in = "loss"` adds beta KL_t to L, by the estimator `kl` (see ops/kl.py), and removes the penalty from r_t: the critic then
    learns the task's return alone. `dual_clip` bounds the surrogate where A < 0 (see _policy_gradient.py). `lam_alpha` > 0 makes the
    lambda of the advantages depend on the length l of a response; the critic's returns R keep `lam` (VAPO, arXiv:2504.05118:
    alpha = 0.05 and lam = 1):

        lambda_i = max(0, 1 - 1 / (lam_alpha l_i)),    A from GAE(r, V; gamma, lambda_i),    R from GAE(r, V; gamma, lam)

    A batch of rollouts is used for `epochs` passes of `mini_batches` optimizer steps each; every pass shuffles the groups into new
    mini-batches. The reuse ends as soon as the KL of an update from mu exceeds `target_kl` (0: never). With `kl_target` > 0, beta
    follows the KL of whole responses, in nats:
    beta <- beta (1 + clip(KL / kl_target - 1, -0.2, 0.2) min(1, n / kl_horizon)) after n responses (Ziegler et al. 2019). Advantages
    are whitened over each mini-batch, and rewards as well (keeping their mean) with `whiten_rewards`, as in the code of Ziegler et al.
    The critic is a separate model with its own optimizer, so its loss has no coefficient: Adam would undo it. Its learning rate is the
    stage's `critic_optimizer.lr`. For the first `critic_warmup` steps only the critic is trained. Responses without a score are
    excluded from the loss and from every metric. A response that was cut off ends there: nothing is bootstrapped, and
    `missing_eos` is subtracted from its score. Algorithms without a critic have `truncated` instead, whose `zero` limits the reward to
    0; a reward model's scores have no zero, so the penalty here is an amount that does not depend on their offset.

    If a task pays by turn, the last token of turn k receives its pay p_k, and s is the rest. `credit = "turn"` makes a whole turn one
    action: its value is that of its first token, its reward the sum over its tokens, and all its tokens have the same advantage. The
    output of a tool or an environment between two turns is not an action.

    `supervision = "outcome"` leaves the v_j out. `"process"` uses them in place of s, because a process reward model computes s from
    the same values: adding both would count them twice. `"both"` is for a reward whose score and steps measure different things.

    gamma = 1.0 is the default for text; control problems often use 0.99. If the sampler's policy mu is not the policy pi_prox at the
    start of the step, `correction` sets rho = pi / pi_prox and c = pi_prox / mu: `decoupled` without a bound, or cut at `cap` by
    `token` or by `sequence`, or c = 1 (`proximal`, see _corrections.py). `drop` leaves out (c = 0, denominators stay, the critic
    learns) responses whose `mean` or `sequence` |log pi_prox / mu| exceeds `bound`, and `mask_low`, `mask_high` leave out tokens whose
    pi_prox / mu is not between them.

    Use it where a reward model scores whole answers, or where credit must be shared out within long ones; it needs the most memory.
    """

    paper = "Schulman et al. 2017, arXiv:1707.06347; Ouyang et al. 2022, arXiv:2203.02155"
    measures_kl = True

    group: Several = 1  # samples a prompt; the critic is the baseline, so one is enough
    clip: Annotated[float, Range(gt=0, lt=1)] = 0.2
    # how far a value may move in a step before its loss is clipped; 0: no clip
    clip_value: NotNegative = 0.2
    lam: Share = 0.95
    # alpha of a lambda that grows with the length of a response; 0: lam for all
    lam_alpha: NotNegative = 0.0
    gamma: Annotated[float, Range(gt=0, le=1)] = 1.0
    beta: NotNegative = 0.2  # coefficient of the KL; its initial value with kl_target
    kl_in: Literal["reward", "loss"] = "reward"  # where the KL to the reference is penalised
    kl: Literal["k2", "k3", "corrected"] = "k3"  # the estimator of kl_in=loss
    kl_target: NotNegative = 0.0  # nats a response; 0: beta is fixed
    kl_horizon: Count = 10_000  # responses
    epochs: Count = 4
    target_kl: NotNegative = 0.0
    entropy: NotNegative = 0.0  # coefficient of the entropy bonus
    whiten_rewards: bool = False
    whiten_advantages: bool = True
    missing_eos: NotNegative = 0.0  # subtracted from the score of a response that was cut off
    critic_warmup: Whole = 0  # steps
    ptx: NotNegative = 0.0  # coefficient of the pretraining mix
    reduction: Literal["token_mean", "sequence_mean"] = "token_mean"
    # whether the reward is the score, the values of steps, or both
    supervision: Literal["outcome", "process", "both"] = "outcome"
    # the action for which advantages are estimated: a token, or a whole turn of an episode
    credit: Literal["token", "turn"] = "token"

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.kl_in == "loss" and (self.kl_target > 0 or self.beta == 0):
            yield "kl_in=loss has a fixed beta above 0: kl_target moves the one of the reward"
        if self.kl_in == "reward" and self.kl != type(self).kl:
            yield "kl is the estimator of kl_in=loss; in the reward the KL is log mu - log ref"
        if self.lam_alpha > 0 and self.credit == "turn":
            yield "lam_alpha is by the length in tokens, and credit=turn makes a turn one action"
        if self.kl_target > 0 and self.beta == 0:
            yield "kl_target needs beta > 0 to start from: the controller multiplies it"
        if self.target_kl > 0 and self.reuse.once:
            none = "one epoch of one mini-batch has none; raise epochs or mini_batches"
            yield f"target_kl stops the reuse of a rollout, and {none}"

    @property
    def roles(self) -> frozenset[str]:
        wanted = {"critic": True, "reference": self.beta > 0, "pretraining": self.ptx > 0}
        return self.correction_roles | {name for name, needed in wanted.items() if needed}

    @property
    def reuse(self) -> Reuse:
        metric = "kl/update" if self.target_kl > 0 else ""
        return replace(super().reuse, metric=metric, limit=self.target_kl)

    @property
    def compares_episodes(self) -> bool:
        return False  # the critic is the baseline

    @property
    def additions(self) -> Mapping[str, float]:
        return {"pretraining": self.ptx}

    def start(self) -> State:
        return {"beta": self.beta, "steps": 0}

    def select(self, groups: Sequence[Group], state: State) -> Selection:
        responses = sum(len(group.rollouts) for group in groups)
        beta = Metric("beta", state.get("beta", self.beta), 1)
        return Selection(tuple(groups), metrics=(Metric("responses", responses, None), beta))

    @property
    def learns_apart(self) -> bool:
        return self.reuse.once and not self.critic_warmup

    def early(self, step: Batch, state: State) -> Batch | None:
        """With one update per rollout, the critic's returns depend only on its own values before the update, sequence by sequence. One
        pass then computes its values and its gradient."""
        warming_up = state.get("steps", 0) < self.critic_warmup
        return self.with_token_rewards(step, state) if self.reuse.once and not warming_up else None

    def early_terms(self, outputs: Outputs, batch: Batch) -> Terms:
        batch = batch.replace(value_T=outputs.value_T.detach(), mask_T=scored_tokens(batch))
        terms, metrics = self.value_terms(
            outputs, batch.replace(return_T=self.estimates(batch, self.lam)[1])
        )
        return Terms(tuple(terms), tuple(metrics))

    def prepare(self, step: Batch, state: State) -> Batch:
        step = self.with_token_rewards(step, state).replace(mask_T=scored_tokens(step))
        mask_T = step.mask_T
        advantage_T, return_T = self.estimates(step, self.lam)
        if self.lam_alpha > 0:
            length_N = sequence_lengths(mask_T, step.sequence_T, step.sequences)
            advantage_T, _ = self.estimates(
                step, advantages.length_adaptive(length_N, self.lam_alpha)
            )
        if self.whiten_advantages:
            advantage_T = whiten(advantage_T, mask_T)
        warming_up = state.get("steps", 0) < self.critic_warmup
        return step.replace(
            token_reward_T=None,
            return_T=return_T,
            advantage_T=None if warming_up else advantage_T,
            resting=frozenset({"policy"} if warming_up else ()),
        )

    def with_token_rewards(self, step: Batch, state: State) -> Batch:
        """The step with the weight and the reward of every token. Neither needs the critic's values."""
        mask_T = scored_tokens(step)
        weight_T = reduction(self.reduction, mask_T, step.sequence_T, step.sequences)
        reward_T = self.rewards(step, mask_T, state.get("beta", self.beta))
        if self.whiten_rewards:
            reward_T = whiten(reward_T, mask_T, shift=False)
        return step.replace(weight_T=weight_T, token_reward_T=reward_T)

    def estimates(self, step: Batch, lam: float | Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and returns by GAE, of a step with token rewards."""
        gae = turn_generalised_advantages if self.credit == "turn" else generalised_advantages
        reward_T, value_T, mask_T = step.token_reward_T, step.value_T, step.mask_T
        return gae(reward_T, value_T, mask_T, step.sequence_T, step.sequences, self.gamma, lam)

    def rewards(self, step: Batch, mask_T: Tensor, beta: float) -> Tensor:
        """The reward of every token: -beta k1 by the sampler's log-probs, the value of a step at its last token, and the score at the
        last token of the response, according to `supervision`."""
        reward_T = torch.zeros_like(step.behaviour_T)
        if beta > 0 and self.kl_in == "reward":
            reward_T = -beta * step_kl(step, mask_T)
        if self.learns_steps:
            step_T = self.step_values(step, self.supervision).nan_to_num(nan=0.0)
            reward_T = reward_T + step_T.where(mask_T, 0.0).to(reward_T.dtype)
        scored = self.supervision != "process"
        score_N = step.reward_N if scored else torch.zeros_like(step.reward_N)
        if scored and "paid_T" in step.columns:  # the score includes what turns were paid
            paid_T = step.paid_T.where(mask_T, 0.0)
            paid_N = sequence_sums(paid_T.double(), mask_T, step.sequence_T, step.sequences)
            score_N = score_N - paid_N.to(score_N.dtype)
            reward_T = reward_T + paid_T
        score_N = score_N - self.missing_eos * step.truncated_N.to(score_N.dtype)
        where, whose = advantages.last_tokens(mask_T, step.sequence_T, step.sequences)
        return reward_T.index_add(0, where, score_N[whose].to(reward_T.dtype))

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        terms, metrics = list[Term](), list[Metric]()
        if "critic" not in batch.learned:
            terms, metrics = self.value_terms(outputs, batch)
        if "policy" not in batch.resting:
            more, figures = self.policy_terms(outputs, batch)
            terms, metrics = more + terms, figures + metrics
        if self.beta > 0:
            mask_T, k1 = batch.mask_T, step_kl(batch, batch.mask_T).sum()
            responses = (sequence_lengths(mask_T, batch.sequence_T, batch.sequences) > 0).sum()
            metrics += [Metric("kl", k1, mask_T.sum()), Metric("kl/response", k1, responses)]
        return Terms(tuple(terms), tuple(metrics))

    def policy_terms(self, outputs: Outputs, batch: Batch) -> tuple[list[Term], list[Metric]]:
        mask_T, advantage_T = batch.mask_T, batch.advantage_T
        # fill masked positions before any arithmetic: their values (even NaN) must not reach a gradient
        logprob_T = outputs.logprob_T.where(mask_T, 0.0)
        behaviour_T = batch.behaviour_T.where(mask_T, 0.0)
        ratio_T = importance_ratio(logprob_T, self.old_logprobs(logprob_T, batch))
        given = (ratio_T, advantage_T, self.clip, self.clip, self.dual_clip)
        count = mask_T.sum()
        policy_T, corrections = self.corrected_loss(clipped_surrogate(*given), logprob_T, batch)
        terms = [Term("policy", policy_T, batch.weight_T)]
        if self.kl_in == "loss":
            reference_T = batch.reference_T.where(mask_T, 0.0)
            kl_T = kl_estimate(self.kl, logprob_T, reference_T, behaviour_T)
            terms.append(Term("kl", kl_T, self.beta * batch.weight_T))
        if self.entropy > 0:
            entropy_T = outputs.entropy_T.where(mask_T, 0.0)
            terms.append(Term("entropy", -entropy_T, self.entropy * batch.weight_T))
        # an estimate of KL(mu || pi), because mu sampled the tokens
        moved_T = kl_estimate("k3", behaviour_T, logprob_T.detach())
        clipped = Metric("clip_fraction", clip_binds(*given).sum(), count)
        moved = Metric("kl/update", moved_T.sum(), count)
        return terms, [clipped, *ratio_range(ratio_T), moved, *corrections]

    def value_terms(self, outputs: Outputs, batch: Batch) -> tuple[list[Term], list[Metric]]:
        mask_T, return_T = batch.mask_T, batch.return_T
        value_T, before_T = outputs.value_T.where(mask_T, 0.0), batch.value_T.where(mask_T, 0.0)
        free_T = (value_T - return_T) ** 2
        loss_T, count = free_T, mask_T.sum()
        metrics = [
            Metric("value/error", free_T.detach().sum(), count),
            Metric("value/mean", value_T.detach().sum(), count),
            Metric("return/mean", return_T.sum(), count),
        ]
        if self.clip_value > 0:
            upper_T, lower_T = before_T + self.clip_value, before_T - self.clip_value
            near_T = torch.maximum(torch.minimum(value_T, upper_T), lower_T)
            held_T = (near_T - return_T) ** 2
            loss_T = torch.maximum(free_T, held_T)
            metrics.append(Metric("value/clip_fraction", (held_T > free_T).sum(), count))
        return [Term("value", 0.5 * loss_T, batch.weight_T)], metrics

    def finish(self, state: State, metrics: Sequence[Metric]) -> State:
        beta = state["beta"]
        measured = [m for m in metrics if m.name == "kl/response"]
        if self.kl_target > 0 and measured:
            responses = sum(float(m.total) for m in metrics if m.name == "responses")
            error = mean_of(measured, "kl/response") / self.kl_target - 1
            error = min(max(error, -STEP_LIMIT), STEP_LIMIT)
            beta *= 1 + error * min(1.0, responses / self.kl_horizon)
        return {"beta": beta, "steps": state["steps"] + 1}


def scored_tokens(step: Batch) -> Tensor:
    """[T]: the loss tokens of the responses that have a score."""
    return step.mask_T & step.valid_N[step.sequence_T]
