"""REINFORCE leave-one-out: the baseline of a response is the mean reward of the other samples of its prompt."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from posttrain.algorithms._policy_gradient import KLIn, PolicyGradient, Reduction
from posttrain.algorithms.base import Correction, State
from posttrain.errors import NotNegative
from posttrain.ops.policy import sequence_ratio, token_form
from posttrain.types import Batch


@dataclass(frozen=True, kw_only=True)
class RLOO(PolicyGradient):
    """The whole response is one action, and the mean reward of the prompt's other samples is an unbiased baseline:

        A_i    = R_i - 1 / (G - 1) sum_{j != i} R_j,    R_i = r_i - beta sum_t (log mu_it - log pi_ref,it)
        grad L = -1 / N sum_i rho_i A_i sum_t grad log pi(y_it | x, y_i<t),    rho_i = pi(y_i | x) / pi_prox(y_i | x)

    with pi_prox the policy at the start of the step, by the trainer's own log-probs (`correction = "proximal"`, see
    _corrections.py). The log-probs of a bfloat16 sampler differ by rounding, which a product over hundreds of tokens makes large;
    `correction = "none"` takes the ratio to them. In the first update rho_i = 1 and this is the paper's estimator. The loss is
    written per token as stop(rho_i) times pi / stop(pi), which has this gradient. The paper does not clip; `clip_low` and
    `clip_high` (0.2 in some libraries) clip rho_i and are for reused rollouts. Use it where a reward model scores whole responses:
    simpler and less memory than PPO.
    """

    paper = "Ahmadian et al. 2024 (Back to Basics), arXiv:2402.14740"
    may_unclip = True

    correction: Correction = "proximal"
    clip_low: float = 0.0
    clip_high: float = 0.0
    beta: NotNegative = 0.05
    kl_in: KLIn = "reward"
    reduction: Reduction = "sequence_sum"

    def advantages(self, step: Batch, mask_T: Tensor, state: State) -> Tensor:
        return self.group_relative(step, mask_T, baseline="leave_one_out", scale="none")

    def ratio(self, logprob_T: Tensor, old_T: Tensor, batch: Batch) -> Tensor:
        mask_T, sequence_T, count = batch.mask_T, batch.sequence_T, batch.sequences
        ratio_T = sequence_ratio(logprob_T, old_T, mask_T, sequence_T, count, mean=False)
        return token_form(ratio_T, logprob_T)
