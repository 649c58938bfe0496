"""Dr. GRPO (GRPO done right): divides neither by the standard deviation nor by the length of a response."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from posttrain.algorithms._policy_gradient import PolicyGradient, Reduction
from posttrain.algorithms.base import State
from posttrain.types import Batch


@dataclass(frozen=True, kw_only=True)
class DrGRPO(PolicyGradient):
    """GRPO without its two biases. Dividing by the group's std gives more weight to easy and to hard prompts. Dividing by the length of
    each response favours short right answers and long wrong ones:

        A_i = r_i - mean(r)
        L   = -1 / (N constant) sum_i sum_t min(rho_it A_i, clip(rho_it, 1 - clip_low, 1 + clip_high) A_i)

    `constant` replaces the length. Any fixed number will do, because it only scales the loss; the paper takes the limit on new tokens.
    No KL by default, as in the paper. A_i is (G - 1) / G of RLOO's. Use it as GRPO, where response length must not drift.
    """

    paper = "Liu et al. 2025 (Understanding R1-Zero-like training), arXiv:2503.20783"

    reduction: Reduction = "constant_mean"
    # a length in tokens that replaces |y_i|; the paper takes the limit on new tokens
    constant: float = 256.0

    def advantages(self, step: Batch, mask_T: Tensor, state: State) -> Tensor:
        return self.group_relative(step, mask_T, scale="none")
