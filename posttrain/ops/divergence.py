"""Divergences between two distributions over the whole vocabulary, from hidden states, never holding more than a chunk of logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posttrain.ops.logprobs import CHUNK_LOGITS, Head, head_logits

DIRECTIONS = ("forward", "reverse")


def vocabulary_kl(
    hidden_NH: Tensor,
    head: Head,
    target_NH: Tensor,
    target_head: Head,
    direction: str = "reverse",
    temperature: float = 1.0,
    chunk_logits: int = CHUNK_LOGITS,
) -> Tensor:
    """[N]: the KL between p, made of `hidden_NH`, and a fixed q, made of `target_NH`, at every position:

        reverse   KL(p || q) = sum_v p_v (log p_v - log q_v)     on-policy distillation: seeks a mode of q
        forward   KL(q || p) = sum_v q_v (log q_v - log p_v)     Hinton et al. 2015, arXiv:1503.02531: covers all of q

    The gradient is with respect to p alone. The backward pass computes each chunk's logits again, so that memory is one chunk of
    both models' logits whatever N is. The vocabularies must be the same; hidden sizes may differ.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"unknown direction {direction!r}: {' or '.join(DIRECTIONS)}")
    rows = max(1, chunk_logits // (2 * head.weight_VH.shape[0]))
    fixed = Head(
        target_head.weight_VH.detach(), target_head.bias_V, target_head.scale, target_head.softcap
    )

    def chunk(own_NH: Tensor, other_NH: Tensor) -> Tensor:
        logp_NV = (head_logits(own_NH, head) / temperature).log_softmax(-1)
        logq_NV = (head_logits(other_NH, fixed) / temperature).log_softmax(-1).detach()
        first, second = (logp_NV, logq_NV) if direction == "reverse" else (logq_NV, logp_NV)
        return (first.exp() * (first - second)).sum(-1)

    parts = zip(torch.split(hidden_NH, rows), torch.split(target_NH.detach(), rows), strict=True)
    return torch.cat([checkpoint(chunk, *part, use_reentrant=False) for part in parts])
