"""Group relative policy optimisation: the group is the baseline, no critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from posttrain.algorithms.base import Algorithm, State
from posttrain.errors import require
from posttrain.ops.advantages import group_advantages
from posttrain.ops.kl import KINDS, kl_estimate
from posttrain.ops.policy import clip_binds, clipped_surrogate, importance_ratio
from posttrain.ops.weights import reduction
from posttrain.types import Batch, Group, Metric, Outputs, Selection, Term, Terms


@dataclass(frozen=True, kw_only=True)
class GRPO(Algorithm):
    """Sample G responses a prompt, score them, and push up those above their group's mean:

        A_i = (r_i - mean(r)) / (std(r) + epsilon)
        L   = sum_i sum_t w_it [ -min(rho_it A_i, clip(rho_it, 1 - clip_low, 1 + clip_high) A_i) + beta KL_it ]
        rho_it = pi(y_it | x, y_i<t) / mu(y_it | x, y_i<t),    w_it = 1 / (N |y_i|)

    with mu the policy that sampled. `kl` names the estimator (see ops/kl.py: the paper's k3 has the gradient of the forward KL;
    `corrected` has that of the reverse KL). `scale = "none"` and `reduction = "constant_mean"` remove the biases that
    Dr. GRPO points out; `reduction = "token_mean"` and a larger `clip_high` are DAPO's. beta = 0 needs no reference model.
    A response cut off by the length limit stays in the loss and in its group's baseline, judged by its reward like any other.
    Use it with verifiable rewards, where several samples of a prompt differ in score.
    """

    paper: ClassVar[str] = "Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300"

    group: int = 8
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.04
    kl: str = "k3"
    scale: str = "group"
    ddof: int = 1
    epsilon: float = 1e-4
    reduction: str = "sequence_mean"
    constant: float = 0.0  # length normaliser of constant_mean
    entropy: float = 0.0  # coefficient of the entropy bonus
    epochs: int = 1  # the paper's mu: passes over a frozen rollout
    mini_batches: int = 1  # optimizer steps a pass; more than one makes the later ones off-policy, which the clip is for

    def __post_init__(self) -> None:
        require(self.group >= 2, f"grpo: group must be at least 2, not {self.group}: a group of one is its own baseline, every "
                "advantage is 0 and nothing is learned")  # fmt: skip
        require(0 < self.clip_low < 1, f"grpo: clip_low must lie in (0, 1), not {self.clip_low}")
        require(self.clip_high > 0, f"grpo: clip_high must be positive, not {self.clip_high}")
        require(self.beta >= 0, f"grpo: beta must not be negative, not {self.beta}")
        require(self.kl in KINDS and self.kl != "k1", f"grpo: kl must be k2, k3 or corrected, not {self.kl!r}: as a loss, k1 has no "
                "gradient on average")  # fmt: skip
        require(self.scale in ("group", "batch", "none"), f"grpo: scale must be group, batch or none, not {self.scale!r}")
        require(self.ddof in (0, 1), f"grpo: ddof must be 0 or 1, not {self.ddof}")
        require(self.epochs >= 1 and self.mini_batches >= 1, "grpo: epochs and mini_batches must be at least 1")
        kinds = ("token_mean", "sequence_mean", "constant_mean")
        require(self.reduction in kinds, f"grpo: reduction must be one of {', '.join(kinds)}, not {self.reduction!r}")
        together = (self.reduction == "constant_mean") == (self.constant > 0)
        require(together, "grpo: constant (a length, in tokens) and reduction=constant_mean go together")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"reference"}) if self.beta > 0 else frozenset()

    @property
    def reuse(self) -> tuple[int, int]:
        return self.epochs, self.mini_batches

    @property
    def group_size(self) -> int:
        return self.group

    def select(self, groups: Sequence[Group], state: State) -> Selection:
        rewards = [group.rewards for group in groups]
        flat = sum(not values or max(values) == min(values) for values in rewards)
        return Selection(tuple(groups), metrics=(Metric("groups/zero_variance", flat, len(groups)),))

    def prepare(self, step: Batch, state: State) -> Batch:
        advantage_N = group_advantages(
            step.reward_N, step.valid_N, step.group_N, scale=self.scale, ddof=self.ddof, epsilon=self.epsilon
        )
        mask_T = step.mask_T & step.valid_N[step.sequence_T]
        weight_T = reduction(self.reduction, mask_T, step.sequence_T, step.sequences, self.constant)
        advantage_T = advantage_N[step.sequence_T].where(mask_T, 0.0)
        if self.beta == 0 and self.entropy == 0:
            # the other tokens keep their place in the denominator, but have no gradient: the trainer need not compute them
            mask_T = mask_T & (advantage_T != 0)
        return step.replace(mask_T=mask_T, advantage_T=advantage_T, weight_T=weight_T)

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        assert batch.advantage_T is not None and batch.weight_T is not None
        mask_T, advantage_T = batch.mask_T, batch.advantage_T
        # masked positions are filled before any arithmetic: what they hold (even NaN) must not reach a gradient
        logprob_T, behaviour_T = outputs.logprob_T.where(mask_T, 0.0), batch.behaviour_T.where(mask_T, 0.0)
        ratio_T = importance_ratio(logprob_T, behaviour_T)
        policy_T = clipped_surrogate(ratio_T, advantage_T, self.clip_low, self.clip_high)
        terms = [Term("policy", policy_T, batch.weight_T)]
        count = mask_T.sum()
        metrics = [
            Metric("clip_fraction", clip_binds(ratio_T, advantage_T, self.clip_low, self.clip_high).sum(), count),
            Metric("mismatch", (logprob_T - behaviour_T).detach().abs().sum(), count),
        ]
        if self.beta > 0:
            assert batch.reference_T is not None
            kl_T = kl_estimate(self.kl, logprob_T, batch.reference_T.where(mask_T, 0.0), behaviour_T)
            terms.append(Term("kl", kl_T, self.beta * batch.weight_T))
            metrics.append(Metric("kl", kl_T.detach().sum(), count))
        if self.entropy != 0:
            entropy_T = outputs.entropy_T.where(mask_T, 0.0)
            terms.append(Term("entropy", -entropy_T, self.entropy * batch.weight_T))
        return Terms(tuple(terms), tuple(metrics))
