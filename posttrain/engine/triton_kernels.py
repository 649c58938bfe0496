"""The CUDA kernels of a decode step, in Triton. `posttrain/engine/fused.py` calls them.

Keys and values lie in pages: slot s of a layer is row s of a [slots, heads, width] tensor, page p holds the slots p * PAGE and on.

EARLY: launched before the kernel ahead of it has ended (programmatic dependent launch). Until `gdc_wait` it reads only weights and
what the host wrote, and writes nothing; every program waits, so that a kernel that waits for this one has waited for those before it.
"""

# mypy: ignore-errors
# Triton reads these functions as its own language: its types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def store_halves(ptr, low, high, mask, WIDTH: tl.constexpr):
    tl.store(ptr, low, mask=mask)
    tl.store(ptr + WIDTH // 2, high, mask=mask)


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
    EARLY: tl.constexpr,
):
    """All heads of one token: [normalise,] rotate by the position's angle, write back; keys and values also into their slot."""
    token = tl.program_id(0).to(tl.int64)
    head, half = tl.arange(0, PADDED)[:, None], tl.arange(0, HALF)[None, :]
    wide = half < WIDTH // 2
    inside = (head < HEADS + 2 * KEYS) & wide
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    place = qkv_ptr + (token * (HEADS + 2 * KEYS) + head) * WIDTH + half
    low = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(place + WIDTH // 2, mask=inside, other=0.0).to(tl.float32)
    narrow = qkv_ptr.dtype.element_ty
    slot = tl.load(slot_ptr + token).to(tl.int64) * KEYS
    value = inside & (head >= HEADS + KEYS)
    to = values_ptr + (slot + head - HEADS - KEYS) * WIDTH + half
    store_halves(to, low.to(narrow), high.to(narrow), value, WIDTH)
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
    store_halves(place, rotated_low, rotated_high, rotated, WIDTH)
    to = keys_ptr + (slot + head - HEADS) * WIDTH + half
    store_halves(to, rotated_low, rotated_high, rotated & (head >= HEADS), WIDTH)


@triton.jit
def load_page(ptr, seen, wide, WHOLE: tl.constexpr):
    """Those tokens of a page that are seen; 0 for the others."""
    if WHOLE:
        return tl.load(ptr, mask=seen[:, None], other=0.0)
    else:
        return tl.load(ptr, mask=seen[:, None] & wide[None, :], other=0.0)


@triton.jit
def share(start, end):
    """The pages of these that are this program's, where others along the third axis have the rest."""
    each = tl.cdiv(end - start, tl.num_programs(2))
    start += tl.program_id(2) * each
    return start, tl.minimum(start + each, end)


@triton.jit
def page_scores(q, k, scaling, softcap, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
    if CAPPED:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
    return score


@triton.jit
def add_page(
    score,
    values_ptr,
    token,
    seen,
    top,
    total,
    acc,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A running softmax with one page more: its largest score, its sum and the weighted values of these tokens' heads."""
    higher = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    p, shrink = tl.exp(score - safe[:, None]), tl.exp(top - safe)
    at_d = tl.arange(0, WIDE)
    at = token[:, None] * WIDTH + at_d[None, :]
    v = load_page(values_ptr + at, seen, at_d < WIDTH, WIDE == WIDTH)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return higher, total * shrink + tl.sum(p, 1), acc


@triton.jit
def add_part(lse, out, top, total, acc):
    """The same with another part's log-sum-exp and output; a part without keys has -inf, and weighs nothing."""
    higher = tl.maximum(top, lse)
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    weight, shrink = tl.exp(lse - safe), tl.exp(top - safe)
    acc = acc * shrink[:, None] + tl.where(weight[:, None] > 0.0, out * weight[:, None], 0.0)
    return higher, total * shrink + weight, acc


@triton.jit
def store_part(out_ptr, lse_ptr, to, top, total, acc, mine, wide, WIDTH: tl.constexpr, at_d):
    """Outputs over a part of the keys, and their log-sum-exps; no keys: 0 and -inf."""
    safe = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, -float("inf"), top + tl.log(safe))
    tl.store(lse_ptr + to, lse, mask=mine)
    place = out_ptr + to[:, None] * WIDTH + at_d[None, :]
    tl.store(place, acc / safe[:, None], mask=mine[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["count"])
def merge_kernel(
    parts_ptr,
    lse_ptr,
    out_ptr,
    count,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attention of one row to all keys from its parts: o = sum(o_i exp(s_i)) / sum(exp(s_i))."""
    row = tl.program_id(0).to(tl.int64)
    member, at_d = tl.arange(0, ROWS), tl.arange(0, WIDE)
    mine, wide = member < HEADS, at_d < WIDTH
    both = mine[:, None] & wide[None, :]
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total, acc = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
    to = row * HEADS + member
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    for part in tl.static_range(PARTS):
        at = to + part * count * HEADS
        lse = tl.load(lse_ptr + at, mask=mine, other=-float("inf"))
        out = tl.load(parts_ptr + at[:, None] * WIDTH + at_d[None, :], mask=both, other=0.0)
        top, total, acc = add_part(lse, out, top, total, acc)
    acc = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + to[:, None] * WIDTH + at_d[None, :], acc, mask=both)


@triton.jit(do_not_specialize=["count"])
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
    count,
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
    EARLY: tl.constexpr,
):
    """Attention of all rows of a tile, [first row, rows, prompt length], to one part of their common prompt, read once; and its
    log-sum-exp."""
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    table_ptr += tile * pages
    rows = tl.load(tile_ptr + tiles + tile)
    first, length = tl.load(tile_ptr + tile), tl.load(tile_ptr + 2 * tiles + tile)
    start, end = share(0, tl.cdiv(length, PAGE))
    coming = tl.load(table_ptr + tl.minimum(start, pages - 1))
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    if rows == 0:
        return
    GROUPED: tl.constexpr = HEADS // KEYS
    member, at_d, at_n = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, PAGE)
    row, mine = (first + member // GROUPED).to(tl.int64), member < rows * GROUPED
    query_head, wide = head * GROUPED + member % GROUPED, at_d < WIDTH
    place = (row * (HEADS + 2 * KEYS) + query_head)[:, None] * WIDTH + at_d[None, :]
    q = tl.load(qkv_ptr + place, mask=mine[:, None] & wide[None, :], other=0.0)
    if WINDOWED:
        position = tl.load(position_ptr + row, mask=mine, other=2147483647)
        oldest = tl.maximum(tl.min(position, 0) - window + 1, 0) // PAGE
        start, end = share(oldest, tl.cdiv(length, PAGE))
        coming = tl.load(table_ptr + tl.minimum(start, pages - 1))
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total, acc = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
    for page in range(start, end):
        slot = coming.to(tl.int64) * PAGE + at_n
        coming = tl.load(table_ptr + tl.minimum(page + 1, end - 1))
        seen = page * PAGE + at_n < length
        token = slot * KEYS + head
        at = token[:, None] * WIDTH + at_d[None, :]
        allowed = seen[None, :]
        if WINDOWED:
            allowed = allowed & (page * PAGE + at_n[None, :] > position[:, None] - window)
        k = load_page(keys_ptr + at, seen, wide, WIDE == WIDTH)
        score = page_scores(q, k, scaling, softcap, CAPPED, PRECISION)
        score = tl.where(allowed, score, -float("inf"))
        top, total, acc = add_page(
            score, values_ptr, token, seen, top, total, acc, WIDTH, WIDE, PRECISION
        )
    to = (part * count + row) * HEADS + query_head
    store_part(out_ptr, lse_ptr, to, top, total, acc, mine, wide, WIDTH, at_d)


@triton.jit(do_not_specialize=["count", "ahead"])
def suffix_kernel(
    qkv_ptr,
    keys_ptr,
    values_ptr,
    parts_ptr,
    lse_ptr,
    out_ptr,
    count_ptr,
    done_ptr,
    table_ptr,
    scaling,
    softcap,
    window,
    count,
    pages,
    ahead,
    WHOLE: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attention of one row to the tokens it has written. WHOLE: merged with what `prefix_kernel` left in one part; else to one part
    of them, left behind the `ahead` ones of that kernel, beside which it runs. Heads of a token lie side by side: theirs are
    neighbouring programs. Where the next page lies is read a page ahead, so that its keys can be on their way in time."""
    head, row, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
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
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total, acc = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
    oldest = 0
    if WINDOWED:
        oldest = tl.maximum(length - window, 0)
    start, end = oldest // PAGE, tl.cdiv(length, PAGE)
    if not WHOLE:
        start, end = share(start, end)
    table_ptr += row * pages
    coming = tl.load(table_ptr + tl.minimum(start, pages - 1))
    for page in range(start, end):
        slot = coming.to(tl.int64) * PAGE + at_n
        coming = tl.load(table_ptr + tl.minimum(page + 1, end - 1))
        seen = (page * PAGE + at_n < length) & (page * PAGE + at_n >= oldest)
        token = slot * KEYS + head
        at = token[:, None] * WIDTH + at_d[None, :]
        k = load_page(keys_ptr + at, seen, wide, WIDE == WIDTH)
        score = page_scores(q, k, scaling, softcap, CAPPED, PRECISION)
        score = tl.where(seen[None, :], score, -float("inf"))
        top, total, acc = add_page(
            score, values_ptr, token, seen, top, total, acc, WIDTH, WIDE, PRECISION
        )
    if EARLY:
        gdc_wait()
    if WHOLE:
        lse = tl.load(lse_ptr + state, mask=mine, other=-float("inf"))
        before_ptr = parts_ptr + state[:, None] * WIDTH + at_d[None, :]
        before = tl.load(before_ptr, mask=both, other=0.0)
        top, total, acc = add_part(lse, before, top, total, acc)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        to = out_ptr + state[:, None] * WIDTH + at_d[None, :]
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=both)
    else:
        state += (ahead + part) * count * HEADS
        store_part(parts_ptr, lse_ptr, state, top, total, acc, mine, wide, WIDTH, at_d)
