"""The CUDA kernels that draw a token, in Triton. `posttrain/engine/fused.py` calls them."""

# mypy: ignore-errors
# Triton reads these functions as its own language: its types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl

from posttrain.ops.triton_training import tiles  # noqa: F401


@triton.jit
def block_sums_kernel(
    logits_ptr, temperature_ptr, top_ptr, sum_ptr, size, blocks, BLOCK: tl.constexpr
):
    """Of one block of one row's logits: the largest z = logit / temperature, and sum(exp(z - largest))."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    heat = tl.load(temperature_ptr + row)
    z = tl.load(logits_ptr + row * size + at, mask=at < size, other=-float("inf"))
    z = z / tl.where(heat == 0.0, 1.0, heat)
    top = tl.max(z, 0)
    tl.store(top_ptr + row * blocks + block, top)
    tl.store(sum_ptr + row * blocks + block, tl.sum(tl.exp(z - top), 0))


@triton.jit(do_not_specialize=["rows"])
def head_sums_kernel(
    hidden_desc,
    weight_desc,
    temperature_ptr,
    top_ptr,
    sum_ptr,
    fine_top_ptr,
    fine_sum_ptr,
    rows,
    size,
    width,
    FINE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """What `block_sums_kernel` gives, from hidden states and the output layer's weight, of blocks of BN logits and of parts of FINE:
    no logit leaves the chip."""
    first, tile = tl.program_id(0) * BM, tl.program_id(1)
    z = tl.zeros([BM, BN], tl.float32)
    for k in range(0, width, BK):
        z = tl.dot(hidden_desc.load([first, k]), weight_desc.load([tile * BN, k]).T, z)
    row = first + tl.arange(0, BM)
    heat = tl.load(temperature_ptr + row, mask=row < rows, other=1.0)
    z = z * (1.0 / tl.where(heat == 0.0, 1.0, heat))[:, None]
    z = tl.where((tile * BN + tl.arange(0, BN) < size)[None, :], z, -float("inf"))
    PARTS: tl.constexpr = BN // FINE
    z = tl.reshape(z, [BM, PARTS, FINE])
    fine_top = tl.max(z, 2)
    fine_sum = tl.exp(z - tl.where(fine_top == -float("inf"), 0.0, fine_top)[:, :, None])
    fine_sum = tl.sum(fine_sum, 2)
    top = tl.max(fine_top, 1)
    at, inside = row.to(tl.int64) * tl.num_programs(1) + tile, row < rows
    tl.store(top_ptr + at, top, mask=inside)
    tl.store(sum_ptr + at, tl.sum(fine_sum * tl.exp(fine_top - top[:, None]), 1), mask=inside)
    at = at[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    tl.store(fine_top_ptr + at, fine_top, mask=inside[:, None])
    tl.store(fine_sum_ptr + at, fine_sum, mask=inside[:, None])


@triton.jit
def place_of(level, mass, SIZE: tl.constexpr):
    """The first place whose cumulative sum exceeds the level, and the level within it."""
    at = tl.arange(0, SIZE)
    place = tl.sum((tl.cumsum(mass, 0) <= level).to(tl.int32), 0)
    # rounding may bring the level up to the whole sum
    place = tl.minimum(place, tl.max(tl.where(mass > 0.0, at, 0), 0))
    return place, level - tl.sum(tl.where(at < place, mass, 0.0), 0)


@triton.jit
def draw_kernel(
    source_ptr,
    weight_ptr,
    temperature_ptr,
    top_ptr,
    sum_ptr,
    fine_top_ptr,
    fine_sum_ptr,
    seed_ptr,
    count_ptr,
    done_ptr,
    id_ptr,
    logprob_ptr,
    size,
    blocks,
    width,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    FINE: tl.constexpr,
    BK: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """The first id whose cumulative probability exceeds the row's own uniform, and its log-prob; the largest at temperature 0. The
    block that has it is read from the logits; or its part that has it is computed AGAIN from the row's hidden state."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(done_ptr + row) != 0:
        return
    heat = tl.load(temperature_ptr + row)
    cold = heat == 0.0
    at_b = tl.arange(0, BLOCKS)
    here = at_b < blocks
    top_b = tl.load(top_ptr + row * blocks + at_b, mask=here, other=-float("inf"))
    top = tl.max(top_b, 0)
    mass_b = tl.load(sum_ptr + row * blocks + at_b, mask=here, other=0.0).to(tl.float64)
    mass_b = mass_b * tl.exp(top_b - top).to(tl.float64)
    # SplitMix64, as posttrain/engine/random.py has it; shifts of a signed integer are masked to be logical
    x = (tl.load(count_ptr + row).to(tl.int64) + 1) * -7046029254386353131
    x = tl.load(seed_ptr + row) + x
    x = (x ^ ((x >> 30) & 17179869183)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 137438953471)) * -7723592293110705685
    x = x ^ ((x >> 31) & 8589934591)
    uniform = ((x >> 11) & 9007199254740991).to(tl.float64) * 1.1102230246251565e-16
    total = tl.sum(mass_b, 0)
    block, level = place_of(uniform * total, mass_b, BLOCKS)
    block = tl.where(cold, tl.argmax(top_b, 0), block)
    first = block * BLOCK
    N: tl.constexpr = FINE if AGAIN else BLOCK
    at_n = tl.arange(0, N)
    if AGAIN:
        PARTS: tl.constexpr = BLOCK // FINE
        at_p = (row * blocks + block) * PARTS + tl.arange(0, PARTS)
        top_p = tl.load(fine_top_ptr + at_p)
        mass_p = tl.load(fine_sum_ptr + at_p).to(tl.float64) * tl.exp(top_p - top).to(tl.float64)
        part, level = place_of(level, mass_p, PARTS)
        first += tl.where(cold, tl.argmax(top_p, 0), part) * FINE
    at = first + at_n
    if AGAIN:
        z = tl.zeros([N], tl.float32)
        for k in range(0, width, BK):
            at_k = k + tl.arange(0, BK)
            inside = at_k < width
            h = tl.load(source_ptr + row * width + at_k, mask=inside, other=0.0).to(tl.float32)
            place = weight_ptr + at.to(tl.int64)[:, None] * width + at_k[None, :]
            w = tl.load(place, mask=(at < size)[:, None] & inside[None, :], other=0.0)
            z += tl.sum(w.to(tl.float32) * h[None, :], 1)
        z = tl.where(at < size, z, -float("inf"))
    else:
        z = tl.load(source_ptr + row * size + at, mask=at < size, other=-float("inf"))
    z = z / tl.where(cold, 1.0, heat)
    below, _ = place_of(level, tl.exp(z - top).to(tl.float64), N)
    below = tl.where(cold, tl.argmax(z, 0), below)
    chosen = tl.sum(tl.where(at_n == below, z, 0.0), 0)
    logprob = chosen - top - tl.log(total.to(tl.float32))
    tl.store(id_ptr + row, (first + below).to(tl.int64))
    tl.store(logprob_ptr + row, tl.where(cold, 0.0, logprob))


@triton.jit
def advance_kernel(
    id_ptr,
    logprob_ptr,
    stop_ptr,
    last_ptr,
    count_ptr,
    position_ptr,
    slot_ptr,
    limit_ptr,
    min_ptr,
    done_ptr,
    table_ptr,
    step_ptr,
    ids_ptr,
    logprobs_ptr,
    rows,
    capacity,
    pages,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the drawn ids down, and make every row ready for its next token."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    live = inside & (tl.load(done_ptr + row, mask=inside, other=1) == 0)
    step = tl.load(step_ptr)
    drawn = tl.load(id_ptr + row, mask=live, other=0)
    tl.store(ids_ptr + step * capacity + row, drawn, mask=live)
    logprob = tl.load(logprob_ptr + row, mask=live, other=0.0)
    tl.store(logprobs_ptr + step * capacity + row, logprob, mask=live)
    tl.store(last_ptr + row, drawn, mask=live)
    count = tl.load(count_ptr + row, mask=live, other=0) + 1
    tl.store(count_ptr + row, count, mask=live)
    stopped = tl.load(stop_ptr + drawn, mask=live, other=0) != 0
    stopped = stopped & (count > tl.load(min_ptr + row, mask=live, other=0))
    finished = stopped | (count >= tl.load(limit_ptr + row, mask=live, other=0))
    tl.store(done_ptr + row, finished.to(tl.int64), mask=live)
    going = live & (finished == 0)
    tl.store(position_ptr + row, tl.load(position_ptr + row, mask=going, other=0) + 1, mask=going)
    page = tl.load(table_ptr + row * pages + (count - 1) // PAGE, mask=going, other=0).to(tl.int64)
    # a row that is done writes to page 0, which no row has: its own pages may be another's before the host takes it out
    tl.store(slot_ptr + row, tl.where(going, page * PAGE + (count - 1) % PAGE, 0), mask=live)
