"""The reduction of a loss, as one weight per token: L = sum_t weight_t * loss_t over the whole optimizer step.

Weights are computed for the whole step before it is split, so no layout of micro-batches, packs or ranks changes a gradient. A token
without loss has weight 0. A sequence without loss tokens does not count as a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_lengths(mask_T: Tensor, sequence_T: Tensor, sequences: int) -> Tensor:
    """[N]: the number of loss tokens in each sequence."""
    zeros_N = torch.zeros(sequences, dtype=torch.float32, device=mask_T.device)
    return zeros_N.index_add(0, sequence_T, mask_T.float())


def loss_token_rows(
    mask_T: Tensor, sequence_T: Tensor, sequences: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """(position, row, column, width): the loss tokens, and their places in a table [sequences, width] with one row per sequence."""
    at = mask_T.nonzero()[:, 0]
    row = sequence_T[at]
    length_N = torch.bincount(row, minlength=sequences)
    column = torch.arange(len(at), device=at.device) - (length_N.cumsum(0) - length_N)[row]
    return at, row, column, int(length_N.max()) if len(at) else 0


def sequence_sums(value_T: Tensor, mask_T: Tensor, sequence_T: Tensor, sequences: int) -> Tensor:
    """s_i = sum of the values at the loss tokens of sequence i. Other values, even NaN, affect neither the sum nor its gradient."""
    zeros_N = torch.zeros(sequences, dtype=value_T.dtype, device=value_T.device)
    return zeros_N.index_add(0, sequence_T, value_T.where(mask_T, 0.0))


def sequence_means(value_T: Tensor, mask_T: Tensor, sequence_T: Tensor, sequences: int) -> Tensor:
    """s_i / |y_i|, with |y_i| the number of loss tokens of sequence i; 0 for a sequence without any."""
    length_N = sequence_lengths(mask_T, sequence_T, sequences).to(value_T.dtype)
    return sequence_sums(value_T, mask_T, sequence_T, sequences) / length_N.clamp(min=1)


def reduction(
    kind: str, mask_T: Tensor, sequence_T: Tensor, sequences: int, constant: float = 0.0
) -> Tensor:
    """[T]: the weights of the reduction `kind`, with T loss tokens in the step and N sequences that have any:

    token_mean      w = 1 / T             every token counts the same (DAPO)
    sequence_mean   w = 1 / (N * len_i)   every sequence counts the same (GRPO as published); tokens of long ones count less
    sequence_sum    w = 1 / N             a response is one action, whose log-prob is the sum of its tokens' (REINFORCE, RLOO)
    constant_mean   w = 1 / (N * C)       with a constant length C: no length bias either way (Dr. GRPO)
    """
    if kind == "token_mean":
        return mask_T.float() / mask_T.sum().clamp(min=1)
    length_N = sequence_lengths(mask_T, sequence_T, sequences)
    count = (length_N > 0).sum().clamp(min=1)
    if kind == "sequence_mean":
        return mask_T.float() / (count * length_N.clamp(min=1))[sequence_T]
    if kind in ("sequence_sum", "constant_mean"):
        return mask_T.float() / (count * (1.0 if kind == "sequence_sum" else constant))
    kinds = "token_mean, sequence_mean, sequence_sum or constant_mean"
    raise ValueError(f"unknown reduction {kind!r}: {kinds}")
