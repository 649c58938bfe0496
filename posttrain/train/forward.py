"""The forward pass over a packed batch: log-probs and entropies of the loss tokens, or scores of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.models.attention import LAYOUT, Packed, as_batch, attend_packed
from posttrain.models.fused_body import fused_body
from posttrain.models.policy import Policy
from posttrain.models.routing import ROUTES
from posttrain.models.scorer import Scorer
from posttrain.ops.device import sent
from posttrain.ops.experts import Routes, load_balance
from posttrain.ops.fused import Sharing
from posttrain.ops.logprobs import token_logprobs
from posttrain.train.pack import host_ids, host_mask
from posttrain.types import Batch, Outputs, Prediction

ROUTER_WEIGHT = "router_weight_T"  # the weight of a token in the routers' auxiliary loss
SHARED = 4  # sequences share the computation of a common prefix of at least this many tokens


def forward(policy: Policy, batch: Batch) -> Outputs:
    """log pi and entropy at every loss token, 0 elsewhere. The hidden state at t - 1 predicts token t."""
    return policy.within(_forward, policy, batch)


def _forward(policy: Policy, batch: Batch) -> Outputs:
    routes, learning = routes_of(policy, batch), torch.is_grad_enabled()
    hidden_KH, source_T = states(policy, batch, routes)
    at = sent(np.flatnonzero(host_mask(batch)), batch.ids_T.device)
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
    """The routing of a mixture of experts: free, or a replay of the routes that the sampler recorded. None for a dense model."""
    gates = policy.routers
    if not gates or not policy.router_replay or "routes_T" not in batch.columns:
        return Routes() if gates else None
    parts = batch.routes_T.split_with_sizes([gate.top_k for gate in gates.values()], 1)
    return Routes(dict(zip(gates, parts, strict=True)))


def balance(routes: Routes, source_T: Tensor | None, batch: Batch) -> Tensor:
    """[T]: the terms of the routers' auxiliary loss, with gradients if the batch has weights for them."""
    with torch.set_grad_enabled(ROUTER_WEIGHT in batch.columns):
        totals = routes.stacked()
        if source_T is not None:
            totals = (totals[0][source_T], totals[1][source_T])
        return load_balance(*totals, len(routes.logit_TE), batch.sequence_T, batch.sequences)


def scorer_outputs(scorer: Scorer, batch: Batch) -> Outputs:
    return Outputs(score_T=scores(scorer, batch))


# the forward pass of the trained model, by `Algorithm.trains`
PASSES: dict[str, Callable[[Any, Batch], Outputs]] = {"policy": forward, "scorer": scorer_outputs}


def positions(batch: Batch) -> Tensor:
    """Positions that start at 0 in every sequence."""
    edges = np.array(batch.starts)
    at = np.arange(batch.tokens) - np.repeat(edges[:-1], np.diff(edges))
    return sent(at, batch.ids_T.device)


def scores(scorer: Scorer, batch: Batch) -> Tensor:
    """[T]: the scorer's output for the sequence up to and including each token."""
    return scorer.within(_scores, scorer, batch)


def _scores(scorer: Scorer, batch: Batch) -> Tensor:
    hidden_KH, source_T = states(scorer, batch)
    score_K = scorer.score(hidden_KH)
    return score_K if source_T is None else score_K[source_T]


def states(
    model: Policy | Scorer, batch: Batch, routes: Routes | None = None
) -> tuple[Tensor, Tensor | None]:
    """(hidden states, the index of each token's state among them, or None if they are in the order of the batch). Routers record their
    choices in `routes`.

    A prefix that sequences have in common is computed once. Layouts are computed on the host, so that nothing waits for the device.
    """
    device, edges, body = batch.ids_T.device, np.array(batch.starts), fused_body(model)
    every = np.arange(batch.tokens)
    kept, source = (every, every) if model.padded else shared_beginnings(batch)
    lengths, queries = (np.diff(at).tolist() for at in (edges, np.searchsorted(kept, edges)))
    batched = body is not None and as_batch(lengths, queries)
    ids_K, position_K, source_T, sharing = batch.ids_T, positions(batch), None, None
    shared = len(kept) < batch.tokens
    if shared:
        at_K, source_T = sent(kept, device), sent(source, device)
        ids_K, position_K = ids_K[at_K], position_K[at_K]
        sharing = Sharing.of(source_T, at_K, batched)
        if routes is not None:
            routes.take(at_K)
    if body is not None:
        attend = attend_packed(tuple(lengths), device, None if batched else tuple(queries), batched)
        return body.hidden(ids_K, position_K, max(lengths), attend, routes, sharing), source_T
    whole = (torch.from_numpy(kept), torch.from_numpy(source)) if shared else ()
    given: dict[str, Any] = {LAYOUT: Packed(batch.starts, device, *whole), ROUTES: routes}
    return model.hidden(ids_K[None], position_K[None], **given)[0], source_T


def shared_beginnings(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """(positions of the tokens to compute, the index of each token's representative among them).

    A hidden state depends only on its token and the tokens before it, so sequences with a common prefix share the states of the
    prefix. In lexicographic order, the longest prefix that a sequence shares with any earlier one is that shared with its neighbour.
    So every prefix is computed once: the system prompt of all groups, the prompt of a group, and its samples as far as they agree.
    """
    ids_T, starts = host_ids(batch), batch.starts
    words = ids_T.astype(">u4").tobytes()  # bytes that sort as the ids do
    order = sorted(range(batch.sequences), key=lambda n: words[4 * starts[n] : 4 * starts[n + 1]])
    kept_T, same_T = np.ones(len(ids_T), bool), np.arange(len(ids_T))
    for before, n in pairwise(order):
        a, b = starts[before], starts[n]
        length = min(starts[before + 1] - a, starts[n + 1] - b)
        differ = ids_T[a : a + length] != ids_T[b : b + length]
        same = int(differ.argmax())
        same = same if differ[same] else length
        if same >= SHARED:
            kept_T[b : b + same] = False
            same_T[b : b + same] = same_T[a : a + same]
    number_T = np.cumsum(kept_T) - 1
    return np.flatnonzero(kept_T), number_T[same_T]
