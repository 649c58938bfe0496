"""The CUDA kernels of the training pass, in Triton. `posttrain/ops/fused.py` and `posttrain/ops/logprobs.py` call them."""

# mypy: ignore-errors
# Triton reads these functions as its own language: its types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


def tiles(matrix, rows, columns):
    """A matrix as a kernel loads it, tile by tile."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


@triton.jit
def activated(x, TANH: tl.constexpr):
    """silu, or gelu with its tanh approximation."""
    if TANH:
        return x * tl.sigmoid(2.0 * 0.7978845608028654 * (x + 0.044715 * x * x * x))
    else:
        return x * tl.sigmoid(x)


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
    narrow = out_ptr.dtype.element_ty
    y = activated(gate, TANH).to(narrow).to(tl.float32) * up
    tl.store(out_ptr + row * width + at, y.to(narrow), mask=inside)


@triton.jit
def gated_backward_kernel(
    grad_ptr, both_ptr, out_ptr, width, TANH: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr
):
    """Of y = act(gate) * up: dgate = g up act'(gate), dup = g act(gate). PAIRS: gate and up of an element lie side by side."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    both_ptr += row * 2 * width
    if PAIRS:
        place = both_ptr + 2 * at[:, None] + tl.arange(0, 2)[None, :]
        gate, up = tl.split(tl.load(place, mask=inside[:, None], other=0.0).to(tl.float32))
    else:
        gate = tl.load(both_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(both_ptr + width + at, mask=inside, other=0.0).to(tl.float32)
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
def angles(cos_ptr, sin_ptr, position, half, WIDTH: tl.constexpr):
    """cos and sin of a position, of both halves of a head."""
    at, wide = position.to(tl.int64) * WIDTH + half, half < WIDTH // 2
    cos_low = tl.load(cos_ptr + at, mask=wide, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_ptr + at + WIDTH // 2, mask=wide, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_ptr + at, mask=wide, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_ptr + at + WIDTH // 2, mask=wide, other=0.0).to(tl.float32)
    return cos_low, cos_high, sin_low, sin_high


@triton.jit
def heads_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    source_ptr,
    kept_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    SHARED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One token of a sequence: key, rotated by the position's angle, and value of the computed token that stands for it; and where it
    is computed itself, or WHOLE, the rotated query."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(source_ptr + token).to(tl.int64) if SHARED else token
    own = tl.load(kept_ptr + row) == token if SHARED and not WHOLE else token >= 0
    asking = token if WHOLE else row
    half = tl.arange(0, HALF)[None, :]
    narrow = qkv_ptr.dtype.element_ty
    wide, start = half < WIDTH // 2, qkv_ptr + row * (HEADS + 2 * KEYS) * WIDTH + half
    position = tl.load(position_ptr + row)
    cos_low, cos_high, sin_low, sin_high = angles(cos_ptr, sin_ptr, position, half, WIDTH)
    head = tl.arange(0, QUERY_BLOCK)[:, None]
    inside = (head < HEADS) & wide & own
    low = tl.load(start + head * WIDTH, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(start + head * WIDTH + WIDTH // 2, mask=inside, other=0.0).to(tl.float32)
    to = query_ptr + (asking * HEADS + head) * WIDTH + half
    tl.store(to, (low * cos_low - high * sin_low).to(narrow), mask=inside)
    tl.store(to + WIDTH // 2, (high * cos_high + low * sin_high).to(narrow), mask=inside)
    head = tl.arange(0, KEY_BLOCK)[:, None]
    inside, place = (head < KEYS) & wide, start + (HEADS + head) * WIDTH
    low = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(place + WIDTH // 2, mask=inside, other=0.0).to(tl.float32)
    to = (token * KEYS + head) * WIDTH + half
    tl.store(key_ptr + to, (low * cos_low - high * sin_low).to(narrow), mask=inside)
    tl.store(key_ptr + to + WIDTH // 2, (high * cos_high + low * sin_high).to(narrow), mask=inside)
    place += KEYS * WIDTH
    tl.store(value_ptr + to, tl.load(place, mask=inside), mask=inside)
    other_half = tl.load(place + WIDTH // 2, mask=inside)
    tl.store(value_ptr + to + WIDTH // 2, other_half, mask=inside)


@triton.jit
def heads_backward_kernel(
    dquery_ptr,
    dkey_ptr,
    dvalue_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    first_ptr,
    reader_ptr,
    kept_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    SHARED: tl.constexpr,
    WHOLE: tl.constexpr,
    READERS: tl.constexpr,
):
    """The gradient of one computed token's query, key and value: those of all tokens for which it stands are summed in float32, and
    rotated by the opposite angle."""
    row = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF)[None, :]
    narrow = out_ptr.dtype.element_ty
    wide, start = half < WIDTH // 2, out_ptr + row * (HEADS + 2 * KEYS) * WIDTH + half
    position = tl.load(position_ptr + row)
    cos_low, cos_high, sin_low, sin_high = angles(cos_ptr, sin_ptr, position, half, WIDTH)
    head = tl.arange(0, QUERY_BLOCK)[:, None]
    asking = tl.load(kept_ptr + row).to(tl.int64) if WHOLE else row
    inside, place = (head < HEADS) & wide, dquery_ptr + (asking * HEADS + head) * WIDTH + half
    low = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(place + WIDTH // 2, mask=inside, other=0.0).to(tl.float32)
    to = start + head * WIDTH
    tl.store(to, (low * cos_low + high * sin_high).to(narrow), mask=inside)
    tl.store(to + WIDTH // 2, (high * cos_high - low * sin_low).to(narrow), mask=inside)
    head = tl.arange(0, KEY_BLOCK)[:, None]
    inside, own = (head < KEYS) & wide, head * WIDTH + half
    low = tl.zeros([KEY_BLOCK, HALF], tl.float32)
    high = tl.zeros([KEY_BLOCK, HALF], tl.float32)
    value_low = tl.zeros([KEY_BLOCK, HALF], tl.float32)
    value_high = tl.zeros([KEY_BLOCK, HALF], tl.float32)
    first, last = row, row + 1
    if SHARED:
        first, last = tl.load(first_ptr + row), tl.load(first_ptr + row + 1)
    for begin in range(first, last, READERS):
        at = begin + tl.arange(0, READERS)
        token = at.to(tl.int64)
        if SHARED:
            token = tl.load(reader_ptr + at, mask=at < last, other=0).to(tl.int64)
        they = token[:, None, None] * KEYS * WIDTH + own[None, :, :]
        here = (at < last)[:, None, None] & inside[None, :, :]
        low += tl.sum(tl.load(dkey_ptr + they, mask=here, other=0.0).to(tl.float32), 0)
        value_low += tl.sum(tl.load(dvalue_ptr + they, mask=here, other=0.0).to(tl.float32), 0)
        they += WIDTH // 2
        high += tl.sum(tl.load(dkey_ptr + they, mask=here, other=0.0).to(tl.float32), 0)
        value_high += tl.sum(tl.load(dvalue_ptr + they, mask=here, other=0.0).to(tl.float32), 0)
    to = start + (HEADS + head) * WIDTH
    tl.store(to, (low * cos_low + high * sin_high).to(narrow), mask=inside)
    tl.store(to + WIDTH // 2, (high * cos_high - low * sin_low).to(narrow), mask=inside)
    to += KEYS * WIDTH
    tl.store(to, value_low.to(narrow), mask=inside)
    tl.store(to + WIDTH // 2, value_high.to(narrow), mask=inside)


@triton.jit
def own_rows_kernel(x_ptr, source_ptr, kept_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """Of a token that is computed itself its row, of others 0."""
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row = tl.load(source_ptr + token).to(tl.int64)
    own = tl.load(kept_ptr + row) == token
    x = tl.load(x_ptr + row * width + at, mask=(at < width) & own, other=0.0)
    tl.store(out_ptr + token * width + at, x, mask=at < width)


@triton.jit
def logprob_tiles_kernel(
    hidden_tiles,
    weight_tiles,
    kept_tiles,
    target_ptr,
    shift_ptr,
    top_ptr,
    total_ptr,
    energy_ptr,
    chosen_ptr,
    rows,
    size,
    inverse,
    WIDTH: tl.constexpr,
    KEEP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SAFE: tl.constexpr,
):
    """Of z = hidden W^T / temperature, one tile a program: with s the row's shift, or what is higher by tile, sum(exp(z - s)) and
    sum(exp(z - s) z), and z of the target; KEEP: exp(z - s) too, rounded. s is raised where z exceeds the shift by more than SAFE."""
    first, tile = tl.program_id(0) * BM, tl.program_id(1)
    z = tl.zeros([BM, BN], tl.float32)
    for k in range(0, WIDTH, BK):
        z = tl.dot(hidden_tiles.load([first, k]), weight_tiles.load([tile * BN, k]).T, z)
    row, column = first + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    inside = row < rows
    z = tl.where((column < size)[None, :], z * inverse, -float("inf"))
    target = tl.load(target_ptr + row, mask=inside, other=-1)
    chosen = tl.sum(tl.where(column[None, :] == target[:, None], z, 0.0), 1)
    here = inside & (target >= tile * BN) & (target < tile * BN + BN)
    tl.store(chosen_ptr + row, chosen, mask=here)
    shift = tl.load(shift_ptr + row, mask=inside, other=0.0).to(tl.float32)
    shift = tl.maximum(shift, tl.max(z, 1) - SAFE)
    p = tl.exp(z - shift[:, None])
    at = tile.to(tl.int64) * rows + row
    tl.store(top_ptr + at, shift, mask=inside)
    tl.store(total_ptr + at, tl.sum(p, 1), mask=inside)
    tl.store(energy_ptr + at, tl.sum(tl.where(p > 0.0, p * z, 0.0), 1), mask=inside)
    if KEEP:
        kept_tiles.store([first, tile * BN], p.to(kept_tiles.dtype))


@triton.jit
def logprob_sums_kernel(
    top_ptr,
    total_ptr,
    energy_ptr,
    chosen_ptr,
    logprob_ptr,
    entropy_ptr,
    normaliser_ptr,
    rows,
    tiles,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Log-probs of the targets, entropies and normalisers from the sums of the tiles."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    energy = tl.zeros([ROWS], tl.float32)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        at = tile.to(tl.int64)[:, None] * rows + row[None, :]
        here = (tile < tiles)[:, None] & inside[None, :]
        tops = tl.load(top_ptr + at, mask=here, other=-float("inf"))
        higher = tl.maximum(top, tl.max(tops, 0))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        factor, shrink = tl.exp(tops - safe[None, :]), tl.exp(top - safe)
        sums = tl.load(total_ptr + at, mask=here, other=0.0)
        total = total * shrink + tl.sum(sums * factor, 0)
        sums = tl.load(energy_ptr + at, mask=here, other=0.0)
        energy = energy * shrink + tl.sum(sums * factor, 0)
        top = higher
    normaliser = top + tl.log(total)
    chosen = tl.load(chosen_ptr + row, mask=inside, other=0.0)
    tl.store(logprob_ptr + row, chosen - normaliser, mask=inside)
    tl.store(entropy_ptr + row, normaliser - energy / total, mask=inside)
    tl.store(normaliser_ptr + row, normaliser, mask=inside)


@triton.jit
def logprob_kept_kernel(
    kept_ptr,
    target_ptr,
    shift_ptr,
    top_ptr,
    logprob_ptr,
    normaliser_ptr,
    factor_ptr,
    rows,
    size,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    SAFE: tl.constexpr,
):
    """What is kept of a row, exp(z - s), becomes (p - 1[target]) / factor with a factor of the row, exp(shift - normaliser), so that
    one number of it changes; in a row whose shift was far too low all of them, and the factor is 1."""
    row = tl.program_id(0).to(tl.int64)
    start = kept_ptr + row * size
    narrow = kept_ptr.dtype.element_ty
    normaliser = tl.load(normaliser_ptr + row)
    gap = normaliser - tl.load(shift_ptr + row).to(tl.float32)
    if gap > SAFE:
        for begin in range(0, size, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            top = tl.load(top_ptr + (at // BN).to(tl.int64) * rows + row, mask=at < size, other=0.0)
            p = tl.load(start + at, mask=at < size, other=0.0).to(tl.float32)
            tl.store(start + at, (p * tl.exp(top - normaliser)).to(narrow), mask=at < size)
        gap = gap * 0.0
        tl.debug_barrier()
    tl.store(factor_ptr + row, tl.exp(-gap))
    less = tl.exp(tl.load(logprob_ptr + row)) - 1.0
    tl.store(start + tl.load(target_ptr + row), (less * tl.exp(gap)).to(narrow))


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
    code_ptr, scale_ptr, pairs_ptr, out_ptr, size, SHARED: tl.constexpr, BLOCK: tl.constexpr
):
    """Two weights for each byte: its pair of levels, times the scale that SHARED bytes have in common."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    code = tl.load(code_ptr + at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + at // SHARED, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(pairs_ptr + 2 * code).to(tl.float32) * scale
    second = tl.load(pairs_ptr + 2 * code + 1).to(tl.float32) * scale
    both = tl.interleave(first, second).to(out_ptr.dtype.element_ty)
    place = tl.program_id(0).to(tl.int64) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    tl.store(out_ptr + place, both, mask=place < 2 * size)
