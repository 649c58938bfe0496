"""Estimators of KL(policy || reference) from one sampled token, with their true gradients stated (Schulman 2020).

Notation: x ~ p (the policy), q the reference, d = log q(x) - log p(x). All have mean KL(p || q) under x ~ p (k2 only near
p = q). As a *loss* their gradients differ, and this is where libraries go wrong; tests enumerate a vocabulary and prove each:

    kind        value             expected gradient when used as a loss on-policy
    k1          -d                0: useless as a loss. As a detached *reward* it gives the exact gradient of KL(p || q)
    k2          d^2 / 2           exact gradient of KL(p || q)
    k3          e^d - d - 1       gradient of the forward KL(q || p), not of KL(p || q)
    corrected   w (e^d - d - 1)   exact gradient of KL(p || q); w = p / stop(behaviour), 1 in value when on-policy
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from posttrain.ops.policy import LIMIT, importance_ratio

KINDS = ("k1", "k2", "k3", "corrected")


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
