"""Estimators of KL(policy || reference) from one sampled token, with their true gradients stated (Schulman 2020); and the exact KL of
two distributions over the whole vocabulary, from hidden states.

Notation: x ~ p (the policy), q the reference, d = log q(x) - log p(x). All have mean KL(p || q) under x ~ p (k2 only near
p = q). As a *loss* their gradients differ, and this is where libraries go wrong; tests enumerate a vocabulary and prove each:

    kind        value             expected gradient when used as a loss on-policy
    k1          -d                0: useless as a loss. As a detached *reward* it gives the exact gradient of KL(p || q)
    k2          d^2 / 2           exact gradient of KL(p || q)
    k3          e^d - d - 1       gradient of the forward KL(q || p), not of KL(p || q)
    corrected   w (e^d - d - 1)   exact gradient of KL(p || q); w = p / stop(behaviour), 1 in value when on-policy
"""

from __future__ import annotations

from dataclasses import replace
from math import log

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posttrain.ops.logprobs import CHUNK_LOGITS, Head, head_logits
from posttrain.ops.policy import LIMIT, importance_ratio

KINDS = ("k1", "k2", "k3", "corrected")
DIRECTIONS = ("forward", "reverse")


def kl_estimate(
    kind: str, logprob_T: Tensor, reference_T: Tensor, behaviour_T: Tensor | None = None
) -> Tensor:
    """The chosen estimator per token. `behaviour_T` is needed by `corrected`: the log-prob the token was sampled with."""
    if kind == "k1":
        return logprob_T - reference_T
    if kind == "k2":
        return 0.5 * (logprob_T - reference_T) ** 2
    # clamped above alone: below, k3 grows like -d, and its gradient must still pull back a token the reference all but forbids
    difference = (reference_T - logprob_T).clamp(max=LIMIT)
    k3 = torch.expm1(difference) - difference
    if kind == "k3":
        return k3
    if kind == "corrected":
        if behaviour_T is None:
            raise ValueError("the corrected estimator needs the behaviour log-probs")
        return importance_ratio(logprob_T, behaviour_T) * k3
    raise ValueError(f"unknown KL estimator {kind!r}: one of {', '.join(KINDS)}")


def best_of_n_kl(n: int) -> float:
    """KL(best-of-n || reference) <= log n - (n - 1) / n, for any reference and any reward.

    With equality where no two responses have the same reward and none has much probability of its own: then the best of n has the
    density n F^(n-1) in terms of its quantile F, and E[log(n F^(n-1))] = log n - (n - 1) / n. Ties and likely responses
    bring the best of n closer to the reference than that (Beirami et al. 2024, arXiv:2401.01879).

    >>> best_of_n_kl(1), round(best_of_n_kl(2), 4), round(best_of_n_kl(16), 4)
    (0.0, 0.1931, 1.8351)
    """
    if n < 1:
        raise ValueError(f"the best of {n} samples does not exist")
    return log(n) - (n - 1) / n


def vocabulary_kl(
    hidden_NH: Tensor,
    head: Head,
    target_NH: Tensor,
    target_head: Head,
    direction: str = "reverse",
    temperature: float = 1.0,
    chunk_logits: int = CHUNK_LOGITS,
) -> Tensor:
    """[N]: the KL over the whole vocabulary between p, made of `hidden_NH`, and a fixed q, made of `target_NH`, at every
    position:

        reverse   KL(p || q) = sum_v p_v (log p_v - log q_v)     on-policy distillation: seeks a mode of q
        forward   KL(q || p) = sum_v q_v (log q_v - log p_v)     Hinton et al. 2015, arXiv:1503.02531: covers all of q

    The gradient is with respect to p alone. The backward pass computes each chunk's logits again, so that memory is one chunk of
    both models' logits whatever N is. The vocabularies must be the same; hidden sizes may differ.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"unknown direction {direction!r}: {' or '.join(DIRECTIONS)}")
    rows = max(1, chunk_logits // (2 * head.weight_VH.shape[0]))
    fixed = replace(target_head, weight_VH=target_head.weight_VH.detach())

    def chunk(own_NH: Tensor, other_NH: Tensor) -> Tensor:
        logp_NV = (head_logits(own_NH, head) / temperature).log_softmax(-1)
        logq_NV = (head_logits(other_NH, fixed) / temperature).log_softmax(-1).detach()
        first, second = (logp_NV, logq_NV) if direction == "reverse" else (logq_NV, logp_NV)
        return (first.exp() * (first - second)).sum(-1)

    parts = zip(torch.split(hidden_NH, rows), torch.split(target_NH.detach(), rows), strict=True)
    return torch.cat([checkpoint(chunk, *part, use_reentrant=False) for part in parts])
