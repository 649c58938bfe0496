"""The operations of a decode step: on CUDA one Triton kernel each, elsewhere plain torch as its reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posttrain.engine.random import uniforms
from posttrain.engine.rows import PAGE, Rows
from posttrain.engine.sampler import Choices, draw
from posttrain.models.attention import Rule
from posttrain.models.layers import Heads, Norm, RopeTable
from posttrain.ops.fused import power_of_two, row_block

BLOCK = 4096  # logits that one program sums
MAX_QUERIES = 64  # queries that read a prompt together


def _triton() -> Any:
    from posttrain.engine import triton_kernels

    return triton_kernels


def rms_norm(x_TH: Tensor, weight_H: Tensor, epsilon: float, shifted: bool) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight; `shifted` as Gemma has it, * (1 + weight) before rounding."""
    if x_TH.is_cuda:
        out, width = torch.empty_like(x_TH), x_TH.shape[1]
        block, warps = row_block(width)
        _triton().rms_norm_kernel[(x_TH.shape[0],)](
            x_TH, weight_H, out, width, epsilon, shifted, block, num_warps=warps
        )
        return out
    x = x_TH.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    return (x * (1 + weight_H.float())).to(x_TH.dtype) if shifted else x.to(x_TH.dtype) * weight_H


def rotate_store(
    qkv: Tensor,
    heads: Heads,
    rope: RopeTable,
    position_T: Tensor,
    slot_T: Tensor,
    store: tuple[Tensor, Tensor],
    norms: tuple[Norm, Norm] | None,
) -> None:
    """In place on [T, (Hq + 2 Hk) D]: normalise queries and keys, where there are norms, rotate them by their positions' angles, and
    write keys and values into their slots of the [slots, Hk, D] stores."""
    (cos, sin), (keys, values) = rope, store
    if qkv.is_cuda:
        weights = (norms[0].weight.detach(), norms[1].weight.detach()) if norms else (qkv, qkv)
        inputs = (qkv, cos, sin, position_T, slot_T, keys, values, *weights)
        epsilon, shifted = (norms[0].epsilon, norms[0].shifted) if norms else (0.0, False)
        blocks = (power_of_two(heads.width // 2), power_of_two(heads.heads + 2 * heads.keys))
        sizes = (heads.heads, heads.keys, heads.width, *blocks)
        _triton().rotate_store_kernel[(qkv.shape[0],)](
            *inputs, epsilon, *sizes, norms is not None, shifted, num_warps=4
        )
        return
    split = qkv.view(qkv.shape[0], heads.heads + 2 * heads.keys, heads.width)
    query, key, value = split.split_with_sizes([heads.heads, heads.keys, heads.keys], 1)
    at, half = position_T.long(), heads.width // 2
    for n, part in enumerate((query, key)):
        x = part
        if norms is not None:
            x = rms_norm(part, norms[n].weight.detach(), norms[n].epsilon, norms[n].shifted)
        swapped = torch.cat([-x[..., half:], x[..., :half]], -1)
        part.copy_(x * cos[at][:, None] + swapped * sin[at][:, None])
    keys[slot_T.long()], values[slot_T.long()] = key, value


def tile_rows(heads: Heads, group: int) -> tuple[int, int]:
    """(rows of a tile, queries of its program) for groups of up to `group` rows."""
    queries = min(MAX_QUERIES, max(16, power_of_two(group * heads.grouped)))
    queries = max(queries, power_of_two(heads.grouped))
    return queries // heads.grouped, queries


def attend(
    qkv: Tensor,
    store: tuple[Tensor, Tensor],
    rows: Rows,
    heads: Heads,
    rule: Rule,
    count: int,
    tiles: int,
    queries: int,
) -> Tensor:
    """One new token of each of the first `count` rows against its prompt, read once a tile, and its own tokens: [N, Hq D].

    With (o, s) the output and log-sum-exp over a part of the keys, two parts merge to
    o = (o1 exp(s1) + o2 exp(s2)) / (exp(s1) + exp(s2)).
    """
    if not qkv.is_cuda:
        return _attend_plain(qkv, store, rows, heads, rule, count, tiles)
    kernels = _triton()
    before = torch.empty(count, heads.heads, heads.width, dtype=torch.float32, device=qkv.device)
    # every live row is in a tile
    lse = torch.empty(count, heads.heads, dtype=torch.float32, device=qkv.device)
    out = torch.empty(count, heads.heads * heads.width, dtype=qkv.dtype, device=qkv.device)
    limits = (rule.scaling, rule.softcap or 1.0, rule.sliding_window or 0)
    precision = "ieee" if qkv.dtype == torch.float32 else "tf32"
    wide = max(16, power_of_two(heads.width))
    flags = (PAGE, rule.sliding_window is not None, rule.softcap is not None, precision)
    shape = (heads.heads, heads.keys, heads.width, wide)
    state = (qkv, *store, before, lse)
    prompts = (rows.tile, rows.prompt_table, rows["position"])
    sizes = (rows.capacity, rows.prompt_pages, *shape, queries)
    kernels.prefix_kernel[(tiles, heads.keys)](
        *state, *prompts, *limits, *sizes, *flags, num_warps=4, num_stages=2
    )
    own = (rows["count"], rows["done"], rows.table)
    members = max(16, power_of_two(heads.grouped))
    kernels.suffix_kernel[(count, heads.keys)](
        *state, out, *own, *limits, rows.pages, *shape, members, *flags, num_warps=4, num_stages=3
    )
    return out


def _attend_plain(
    qkv: Tensor,
    store: tuple[Tensor, Tensor],
    rows: Rows,
    heads: Heads,
    rule: Rule,
    count: int,
    tiles: int,
) -> Tensor:
    query_NHD = qkv.view(count, -1, heads.width)[:, : heads.heads]
    position = rows["position"][:count]
    before = torch.zeros(count, heads.heads, heads.width)
    lse = torch.full((count, heads.heads), -torch.inf)
    for tile in range(tiles):
        first, number, length = rows.tile[:, tile].tolist()
        if number:
            at = torch.arange(length)
            slots = rows.prompt_table[tile, at // PAGE].long() * PAGE + at % PAGE
            part = slice(first, first + number)
            before[part], lse[part] = _partial(
                query_NHD[part], slots, store, at[None], position[part], heads, rule
            )
    out = torch.empty(count, heads.heads, heads.width, dtype=qkv.dtype)
    for n in range(count):
        at = torch.arange(0 if rows["done"][n] else int(rows["count"][n]))
        slots = rows.table[n, at // PAGE].long() * PAGE + at % PAGE
        absolute = position[n] - rows["count"][n] + 1 + at
        own, own_lse = _partial(
            query_NHD[n : n + 1], slots, store, absolute[None], position[n : n + 1], heads, rule
        )
        out[n] = merge((before[n], lse[n]), (own[0], own_lse[0]))[0].to(qkv.dtype)
    return out.view(count, -1)


def _partial(
    query_NHD: Tensor,
    slots: Tensor,
    store: tuple[Tensor, Tensor],
    at: Tensor,
    position_N: Tensor,
    heads: Heads,
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the keys in `slots`, which stand at the positions `at`."""
    keys, values = (s[slots].float().repeat_interleave(heads.grouped, 1) for s in store)
    score = torch.einsum("nhd,lhd->nhl", query_NHD.float(), keys) * rule.scaling
    if rule.softcap is not None:
        score = rule.softcap * torch.tanh(score / rule.softcap)
    if rule.sliding_window is not None:
        score = score.masked_fill(
            (at <= position_N[:, None] - rule.sliding_window)[:, None], -torch.inf
        )
    lse = torch.logsumexp(score, -1)
    weight = torch.where(lse[..., None] == -torch.inf, 0.0, torch.exp(score - lse[..., None]))
    return torch.einsum("nhl,lhd->nhd", weight, values), lse


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two partial attentions as one: outputs weighted by the exponents of their log-sum-exps. A part without keys weighs 0."""
    lse = torch.logaddexp(one[1], other[1])
    parts = [
        torch.where(s[..., None] == -torch.inf, 0.0, o * torch.exp(s - lse)[..., None])
        for o, s in (one, other)
    ]
    return parts[0] + parts[1], lse


def choose(logits_NV: Tensor, rows: Rows, truncated: bool) -> tuple[Tensor, Tensor]:
    """An id and its log-prob for each of the first rows, drawn at the row's own uniform. Logits are read once, and one block of
    them again; rows that are done get nothing of meaning."""
    count, size = logits_NV.shape
    if truncated or not logits_NV.is_cuda:
        choices = Choices(rows.temperature[:count], rows["top_k"][:count], rows.top_p[:count])
        return draw(
            logits_NV, choices, uniforms(rows["seed"][:count], rows["count"][:count]), truncated
        )
    kernels, blocks, device = _triton(), -(-size // BLOCK), logits_NV.device
    top, total = (torch.empty(count, blocks, dtype=torch.float32, device=device) for _ in range(2))
    best = torch.empty(count, blocks, dtype=torch.int32, device=device)
    id_N = torch.zeros(count, dtype=torch.int64, device=device)
    logprob_N = torch.zeros(count, device=device)
    sums, sizes = (logits_NV, rows.temperature, top, total, best), (size, blocks, BLOCK)
    kernels.block_sums_kernel[(count, blocks)](*sums, *sizes, num_warps=4)
    state = (rows["seed"], rows["count"], rows["done"], id_N, logprob_N)
    kernels.draw_kernel[(count,)](*sums, *state, *sizes, power_of_two(blocks), num_warps=4)
    return id_N, logprob_N


def advance(id_N: Tensor, logprob_N: Tensor, stop_V: Tensor, rows: Rows) -> None:
    """Write down what was drawn, and make the rows that go on ready for their next token. Done rows stay as they are."""
    count = id_N.shape[0]
    if id_N.is_cuda:
        _triton().advance_kernel[(-(-count // 128),)](
            id_N,
            logprob_N,
            stop_V,
            rows["last"],
            rows["count"],
            rows["position"],
            rows["slot"],
            rows["limit"],
            rows["min"],
            rows["done"],
            rows.table,
            rows.step,
            rows.ids,
            rows.logprobs,
            count,
            rows.capacity,
            rows.pages,
            PAGE,
            128,
        )
    else:
        live = rows["done"][:count] == 0
        at = int(rows.step)
        rows.ids[at, :count] = torch.where(live, id_N, rows.ids[at, :count])
        rows.logprobs[at, :count] = torch.where(live, logprob_N, rows.logprobs[at, :count])
        rows["last"][:count] = torch.where(live, id_N, rows["last"][:count])
        written = rows["count"][:count] + live
        rows["count"][:count] = written
        finished = (stop_V[id_N].bool() & (written > rows["min"][:count])) | (
            written >= rows["limit"][:count]
        )
        rows["done"][:count] = torch.where(live, finished.long(), rows["done"][:count])
        going = live & ~finished
        rows["position"][:count] += going
        page = rows.table[
            torch.arange(count), ((written - 1) // PAGE).clamp(max=rows.pages - 1)
        ].long()
        rows["slot"][:count] = torch.where(
            going, page * PAGE + (written - 1) % PAGE, rows["slot"][:count]
        )
    rows.step.add_(1)
