"""CISPO: clips the importance weight and not the update, so that every token keeps its gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from posttrain.algorithms._policy_gradient import PolicyGradient
from posttrain.ops.policy import weighted_likelihood


@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyGradient):
    """The clip of PPO and GRPO removes the gradient of a rare token as soon as its probability has grown, and such tokens are often the
    decisive ones in reasoning ("however", "wait"). Here the ratio is a weight without gradient, cut above, and every token keeps its
    gradient:

        L   = -1 / T sum_i sum_t stop(min(rho_it, 1 + clip_high)) A_i log pi(y_it | x, y_i<t)
        A_i = (r_i - mean(r)) / (std(r) + 1e-4)

    over all T tokens. The paper sets no lower bound (`clip_low = 0`; above 0, the weight is at least 1 - clip_low) and does not
    give the upper one; the default of 4, weights up to 5, is wide on purpose. No KL. Use it like DAPO, with rollouts that are
    reused or stale.
    """

    paper = "MiniMax 2025 (MiniMax-M1), arXiv:2506.13585"
    may_unclip = True
    clips_objective = False

    clip_low: float = 0.0
    clip_high: float = 4.0

    def surrogate(
        self, ratio_T: Tensor, advantage_T: Tensor, logprob_T: Tensor, old_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        low, high = self.clip
        cut_T = (ratio_T < 1 - low) | (ratio_T > 1 + high)
        return weighted_likelihood(ratio_T, logprob_T, advantage_T, low, high), cut_T
