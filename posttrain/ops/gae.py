"""Advantages from a critic's values, token by token, and whitening. Only tokens that carry loss exist here: they are the actions."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.ops.weights import loss_token_rows


def generalised_advantages(
    reward_T: Tensor,
    value_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    sequences: int,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman 2015) and the returns that the critic learns:

        delta_t = r_t + gamma V_t' - V_t,    A_t = delta_t + gamma lam A_t',    R_t = A_t + V_t

    with t' the next loss token of the same sequence. What a tool says in between is part of the next state, not a step of its own:
    it is skipped, whatever it holds. After the last loss token V = A = 0: an episode ends there, also one cut off by the length
    limit. lam = 1 is the return minus the value, lam = 0 the error of one step. Sums are float64, results of the values' dtype; both
    are 0 where there is no loss.
    """
    device, wide = value_T.device, torch.float64
    empty_T = torch.zeros_like(value_T)
    at, row, column, longest = loss_token_rows(mask_T, sequence_T, sequences)
    if not longest:
        return empty_T, empty_T.clone()
    reward_NL, value_NL = torch.zeros(2, sequences, longest + 1, dtype=wide, device=device)
    reward_NL[row, column], value_NL[row, column] = reward_T[at].to(wide), value_T[at].to(wide)
    # beyond a sequence's end rewards and values are 0, and so is every sum that starts there
    delta_NL = reward_NL[:, :-1] + gamma * value_NL[:, 1:] - value_NL[:, :-1]
    advantage_NL = torch.zeros_like(delta_NL)
    following_N = torch.zeros(sequences, dtype=wide, device=device)
    for t in range(longest - 1, -1, -1):
        following_N = delta_NL[:, t] + gamma * lam * following_N
        advantage_NL[:, t] = following_N
    advantage_M = advantage_NL[row, column]
    return_M = advantage_M + value_NL[row, column]
    return empty_T.index_copy(0, at, advantage_M.to(value_T.dtype)), empty_T.index_copy(
        0, at, return_M.to(value_T.dtype)
    )


def last_tokens(mask_T: Tensor, sequence_T: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
    """(where, whose): the position of the last loss token of each sequence that has one, and that sequence's number."""
    at = mask_T.nonzero()[:, 0]
    last_N = torch.full((sequences,), -1, dtype=at.dtype, device=at.device).scatter_reduce(
        0, sequence_T[at], at, "amax"
    )
    whose = (last_N >= 0).nonzero()[:, 0]
    return last_N[whose], whose


def whiten(value_T: Tensor, mask_T: Tensor, shift: bool = True, epsilon: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + epsilon) over the loss tokens of the step, 0 elsewhere; without `shift` the mean is added
    again, (x - mean) / sqrt(var + epsilon) + mean, as in the code of Ziegler et al. 2019: what is whitened keeps its mean.

    The variance is the population's (ddof 0). Where all values are equal (by max == min) there is nothing to scale: they become
    exactly 0 with `shift`, and stay as they are without it. Sums are float64, the result is of the values' dtype.
    """
    inside_M = value_T[mask_T].to(torch.float64)
    if not len(inside_M) or bool(inside_M.max() == inside_M.min()):
        return torch.zeros_like(value_T) if shift else value_T.where(mask_T, 0.0)
    mean, scale = inside_M.mean(), (inside_M.var(correction=0) + epsilon).rsqrt()
    whitened_M = (inside_M - mean) * scale + (0.0 if shift else mean)
    return torch.zeros_like(value_T).masked_scatter(mask_T, whitened_M.to(value_T.dtype))
