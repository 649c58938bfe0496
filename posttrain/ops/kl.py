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

import torch
from torch import Tensor

KINDS = ("k1", "k2", "k3", "corrected")
LIMIT = 20.0  # log-ratios are clamped here before exp: e^20 is far outside any trust region and still finite


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
        return (logprob_T - behaviour_T).clamp(-LIMIT, LIMIT).exp() * k3
    raise ValueError(f"unknown KL estimator {kind!r}: one of {', '.join(KINDS)}")
