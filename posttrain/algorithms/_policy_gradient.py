"""The base class of policy gradients without a critic: clipped loss, KL and entropy terms, reduction, truncated responses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from posttrain.algorithms._corrections import ReusedSamples, ratio_range, step_kl
from posttrain.algorithms.base import Algorithm, State
from posttrain.errors import NotNegative, Range
from posttrain.ops import advantages
from posttrain.ops.kl import KINDS, kl_estimate
from posttrain.ops.policy import clip_binds, clipped_surrogate, importance_ratio
from posttrain.ops.weights import reduction, sequence_sums
from posttrain.types import Batch, Group, Metric, Outputs, Selection, Term, Terms

KLIn = Literal["loss", "reward", "both"]
Reduction = Literal["token_mean", "sequence_mean", "sequence_sum", "constant_mean"]
Supervision = Literal["outcome", "process"]


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(ReusedSamples, Algorithm):
    """A subclass defines its `advantages` and, if they are not the usual ones, its `ratio` and `surrogate`:

        L      = sum_i sum_t w_it [ c_it l(rho_it, A_it) + beta KL_it - entropy H_it ]
        rho_it = pi(y_it | x, y_i<t) / mu(y_it | x, y_i<t),    c_it = 1
        l      = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    with mu the policy that sampled.

    beta, kl, kl_in   KL to the reference: as a term of the `loss` by the estimator `kl` (ops/kl.py has their gradients), in the
                      `reward` as -beta (log mu - log pi_ref), or in `both`
    reduction         w: token_mean 1/T, sequence_mean 1/(N |y_i|), sequence_sum 1/N, constant_mean 1/(N constant)
    truncated         responses that the length limit cut off: `keep` them, `mask` them out of the loss and its denominators, or pay
                      them nothing (`zero`: their reward is at most 0, and so is that of each of their turns), so that never ending does
                      not pay; they count in the baseline in any case
    correction        for samplers whose policy mu is not the policy pi_prox at the start of the step (another engine, stale weights):
                      rho = pi / pi_prox and c = pi_prox / mu, `decoupled` without a bound, or cut at `cap` by `token` or by
                      `sequence`; or c = 1 (`proximal`), if mu differs by rounding alone
    drop, bound       leave out (c = 0, denominators stay) responses whose `mean` or `sequence` |log pi_prox / mu| exceeds `bound`
    mask_low, _high   leave out (c = 0, denominators stay) tokens whose pi_prox / mu is not between them (IcePop; 0: none)
    dual_clip         c > 1: where A < 0, l is at most -c A (arXiv:1912.09729; 0: none). Without it, a token that has become much
                      likelier than when it was sampled gets an unbounded loss
    epochs            passes over a batch of rollouts, of `mini_batches` optimizer steps each; every pass shuffles the groups into new
                      mini-batches. The clip bounds these updates
    """

    min_group: ClassVar[int] = 2  # 1 if the baseline does not come from the group
    may_unclip: ClassVar[bool] = False  # whether clip_low = clip_high = 0 (no clip) is allowed
    clips_objective: ClassVar[bool] = True  # whether `surrogate` is the clipped one
    trust_region: ClassVar[str] = ""  # the setting that replaces the clip, which must then be 0

    group: Annotated[int, Range(le=65_536)] = 8
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: NotNegative = 0.0
    kl: str = "k3"
    kl_in: KLIn = "loss"
    reduction: Reduction = "token_mean"
    constant: float = 0.0  # length normaliser of constant_mean
    entropy: Annotated[float, Range()] = 0.0  # coefficient of the entropy bonus
    truncated: Literal["keep", "mask", "zero"] = "keep"

    def mistakes(self) -> Iterator[str]:
        if self.group < self.min_group:
            own = "a group of one is its own baseline, every advantage is 0 and nothing is learned"
            why = f": {own}" if self.min_group > 1 else ""
            yield f"group must be at least {self.min_group}, not {self.group}{why}"
        low, high = self.clip_low, self.clip_high
        zero = " (0: no clip)" if self.may_unclip else ""
        if not (0 < low < 1 or (low == 0 and self.may_unclip)):
            yield f"clip_low must lie in (0, 1), not {low}{zero}"
        if not (high > 0 or (high == 0 and self.may_unclip)):
            yield f"clip_high must be positive, not {high}{zero}"
        if self.dual_clip and not self.clips_objective:
            yield "dual_clip must be 0: it bounds the clipped objective, and this is another"
        if self.kl not in KINDS or self.kl == "k1":
            yield f"kl must be k2, k3 or corrected, not {self.kl!r}: as a loss, k1 has no gradient on average"
        if self.kl_in == "both" and self.beta == 0:
            yield "kl_in=both needs a beta above 0"
        if not (self.constant > 0 if self.reduction == "constant_mean" else self.constant == 0):
            yield "constant (a length, in tokens) and reduction=constant_mean go together"
        if self.trust_region and (low or high):
            yield f"clip_low and clip_high must be 0: {self.trust_region} is the trust region"
        yield from super().mistakes()

    @property
    def roles(self) -> frozenset[str]:
        return self.correction_roles | ({"reference"} if self.beta > 0 else frozenset())

    @property
    def compares_episodes(self) -> bool:
        return self.min_group > 1

    @property
    def kl_in_loss(self) -> bool:
        return self.beta > 0 and self.kl_in in ("loss", "both")

    @property
    def kl_in_reward(self) -> bool:
        return self.beta > 0 and self.kl_in in ("reward", "both")

    @property
    def only_advantages(self) -> bool:
        """Whether the loss has only the advantage term, so that a response with advantage 0 has no gradient. A subclass with `terms` of
        its own may have others."""
        own = type(self).terms is not PolicyGradient.terms
        return not (own or self.kl_in_loss or self.entropy)

    @property
    def clip(self) -> tuple[float, float]:
        """The clip range below and above 1; a setting of 0 means no clip."""
        return self.clip_low or 1.0, self.clip_high or math.inf

    def select(self, groups: Sequence[Group], state: State) -> Selection:
        alike, found = sum(map(self.zero_variance, groups)), []
        if self.group > 1:
            found.append(Metric("groups/zero_variance", alike, len(groups)))
        if self.truncated == "zero":
            paid = [reward for group in groups for reward in self.paid_rewards(group)]
            found.append(Metric("reward_paid", sum(paid), len(paid)))
        return Selection(tuple(groups), metrics=tuple(found))

    # --- what subclasses override ----------------------------------------------------------------------------------------

    def advantages(self, step: Batch, mask_T: Tensor, state: State) -> Tensor:
        """[T]: the advantage of every token in `mask_T`; values at other tokens are ignored."""
        return self.group_relative(step, mask_T)

    def ratio(self, logprob_T: Tensor, old_T: Tensor, batch: Batch) -> Tensor:
        """[T]: the importance ratio of each token."""
        return importance_ratio(logprob_T, old_T)

    def surrogate(
        self, ratio_T: Tensor, advantage_T: Tensor, logprob_T: Tensor, old_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """([T], [T]): the loss of every token, and whether the trust region stops its gradient."""
        given = (ratio_T, advantage_T, *self.clip, self.dual_clip)
        return clipped_surrogate(*given), clip_binds(*given)

    # --- what all share --------------------------------------------------------------------------------------------------

    def reward_kl(self, step: Batch, mask_T: Tensor) -> Tensor:
        """[T]: beta (log mu - log pi_ref), which is subtracted from the reward of a token, if the KL is in the reward; else 0."""
        if not self.kl_in_reward:
            return torch.zeros_like(step.behaviour_T)
        return self.beta * step_kl(step, mask_T)

    def rewards(self, step: Batch, mask_T: Tensor) -> Tensor:
        """[N]: the reward of a whole response: r_i - sum_t beta (log mu_t - log pi_ref,t) if the KL is in the reward, else r_i."""
        if not self.kl_in_reward:
            return step.reward_N
        cost_T = self.reward_kl(step, mask_T).double()
        cost_N = sequence_sums(cost_T, mask_T, step.sequence_T, step.sequences)
        return (step.reward_N - cost_N).to(step.reward_N.dtype)

    def less_kl(self, advantage_T: Tensor, step: Batch, mask_T: Tensor) -> Tensor:
        """[T]: A_it - beta sum_{s >= t} KL_is, if the KL is in the reward: a token is charged for its own and that of later tokens."""
        cost_T = advantages.sums_to_go(
            self.reward_kl(step, mask_T), mask_T, step.sequence_T, step.sequences
        )
        return advantage_T - cost_T.to(advantage_T.dtype)

    def paid(self, step: Batch) -> Batch:
        """The step with the rewards that are learned from: with `truncated = "zero"`, min(r_i, 0) for a response that was cut off, and
        for each turn of an episode that was."""
        if self.truncated != "zero":
            return step
        unpaid_N = step.truncated_N & (step.reward_N > 0)
        columns = {"reward_N": step.reward_N.masked_fill(unpaid_N, 0.0)}
        if "paid_T" in step.columns:  # then every turn has the return of the whole episode
            columns["paid_T"] = step.paid_T.masked_fill(step.truncated_N[step.sequence_T], 0.0)
        return step.replace(**columns)

    def paid_rewards(self, group: Group) -> list[float]:
        """The same rewards of a group, of the responses that have one."""
        cut = "length" if self.truncated == "zero" else None
        found = [(r.score.value, r.finish == cut) for r in group.rollouts]
        return [min(v, 0.0) if unpaid else v for v, unpaid in found if v is not None]

    def zero_variance(self, group: Group) -> bool:
        """Whether a group gives no learning signal: all its rewards are equal, or there are none."""
        return len(set(self.paid_rewards(group))) < 2

    def by_token(self, what: str, found: Tensor, mask_T: Tensor) -> Tensor:
        """`found`, which a method returned. An error unless it has a value for each token."""
        wrong = f"{what} a tensor, one for each token, of shape {list(mask_T.shape)}"
        self.check(isinstance(found, Tensor), f"{wrong}, not {type(found).__name__}")
        self.check(found.shape == mask_T.shape, f"{wrong}, not {list(found.shape)}")
        return found

    def prepare(self, step: Batch, state: State) -> Batch:
        mask_T = step.mask_T & step.valid_N[step.sequence_T]
        found = self.advantages(self.paid(step), mask_T, state)
        advantage_T = self.by_token("advantages are", found, mask_T)
        if self.truncated == "mask":
            mask_T = mask_T & ~step.truncated_N[step.sequence_T]
        weight_T = reduction(self.reduction, mask_T, step.sequence_T, step.sequences, self.constant)
        advantage_T = advantage_T.where(mask_T, 0.0)
        if self.only_advantages:
            # Responses with advantage 0 count in the denominator but have no gradient: mask them, so that no forward pass is spent.
            moved_T = (advantage_T != 0).float()
            moved_N = sequence_sums(moved_T, mask_T, step.sequence_T, step.sequences)
            mask_T = mask_T & (moved_N > 0)[step.sequence_T]
        return step.replace(mask_T=mask_T, advantage_T=advantage_T, weight_T=weight_T)

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        mask_T, advantage_T = batch.mask_T, batch.advantage_T
        # fill masked positions before any arithmetic: their values (even NaN) must not reach a gradient
        logprob_T = outputs.logprob_T.where(mask_T, 0.0)
        behaviour_T = batch.behaviour_T.where(mask_T, 0.0)
        old_T = self.old_logprobs(logprob_T, batch)
        ratio_T = self.by_token("ratio is", self.ratio(logprob_T, old_T, batch), mask_T)
        surrogate = self.surrogate(ratio_T, advantage_T, logprob_T, old_T)
        two = "surrogate returns two tensors: the loss of every token, and where the clip stops it"
        self.check(isinstance(surrogate, tuple) and len(surrogate) == 2, two)
        policy_T, stopped_T = surrogate
        count = mask_T.sum()
        policy_T, corrections = self.corrected_loss(policy_T, logprob_T, batch)
        moved = ratio_range(ratio_T)
        metrics = [Metric("clip_fraction", stopped_T.sum(), count), *moved, *corrections]
        terms = [Term("policy", policy_T, batch.weight_T)]
        if self.beta > 0:
            reference_T = batch.reference_T.where(mask_T, 0.0)
            if self.kl_in_loss:
                kl_T = kl_estimate(self.kl, logprob_T, reference_T, behaviour_T)
                terms.append(Term("kl", kl_T, self.beta * batch.weight_T))
            else:
                kl_T = kl_estimate("k1", behaviour_T, reference_T)
            metrics.append(Metric("kl", kl_T.detach().sum(), count))
        if self.entropy != 0:
            entropy_T = outputs.entropy_T.where(mask_T, 0.0)
            terms.append(Term("entropy", -entropy_T, self.entropy * batch.weight_T))
        return Terms(tuple(terms), tuple(metrics))

    def group_relative(
        self, step: Batch, mask_T: Tensor, supervision: str = "outcome", **scaling: Any
    ) -> Tensor:
        """[T]: A = (r - mean of the group) / (std of the group + epsilon), with r the reward of the whole response, the return from a
        turn on if the task pays by turn, or the value of a step. `scaling` are the options of `ops.advantages.group_advantages`."""
        sequence_T, group_N, valid_N = step.sequence_T, step.group_N, step.valid_N
        if supervision != "outcome":
            step_T = self.step_values(step, supervision)
            return advantages.process_advantages(step_T, mask_T, sequence_T, group_N, **scaling)
        reward_N = self.rewards(step, mask_T)
        scaling["episode_N"] = step.columns.get("episode_N")
        if "paid_T" not in step.columns:
            return advantages.group_advantages(reward_N, valid_N, group_N, **scaling)[sequence_T]
        return advantages.turn_advantages(
            reward_N, step.paid_T, valid_N, mask_T, sequence_T, group_N, **scaling
        )

    def supervision_mistakes(self, supervision: str) -> Iterator[str]:
        """Settings that process supervision excludes."""
        if supervision == "process" and self.kl_in_reward:
            unused = "kl_in=reward adds it to the outcome, which is not used"
            yield f"with supervision=process the KL belongs in the loss: {unused}"
        if supervision == "process" and self.truncated == "zero":
            yield "truncated=zero changes the outcome, which supervision=process does not use; take truncated=mask"
