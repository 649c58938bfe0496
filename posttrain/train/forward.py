"""The forward pass of a packed batch: log-probs and entropies of the tokens that carry loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.models.attention import LAYOUT, Packed, as_batch, attend_packed
from posttrain.models.fused_body import fused_body
from posttrain.models.policy import Policy
from posttrain.models.routing import ROUTES, routers
from posttrain.models.scorer import Scorer
from posttrain.ops.device import sent
from posttrain.ops.experts import Routes, load_balance
from posttrain.ops.fused import Sharing
from posttrain.ops.logprobs import token_logprobs
from posttrain.train.pack import host_ids, host_mask
from posttrain.types import Batch, Outputs, Prediction

ROUTER_WEIGHT = "router_weight_T"  # of a token in the routers' auxiliary loss
SHARED = 4  # sequences that begin with at least this many equal tokens share their computation


def forward(policy: Policy, batch: Batch) -> Outputs:
    """log pi and entropy at every loss token, 0 elsewhere. Token t is predicted by the hidden state before it, t - 1."""
    return policy.within(_forward, policy, batch)


def _forward(policy: Policy, batch: Batch) -> Outputs:
    routes, learning = routes_of(policy, batch), torch.is_grad_enabled()
    hidden_KH, source_T = states(policy, batch, routes)
    at = _sent(np.flatnonzero(host_mask(batch)), batch)
    before = at - 1 if source_T is None else source_T[at - 1]
    hidden_MH, head = hidden_KH.index_select(0, before), policy.head
    logprob_M, entropy_M = token_logprobs(hidden_MH, batch.ids_T[at], head, batch.temperature)
    empty_T = torch.zeros(batch.tokens, dtype=logprob_M.dtype, device=logprob_M.device)
    return Outputs(
        empty_T.index_copy(0, at, logprob_M),
        empty_T.index_copy(0, at, entropy_M),
        predictions={"policy": Prediction(at, hidden_MH, head)},
        balance_T=balance(routes, source_T, batch) if routes is not None and learning else None,
        rerouted_T=None if routes is None else routes.differing(source_T),
    )


def routes_of(policy: Policy, batch: Batch) -> Routes | None:
    """How a mixture of experts is routed: freely, or where it replays them as the sampler recorded."""
    gates = routers(policy.body)
    if not gates or not policy.router_replay or "routes_T" not in batch.columns:
        return Routes() if gates else None
    parts = batch.routes_T.split_with_sizes([gate.top_k for gate in gates.values()], 1)
    return Routes(dict(zip(gates, parts, strict=True)))


def balance(routes: Routes, source_T: Tensor | None, batch: Batch) -> Tensor:
    """[T]: the terms of the auxiliary loss, with gradients where the batch weighs them."""
    with torch.set_grad_enabled(ROUTER_WEIGHT in batch.columns):
        totals = routes.stacked()
        if source_T is not None:
            totals = (totals[0][source_T], totals[1][source_T])
        return load_balance(*totals, len(routes.logit_TE), batch.sequence_T, batch.sequences)


def scorer_outputs(scorer: Scorer, batch: Batch) -> Outputs:
    return Outputs(score_T=scores(scorer, batch))


# the forward pass of the model that learns, by what the algorithm trains
PASSES: Mapping[str, Callable[[Any, Batch], Outputs]] = {
    "policy": forward,
    "scorer": scorer_outputs,
}


def positions(batch: Batch) -> Tensor:
    """Positions that start at 0 in every sequence."""
    edges = np.array(batch.starts)
    return _sent(np.arange(batch.tokens) - np.repeat(edges[:-1], np.diff(edges)), batch)


def _sent(array: np.ndarray, batch: Batch) -> Tensor:
    return sent(torch.from_numpy(array), batch.ids_T.device)


def scores(scorer: Scorer, batch: Batch) -> Tensor:
    """[T]: a scorer's number for everything up to and with each token."""
    return scorer.within(_scores, scorer, batch)


def _scores(scorer: Scorer, batch: Batch) -> Tensor:
    hidden_KH, source_T = states(scorer, batch)
    score_K = scorer.score(hidden_KH)
    return score_K if source_T is None else score_K[source_T]


def states(
    model: Policy | Scorer, batch: Batch, routes: Routes | None = None
) -> tuple[Tensor, Tensor | None]:
    """Hidden states, and which of them is that of each token of the batch; None where they are in the batch's order. What routers do
    goes to `routes`.

    Equal beginnings are computed once. Layouts are made on the host, so that nothing waits for the device.
    """
    device, edges, body = batch.ids_T.device, np.array(batch.starts), fused_body(model)
    kept, source = shared_beginnings(batch)
    lengths, queries = (np.diff(at).tolist() for at in (edges, np.searchsorted(kept, edges)))
    batched = body is not None and as_batch(lengths, queries)
    ids_K, position_K, source_T, sharing = batch.ids_T, positions(batch), None, None
    shared = len(kept) < batch.tokens
    if shared:
        at_K, source_T = _sent(kept, batch), _sent(source, batch)
        ids_K, position_K = ids_K[at_K], position_K[at_K]
        sharing = Sharing.of(source_T, at_K, batched)
        if routes is not None:
            routes.take(at_K)
    if body is not None:
        asking = None if batched else tuple(queries)
        attend = attend_packed(tuple(lengths), device, asking, batched)
        return body.hidden(ids_K, position_K, max(lengths), attend, routes, sharing), source_T
    layout = Packed(batch.starts, device)
    if shared:
        layout = Packed(batch.starts, device, torch.from_numpy(kept), torch.from_numpy(source))
    given: dict[str, Any] = {LAYOUT: layout, ROUTES: routes}
    return model.hidden(ids_K[None], position_K[None], **given)[0], source_T


def shared_beginnings(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens must be computed, and which of those stands for each token of the batch.

    A token's hidden state depends on it and on what is before it in its sequence alone, so a sequence that begins like another has
    those states already. In dictionary order each sequence has its longest common beginning with any earlier one in common with its
    neighbour, so that every beginning is computed once: the system prompt of all groups, the prompt of a group, and samples of it as
    far as they agree.
    """
    ids_T, starts = host_ids(batch), batch.starts
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
    return np.flatnonzero(kept_T), number_T[same_T]
