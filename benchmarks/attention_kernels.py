"""Variants of the kernels of attention in a decode step that are timed by `gpu_attention.py` and are no part of the package.

`soon_kernel` and `flat_kernel` take the place of `prefix_kernel` and `suffix_kernel` of `posttrain/engine/triton_kernels.py`, where
keys are not cut into parts and no window is slid; `prefetch_kernel` is new.
"""

# mypy: ignore-errors
# Triton reads these functions as its own language: its types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from posttrain.engine.triton_kernels import add_page, add_part, load_page, page_scores, store_part


@triton.jit
def add_scores(score, v, top, total, acc, PRECISION: tl.constexpr):
    """`add_page` with values that are there already."""
    higher = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    p, shrink = tl.exp(score - safe[:, None]), tl.exp(top - safe)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return higher, total * shrink + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["count"])
def soon_kernel(
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
    """`prefix_kernel` in one part, without a window. Where a prompt's first page lies is read while the kernel ahead runs."""
    tile, head = tl.program_id(0), tl.program_id(1)
    table_ptr += tile * pages
    rows = tl.load(tile_ptr + tiles + tile)
    first, length = tl.load(tile_ptr + tile), tl.load(tile_ptr + 2 * tiles + tile)
    coming = tl.load(table_ptr)
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
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total, acc = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
    end = tl.cdiv(length, PAGE)
    for page in range(0, end):
        slot = coming.to(tl.int64) * PAGE + at_n
        coming = tl.load(table_ptr + tl.minimum(page + 1, end - 1))
        seen = page * PAGE + at_n < length
        token = slot * KEYS + head
        at = token[:, None] * WIDTH + at_d[None, :]
        k = load_page(keys_ptr + at, seen, wide, WIDE == WIDTH)
        score = page_scores(q, k, scaling, softcap, CAPPED, PRECISION)
        score = tl.where(seen[None, :], score, -float("inf"))
        top, total, acc = add_page(score, values_ptr, token, seen, top, total, acc, WIDTH, WIDE, PRECISION)
    store_part(out_ptr, lse_ptr, row * HEADS + query_head, top, total, acc, mine, wide, WIDTH, at_d)


@triton.jit
def own_tokens(count_ptr, done_ptr, row, inside):
    """How many tokens these rows have written; 0 where they are done."""
    done = tl.load(done_ptr + row, mask=inside, other=1)
    return tl.where(done == 0, tl.load(count_ptr + row, mask=inside, other=0), 0).to(tl.int32)


@triton.jit
def load_block(source, coming, part, head, token, seen, wide, WIDTH: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
               BLOCK: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """A block of a page's keys or values of one head. By TMA also those that are not seen: what another row left there."""
    if TMA:
        return source.load([coming * PAGE + part * BLOCK, head * WIDTH])
    else:
        at = token[:, None] * WIDTH + tl.arange(0, WIDE)[None, :]
        return load_page(source + at, seen, wide, WIDE == WIDTH)


@triton.jit(do_not_specialize=["items", "pages", "each"])
def flat_kernel(
    qkv_ptr,
    keys,
    values,
    parts_ptr,
    lse_ptr,
    out_ptr,
    count_ptr,
    done_ptr,
    table_ptr,
    scaling,
    softcap,
    items,
    pages,
    each,
    EACH: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
    TMA: tl.constexpr,
):
    """What `suffix_kernel` gives as a WHOLE, by fewer programs that stay: each has `each` items, a row and a key head, and one loop
    over the blocks of all of them. The first blocks of an item are on their way while the item before it ends. The length of the
    item after, and where its first page lies, are read a block ahead. An item without tokens takes a block of which none is seen."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    GROUPED: tl.constexpr = HEADS // KEYS
    SPLIT: tl.constexpr = PAGE // BLOCK
    member, at_d, at_n = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, BLOCK)
    mine, wide = member < GROUPED, at_d < WIDTH
    both = mine[:, None] & wide[None, :]
    at_e = tl.arange(0, EACH)
    all_items = program + at_e * programs
    inside = (all_items < items) & (at_e < each)
    lengths = own_tokens(count_ptr, done_ptr, all_items // KEYS, inside)
    steps = tl.sum(tl.where(inside, tl.maximum(tl.cdiv(lengths, BLOCK), 1), 0), 0)
    length = tl.sum(tl.where(at_e == 0, lengths, 0), 0)
    following = tl.sum(tl.where(at_e == 1, lengths, 0), 0)
    item, block = program, 0
    coming = tl.load(table_ptr + (item // KEYS).to(tl.int64) * pages)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total, acc = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
    for _ in range(steps):
        row, head = (item // KEYS).to(tl.int64), item % KEYS
        query_head = head * GROUPED + member
        place = (row * (HEADS + 2 * KEYS) + query_head)[:, None] * WIDTH + at_d[None, :]
        q = tl.load(qkv_ptr + place, mask=both, other=0.0)
        seen = block * BLOCK + at_n < length
        last = (block + 1) * BLOCK >= length
        token = (coming.to(tl.int64) * PAGE + (block % SPLIT) * BLOCK + at_n) * KEYS + head
        k = load_block(keys, coming, block % SPLIT, head, token, seen, wide, WIDTH, WIDE, PAGE, BLOCK, TMA)
        v = load_block(values, coming, block % SPLIT, head, token, seen, wide, WIDTH, WIDE, PAGE, BLOCK, TMA)
        state = row * HEADS + query_head
        item = tl.where(last, item + programs, item)
        block = tl.where(last, 0, block + 1)
        length = tl.where(last, following, length)
        row = tl.minimum(item, items - 1) // KEYS
        coming = tl.load(table_ptr + row.to(tl.int64) * pages + block // SPLIT)
        after = item + programs
        following = own_tokens(count_ptr, done_ptr, after // KEYS, after < items)
        score = page_scores(q, k, scaling, softcap, CAPPED, PRECISION)
        score = tl.where(seen[None, :], score, -float("inf"))
        top, total, acc = add_scores(score, v, top, total, acc, PRECISION)
        if last:
            if EARLY:
                gdc_wait()
            lse = tl.load(lse_ptr + state, mask=mine, other=-float("inf"))
            to = state[:, None] * WIDTH + at_d[None, :]
            before = tl.load(parts_ptr + to, mask=both, other=0.0)
            top, total, acc = add_part(lse, before, top, total, acc)
            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty), mask=both)
            top = tl.full([ROWS], -float("inf"), tl.float32)
            total, acc = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)


@triton.jit
def to_cache(keys_ptr, values_ptr, page, SIZE: tl.constexpr):
    """Ask for a page's keys and values, of all heads, to be brought into the L2 cache. One thread asks."""
    ASK: tl.constexpr = """{
        .reg .pred one; .reg .u32 thread;
        mov.u32 thread, %tid.x; setp.eq.u32 one, thread, 0; mov.u32 $0, 0;
        @one cp.async.bulk.prefetch.L2.global [$1], $2;
    }"""
    at, size = page.to(tl.int64) * SIZE, SIZE * keys_ptr.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(ASK, "=r,l,r", [keys_ptr + at, size], tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise(ASK, "=r,l,r", [values_ptr + at, size], tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["tiles", "pages", "prompt_pages", "limit"])
def prefetch_kernel(
    keys_ptr,
    values_ptr,
    tile_ptr,
    prompt_table_ptr,
    count_ptr,
    done_ptr,
    table_ptr,
    capacity,
    tiles,
    pages,
    prompt_pages,
    limit,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Into the L2 cache: the first `limit` pages of a tile's prompt, by the first `tiles` programs; the first page of a row's own
    tokens, where it is full, by each of the others."""
    program = tl.program_id(0)
    if program < tiles:
        rows = tl.load(tile_ptr + capacity + program)
        length = tl.load(tile_ptr + 2 * capacity + program)
        count = tl.where(rows > 0, tl.minimum(tl.cdiv(length, PAGE), limit), 0)
        for page in range(count):
            at = program.to(tl.int64) * prompt_pages + page
            to_cache(keys_ptr, values_ptr, tl.load(prompt_table_ptr + at), SIZE)
    else:
        row = program - tiles
        if own_tokens(count_ptr, done_ptr, row, row >= 0) > PAGE:
            to_cache(keys_ptr, values_ptr, tl.load(table_ptr + row.to(tl.int64) * pages), SIZE)
