"""Importance ratios, policy-gradient surrogates and weights for samples of another policy. No log-ratio overflows."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.ops.weights import sequence_means, sequence_sums

LIMIT = 20.0  # log-ratios are clamped to this before exp: e^20 is outside any trust region, and nothing becomes inf or NaN


def importance_ratio(logprob_T: Tensor, behaviour_T: Tensor) -> Tensor:
    """exp(log p - log mu). Fill masked positions with equal values first: 0 * inf, and its gradient, are NaN."""
    return (logprob_T - behaviour_T).clamp(-LIMIT, LIMIT).exp()


def clipped_surrogate(
    ratio_T: Tensor, advantage_T: Tensor, clip_low: float, clip_high: float, dual: float = 0.0
) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A): PPO's loss per token (Schulman 2017), clip-higher if high > low (DAPO). The loss has no
    upper bound where A < 0; a `dual` clip c > 1 adds one: -max(min(r A, clip(r) A), c A) (Ye et al. 2020, arXiv:1912.09729)."""
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
    if not dual:
        return loss_T
    return torch.minimum(loss_T, -dual * advantage_T).where(advantage_T < 0, loss_T)


def clip_binds(
    ratio_T: Tensor, advantage_T: Tensor, clip_low: float, clip_high: float, dual: float = 0.0
) -> Tensor:
    """Where the clip stops the gradient: (r > 1 + high and A > 0) or (r < 1 - low and A < 0) or, dual, (r > c and A < 0)."""
    above_T, below_T = ratio_T > 1 + clip_high, ratio_T < 1 - clip_low
    if dual:
        below_T = below_T | (ratio_T > dual)
    return (above_T & (advantage_T > 0)) | (below_T & (advantage_T < 0))


def soft_gate(
    ratio_T: Tensor, advantage_T: Tensor, tau_positive: float, tau_negative: float
) -> tuple[Tensor, Tensor]:
    """f(r) = 4 / tau s with s = sigmoid(tau (r - 1)) and the tau of the advantage's sign, and its slope f'(r) = 4 s (1 - s), a
    constant, which is 1 at r = 1 and falls on both sides of it (SAPO)."""
    tau_T = torch.full_like(ratio_T, tau_negative).masked_fill(advantage_T > 0, tau_positive)
    share_T = torch.sigmoid(tau_T * (ratio_T - 1))
    still_T = share_T.detach()
    return 4 / tau_T * share_T, 4 * still_T * (1 - still_T)


def sequence_ratio(
    logprob_T: Tensor, old_T: Tensor, mask_T: Tensor, sequence_T: Tensor, sequences: int, mean: bool
) -> Tensor:
    """The ratio of whole responses, at each of their tokens: s_i = prod_t p_t / q_t, or with `mean` its |y_i|-th root (GSPO):

    s_i = exp( 1 / |y_i| sum_t (log p_t - log q_t) )
    """
    taken = sequence_means if mean else sequence_sums
    log_N = taken(logprob_T - old_T, mask_T, sequence_T, sequences)
    return log_N.clamp(-LIMIT, LIMIT).exp()[sequence_T]


def token_form(ratio_T: Tensor, logprob_T: Tensor) -> Tensor:
    """s_it = stop(s_i) p_t / stop(p_t): the value of the given ratio, the gradient of each token's own log-prob (GSPO-token)."""
    return ratio_T.detach() * (logprob_T - logprob_T.detach()).exp()


def weighted_likelihood(
    ratio_T: Tensor, logprob_T: Tensor, advantage_T: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """-stop(clip(r, 1 - low, 1 + high)) A log p: the weight is clipped, and every token keeps its gradient (CISPO)."""
    return -ratio_T.clamp(1 - clip_low, 1 + clip_high).detach() * advantage_T * logprob_T


def mismatch_weights(
    kind: str,
    proximal_T: Tensor,
    behaviour_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    sequences: int,
    cap: float,
) -> Tensor:
    """Importance weights, without gradient, of samples of mu for the policy pi_prox at the start of the step:

        decoupled   w_t = pi_prox(y_t) / mu(y_t)                        Hilton et al. 2022, arXiv:2110.00641
        token       w_t = min(pi_prox(y_t) / mu(y_t), cap)              truncated importance sampling, Yao et al. 2025
        sequence    w_i = min(prod_t pi_prox(y_t) / mu(y_t), cap)       the same for whole responses

    They multiply the surrogate of pi / pi_prox. They have no lower bound.
    """
    proximal_T, behaviour_T = proximal_T.where(mask_T, 0.0), behaviour_T.where(mask_T, 0.0)
    if kind == "decoupled":
        return importance_ratio(proximal_T, behaviour_T)
    if kind == "token":
        return importance_ratio(proximal_T, behaviour_T).clamp(max=cap)
    if kind == "sequence":
        ratio_T = sequence_ratio(proximal_T, behaviour_T, mask_T, sequence_T, sequences, mean=False)
        return ratio_T.clamp(max=cap)
    raise ValueError(f"unknown correction {kind!r}: decoupled, token or sequence")


def near_sequences(
    kind: str,
    proximal_T: Tensor,
    behaviour_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    sequences: int,
    bound: float,
) -> Tensor:
    """[N]: whether the log-ratio of a response, between the policy at the start of the step and the sampler, is within `bound`:

    sequence   |sum_t log pi_prox(y_t) / mu(y_t)| <= bound
    mean       the same sum divided by |y_i|
    """
    proximal_T, behaviour_T = proximal_T.where(mask_T, 0.0), behaviour_T.where(mask_T, 0.0)
    if kind not in ("mean", "sequence"):
        raise ValueError(f"unknown kind {kind!r}: mean or sequence")
    taken = sequence_means if kind == "mean" else sequence_sums
    return taken(proximal_T - behaviour_T, mask_T, sequence_T, sequences).abs() <= bound
