"""Estimators of KL(policy || reference) from one sampled token (Schulman 2020), and their gradients.

Notation: x ~ p (the policy), q the reference, d = log q(x) - log p(x). All have mean KL(p || q) under x ~ p (k2 only near
p = q). As a *loss* their gradients differ, a common mistake in libraries. Tests enumerate a vocabulary and prove each row:

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
    """[T]: the estimator `kind`. `corrected` needs `behaviour_T`, the log-probs that the tokens were sampled with."""
    if kind == "k1":
        return logprob_T - reference_T
    if kind == "k2":
        return 0.5 * (logprob_T - reference_T) ** 2
    # Clamped above only: for very negative d, k3 grows like -d, and its gradient must still act on a token that the reference all but
    # excludes.
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

    With equality if no two responses have the same reward and no single response has much probability: then the best of n has the
    density n F^(n-1) in terms of its quantile F, and E[log(n F^(n-1))] = log n - (n - 1) / n. With ties and likely responses the best
    of n is closer to the reference than that (Beirami et al. 2024, arXiv:2401.01879).

    >>> best_of_n_kl(1), round(best_of_n_kl(2), 4), round(best_of_n_kl(16), 4)
    (0.0, 0.1931, 1.8351)
    """
    if n < 1:
        raise ValueError(f"the best of {n} samples does not exist")
    return log(n) - (n - 1) / n
