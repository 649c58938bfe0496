"""Preference losses per pair or per sequence, as pure functions of log-probs. The caller applies means and weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# mean log-probs are clamped to this: at probability 1 the odds, and their gradient, are infinite
CERTAIN = -1e-6


def pair_members(unit_N: Sequence[int], reward_N: Tensor) -> tuple[Tensor, Tensor]:
    """(preferred, rejected): the indices of the two sequences of each unit, by reward. Their order in the unit does not matter."""
    firsts = list(range(0, len(unit_N), 2))
    paired = len(unit_N) % 2 == 0 and all(unit_N[n] == unit_N[n + 1] for n in firsts)
    if not paired or len({unit_N[n] for n in firsts}) < len(firsts):
        raise ValueError("these are not pairs: every unit must be two neighbouring sequences")
    first_P = torch.arange(0, len(unit_N), 2, device=reward_N.device)
    swapped_P = reward_N[first_P + 1] > reward_N[first_P]
    return first_P + swapped_P.long(), first_P + (~swapped_P).long()


def sigmoid_loss(margin_P: Tensor, smoothing: float | Tensor = 0.0) -> Tensor:
    """-(1 - e) log sigma(m) - e log sigma(-m): m is the log-odds that the preferred one wins, e the probability of a wrong label.

    With e constant this is conservative DPO's label smoothing (Mitchell 2023), minimal at m = log((1 - e) / e); with e = sigma(-d)
    it is the expected loss under Bradley-Terry labels of rewards that differ by d, minimal at m = d.
    """
    return -(1 - smoothing) * F.logsigmoid(margin_P) - smoothing * F.logsigmoid(-margin_P)


def robust_loss(margin_P: Tensor, smoothing: Tensor) -> Tensor:
    """[ -(1 - e) log sigma(m) + e log sigma(-m) ] / (1 - 2 e): if labels are flipped with probability e, its expectation is that of
    -log sigma(m) on the true labels. The loss of a single pair has no lower bound."""
    right_P, wrong_P = F.logsigmoid(margin_P), F.logsigmoid(-margin_P)
    return (smoothing * wrong_P - (1 - smoothing) * right_P) / (1 - 2 * smoothing)


def hinge_loss(margin_P: Tensor) -> Tensor:
    """max(0, 1 - m): a pair with a margin of 1 or more has no gradient."""
    return F.relu(1 - margin_P)


def apo_zero_loss(better_P: Tensor, worse_P: Tensor) -> Tensor:
    """1 - sigma(r_w) + sigma(r_l): the preferred one becomes likelier than under the reference, the other less likely."""
    return torch.sigmoid(-better_P) + torch.sigmoid(worse_P)


def apo_down_loss(better_P: Tensor, worse_P: Tensor) -> Tensor:
    """sigma(r_w) + 1 - sigma(r_w - r_l): both become less likely than under the reference, the rejected one more so."""
    return torch.sigmoid(better_P) + torch.sigmoid(worse_P - better_P)


def ipo_loss(difference_P: Tensor, tau: float) -> Tensor:
    """(h - 1 / (2 tau))^2, with h the difference of two log-ratios. The minimum is at h = 1 / (2 tau), so h stays bounded."""
    return (difference_P - 1 / (2 * tau)) ** 2


def kto_loss(
    ratio_N: Tensor,
    good_N: Tensor,
    baseline_N: Tensor,
    beta: float,
    desirable: float,
    undesirable: float,
) -> Tensor:
    """lambda_D (1 - sigma(beta (r - z))) for good responses, lambda_U (1 - sigma(beta (z - r))) for bad ones."""
    sign_N = good_N.to(ratio_N.dtype) * 2 - 1
    weight_N = good_N.to(ratio_N.dtype) * (desirable - undesirable) + undesirable
    return weight_N * torch.sigmoid(-beta * sign_N * (ratio_N - baseline_N))


def log_odds(logprob_N: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = e^logprob, for mean log-probs, which are at most 0."""
    below_N = logprob_N.clamp(max=CERTAIN)
    return below_N - torch.log(-torch.expm1(below_N))
