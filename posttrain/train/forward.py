"""The forward pass of a packed batch: log-probs and entropies of the tokens that carry loss."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from posttrain.models.attention import LAYOUT, Packed
from posttrain.models.fused_body import FusedBody, attend_packed, fused_body
from posttrain.models.policy import Policy
from posttrain.models.scorer import Scorer
from posttrain.ops.logprobs import token_logprobs
from posttrain.types import Batch, Outputs

SHARED = 4  # sequences that begin with at least this many equal tokens share their computation


def positions(batch: Batch) -> Tensor:
    """Positions that start at 0 in every sequence."""
    starts = torch.tensor(batch.starts[:-1], device=batch.ids_T.device)
    return torch.arange(batch.tokens, device=batch.ids_T.device) - starts[batch.sequence_T]


def forward(policy: Policy, batch: Batch) -> Outputs:
    """log pi and entropy at every loss token, 0 elsewhere. Token t is predicted by the hidden state before it, t - 1."""
    hidden_KH, source_T = states(policy, batch)
    at = batch.mask_T.nonzero()[:, 0]
    before = at - 1 if source_T is None else source_T[at - 1]
    logprob_M, entropy_M = token_logprobs(
        hidden_KH.index_select(0, before), batch.ids_T[at], policy.head, batch.temperature
    )
    empty_T = torch.zeros(batch.tokens, dtype=logprob_M.dtype, device=logprob_M.device)
    return Outputs(empty_T.index_copy(0, at, logprob_M), empty_T.index_copy(0, at, entropy_M))


def scores(scorer: Scorer, batch: Batch) -> Tensor:
    """[T]: a scorer's number for everything up to and with each token."""
    hidden_KH, source_T = states(scorer, batch)
    score_K = scorer.score(hidden_KH)
    return score_K if source_T is None else score_K[source_T]


def values(critic: Scorer, batch: Batch) -> Tensor:
    """[T]: the critic's value of the state in which each loss token was chosen, which is all that precedes it; 0 elsewhere."""
    score_T = scores(critic, batch)
    return torch.cat([score_T.new_zeros(1), score_T[:-1]]).where(batch.mask_T, 0.0)


def states(model: Policy | Scorer, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Hidden states, and which of them is that of each token of the batch; None where they are in the batch's order.

    Equal beginnings are computed once.
    """
    device = batch.ids_T.device
    body = fused_body(model)  # before what follows, which waits for the device
    kept_K, source_T = shared_beginnings(batch)
    if body is not None:
        return _fused(body, batch, kept_K, source_T)
    if len(kept_K) == batch.tokens:
        return model.hidden(
            batch.ids_T[None], positions(batch)[None], **{LAYOUT: Packed(batch.starts, device)}
        )[0], None
    layout = Packed(batch.starts, device, kept_K, source_T)
    kept_K, source_T = kept_K.to(device), source_T.to(device)
    ids, position = batch.ids_T[kept_K], positions(batch)[kept_K]
    return model.hidden(ids[None], position[None], **{LAYOUT: layout})[0], source_T


def _fused(
    body: FusedBody, batch: Batch, kept_K: Tensor, source_T: Tensor
) -> tuple[Tensor, Tensor | None]:
    """`states` by the fused way through a model on CUDA."""
    device, edges = batch.ids_T.device, np.array(batch.starts)
    lengths = np.diff(edges)
    longest, whole = int(lengths.max()), tuple(lengths.tolist())
    if len(kept_K) == batch.tokens:
        return body.hidden(
            batch.ids_T, positions(batch), longest, attend_packed(whole, device)
        ), None
    queries = np.diff(np.searchsorted(kept_K.numpy(), edges))
    kept_K, source_T = kept_K.to(device), source_T.to(device)
    attend = attend_packed(whole, device, tuple(queries.tolist()), source_T)
    return body.hidden(batch.ids_T[kept_K], positions(batch)[kept_K], longest, attend), source_T


def shared_beginnings(batch: Batch) -> tuple[Tensor, Tensor]:
    """Which tokens must be computed, and which of those stands for each token of the batch.

    A token's hidden state depends on it and on what is before it in its sequence alone, so a sequence that begins like another has
    those states already. In dictionary order each sequence has its longest common beginning with any earlier one in common with its
    neighbour, so that every beginning is computed once: the system prompt of all groups, the prompt of a group, and samples of it as
    far as they agree.
    """
    ids_T, starts = batch.ids_T.cpu().numpy(), batch.starts
    words = ids_T.astype(">u4").tobytes()  # bytes that sort as the ids do
    order = sorted(range(batch.sequences), key=lambda n: words[4 * starts[n] : 4 * starts[n + 1]])
    kept_T, same_T = np.ones(len(ids_T), bool), np.arange(len(ids_T))
    for before, n in pairwise(order):
        a, b = starts[before], starts[n]
        length = min(starts[before + 1] - a, starts[n + 1] - b)
        differ = ids_T[a : a + length] != ids_T[b : b + length]
        same = int(differ.argmax()) if differ.any() else length
        if same >= SHARED:
            kept_T[b : b + same] = False
            same_T[b : b + same] = same_T[a : a + same]
    number_T = np.cumsum(kept_T) - 1
    return torch.from_numpy(np.flatnonzero(kept_T)), torch.from_numpy(number_T[same_T])
