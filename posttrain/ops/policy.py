"""The clipped policy-gradient surrogate, safe at any log-ratio."""

from __future__ import annotations

import torch
from torch import Tensor

LIMIT = 20.0  # log-ratios are clamped here before exp, so that neither value nor gradient can become NaN


def importance_ratio(logprob_T: Tensor, behaviour_T: Tensor) -> Tensor:
    """exp(log p - log mu). Fill masked positions with equal values first: 0 * inf, and its gradient, are NaN."""
    return (logprob_T - behaviour_T).clamp(-LIMIT, LIMIT).exp()


def clipped_surrogate(ratio_T: Tensor, advantage_T: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A): PPO's loss per token (Schulman 2017), clip-higher when high > low (DAPO)."""
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)


def clip_binds(ratio_T: Tensor, advantage_T: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Where the clip stops the gradient: (r > 1 + high and A > 0) or (r < 1 - low and A < 0)."""
    return ((ratio_T > 1 + clip_high) & (advantage_T > 0)) | ((ratio_T < 1 - clip_low) & (advantage_T < 0))
