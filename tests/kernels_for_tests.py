"""What the Triton kernels compute, in plain torch: with it the code for CUDA runs on the CPU, launches and all.

Importing this module lets launches on CPU tensors come here; those on CUDA tensors go to Triton as ever. With TRITON_INTERPRET=1
and Triton installed (`make test-kernels`), each launch here is also made by Triton's interpreter, on copies, and all that it wrote is
compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.engine import engine, fp8
from posttrain.engine import fused as decoding
from posttrain.engine.cuda import CUDABackend
from posttrain.engine.random import uniforms
from posttrain.engine.sampler import Choices, draw
from posttrain.ops import fused as training

Grid = tuple[int, ...]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def normalised(x: Tensor, weight: Tensor, epsilon: float, shifted: bool) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + epsilon) * weight, and the factor of each row; `shifted`: * (1 + weight) before rounding."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.pow(2).mean(-1) + epsilon)
    y = wide * scale[..., None]
    return (y * (1 + weight.to(y.dtype))).to(x.dtype) if shifted else y.to(x.dtype) * weight, scale


def add_norm_kernel(grid: Grid, x: Tensor, y: Tensor, weight: Tensor, total: Tensor, out: Tensor, scale: Tensor, width: int,
                    epsilon: float, add: bool, shifted: bool, block: int) -> None:  # fmt: skip
    if add:
        torch.add(x, y, out=total)
    found = normalised(total if add else x, weight, epsilon, shifted)
    out.copy_(found[0])
    scale.copy_(found[1])


def add_norm_backward_kernel(grid: Grid, grad: Tensor, residual: Tensor, total: Tensor, weight: Tensor, scale: Tensor, dx: Tensor,
                             parts: Tensor, rows: int, width: int, has_residual: bool, shifted: bool, block: int) -> None:  # fmt: skip
    x, g, factor = total.to(scale.dtype), grad.to(scale.dtype), scale[:, None]
    parts.zero_()[0] = (g * x * factor).sum(0)
    g = g * (weight + 1 if shifted else weight)
    found = factor * (g - x * factor**2 * (g * x).mean(-1, keepdim=True))
    dx.copy_(found + residual if has_residual else found)


def gated_kernel(grid: Grid, both: Tensor, out: Tensor, width: int, tanh: bool, block: int) -> None:
    gate, up = both.chunk(2, 1)
    out.copy_((F.gelu(gate, approximate="tanh") if tanh else F.silu(gate)) * up)


def gated_backward_kernel(
    grid: Grid, grad: Tensor, both: Tensor, out: Tensor, width: int, tanh: bool, pairs: bool, block: int
) -> None:
    gate, up = both.unflatten(1, (width, 2)).unbind(2) if pairs else both.chunk(2, 1)
    if tanh:
        slope = torch.ops.aten.gelu_backward(torch.ones_like(gate), gate, approximate="tanh")
        act = F.gelu(gate, approximate="tanh")
    else:
        half = gate.sigmoid()
        act, slope = gate * half, half * (1 + gate * (1 - half))
    out.copy_(torch.cat([grad * up * slope, grad * act], 1))


def turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """[T, H, D] rotated by angles of [T, D]; sign -1: by the transposed rotation."""
    cos, sin, half = cos[:, None], sin[:, None], x.shape[-1] // 2
    if sign > 0:
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
    y = x * sin
    return x * cos + torch.cat([y[..., half:], -y[..., :half]], -1)


def heads_kernel(grid: Grid, qkv: Tensor, cos: Tensor, sin: Tensor, position: Tensor, source: Tensor, kept: Tensor, query: Tensor,
                 key: Tensor, value: Tensor, heads: int, keys: int, width: int, *rest: int) -> None:  # fmt: skip
    q, k, v = qkv.view(len(qkv), -1, width).split_with_sizes([heads, keys, keys], 1)
    shared, whole = rest[3:5]
    at = source if shared else torch.arange(grid[0])
    assert not shared or torch.equal(source[kept], torch.arange(len(kept)))
    turn = turned(q, cos[position], sin[position], 1)
    query.copy_(turn[at] if whole else turn)
    key.copy_(turned(k, cos[position], sin[position], 1)[at])
    value.copy_(v[at])


def heads_backward_kernel(grid: Grid, dquery: Tensor, dkey: Tensor, dvalue: Tensor, cos: Tensor, sin: Tensor, position: Tensor,
                          first: Tensor, reader: Tensor, kept: Tensor, out: Tensor, heads: int, keys: int, width: int,
                          *rest: int) -> None:  # fmt: skip
    dquery = dquery[kept] if rest[4] else dquery
    wide = torch.promote_types(dkey.dtype, torch.float32)
    ends = [*zip(first[:-1].tolist(), first[1:].tolist(), strict=True)] if rest[3] else []
    sums = [torch.stack([g[reader[a:b]].to(wide).sum(0) for a, b in ends]) if ends else g.to(wide) for g in (dkey, dvalue)]
    turn = [turned(g, cos[position].to(wide), sin[position].to(wide), -1) for g in (dquery.to(wide), sums[0])]
    out.copy_(torch.cat([*turn, sums[1]], 1).view_as(out))


def own_rows_kernel(grid: Grid, x: Tensor, source: Tensor, kept: Tensor, out: Tensor, width: int, block: int) -> None:
    assert block >= width == x[0].numel() and grid == (len(source),)
    out.zero_()[kept] = x


def logprob_tiles_kernel(grid: Grid, hidden: Tensor, weight: Tensor, kept: Tensor, target: Tensor, shift: Tensor, top: Tensor,
                         total: Tensor, energy: Tensor, chosen: Tensor, rows: int, size: int, inverse: float, width: int,
                         keep: bool, tall: int, broad: int, deep: int, safe: float) -> None:  # fmt: skip
    z = (hidden.to(total.dtype) @ weight.to(total.dtype).t()) * inverse
    chosen.copy_(z.gather(1, target[:, None])[:, 0])
    for tile, part in enumerate(z.split(broad, 1)):
        s = torch.maximum(shift.to(z.dtype), part.max(1).values - safe)
        p = torch.exp(part - s[:, None])
        top[tile], total[tile], energy[tile] = s, p.sum(1), (p * part).sum(1)
        if keep:
            kept[:, tile * broad : (tile + 1) * broad] = p


def logprob_sums_kernel(grid: Grid, top: Tensor, total: Tensor, energy: Tensor, chosen: Tensor, logprob: Tensor, entropy: Tensor,
                        normaliser: Tensor, *sizes: int) -> None:  # fmt: skip
    highest = top.max(0).values
    factor = torch.exp(top - highest)
    mass = (total * factor).sum(0)
    normaliser.copy_(highest + mass.log())
    logprob.copy_(chosen - normaliser)
    entropy.copy_(normaliser - (energy * factor).sum(0) / mass)


def logprob_kept_kernel(grid: Grid, kept: Tensor, target: Tensor, shift: Tensor, top: Tensor, logprob: Tensor, normaliser: Tensor,
                        factor: Tensor, rows: int, size: int, block: int, broad: int, safe: float) -> None:  # fmt: skip
    gap = normaliser - shift.to(normaliser.dtype)
    low = gap > safe
    by_id = torch.exp(top - normaliser).repeat_interleave(broad, 0)[:size].t()
    kept.copy_(torch.where(low[:, None], kept.to(by_id.dtype) * by_id, kept.to(by_id.dtype)))
    gap = gap.where(~low, 0.0)
    factor.copy_(torch.exp(-gap))
    kept[torch.arange(len(kept)), target] = (torch.expm1(logprob) * torch.exp(gap)).to(kept.dtype)


def rotate_store_kernel(grid: Grid, qkv: Tensor, cos: Tensor, sin: Tensor, position: Tensor, slot: Tensor, keys: Tensor,
                        values: Tensor, query_norm: Tensor, key_norm: Tensor, epsilon: float, heads: int,
                        key_heads: int, width: int, half_block: int, padded: int, norm: bool, shifted: bool,
                        early: bool) -> None:  # fmt: skip
    split = qkv.view(len(qkv), heads + 2 * key_heads, width)
    query, key, value = split.split_with_sizes([heads, key_heads, key_heads], 1)
    at, half = position.long(), width // 2
    for part, weight in ((query, query_norm), (key, key_norm)):
        x = normalised(part, weight, epsilon, shifted)[0] if norm else part
        swapped = torch.cat([-x[..., half:], x[..., :half]], -1)
        part.copy_(x * cos[at][:, None] + swapped * sin[at][:, None])
    for store, kept in ((keys, key), (values, value)):
        store[slot.long()] = kept


def partial_attention(query_NHD: Tensor, slots: Tensor, store: tuple[Tensor, Tensor], hidden_NL: Tensor | None,
                      scaling: float, softcap: float | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp over the keys in `slots`."""
    grouped = query_NHD.shape[1] // store[0].shape[1]
    keys, values = (s[slots].float().repeat_interleave(grouped, 1) for s in store)
    score = torch.einsum("nhd,lhd->nhl", query_NHD.float(), keys) * scaling
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if hidden_NL is not None:
        score = score.masked_fill(hidden_NL[:, None], -torch.inf)
    lse = torch.logsumexp(score, -1)
    weight = torch.where(lse[..., None] == -torch.inf, 0.0, torch.exp(score - lse[..., None]))
    return torch.einsum("nhl,lhd->nhd", weight, values), lse


def merge(*given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Partial attentions, [parts, ...] each, as one: outputs weighted by the exponents of their log-sum-exps. A part without keys
    weighs 0."""
    outs, lses = (torch.cat(side) for side in zip(*given, strict=True))
    lse = torch.logsumexp(lses, 0)
    weighed = torch.where(lses[..., None] == -torch.inf, 0.0, outs * torch.exp(lses - lse)[..., None])
    return weighed.sum(0), lse


def cut(first: int, end: int, part: int, parts: int) -> range:
    """The pages of one part."""
    each = -(-(end - first) // parts)
    return range(first + part * each, min(first + (part + 1) * each, end))


def prefix_kernel(grid: Grid, query: Tensor, keys: Tensor, values: Tensor, found: Tensor, lse: Tensor, tile: Tensor,
                  table: Tensor, position: Tensor, scaling: float, softcap: float, window: int, rows_in_all: int, tiles: int,
                  pages: int, heads: int, key_heads: int, width: int, wide: int, rows: int, page: int, windowed: bool, capped: bool,
                  precision: str, early: bool) -> None:  # fmt: skip
    assert tiles == tile.shape[1] and pages == table.shape[1] and rows_in_all == len(query)
    for number in range(grid[0]):
        first, count, length = tile[:, number].tolist()
        mine = slice(first, first + count)
        start = max(0, int(position[mine].min()) - window + 1) // page if count and windowed else 0
        for part in range(grid[2] if count else 0):
            at = positions(cut(start, -(-length // page), part, grid[2]), page, length)
            slots = table[number, at // page].long() * page + at % page
            hidden = at[None] <= position[mine, None] - window if windowed else None
            one = partial_attention(query[mine], slots, (keys, values), hidden, scaling, softcap if capped else None)
            found[part, mine], lse[part, mine] = one


def positions(pages: range, page: int, length: int) -> Tensor:
    """The tokens of these pages of a sequence."""
    return torch.arange(pages.start * page, max(pages.start * page, min(pages.stop * page, length)))


def suffix_kernel(grid: Grid, query: Tensor, keys: Tensor, values: Tensor, found: Tensor, lse: Tensor, out: Tensor, count: Tensor,
                  done: Tensor, table: Tensor, scaling: float, softcap: float, window: int, rows_in_all: int, pages: int,
                  ahead: int, whole: bool, heads: int, key_heads: int, width: int, wide: int, rows: int, page: int, windowed: bool,
                  capped: bool, precision: str, early: bool) -> None:  # fmt: skip
    assert pages == table.shape[1] and (ahead, grid[2]) == (1, 1) if whole else len(found) == ahead + grid[2]
    for n in range(grid[1]):
        length = 0 if done[n] else int(count[n])
        oldest = max(0, length - window) if windowed else 0
        for part in range(grid[2]):
            at = positions(cut(oldest // page, -(-length // page), part, grid[2]), page, length)
            slots = table[n, at // page].long() * page + at % page
            hidden = (at < oldest)[None] if windowed else None
            own = partial_attention(query[n : n + 1], slots, (keys, values), hidden, scaling, softcap if capped else None)
            if whole:
                both = merge((found[:ahead, n], lse[:ahead, n]), (own[0], own[1]))
                out[n] = both[0].to(out.dtype)
            else:
                found[ahead + part, n], lse[ahead + part, n] = own[0][0], own[1][0]


def merge_kernel(grid: Grid, found: Tensor, lse: Tensor, out: Tensor, *sizes: int) -> None:
    out.copy_(merge((found, lse))[0])


def block_sums_kernel(grid: Grid, *rest: Any) -> None:
    """What it sums is only for `draw_kernel`, which here draws from all logits at once."""


head_sums_kernel = block_sums_kernel


def draw_kernel(grid: Grid, source: Tensor, weight: Tensor, temperature: Tensor, top: Tensor, total: Tensor, fine_top: Tensor,
                fine_total: Tensor, seed: Tensor, count: Tensor, done: Tensor, id_N: Tensor, logprob_N: Tensor, size: int,
                blocks: int, width: int, block: int, padded: int, fine: int, deep: int, again: bool) -> None:  # fmt: skip
    rows, logits = len(id_N), source.float() @ weight.float().t() if again else source
    choices = Choices(temperature[:rows], temperature[:rows], temperature[:rows])
    live = done[:rows] == 0
    for target, found in zip((id_N, logprob_N), draw(logits, choices, uniforms(seed[:rows], count[:rows]), False), strict=True):
        target[live] = found[live].to(target.dtype)


def advance_kernel(grid: Grid, id_N: Tensor, logprob_N: Tensor, stop_V: Tensor, last: Tensor, count: Tensor, position: Tensor,
                   slot: Tensor, limit: Tensor, minimum: Tensor, done: Tensor, table: Tensor, step: Tensor, ids: Tensor,
                   logprobs: Tensor, rows: int, capacity: int, pages: int, page: int, block: int) -> None:  # fmt: skip
    live, at = done[:rows] == 0, int(step)
    ids[at, :rows] = torch.where(live, id_N, ids[at, :rows])
    logprobs[at, :rows] = torch.where(live, logprob_N, logprobs[at, :rows])
    last[:rows] = torch.where(live, id_N, last[:rows])
    count[:rows] += live
    written = count[:rows]
    finished = (stop_V[id_N].bool() & (written > minimum[:rows])) | (written >= limit[:rows])
    done[:rows] = torch.where(live, finished.long(), done[:rows])
    going = live & ~finished
    position[:rows] += going
    own = table[torch.arange(rows), ((written - 1) // page).clamp(max=pages - 1)].long()
    slot[:rows] = torch.where(live, torch.where(going, own * page + (written - 1) % page, 0), slot[:rows])


def norm_rows_kernel(grid: Grid, x: Tensor, weight: Tensor, out: Tensor, q: Tensor, scale: Tensor, width: int, epsilon: float,
                     shifted: bool, keep: bool, *rest: int) -> None:  # fmt: skip
    found = normalised(x, weight, epsilon, shifted)[0]
    if keep:
        out.copy_(found)
    _quantize_into(found, q, scale)


def gated_rows_kernel(grid: Grid, both: Tensor, row_scale: Tensor, added: Tensor, out: Tensor, q: Tensor, scale: Tensor,
                      width: int, tanh: bool, add: bool, keep: bool, block: int, rest: int, early: bool) -> None:  # fmt: skip
    assert block < width <= block + rest
    sums = both.float() * row_scale[:, None]
    gate, up = (sums + added if add else sums).chunk(2, 1)
    found = (F.gelu(gate, approximate="tanh") if tanh else F.silu(gate)) * up
    if keep:
        out.copy_(found)
    _quantize_into(found, q, scale)


def add_rows_kernel(grid: Grid, x: Tensor, sums: Tensor, row_scale: Tensor, *sizes: int) -> None:
    x.add_(sums.float() * row_scale[:, None])


def _quantize_into(x: Tensor, q: Tensor, scale: Tensor) -> None:
    for target, found in zip((q, scale), fp8.quantize(x), strict=True):
        target.copy_(found)


class Kernels:
    """A module of Triton kernels, of which those that get CPU tensors run here."""

    def __init__(self, module: str):
        self.module = module

    def tiles(self, matrix: Tensor, *shape: int) -> Any:
        return import_module(self.module).tiles(matrix, *shape) if matrix.is_cuda or INTERPRETED else matrix

    def __getattr__(self, name: str) -> Kernel:
        return Kernel(self.module, name)


class Kernel:
    def __init__(self, module: str, name: str):
        self.module, self.name = module, name

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        def launch(*inputs: Any, **options: int) -> None:
            if any(isinstance(one, Tensor) and one.is_cuda for one in inputs):
                getattr(import_module(self.module), self.name)[grid](*inputs, **options)
            else:
                if self.name == "prefix_kernel":  # rows that are in no tile: what is there is of no use, and not to be compared
                    inputs[3][: grid[2]], inputs[4][: grid[2]] = 0, -torch.inf
                found = self.interpreted(grid, inputs) if INTERPRETED else []
                globals()[self.name](grid, *inputs)
                for own, other in found:
                    if globals()[self.name] is block_sums_kernel:  # for the next kernel
                        own.copy_(other)
                    if own.dtype == torch.float8_e4m3fn:  # which the interpreter rounds wrongly
                        continue
                    if self.name == "add_norm_backward_kernel" and own is inputs[6]:  # parts of a sum, cut otherwise
                        own, other = own.sum(0), other.sum(0)
                    limits = tolerance(own)
                    torch.testing.assert_close(other, own, **limits, equal_nan=True, msg=lambda m: f"{self.name}: {m}")

        return launch

    def interpreted(self, grid: Grid, inputs: tuple[Any, ...]) -> list[tuple[Tensor, Tensor]]:
        """The inputs that are tensors, each with the copy that Triton's kernel was given in its place. Those that share memory
        share it in the copies too."""
        memory: dict[int, Any] = {}

        def copy(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            own = one.untyped_storage()
            kept = memory.setdefault(own.data_ptr(), own.clone())
            return torch.empty(0, dtype=one.dtype).set_(kept, one.storage_offset(), one.size(), one.stride())

        copies = [copy(one) for one in inputs]
        getattr(import_module(self.module), self.name)[grid](*copies)
        return [(a, b) for a, b in zip(inputs, copies, strict=True) if isinstance(a, Tensor)]


def tolerance(tensor: Tensor) -> dict[str, float]:
    """Two orders of the same sums, in the type's precision; kernels compute in float32 at most."""
    wide = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
    return {"rtol": wide.get(tensor.dtype, 0.0), "atol": wide.get(tensor.dtype, 0.0)}


class Steps:
    """In place of a captured graph."""

    def __init__(self, replay: Callable[[], None]):
        self.replay = replay


def decode_in_pages(patch: pytest.MonkeyPatch, on: bool = True) -> None:
    """Let the engine's CUDA backend generate on the CPU, or not."""
    patch.setattr(engine, "PAGED_DEVICES", {"cpu"} if on else set())
    patch.setattr(CUDABackend, "room", lambda _: 1 << 40)
    patch.setattr(CUDABackend, "_capture", lambda one, *sizes: Steps(lambda: one._step(*sizes)))


decoding._triton = lambda: Kernels("posttrain.engine.triton_kernels")
decoding._sampling = lambda: Kernels("posttrain.engine.triton_sampling")
fp8._triton = lambda: Kernels("posttrain.engine.triton_fp8")
training._triton = lambda: Kernels("posttrain.ops.triton_training")
