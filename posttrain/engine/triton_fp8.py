"""The CUDA kernels around products in fp8, in Triton. `posttrain/engine/fp8.py` calls them."""

# mypy: ignore-errors
# Triton reads these functions as its own language: its types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantize_row(y, q_ptr, scale_ptr, row, width, at, inside):
    """A row of float32, 0 outside, in e4m3 and its scale: the largest of it over the largest number of the type."""
    scale = tl.maximum(tl.max(tl.abs(y), 0), 1e-12) / 448.0
    tl.store(scale_ptr + row, scale)
    tl.store(q_ptr + row * width + at, (y / scale).to(q_ptr.dtype.element_ty), mask=inside)


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
):
    """x / sqrt(mean(x^2) + epsilon) * weight of one row, quantised, and with KEEP also as it is."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    narrow = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if SHIFTED:
        y = x * factor * (1.0 + weight)
    else:
        y = (x * factor).to(narrow).to(tl.float32) * weight
    if KEEP:
        tl.store(out_ptr + row * width + at, y.to(narrow), mask=inside)
    quantize_row(y.to(narrow).to(tl.float32), q_ptr, scale_ptr, row, width, at, inside)


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
):
    """act(gate) * up of one row of sums without the row's scale, gate and then up, quantised, and with KEEP also as it is. With ADD,
    what adapters give is added first."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    row_scale = tl.load(row_scale_ptr + row)
    gate = tl.load(both_ptr + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    gate, up = gate * row_scale, up * row_scale
    if ADD:
        more = added_ptr + row * 2 * width + at
        gate += tl.load(more, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(more + width, mask=inside, other=0.0).to(tl.float32)
    if TANH:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        y = gate * tl.sigmoid(2.0 * inner)
    else:
        y = gate * tl.sigmoid(gate)
    y = y * up
    if KEEP:
        tl.store(out_ptr + row * width + at, y.to(out_ptr.dtype.element_ty), mask=inside)
    quantize_row(y, q_ptr, scale_ptr, row, width, at, inside)


@triton.jit
def add_rows_kernel(x_ptr, sums_ptr, row_scale_ptr, width, BLOCK: tl.constexpr):
    """x += sums * scale of the row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    place = row * width + at
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    sums = tl.load(sums_ptr + place, mask=inside, other=0.0).to(tl.float32)
    x += sums * tl.load(row_scale_ptr + row)
    tl.store(x_ptr + place, x.to(x_ptr.dtype.element_ty), mask=inside)
