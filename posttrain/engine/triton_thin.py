"""The CUDA kernels of a step of few rows, in Triton. `posttrain/engine/thin.py` calls them. EARLY is as in triton_kernels.py."""

# mypy: ignore-errors
# Triton reads these functions as its own language: its types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from posttrain.engine.triton_fp8 import activated
from posttrain.engine.triton_kernels import add_page, add_part, load_page, page_scores, store_part


@triton.jit
def prefetch(ptr):
    """Ask for lines of memory to be brought into the L2 cache."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [ptr], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def row_factors(x_ptr, at, there, epsilon, DEPTH: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """1 / sqrt(mean(x^2) + epsilon) of each row."""
    squares = tl.zeros([BM, BK], tl.float32)
    for k in tl.static_range(0, DEPTH, BK):
        x = tl.load(x_ptr + at + k, mask=there, other=0.0).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, 1) / DEPTH + epsilon)[:, None]


@triton.jit(do_not_specialize=["rows"])
def thin_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    rows,
    epsilon,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    NORM: tl.constexpr,
    SHIFTED: tl.constexpr,
    GATED: tl.constexpr,
    TANH: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y = x W^T [+ bias] of few rows, [of x normalised as `add_norm_kernel` does,] [added to `out`]; GATED: act(gate) * up, with the
    weight of up below that of the gate, both rounded first. The inner dimension is cut into SPLIT parts, which the program that comes
    last adds up in their order. EARLY: the weights are on their way to the L2 cache while the kernel ahead still computes x."""
    tile, part = tl.program_id(0), tl.program_id(1)
    at_m, at_n, at_k = tl.arange(0, BM), tile * BN + tl.arange(0, BN), tl.arange(0, BK)
    BLOCKS: tl.constexpr = (DEPTH // BK + SPLIT - 1) // SPLIT
    first = part * BLOCKS * BK
    end = tl.minimum(first + BLOCKS * BK, DEPTH)
    there = (at_m < rows)[:, None]
    weight_ptr += at_n[:, None] * DEPTH
    narrow = x_ptr.dtype.element_ty
    if EARLY:
        gdc_launch_dependents()
        line = tl.arange(0, BK // 64)[None, :] * 64
        for k in range(first, end, BK):
            prefetch(weight_ptr + k + line)
            if GATED:
                prefetch(weight_ptr + WIDTH * DEPTH + k + line)
        gdc_wait()
    at = at_m[:, None] * DEPTH + at_k[None, :]
    if NORM:
        factor = row_factors(x_ptr, at, there, epsilon, DEPTH, BM, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for k in range(first, end, BK):
        x = tl.load(x_ptr + at + k, mask=there, other=0.0)
        if NORM:
            scale = tl.load(norm_ptr + k + at_k).to(tl.float32)[None, :]
            if SHIFTED:
                x = (x.to(tl.float32) * factor * (1.0 + scale)).to(narrow)
            else:
                x = ((x.to(tl.float32) * factor).to(narrow).to(tl.float32) * scale).to(narrow)
        acc = tl.dot(x, tl.trans(tl.load(weight_ptr + k + at_k[None, :])), acc)
        if GATED:
            w = tl.load(weight_ptr + WIDTH * DEPTH + k + at_k[None, :])
            up = tl.dot(x, tl.trans(w), up)
    to = at_m[:, None] * WIDTH + at_n[None, :]
    if GATED:
        acc = activated(acc.to(narrow).to(tl.float32), TANH).to(narrow).to(tl.float32)
        acc = acc * up.to(narrow).to(tl.float32)
    if BIAS:
        acc += tl.load(bias_ptr + at_n).to(tl.float32)[None, :]
    last = True
    if SPLIT > 1:
        tl.store(parts_ptr + part * rows * WIDTH + to, acc, mask=there)
        tl.debug_barrier()
        last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
    if last:
        if SPLIT > 1:
            acc = tl.zeros([BM, BN], tl.float32)
            for one in tl.static_range(SPLIT):
                other = parts_ptr + one * rows * WIDTH + to
                acc += tl.load(other, mask=there, other=0.0, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
        if ADD:
            acc += tl.load(out_ptr + to, mask=there, other=0.0).to(tl.float32)
        tl.store(out_ptr + to, acc.to(narrow), mask=there)


@triton.jit
def page_at(table_ptr, prompt_ptr, number, before):
    """Where a page lies of those of a prompt, `before` in number, and then of a row's own tokens."""
    own = number >= before
    page = tl.load(table_ptr + number - before, mask=own, other=0)
    return page + tl.load(prompt_ptr + number, mask=number < before, other=0)


@triton.jit(do_not_specialize=["count", "tiles", "shown"])
def few_kernel(
    qkv_ptr,
    keys_ptr,
    values_ptr,
    parts_ptr,
    lse_ptr,
    out_ptr,
    arrived_ptr,
    tile_ptr,
    prompt_table_ptr,
    count_ptr,
    done_ptr,
    table_ptr,
    scaling,
    softcap,
    count,
    tiles,
    prompt_pages,
    pages,
    shown,
    TILES: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attention of one of few rows to its prompt and to the tokens it has written, of which each program takes MIN_PAGES pages or more;
    the one that comes last merges them, in their order. EARLY: they are on their way to the L2 cache while the kernel ahead still
    computes the query. Which pages these are does not depend on it."""
    head, row, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    GROUPED: tl.constexpr = HEADS // KEYS
    member, at_d, at_n = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, PAGE)
    mine, wide = member < GROUPED, at_d < WIDTH
    at_t = tl.arange(0, TILES)
    there = tl.load(tile_ptr + tiles + at_t, mask=at_t < shown, other=0) > 0
    begins = there & (tl.load(tile_ptr + at_t, mask=there, other=0) <= row)
    tile = tl.maximum(tl.sum(begins.to(tl.int32), 0) - 1, 0)
    prompt, length = tl.load(tile_ptr + 2 * tiles + tile), tl.load(count_ptr + row).to(tl.int32)
    if tl.load(done_ptr + row) != 0:
        prompt, length = 0, 0
    table_ptr += row * pages
    prompt_table_ptr += tile * prompt_pages
    before = tl.cdiv(prompt, PAGE)
    every = before + tl.cdiv(length, PAGE)
    each = tl.maximum(tl.cdiv(every, tl.num_programs(2)), MIN_PAGES)
    used = tl.maximum(tl.cdiv(every, each), 1)
    start = part * each
    end = tl.minimum(start + each, every)
    if EARLY:
        gdc_launch_dependents()
        for number in range(start, end):
            page = page_at(table_ptr, prompt_table_ptr, number, before).to(tl.int64)
            token = ((page * PAGE + at_n) * KEYS + head) * WIDTH
            for d in tl.static_range(0, WIDTH, 64):
                prefetch(keys_ptr + token + d)
                prefetch(values_ptr + token + d)
        gdc_wait()
    if part >= used:
        return
    query_head = head * GROUPED + member
    both = mine[:, None] & wide[None, :]
    place = (row * (HEADS + 2 * KEYS) + query_head)[:, None] * WIDTH + at_d[None, :]
    q = tl.load(qkv_ptr + place, mask=both, other=0.0)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total, acc = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
    coming = page_at(table_ptr, prompt_table_ptr, tl.minimum(start, every), before)
    for number in range(start, end):
        slot = coming.to(tl.int64) * PAGE + at_n
        coming = page_at(table_ptr, prompt_table_ptr, tl.minimum(number + 1, end - 1), before)
        first = tl.where(number < before, number, number - before) * PAGE
        seen = first + at_n < tl.where(number < before, prompt, length)
        token = slot * KEYS + head
        at = token[:, None] * WIDTH + at_d[None, :]
        k = load_page(keys_ptr + at, seen, wide, WIDE == WIDTH)
        score = page_scores(q, k, scaling, softcap, CAPPED, PRECISION)
        score = tl.where(seen[None, :], score, -float("inf"))
        top, total, acc = add_page(
            score, values_ptr, token, seen, top, total, acc, WIDTH, WIDE, PRECISION
        )
    state = row * HEADS + query_head
    last = True
    if used > 1:
        to = state + part * count * HEADS
        store_part(parts_ptr, lse_ptr, to, top, total, acc, mine, wide, WIDTH, at_d)
        tl.debug_barrier()
        last = tl.atomic_add(arrived_ptr + row * KEYS + head, 1, sem="acq_rel") == used - 1
    if last:
        if used > 1:
            tl.store(arrived_ptr + row * KEYS + head, 0)
            top = tl.full([ROWS], -float("inf"), tl.float32)
            total, acc = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
            for one in range(0, used):
                at = state + one * count * HEADS
                lse = tl.load(lse_ptr + at, mask=mine, other=-float("inf"), cache_modifier=".cg")
                other = parts_ptr + at[:, None] * WIDTH + at_d[None, :]
                other = tl.load(other, mask=both, other=0.0, cache_modifier=".cg")
                top, total, acc = add_part(lse, other, top, total, acc)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        to = out_ptr + state[:, None] * WIDTH + at_d[None, :]
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=both)
