"""The forward pass of a packed batch: log-probs and entropies of the tokens that carry loss."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.models.attention import LAYOUT, Packed
from posttrain.models.policy import Policy
from posttrain.ops.logprobs import token_logprobs
from posttrain.types import Batch, Outputs


def positions(batch: Batch) -> Tensor:
    """Positions that start at 0 in every sequence."""
    starts = torch.tensor(batch.starts[:-1], device=batch.ids_T.device)
    return torch.arange(batch.tokens, device=batch.ids_T.device) - starts[batch.sequence_T]


def forward(policy: Policy, batch: Batch) -> Outputs:
    """log pi and entropy at every loss token, 0 elsewhere. Token t is predicted by the hidden state before it, t - 1."""
    layout = Packed(batch.starts, batch.ids_T.device)
    hidden_TH = policy.hidden(batch.ids_T[None], positions(batch)[None], **{LAYOUT: layout})[0]
    at = batch.mask_T.nonzero()[:, 0]
    logprob_M, entropy_M = token_logprobs(hidden_TH.index_select(0, at - 1), batch.ids_T[at], policy.head, batch.temperature)
    empty_T = torch.zeros(batch.tokens, dtype=logprob_M.dtype, device=logprob_M.device)
    return Outputs(empty_T.index_copy(0, at, logprob_M), empty_T.index_copy(0, at, entropy_M))
