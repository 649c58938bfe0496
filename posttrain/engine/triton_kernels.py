"""The CUDA kernels of a decode step, in Triton. `posttrain/engine/fused.py` calls them.

Keys and values lie in pages: slot s of a layer is row s of a [slots, heads, width] tensor, page p holds the slots p * PAGE and on.
"""

# mypy: ignore-errors
# Triton reads these functions as its own language: its types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_store_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    slot_ptr,
    keys_ptr,
    values_ptr,
    query_norm_ptr,
    key_norm_ptr,
    epsilon,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    NORM: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """All heads of one token: [normalise,] rotate by the position's angle, write back; keys and values also into their slot."""
    token = tl.program_id(0).to(tl.int64)
    head, half = tl.arange(0, PADDED)[:, None], tl.arange(0, HALF)[None, :]
    wide = half < WIDTH // 2
    inside = (head < HEADS + 2 * KEYS) & wide
    place = qkv_ptr + (token * (HEADS + 2 * KEYS) + head) * WIDTH + half
    low = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(place + WIDTH // 2, mask=inside, other=0.0).to(tl.float32)
    narrow = qkv_ptr.dtype.element_ty
    slot = tl.load(slot_ptr + token).to(tl.int64) * KEYS
    value = inside & (head >= HEADS + KEYS)
    to = values_ptr + (slot + head - HEADS - KEYS) * WIDTH + half
    tl.store(to, low.to(narrow), mask=value)
    tl.store(to + WIDTH // 2, high.to(narrow), mask=value)
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / WIDTH + epsilon)[:, None]
        asks, gives = (head < HEADS) & wide, (head >= HEADS) & wide
        lower = half + 0 * head
        upper = lower + WIDTH // 2
        first = tl.load(query_norm_ptr + lower, mask=asks, other=0.0).to(tl.float32)
        first += tl.load(key_norm_ptr + lower, mask=gives, other=0.0).to(tl.float32)
        second = tl.load(query_norm_ptr + upper, mask=asks, other=0.0).to(tl.float32)
        second += tl.load(key_norm_ptr + upper, mask=gives, other=0.0).to(tl.float32)
        if SHIFTED:
            low, high = low * scale * (1.0 + first), high * scale * (1.0 + second)
        else:
            low = (low * scale).to(narrow).to(tl.float32) * first
            high = (high * scale).to(narrow).to(tl.float32) * second
        low, high = low.to(narrow).to(tl.float32), high.to(narrow).to(tl.float32)
    at = tl.load(position_ptr + token).to(tl.int64) * WIDTH + half
    cos_low = tl.load(cos_ptr + at, mask=wide, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_ptr + at + WIDTH // 2, mask=wide, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_ptr + at, mask=wide, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_ptr + at + WIDTH // 2, mask=wide, other=0.0).to(tl.float32)
    rotated_low = (low * cos_low - high * sin_low).to(narrow)
    rotated_high = (high * cos_high + low * sin_high).to(narrow)
    rotated = (head < HEADS + KEYS) & wide
    tl.store(place, rotated_low, mask=rotated)
    tl.store(place + WIDTH // 2, rotated_high, mask=rotated)
    key = rotated & (head >= HEADS)
    to = keys_ptr + (slot + head - HEADS) * WIDTH + half
    tl.store(to, rotated_low, mask=key)
    tl.store(to + WIDTH // 2, rotated_high, mask=key)


@triton.jit
def load_page(ptr, wide, WHOLE: tl.constexpr):
    """A page is always there as a whole, and always finite: what is not allowed weighs nothing."""
    if WHOLE:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=wide[None, :], other=0.0)


@triton.jit
def page_scores(q, k, scaling, softcap, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
    if CAPPED:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
    return score


@triton.jit
def add_page(score, v, top, total, acc, PRECISION: tl.constexpr):
    """A running softmax with one page more: its largest score, its sum and the weighted values."""
    higher = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    p, shrink = tl.exp(score - safe[:, None]), tl.exp(top - safe)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return higher, total * shrink + tl.sum(p, 1), acc


@triton.jit
def prefix_kernel(
    qkv_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    lse_ptr,
    tile_ptr,
    table_ptr,
    position_ptr,
    scaling,
    softcap,
    window,
    tiles,
    pages,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of all rows of a tile, [first row, rows, prompt length], to their common prompt, read once; and its log-sum-exp."""
    tile, head = tl.program_id(0), tl.program_id(1)
    rows = tl.load(tile_ptr + tiles + tile)
    if rows == 0:
        return
    first, length = tl.load(tile_ptr + tile), tl.load(tile_ptr + 2 * tiles + tile)
    GROUPED: tl.constexpr = HEADS // KEYS
    member, at_d, at_n = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, PAGE)
    row, mine = (first + member // GROUPED).to(tl.int64), member < rows * GROUPED
    query_head, wide = head * GROUPED + member % GROUPED, at_d < WIDTH
    place = (row * (HEADS + 2 * KEYS) + query_head)[:, None] * WIDTH + at_d[None, :]
    q = tl.load(qkv_ptr + place, mask=mine[:, None] & wide[None, :], other=0.0)
    start = 0
    if WINDOWED:
        position = tl.load(position_ptr + row, mask=mine, other=2147483647)
        start = tl.maximum(tl.min(position, 0) - window + 1, 0) // PAGE
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    for page in range(start, tl.cdiv(length, PAGE)):
        slot = tl.load(table_ptr + tile * pages + page).to(tl.int64) * PAGE + at_n
        seen = page * PAGE + at_n < length
        at = (slot * KEYS + head)[:, None] * WIDTH + at_d[None, :]
        allowed = seen[None, :]
        if WINDOWED:
            allowed = allowed & (page * PAGE + at_n[None, :] > position[:, None] - window)
        k = load_page(keys_ptr + at, wide, WIDE == WIDTH)
        score = page_scores(q, k, scaling, softcap, CAPPED, PRECISION)
        score = tl.where(allowed, score, -float("inf"))
        v = load_page(values_ptr + at, wide, WIDE == WIDTH)
        top, total, acc = add_page(score, v, top, total, acc, PRECISION)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    lse = tl.where(total == 0.0, -float("inf"), top + tl.log(tl.where(total == 0.0, 1.0, total)))
    to = row * HEADS + query_head
    tl.store(lse_ptr + to, lse, mask=mine)
    tl.store(out_ptr + to[:, None] * WIDTH + at_d[None, :], acc, mask=mine[:, None] & wide[None, :])


@triton.jit
def suffix_kernel(
    qkv_ptr,
    keys_ptr,
    values_ptr,
    before_ptr,
    lse_ptr,
    out_ptr,
    count_ptr,
    done_ptr,
    table_ptr,
    scaling,
    softcap,
    window,
    pages,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of one row to the tokens it has written, begun from what `prefix_kernel` left: a merge by log-sum-exp."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    GROUPED: tl.constexpr = HEADS // KEYS
    member, at_d, at_n = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, PAGE)
    mine, wide = member < GROUPED, at_d < WIDTH
    length = tl.load(count_ptr + row).to(tl.int32)
    if tl.load(done_ptr + row) != 0:
        length = 0
    query_head = head * GROUPED + member
    both = mine[:, None] & wide[None, :]
    place = (row * (HEADS + 2 * KEYS) + query_head)[:, None] * WIDTH + at_d[None, :]
    q = tl.load(qkv_ptr + place, mask=both, other=0.0)
    state = row * HEADS + query_head
    top = tl.load(lse_ptr + state, mask=mine, other=-float("inf"))
    total = tl.where(top == -float("inf"), 0.0, 1.0)
    acc = tl.load(before_ptr + state[:, None] * WIDTH + at_d[None, :], mask=both, other=0.0)
    oldest = 0
    if WINDOWED:
        oldest = tl.maximum(length - window, 0)
    for page in range(oldest // PAGE, tl.cdiv(length, PAGE)):
        slot = tl.load(table_ptr + row * pages + page).to(tl.int64) * PAGE + at_n
        seen = (page * PAGE + at_n < length) & (page * PAGE + at_n >= oldest)
        at = (slot * KEYS + head)[:, None] * WIDTH + at_d[None, :]
        k = load_page(keys_ptr + at, wide, WIDE == WIDTH)
        score = page_scores(q, k, scaling, softcap, CAPPED, PRECISION)
        score = tl.where(seen[None, :], score, -float("inf"))
        v = load_page(values_ptr + at, wide, WIDE == WIDTH)
        top, total, acc = add_page(score, v, top, total, acc, PRECISION)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    acc = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + state[:, None] * WIDTH + at_d[None, :], acc, mask=both)


@triton.jit
def block_sums_kernel(
    logits_ptr, temperature_ptr, top_ptr, sum_ptr, best_ptr, size, blocks, BLOCK: tl.constexpr
):
    """Of one block of one row's logits: the largest z = logit / temperature, sum(exp(z - largest)), and where the largest is."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    heat = tl.load(temperature_ptr + row)
    z = tl.load(logits_ptr + row * size + at, mask=at < size, other=-float("inf"))
    z = z / tl.where(heat == 0.0, 1.0, heat)
    top, best = tl.max(z, 0, return_indices=True)
    tl.store(top_ptr + row * blocks + block, top)
    tl.store(sum_ptr + row * blocks + block, tl.sum(tl.exp(z - top), 0))
    tl.store(best_ptr + row * blocks + block, block * BLOCK + best)


@triton.jit
def draw_kernel(
    logits_ptr,
    temperature_ptr,
    top_ptr,
    sum_ptr,
    best_ptr,
    seed_ptr,
    count_ptr,
    done_ptr,
    id_ptr,
    logprob_ptr,
    size,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The first id whose cumulative probability exceeds the row's own uniform, and its log-prob: one block is read again."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(done_ptr + row) != 0:
        return
    heat = tl.load(temperature_ptr + row)
    at_b = tl.arange(0, BLOCKS)
    here = at_b < blocks
    top_b = tl.load(top_ptr + row * blocks + at_b, mask=here, other=-float("inf"))
    top = tl.max(top_b, 0)
    mass_b = tl.load(sum_ptr + row * blocks + at_b, mask=here, other=0.0).to(tl.float64)
    mass_b = mass_b * tl.exp(top_b - top).to(tl.float64)
    if heat == 0.0:
        place = tl.min(tl.where(top_b == top, at_b, BLOCKS), 0)
        tl.store(id_ptr + row, tl.load(best_ptr + row * blocks + place).to(tl.int64))
        tl.store(logprob_ptr + row, 0.0)
    else:
        # SplitMix64, as posttrain/engine/random.py has it; shifts of a signed integer are masked to be logical
        x = (tl.load(count_ptr + row).to(tl.int64) + 1) * -7046029254386353131
        x = tl.load(seed_ptr + row) + x
        x = (x ^ ((x >> 30) & 17179869183)) * -4658895280553007687
        x = (x ^ ((x >> 27) & 137438953471)) * -7723592293110705685
        x = x ^ ((x >> 31) & 8589934591)
        uniform = ((x >> 11) & 9007199254740991).to(tl.float64) * 1.1102230246251565e-16
        cumulative_b = tl.cumsum(mass_b, 0)
        total = tl.sum(mass_b, 0)
        level = uniform * total
        block = tl.sum(((cumulative_b <= level) & here).to(tl.int32), 0)
        # rounding may bring the level up to the whole sum
        last = tl.max(tl.where(mass_b > 0.0, at_b, 0), 0)
        block = tl.minimum(block, last)
        level = level - tl.sum(tl.where(at_b < block, mass_b, 0.0), 0)
        at = block * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(logits_ptr + row * size + at, mask=at < size, other=-float("inf")) / heat
        p = tl.exp(z - top)
        below = tl.sum((tl.cumsum(p.to(tl.float64), 0) <= level).to(tl.int32), 0)
        below = tl.minimum(below, tl.max(tl.where(p > 0.0, tl.arange(0, BLOCK), 0), 0))
        chosen = block * BLOCK + below
        z_chosen = tl.load(logits_ptr + row * size + chosen) / heat
        tl.store(id_ptr + row, chosen.to(tl.int64))
        tl.store(logprob_ptr + row, z_chosen - top - tl.log(total.to(tl.float32)))


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
    tl.store(slot_ptr + row, page * PAGE + (count - 1) % PAGE, mask=going)
