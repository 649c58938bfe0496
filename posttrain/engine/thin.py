"""What a step of few rows computes, in few kernels: products with the norm before them, and the gate or the sum after them; and
attention to prompts and own tokens at once. Such a step takes the time of its kernels' latencies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posttrain.engine.rows import PAGE, Rows
from posttrain.models.attention import Rule
from posttrain.models.layers import Heads, Norm
from posttrain.ops.fused import power_of_two

THIN = 64  # rows up to which these kernels are used; 0: never
TOGETHER = 64  # rows up to which attention reads prompts and own tokens at once; 0: never
DEEP = 128  # inputs, and outputs of 32 of which there must be multiples
SPREAD = 512  # programs of attention, for which keys are cut
MIN_PAGES = 2  # pages of one of them
STAGES = 4  # blocks of weights that are on their way at once


def _triton() -> Any:
    from posttrain.engine import triton_thin

    return triton_thin


def fits(x: Tensor, width: int) -> bool:
    """Whether a product of these rows to so many outputs is one of few rows."""
    narrow = x.dtype.itemsize == 2 and x.shape[1] % DEEP == 0 and width % 32 == 0
    return len(x) <= THIN and narrow


def tile(rows: int, width: int, depth: int) -> tuple[int, int, int, int]:
    """(rows, outputs, inputs, parts of the inputs) of a program.

    >>> tile(8, 1152, 896), tile(64, 4864, 896), tile(64, 896, 4864)
    ((16, 16, 128, 1), (64, 32, 128, 1), (64, 32, 128, 8))
    """
    split = 1 if depth < 2048 else 8
    return max(16, power_of_two(rows)), 16 if width <= 2048 and split == 1 else 32, DEEP, split


def product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    early: bool,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    gated: bool = False,
    tanh: bool = False,
    add: bool = False,
    arrived: Tensor | None = None,
) -> Tensor:
    """out = x W^T + bias of x, or of x normalised; `gated`: act(gate) * up of the two halves of that; `add`: out += in its place.
    `arrived` counts the parts of a cut product: [outputs] of 0, and 0 again afterwards."""
    (rows, depth), width = x.shape, out.shape[1]
    sizes = tile(rows, width, depth)
    split = sizes[3]
    parts = torch.empty(split if split > 1 else 0, rows, width, device=x.device)
    weights = (weight, x if bias is None else bias, x if norm is None else norm.weight.detach())
    epsilon, shifted = (0.0, False) if norm is None else (norm.epsilon, norm.shifted)
    flags = (norm is not None, shifted, gated, tanh, bias is not None, add, early)
    given = (x, *weights, out, parts, x if arrived is None else arrived, rows, epsilon)
    how = {"num_warps": 4 if sizes[0] >= 64 else sizes[1] // 8, "num_stages": STAGES}
    grid = (width // sizes[1], split)
    _triton().thin_kernel[grid](*given, width, depth, *sizes, *flags, **how, launch_pdl=early)
    return out


def attend(
    query_NHD: Tensor,
    store: tuple[Tensor, Tensor],
    rows: Rows,
    heads: Heads,
    rule: Rule,
    tiles: int,
    early: bool,
) -> Tensor:
    """What `attend_pages` gives (engine/fused.py), each row reading its prompt itself. Keys are cut into parts, as many as a row has
    pages for, which the last program of each row and key head merges."""
    count, device = len(query_NHD), query_NHD.device
    parts = min(16, max(1, SPREAD // (power_of_two(count) * heads.keys)))
    found = torch.empty(parts, *query_NHD.shape, device=device)
    lse = torch.empty(parts, count, heads.heads, device=device)
    out = torch.empty(query_NHD.shape, dtype=query_NHD.dtype, device=device)
    given = (query_NHD, *store, found, lse, out, rows.arrived, rows.tile, rows.prompt_table)
    state = (rows["count"], rows["done"], rows.table, rule.scaling, rule.softcap or 1.0, count)
    wide = max(16, power_of_two(heads.width))
    block = power_of_two(max(tiles, TOGETHER))
    sizes = (rows.capacity, rows.prompt_pages, rows.pages, tiles, block, MIN_PAGES)
    shape = (heads.heads, heads.keys, heads.width, wide, max(16, power_of_two(heads.grouped)), PAGE)
    precision = "ieee" if query_NHD.dtype == torch.float32 else "tf32"
    flags = (rule.softcap is not None, precision, early)
    page_bytes = PAGE * wide * store[0].dtype.itemsize
    how = {
        "num_warps": 2 if page_bytes <= 1 << 13 else 4,
        "num_stages": 3 if page_bytes <= 1 << 15 else 2,
    }
    grid = (heads.keys, count, parts)
    _triton().few_kernel[grid](*given, *state, *sizes, *shape, *flags, **how, launch_pdl=early)
    return out
