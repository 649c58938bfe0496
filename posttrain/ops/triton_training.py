"""The CUDA kernels of the training pass, in Triton. `posttrain/ops/fused.py` and `posttrain/ops/logprobs.py` call them."""

# mypy: ignore-errors
# Triton reads these functions as its own language: its types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    x_ptr,
    y_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    scale_ptr,
    width,
    epsilon,
    ADD: tl.constexpr,
    SHIFTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """sum = x + y, out = sum / sqrt(mean(sum^2) + epsilon) * weight; the factor of each row is kept for the backward pass."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    narrow = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        y = tl.load(y_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        summed = (x + y).to(narrow)
        tl.store(sum_ptr + row * width + at, summed, mask=inside)
        x = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    tl.store(scale_ptr + row, scale)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if SHIFTED:
        out = x * scale * (1.0 + weight)
    else:
        out = (x * scale).to(narrow).to(tl.float32) * weight
    tl.store(out_ptr + row * width + at, out.to(narrow), mask=inside)


@triton.jit
def add_norm_backward_kernel(
    grad_ptr,
    residual_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    dx_ptr,
    dweight_ptr,
    rows,
    width,
    RESIDUAL: tl.constexpr,
    SHIFTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx = residual + s (g w - x s^2 mean(g w x)), dweight = sum over this program's rows of g x s."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if SHIFTED:
        weight += 1.0
    total, long_width = tl.zeros([BLOCK], tl.float32), width.to(tl.int64)
    for row in range(program, rows, programs):
        place = row * long_width + at
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row)
        total += grad * x * scale
        grad *= weight
        dx = scale * (grad - x * (scale * scale * tl.sum(grad * x, 0) / width))
        if RESIDUAL:
            dx += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dweight_ptr + program.to(tl.int64) * width + at, total, mask=inside)


@triton.jit
def gated_kernel(both_ptr, out_ptr, width, TANH: tl.constexpr, BLOCK: tl.constexpr):
    """out = act(gate) * up, where a row of `both` is gate and then up; act is silu or tanh-approximated gelu."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(both_ptr + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    if TANH:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        y = gate * tl.sigmoid(2.0 * inner)
    else:
        y = gate * tl.sigmoid(gate)
    narrow = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * width + at, (y.to(narrow).to(tl.float32) * up).to(narrow), mask=inside)


@triton.jit
def gated_backward_kernel(
    grad_ptr, both_ptr, out_ptr, width, TANH: tl.constexpr, BLOCK: tl.constexpr
):
    """Of y = act(gate) * up: dgate = g up act'(gate), dup = g act(gate)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(both_ptr + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if TANH:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        bend = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * gate * gate)
        half = tl.sigmoid(2.0 * inner)
        act, slope = gate * half, half + 2.0 * gate * half * (1.0 - half) * bend
    else:
        half = tl.sigmoid(gate)
        act, slope = gate * half, half * (1.0 + gate * (1.0 - half))
    narrow = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * 2 * width + at, (grad * up * slope).to(narrow), mask=inside)
    tl.store(out_ptr + row * 2 * width + width + at, (grad * act).to(narrow), mask=inside)


@triton.jit
def rotate_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    stride,
    sign,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
):
    """Rotate the first HEADS heads of a token in place by its position's angle; sign -1: by the opposite angle."""
    token = tl.program_id(0).to(tl.int64)
    head, half = tl.arange(0, PADDED)[:, None], tl.arange(0, HALF)[None, :]
    wide = half < WIDTH // 2
    inside = (head < HEADS) & wide
    place = x_ptr + token * stride + head * WIDTH + half
    low = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(place + WIDTH // 2, mask=inside, other=0.0).to(tl.float32)
    at = tl.load(position_ptr + token).to(tl.int64) * WIDTH + half
    cos_low = tl.load(cos_ptr + at, mask=wide, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_ptr + at + WIDTH // 2, mask=wide, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_ptr + at, mask=wide, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_ptr + at + WIDTH // 2, mask=wide, other=0.0).to(tl.float32)
    narrow = x_ptr.dtype.element_ty
    if sign > 0:
        new_low, new_high = low * cos_low - high * sin_low, high * cos_high + low * sin_high
    else:  # the transpose of the above
        new_low, new_high = low * cos_low + high * sin_high, high * cos_high - low * sin_low
    tl.store(place, new_low.to(narrow), mask=inside)
    tl.store(place + WIDTH // 2, new_high.to(narrow), mask=inside)


@triton.jit
def statistics_kernel(
    logits_ptr,
    target_ptr,
    logprob_ptr,
    entropy_ptr,
    normaliser_ptr,
    size,
    inverse,
    BLOCK: tl.constexpr,
):
    """Of z = logits / temperature, one row a program, in one pass: logsumexp(z), z[target] - logsumexp(z), and the entropy."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    energy = tl.zeros([BLOCK], tl.float32)  # sum of exp(z - top) z, lane by lane
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(logits_ptr + row * size + at, mask=at < size, other=-float("inf")) * inverse
        higher = tl.maximum(top, z)
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        shrink, p = tl.exp(top - safe), tl.exp(z - safe)
        total = total * shrink + p
        energy = energy * shrink + tl.where(p > 0.0, p * z, 0.0)
        top = higher
    largest = tl.max(top, 0)
    factor = tl.exp(top - largest)
    mass = tl.sum(total * factor, 0)
    normaliser = largest + tl.log(mass)
    chosen = tl.load(logits_ptr + row * size + tl.load(target_ptr + row)) * inverse
    tl.store(logprob_ptr + row, chosen - normaliser)
    tl.store(entropy_ptr + row, normaliser - tl.sum(energy * factor, 0) / mass)
    tl.store(normaliser_ptr + row, normaliser)


@triton.jit
def logits_gradient_kernel(
    logits_ptr,
    target_ptr,
    normaliser_ptr,
    entropy_ptr,
    dlogprob_ptr,
    dentropy_ptr,
    out_ptr,
    size,
    inverse,
    BLOCK: tl.constexpr,
):
    """d loss / d logits = ((1[target] - p) dlogprob - p (log p + entropy) dentropy) / temperature, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits_ptr + row * size + at, mask=at < size, other=0.0) * inverse
    logp = z - tl.load(normaliser_ptr + row)
    p = tl.exp(logp)
    hit = (at == tl.load(target_ptr + row)).to(tl.float32)
    grad = (hit - p) * tl.load(dlogprob_ptr + row)
    grad -= p * (logp + tl.load(entropy_ptr + row)) * tl.load(dentropy_ptr + row)
    grad = (grad * inverse).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + at, grad, mask=at < size)


@triton.jit
def dequantize_kernel(
    code_ptr,
    scale_ptr,
    pairs_ptr,
    factor_ptr,
    out_ptr,
    size,
    width,
    FACTOR: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Two weights for each byte: its pair of levels, times the scale that SHARED bytes have in common; FACTOR: times that of the
    column, of which a row has `width`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    code = tl.load(code_ptr + at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + at // SHARED, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(pairs_ptr + 2 * code).to(tl.float32) * scale
    second = tl.load(pairs_ptr + 2 * code + 1).to(tl.float32) * scale
    both = tl.interleave(first, second).to(out_ptr.dtype.element_ty)
    place = tl.program_id(0).to(tl.int64) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    if FACTOR:
        factor = tl.load(factor_ptr + place % width).to(tl.float32)
        both = (both.to(tl.float32) * factor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, both, mask=place < 2 * size)
