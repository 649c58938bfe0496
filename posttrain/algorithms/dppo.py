"""DPPO: a trust region in probabilities instead of their ratio, because a rare token can change its ratio but hardly the policy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from posttrain.algorithms._policy_gradient import PolicyGradient
from posttrain.algorithms.base import Correction
from posttrain.errors import NotNegative, Positive
from posttrain.ops.policy import token_form


@dataclass(frozen=True, kw_only=True)
class DPPO(PolicyGradient):
    """A ratio of 2 is a small change for a token of probability 1e-4 and a large one for a token of 0.4. So the update of a token is
    stopped not by its ratio but by how far the distribution has moved, estimated from the sampled token against all others (equations
    11 to 14):

        L      = -1 / T sum_i sum_t M_it min(rho_it, ratio_cap) A_i,    A_i = (r_i - mean(r)) / (std(r) + 1e-4)
        M_it   = 0 where D_it > delta and rho_it has left 1 in the direction of A_i, else 1
        D_tv   = |mu - pi|,    D_kl = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))

    with mu and pi the token's probabilities when sampled and now. The gradient is -M min(rho, ratio_cap) A grad log pi: beyond the cap
    a token has the weight of one at the cap and keeps its gradient. Without a clip, nothing else bounds the ratio of a rare token (20
    is the authors' value; 0: no cap). `divergence` is tv or kl (take delta = 0.05 with it). The paper measures from mu itself, never
    from recomputed log-probs, so no correction applies. Use it like DAPO, where rare tokens matter.
    """

    paper = "Rethinking the trust region in LLM reinforcement learning, 2026, arXiv:2602.04879"
    may_unclip = True
    clips_objective = False
    trust_region = "delta"

    clip_low: float = 0.0
    clip_high: float = 0.0
    divergence: Literal["tv", "kl"] = "tv"
    delta: Positive = 0.2
    ratio_cap: NotNegative = 20.0  # the importance ratio is truncated here; 0: nowhere

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.correction != "none":
            yield "correction must be none: its ratio and trust region are those to the policy that sampled"

    def corrected(self, correction: Correction) -> Self:
        return self  # the ratio is to the policy that sampled

    def surrogate(
        self, ratio_T: Tensor, advantage_T: Tensor, logprob_T: Tensor, old_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        away_T = ((ratio_T > 1) & (advantage_T > 0)) | ((ratio_T < 1) & (advantage_T < 0))
        moved_T = binary_divergence(self.divergence, old_T, logprob_T.detach())
        stopped_T = away_T & (moved_T > self.delta)
        weight_T = token_form(ratio_T.clamp(max=self.ratio_cap or math.inf), logprob_T)
        return (-weight_T * advantage_T).where(~stopped_T, 0.0), stopped_T


def binary_divergence(kind: str, old_T: Tensor, logprob_T: Tensor) -> Tensor:
    """The divergence of the two-way distribution (sampled token, all others) from mu to pi: total variation, or KL(mu || pi)."""
    # keep probabilities this far from 0 and 1, where the KL is infinite
    tiny = torch.finfo(torch.float32).eps
    mu_T, pi_T = old_T.exp().clamp(tiny, 1 - tiny), logprob_T.exp().clamp(tiny, 1 - tiny)
    if kind == "tv":
        return (mu_T - pi_T).abs()
    return mu_T * (mu_T / pi_T).log() + (1 - mu_T) * ((1 - mu_T) / (1 - pi_T)).log()
