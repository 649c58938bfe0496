"""Group relative policy optimisation: the mean of a group of responses is the baseline, in place of a critic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from posttrain.algorithms._policy_gradient import PolicyGradient, Reduction, Supervision
from posttrain.algorithms.base import State
from posttrain.errors import NotNegative, Range, Several
from posttrain.ops.advantages import part_advantages, pass_at_k_advantages
from posttrain.types import Batch, part_column


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyGradient):
    """Sample G responses a prompt, score them, and make those above their group's mean likelier:

        A_i = (r_i - mean(r)) / (std(r) + epsilon)
        L   = sum_i sum_t w_it [ -min(rho_it A_i, clip(rho_it, 1 - clip_low, 1 + clip_high) A_i) + beta KL_it ]
        rho_it = pi(y_it | x, y_i<t) / mu(y_it | x, y_i<t),    w_it = 1 / (N |y_i|)

    with mu the policy that sampled. `supervision = "process"` uses the rewards of steps instead (section 4.1.3): all step rewards
    of a group are normalised together, and a token's advantage is the sum over the steps that end at it or later. `kl` names the
    estimator (see ops/kl.py: the paper's k3 has the gradient of the forward KL; `corrected` has that of the reverse KL).
    `scale = "none"` and `reduction = "constant_mean"` remove the biases that Dr. GRPO points out; `reduction = "token_mean"` and a
    larger `clip_high` are DAPO's. beta = 0 needs no reference model. The paper does not give the divisor of std: `ddof = 1` divides
    by n - 1, as torch does.
    `pass_k` > 1 uses the advantages of pass@k (ops/advantages.py): k answers are rewarded together if at least one of them is right
    (its reward is at least `solved`), which favours exploration over the single likeliest answer; k = 1 is the mean.
    `parts` names parts of a composed reward. Each is normalised within the group separately and weighted by `part_weights` (GDPO,
    ops/advantages.py); the reward's own sum of its parts is then not used.
    A response that the length limit cut off stays in the loss and in its group's baseline, with the reward that it got, unless
    `truncated` says otherwise.
    Use it with verifiable rewards, where several samples of a prompt differ in score.
    """

    paper = "Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300"

    beta: NotNegative = 0.04
    scale: Literal["group", "batch", "none"] = "group"
    ddof: Literal[0, 1] = 1
    epsilon: NotNegative = 1e-4
    pass_k: Several = 1  # how many answers are rewarded together; 1: each by itself
    solved: Annotated[float, Range()] = 1.0  # the smallest reward that pass_k counts as right
    # parts of the reward that are normalised separately; none: the reward as a whole
    parts: tuple[str, ...] = ()
    part_weights: tuple[float, ...] = ()  # weights of `parts`, in their order; none: 1 each
    supervision: Supervision = "outcome"
    reduction: Reduction = "sequence_mean"

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        yield from self.supervision_mistakes(self.supervision)
        whole = not self.kl_in_reward and self.supervision == "outcome" and self.scale == "group"
        for name, given in (("pass_k", self.pass_k > 1), ("parts", bool(self.parts))):
            if given and not whole:
                yield f"{name} goes with scale=group, supervision=outcome and the KL in the loss"
        if self.parts and self.truncated == "zero":
            yield "truncated=zero changes the reward as a whole, and parts are learned from one by one; take truncated=mask"
        if self.pass_k > 1 and self.parts:
            yield "pass_k counts right answers, and parts has several rewards: choose one"
        if not 1 <= self.pass_k <= self.group:
            yield f"pass_k must be at most the group of {self.group}, not {self.pass_k}"
        if self.pass_k == 1 and self.solved != type(self).solved:
            yield "solved says what pass_k counts as right; pass_k=1 takes the reward as it is"
        if self.part_weights and len(self.part_weights) != len(self.parts):
            yield f"part_weights has {len(self.part_weights)} numbers for {len(self.parts)} parts"

    @property
    def learns_parts(self) -> tuple[str, ...]:
        return self.parts

    def advantages(self, step: Batch, mask_T: Tensor, state: State) -> Tensor:
        scaling: dict[str, Any] = {"scale": self.scale, "ddof": self.ddof, "epsilon": self.epsilon}
        whole, episode_N = (step.valid_N, step.group_N), step.columns.get("episode_N")
        if self.pass_k > 1:
            given: dict[str, Any] = {"k": self.pass_k, "solved": self.solved}
            given |= {"epsilon": self.epsilon, "episode_N": episode_N}
            return pass_at_k_advantages(step.reward_N, *whole, **given)[step.sequence_T]
        if self.parts:
            part_NK = torch.stack([step.columns[part_column(name)] for name in self.parts], 1)
            weights = self.part_weights or (1.0,) * len(self.parts)
            advantage_N = part_advantages(part_NK, weights, *whole, episode_N=episode_N, **scaling)
            return advantage_N[step.sequence_T]
        return self.group_relative(step, mask_T, self.supervision, **scaling)
