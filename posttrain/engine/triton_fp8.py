"""The CUDA kernels around products in fp8, in Triton. `posttrain/engine/fp8.py` calls them. EARLY is as in triton_kernels.py."""

# mypy: ignore-errors
# Triton reads these functions as its own language: its types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from posttrain.ops.triton_training import activated


@triton.jit
def begin(EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def row_scale(top, scale_ptr, row):
    """The scale of a row by its largest |number|: that becomes the largest number of e4m3."""
    scale = tl.maximum(top, 1e-12) / 448.0
    tl.store(scale_ptr + row, scale)
    return scale


@triton.jit
def norm_rows_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    q_ptr,
    scale_ptr,
    width,
    epsilon,
    SHIFTED: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """x / sqrt(mean(x^2) + epsilon) * weight of one row, quantised, and with KEEP also as it is."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    narrow = x_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    begin(EARLY)
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    if SHIFTED:
        y = x * factor * (1.0 + weight)
    else:
        y = (x * factor).to(narrow).to(tl.float32) * weight
    if KEEP:
        tl.store(out_ptr + row * width + at, y.to(narrow), mask=inside)
    y = y.to(narrow).to(tl.float32)
    scale = row_scale(tl.max(tl.abs(y), 0), scale_ptr, row)
    tl.store(q_ptr + row * width + at, (y / scale).to(q_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gated_piece(both_ptr, added_ptr, at, width, scale, TANH: tl.constexpr, ADD: tl.constexpr):
    """act(gate) * up of some places of a row, 0 outside of it."""
    inside = at < width
    gate = tl.load(both_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale
    up = tl.load(both_ptr + width + at, mask=inside, other=0.0).to(tl.float32) * scale
    if ADD:
        gate += tl.load(added_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(added_ptr + width + at, mask=inside, other=0.0).to(tl.float32)
    return activated(gate, TANH) * up


@triton.jit
def store_piece(y, q_ptr, out_ptr, at, width, scale, KEEP: tl.constexpr):
    inside = at < width
    tl.store(q_ptr + at, (y / scale).to(q_ptr.dtype.element_ty), mask=inside)
    if KEEP:
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gated_rows_kernel(
    both_ptr,
    row_scale_ptr,
    added_ptr,
    out_ptr,
    q_ptr,
    scale_ptr,
    width,
    TANH: tl.constexpr,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """act(gate) * up of one row of sums without the row's scale, gate and then up, quantised, and with KEEP also as it is. With ADD,
    what adapters give is added first. A row is read in two pieces: its width is seldom a power of 2."""
    row = tl.program_id(0).to(tl.int64)
    both_ptr += row * 2 * width
    added_ptr += row * 2 * width
    q_ptr += row * width
    out_ptr += row * width
    first, rest = tl.arange(0, BLOCK), BLOCK + tl.arange(0, REST)
    begin(EARLY)
    before = tl.load(row_scale_ptr + row)
    y = gated_piece(both_ptr, added_ptr, first, width, before, TANH, ADD)
    z = gated_piece(both_ptr, added_ptr, rest, width, before, TANH, ADD)
    top = tl.maximum(tl.max(tl.abs(y), 0), tl.max(tl.abs(z), 0))
    scale = row_scale(top, scale_ptr, row)
    store_piece(y, q_ptr, out_ptr, first, width, scale, KEEP)
    store_piece(z, q_ptr, out_ptr, rest, width, scale, KEEP)


@triton.jit
def add_rows_kernel(
    x_ptr, sums_ptr, row_scale_ptr, width, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """x += sums * scale of the row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    place = row * width + at
    begin(EARLY)
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    sums = tl.load(sums_ptr + place, mask=inside, other=0.0).to(tl.float32)
    x += sums * tl.load(row_scale_ptr + row)
    tl.store(x_ptr + place, x.to(x_ptr.dtype.element_ty), mask=inside)
