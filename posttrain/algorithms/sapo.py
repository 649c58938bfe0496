"""Soft adaptive policy optimisation: a smooth gate on the ratio in place of the clip."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from posttrain.algorithms._policy_gradient import PolicyGradient, Reduction
from posttrain.errors import Positive
from posttrain.ops.policy import soft_gate


@dataclass(frozen=True, kw_only=True)
class SAPO(PolicyGradient):
    """A clip stops the gradient of a token abruptly. A gate reduces it smoothly, and faster for a larger tau:

        L    = -1 / N sum_i 1 / |y_i| sum_t f_it(rho_it) A_i,    A_i = (r_i - mean(r)) / (std(r) + 1e-4)
        f(r) = 4 / tau sigmoid(tau (r - 1)),    tau = tau_positive where A_i > 0, else tau_negative

    The gradient is -4 s (1 - s) rho A grad log pi with s = sigmoid(tau (rho - 1)): the plain policy gradient at rho = 1, and less on
    both sides. A token that becomes less likely spreads its probability over the whole vocabulary, so the gate closes sooner for
    negative advantages; the temperatures are the paper's. `clip_fraction` counts tokens whose gradient the gate has more than halved.
    No KL by default.
    Use it like GSPO, for mixture-of-experts models and reused rollouts, where a few tokens of a response have moved far.
    """

    paper = "Gao et al. 2025, arXiv:2511.20347"
    may_unclip = True
    clips_objective = False
    trust_region = "the gate"

    clip_low: float = 0.0
    clip_high: float = 0.0
    reduction: Reduction = "sequence_mean"
    tau_positive: Positive = 1.0  # how fast the gate closes where the advantage is positive
    tau_negative: Positive = 1.05  # how fast the gate closes where the advantage is negative

    def surrogate(
        self, ratio_T: Tensor, advantage_T: Tensor, logprob_T: Tensor, old_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        gated_T, slope_T = soft_gate(ratio_T, advantage_T, self.tau_positive, self.tau_negative)
        return -gated_T * advantage_T, slope_T < 0.5
