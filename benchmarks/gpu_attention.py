"""Times variants of attention in a decode step on one GPU, in one process: programs that stay, tables read early, keys and values
brought into the L2 cache beside the products ahead.

    python benchmarks/gpu_attention.py                          # errors, layer and whole
    python benchmarks/gpu_attention.py --parts whole
    TRITON_INTERPRET=1 python benchmarks/gpu_attention.py --parts interpret   # on a CPU: right for lengths around a page's

Prints one JSON line for each part. `WAYS` of the environment names those to time: their numbers in the list, "0,3,5".
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from gpu_cases import CASES, clock, graphed, lognormal_lengths, make_policy, make_requests, run_parts, settle  # noqa: E402

from posttrain.collect import generate_groups  # noqa: E402
from posttrain.engine import cuda, fused  # noqa: E402
from posttrain.engine.engine import Engine  # noqa: E402
from posttrain.engine.rows import PAGE, Rows, pages_of  # noqa: E402
from posttrain.models.attention import Rule  # noqa: E402
from posttrain.models.layers import Heads  # noqa: E402
from posttrain.ops.fused import power_of_two  # noqa: E402
from posttrain.ops.triton_training import tiles as descriptor  # noqa: E402

DEVICE = torch.device("cuda")
HEADS, RULE = Heads(14, 2, 64), Rule(0.125)
PROMPT, GROUP, HIDDEN = 256, 8, 896
EACH = 16  # items of a program that stays: so many or more, so that one kernel serves all numbers of rows


@dataclass(frozen=True)
class Flat:
    """Programs that stay: how many a multiprocessor, warps, stages, tokens a block, by TMA."""

    programs: int
    warps: int = 2
    stages: int = 3
    block: int = PAGE
    tma: bool = False


@dataclass(frozen=True)
class Way:
    flat: Flat | None = None
    soon: bool = False  # tables of prompts are read early
    ahead: int = 0  # MiB of a layer's keys and values that are brought into the L2 cache


ALL = [
    Way(),
    Way(soon=True),
    Way(ahead=16),
    Way(ahead=28),
    Way(Flat(2)),
    Way(Flat(3)),
    Way(Flat(4)),
    Way(Flat(3, stages=4)),
    Way(Flat(6, stages=2)),
    Way(Flat(4, warps=1)),
    Way(Flat(6, warps=1)),
    Way(Flat(4, stages=4, block=32)),
    Way(Flat(3, tma=True)),
    Way(Flat(4, tma=True)),
    Way(Flat(4, stages=4, block=32, tma=True)),
    Way(Flat(4), soon=True, ahead=16),
]
WRONG: list[str] = []
BEST: list[Way] = []  # those that `layer` found, for `whole`
CHOSEN = [ALL[int(n)] for n in os.environ.get("WAYS", "").split(",") if n] or ALL


def kernels() -> Any:
    import attention_kernels

    return attention_kernels


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def stay(items: int, keys: int, slots: int) -> tuple[int, int]:
    """(programs that stay, items of each at most): as many for each as can be, neighbouring heads in neighbouring programs."""
    each = -(-items // slots)
    return -(-items // (each * keys)) * keys, each


class Attention:
    """`fused.attend_pages` in one of the ways; as it is where keys are cut into parts, a window slides, or heads are wide."""

    def __init__(self, way: Way, slots: int = 0):
        """`slots`: programs that fit the device, in place of what the way says."""
        self.way, self.slots, self.launched, self.plain = way, slots, set[str](), fused.attend_pages

    def __call__(
        self, query: Tensor, store: tuple[Tensor, Tensor], rows: Rows, heads: Heads, rule: Rule, tiles: int, queries: int
    ) -> Tensor:
        count, device, wide = len(query), query.device, max(16, power_of_two(heads.width))
        whole = fused.parts(count * heads.keys, rows.pages) == 1 and rule.sliding_window is None and wide <= 64
        if not whole or not (self.way.flat or self.way.soon):
            return self.plain(query, store, rows, heads, rule, tiles, queries)
        found = torch.empty(1, *query.shape, dtype=torch.float32, device=device)
        lse = torch.empty(1, count, heads.heads, dtype=torch.float32, device=device)
        out = torch.empty(query.shape, dtype=query.dtype, device=device)
        limits, early = (rule.scaling, rule.softcap or 1.0), fused._hopper(device)
        capped, precision = rule.softcap is not None, "ieee" if query.dtype == torch.float32 else "tf32"
        shape, grouped = (heads.heads, heads.keys, heads.width, wide), max(16, power_of_two(heads.grouped))
        options: dict[str, Any] = {"num_stages": 3, "launch_pdl": early} if device.type == "cuda" else {}
        flags = (PAGE, False, capped, precision, early)
        ours, theirs = kernels(), fused._triton()
        prompts = (rows.tile, rows.prompt_table, rows["position"], *limits, 0, count, rows.capacity, rows.prompt_pages)
        prefix = ours.soon_kernel if self.way.soon else theirs.prefix_kernel
        prefix[(tiles, heads.keys, 1)](query, *store, found, lse, *prompts, *shape, queries, *flags, **options)
        written, state = (rows["count"], rows["done"], rows.table), (found, lse, out)
        items, flat = count * heads.keys, self.way.flat
        slots = self.slots or multiprocessors(device) * (flat.programs if flat else 0)
        programs, each = stay(items, heads.keys, slots) if flat else (0, 1)
        if flat is None or each < 2:
            self.launched.add("suffix")
            options |= {"num_warps": 2} if device.type == "cuda" else {}
            own = (*limits, 0, count, rows.pages, 1, True, *shape, grouped, *flags)
            theirs.suffix_kernel[(heads.keys, count, 1)](query, *store, *state, *written, *own, **options)
            return out
        self.launched.add("flat")
        options |= {"num_warps": flat.warps, "num_stages": flat.stages} if device.type == "cuda" else {}
        pool = [descriptor(side.flatten(1), flat.block, wide) for side in store] if flat.tma else store
        sizes = (items, rows.pages, each, max(EACH, power_of_two(each)), *shape, grouped, PAGE, capped, precision, early)
        ours.flat_kernel[(programs,)](query, *pool, *state, *written, *limits, *sizes, flat.block, flat.tma, **options)
        return out


class Prefetch:
    """Brings keys and values into the L2 cache on a second stream, beside what is launched until `end`: those of prompts, then the
    first pages of the first rows. Prompts of four pages are assumed."""

    def __init__(self, megabytes: int, store: tuple[Tensor, Tensor], rows: Rows, heads: Heads, tiles: int, count: int):
        device, size = store[0].device, PAGE * heads.keys * heads.width
        self.current, self.side = torch.cuda.current_stream(device), fused._side_stream(device)
        self.side.wait_event(self.current.record_event())
        pages = (megabytes << 20) // (2 * size * store[0].dtype.itemsize)
        limit = max(1, min(rows.prompt_pages, 4, pages // tiles))
        own = max(0, min(count, pages - tiles * limit))
        tables = (rows.tile, rows.prompt_table, rows["count"], rows["done"], rows.table, rows.capacity)
        with torch.cuda.stream(self.side):
            grid, sizes = (tiles + own,), (tiles, rows.pages, rows.prompt_pages, limit, size, PAGE)
            kernels().prefetch_kernel[grid](*store, *tables, *sizes, num_warps=1)
        self.done = self.side.record_event()

    def end(self) -> None:
        self.current.wait_event(self.done)


@contextmanager
def engine_in(way: Way) -> Iterator[Attention]:
    """The engine's decode steps in one of the ways. Graphs are those of the way they were captured in."""
    step, call, attend = cuda.CUDABackend._step, fused.Layer.__call__, Attention(way)
    now: list[Any] = []

    def stepped(backend: Any, size: int, tiles: int) -> None:
        now[:] = [backend.state, tiles, size] if way.ahead and size > cuda.FEW else []
        step(backend, size, tiles)
        now.clear()

    def called(layer: Any, x: Tensor, rope: Any, position: Tensor, slot: Tensor, store: Any, inner: Any, *rest: Any) -> None:
        if not now:
            call(layer, x, rope, position, slot, store, inner, *rest)
            return
        state, tiles, size = now
        begun = Prefetch(way.ahead, store, state, layer.heads, tiles, size)

        def attended(*given: Any) -> Tensor:
            out: Tensor = inner(*given)
            begun.end()
            return out

        call(layer, x, rope, position, slot, store, attended, *rest)

    with patched(cuda.CUDABackend, _step=stepped), patched(fused.Layer, __call__=called), patched(cuda, attend_pages=attend):
        yield attend


@contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    old = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(owner, name, value)


def made_rows(count: Tensor, done: Tensor, prompts: list[tuple[int, int, int]], device: torch.device) -> tuple[Rows, int]:
    """Rows with so many own tokens, with pages in random order, and prompts of (first row, rows, length); and the pool's pages."""
    number, most = len(count), max(pages_of(length) for *_, length in prompts)
    rows = Rows(number, int(count.max()) // PAGE + 1, max(32, most), 1, device)
    pool = number * rows.pages + len(prompts) * most + 1
    order = (torch.randperm(pool - 1) + 1).int()
    rows.table.copy_(order[: number * rows.pages].view(number, -1))
    rows.prompt_table[: len(prompts), :most].copy_(order[number * rows.pages :].view(-1, most))
    rows.tile[:, : len(prompts)].copy_(torch.tensor(prompts).t())
    length = torch.cat([torch.full((rows_of,), length) for _, rows_of, length in prompts])
    rows["count"].copy_(count)
    rows["position"].copy_(length + count - 1)
    rows["done"].copy_(done)
    last = (count - 1).clamp(min=0)
    own = rows.table.cpu().gather(1, (last // PAGE)[:, None])[:, 0].long()
    rows["slot"].copy_(torch.where((done == 0) & (count > 0), own * PAGE + last % PAGE, 0))
    return rows, pool


def exact(
    query: Tensor, store: tuple[Tensor, Tensor], rows: Rows, heads: Heads, rule: Rule, tiles: int, which: list[int]
) -> Tensor:
    """The attention of these rows in plain torch and float32."""
    found = []
    table, prompt, tile = rows.table.tolist(), rows.prompt_table.tolist(), rows.tile[:, :tiles].t().tolist()
    counts, done = rows["count"].tolist(), rows["done"].tolist()
    for r in which:
        number, length = next((n, size) for n, (first, rows_of, size) in enumerate(tile) if first <= r < first + rows_of)
        own = 0 if done[r] else counts[r]
        slots = [prompt[number][a // PAGE] * PAGE + a % PAGE for a in range(length)]
        slots += [table[r][a // PAGE] * PAGE + a % PAGE for a in range(own)]
        key, value = (side[slots].float().repeat_interleave(heads.grouped, 1) for side in store)
        score = torch.einsum("hd,lhd->hl", query[r].float(), key) * rule.scaling
        score = rule.softcap * torch.tanh(score / rule.softcap) if rule.softcap else score
        found.append(torch.einsum("hl,lhd->hd", score.softmax(-1), value))
    return torch.stack(found)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def right(device: torch.device, ways: list[Way], dtype: torch.dtype, limit: float, heads: Heads, rule: Rule) -> dict[str, Any]:
    """How far each way is from plain torch and from the present kernels, at lengths around a page's, of rows that are done or have
    no tokens."""
    torch.manual_seed(0)
    count = torch.tensor([1, 64, 65, 130, 0, 200, 2, 63, 128, 129, 256, 127, 1, 1, 300, 0])
    done = torch.tensor([0] * 6 + [1, 0, 2] + [0] * 6 + [3])
    rows, pool = made_rows(count, done, [(0, 4, 150), (4, 5, 3), (9, 7, 64)], device)
    keys, values = (torch.randn(pool * PAGE, heads.keys, heads.width, device=device).to(dtype) for _ in range(2))
    mixed = torch.randn(len(count), heads.heads + 2 * heads.keys, heads.width, device=device).to(dtype)
    given = (mixed[:, : heads.heads], (keys, values), rows, heads, rule, 4)
    expected = exact(*given, list(range(len(count))))
    compared, queries = Compared(limit), fused.tile_rows(heads, 7)[1]
    with patched(fused, PROGRAMS=1):
        for way, slots in product(ways, (2, 5)):
            attend = Attention(way, slots)
            compared(f"{way}, {slots}", attend, lambda a=attend: a(*given, queries), expected)
    return compared.found


class Compared:
    """Errors against what is right, differences from the first, and what was launched."""

    def __init__(self, limit: float):
        self.limit, self.found = limit, dict[str, Any]()
        self.first: Tensor | None = None

    def __call__(self, name: str, attend: Attention, work: Any, expected: Tensor) -> None:
        try:
            out = work()
            self.first = out if self.first is None else self.first
            off = error(out, expected)
            self.found[name] = [off, float((out - self.first).abs().max()), *attend.launched]
            if not off < self.limit:
                WRONG.append(f"{name}: {off}")
            assert not attend.way.flat or "flat" in attend.launched, "another kernel ran"
        except Exception as problem:
            self.found[name] = f"{type(problem).__name__}: {problem}"[:300]
            WRONG.append(f"{name}: {self.found[name]}")


def interpret() -> dict[str, Any]:
    """By Triton's interpreter, whose products in bfloat16 are wrong."""
    device = torch.device("cpu")
    theirs = __import__("posttrain.engine.triton_kernels", fromlist=[""])
    fused._triton = lambda: Uncompiled(theirs)
    ways = [way for n, way in enumerate(ALL) if n in (0, 1, 5, 11, 12, 14, 15)]
    found = {}
    for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 1e-3)):
        for heads in (HEADS, Heads(9, 3, 64), Heads(4, 1, 32), Heads(4, 2, 40)):
            for rule in (RULE, Rule(0.2, softcap=3.0)):
                some = [way for way in ways if not (way.flat and way.flat.tma and heads.width == 40)]
                found[f"{dtype}, {heads}, {rule}"] = right(device, some, dtype, limit, heads, rule)
    assert not WRONG, WRONG
    return found


class Uncompiled:
    """A module's kernels without options of the compiler."""

    def __init__(self, module: Any):
        self.module = module

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self.module, name)

        class Launch:
            def __getitem__(self, grid: Any) -> Any:
                return lambda *inputs, **_: kernel[grid](*inputs)

        return Launch()


def errors() -> dict[str, Any]:
    """The same on the GPU, for enough rows that programs stay."""
    found: dict[str, Any] = right(DEVICE, CHOSEN, torch.bfloat16, 1e-2, HEADS, RULE)
    torch.manual_seed(0)
    number, which = 1024, list(range(0, 1024, 37))
    count = torch.randint(0, 400, (number,))
    count[:6] = torch.tensor([0, 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE])
    done = (torch.rand(number) < 0.1).long()
    for dtype, limit in ((torch.bfloat16, 1e-2), (torch.float32, 1e-5)):
        one, compared = Layer(count, done, dtype, 1), Compared(limit)
        ways = [way for way in CHOSEN if dtype == torch.bfloat16 or way in (Way(), Way(Flat(3)), Way(Flat(3, tma=True)))]
        # the last token's key and value are stored by the kernel ahead, and the same each time
        one(Attention(Way()))
        expected = exact(one.query, one.stores[0], one.rows, HEADS, RULE, one.tiles, which)
        for way in ways:
            attend = Attention(way)
            work = lambda a=attend, w=way, one=one: one(a, w.ahead)[which]  # noqa: E731
            compared(f"{dtype}, {way}", attend, work, expected)
        found |= compared.found
    for name, values in found.items():
        print(name, values, flush=True)
    assert not WRONG, WRONG
    return found


class Layer:
    """The product, the rotation and the attention of one layer, with more keys and values than the cache holds."""

    def __init__(self, count: Tensor, done: Tensor, dtype: torch.dtype, copies: int):
        device, number = DEVICE, len(count)
        prompts = [(first, min(GROUP, number - first), PROMPT) for first in range(0, number, GROUP)]
        self.rows, pool = made_rows(count, done, prompts, device)
        self.stores: list[tuple[Tensor, Tensor]] = []
        for _ in range(copies):
            keys, values = torch.randn(2, pool * PAGE, HEADS.keys, HEADS.width, device=device, dtype=dtype)
            self.stores.append((keys, values))
        heads = HEADS.heads + 2 * HEADS.keys
        self.x, self.tiles = torch.randn(number, HIDDEN, device=device, dtype=dtype), power_of_two(len(prompts))
        self.weight = torch.randn(heads * HEADS.width, HIDDEN, device=device, dtype=dtype) * HIDDEN**-0.5
        angle = torch.arange(2048, device=device)[:, None] * (1e4 ** -(torch.arange(32, device=device) / 32)).repeat(2)
        self.rope, self.queries, self.turn = (angle.cos().to(dtype), angle.sin().to(dtype)), fused.tile_rows(HEADS, GROUP)[1], 0

    def __call__(self, attend: Attention, ahead: int = 0) -> Tensor:
        store = self.stores[self.turn % len(self.stores)]
        self.turn += 1
        begun = Prefetch(ahead, store, self.rows, HEADS, self.tiles, len(self.x)) if ahead else None
        qkv = self.x @ self.weight.t()
        rows = self.rows
        fused.rotate_store(qkv, HEADS, self.rope, rows["position"], rows["slot"], store, None)
        self.query = qkv.view(len(qkv), -1, HEADS.width)[:, : HEADS.heads]
        out = attend(self.query, store, rows, HEADS, RULE, self.tiles, self.queries)
        if begun is not None:
            begun.end()
        return out


def layer() -> dict[str, Any]:
    """Microseconds of a layer's product, rotation and attention, and of the first two alone, after prompts of 256 tokens."""
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    mixed = torch.from_numpy(lognormal_lengths(CASES["a"], 256, 1024))
    shapes = [(rows, own, torch.full((rows,), own)) for rows in (1024, 512, 256, 128, 64) for own in (64, 256, 300, 512)]
    for number, own, count in [(1024, "lognormal", mixed), *shapes]:
        stored = int(count.sum()) * HEADS.keys * HEADS.width * 4 + -(-number // GROUP) * PROMPT * HEADS.keys * HEADS.width * 4
        one = Layer(count, torch.zeros(number, dtype=torch.long), torch.bfloat16, max(2, min(48, (200 << 20) // stored)))
        name = f"{number} x {own}"
        alone = graphed(lambda one=one: one(lambda *_: None))
        found[name] = {"bytes": stored, "product and rotation": alone}
        for way in CHOSEN:
            if number <= cuda.FEW and way.ahead:
                continue
            attend = Attention(way)
            try:
                times = [graphed(lambda a=attend, w=way, one=one: one(a, w.ahead)) for _ in range(3)]
                found[name][str(way)] = statistics.median(times)
            except Exception as problem:
                found[name][str(way)] = str(problem)[:200]
        best = sorted((t, w) for w, t in found[name].items() if w.startswith("Way") and isinstance(t, float))
        print(f"{name}: product and rotation {alone:.1f}", *(f"{t:.1f} {w}" for t, w in best[:4]), sep="; ", flush=True)
        print(f"    as it is: {found[name].get(str(Way()))}", flush=True)
        del one
        torch.cuda.empty_cache()
    many = [values for name, values in found.items() if name.startswith("1024") and not name.endswith(" 64")]
    means = {way: [values[str(way)] for values in many] for way in CHOSEN}
    ranked = sorted((sum(times), n) for n, times in enumerate(means.values()) if all(isinstance(t, float) for t in times))
    ways = [CHOSEN[n] for _, n in ranked if not any(str(CHOSEN[n]) in name for name in WRONG)]
    flat = [way for way in ways if way.flat and not way.ahead][:2]
    early = [way for way in ways if way.ahead and not way.flat][:1]
    BEST[:] = [Way(), *flat, *early, *(replace(way, soon=True, ahead=early[0].ahead) for way in flat[:1] if early)]
    return found


@cache
def made_engine() -> Engine:
    """That has generated once, and has all memory that case a needs."""
    engine = Engine(make_policy(CASES["a"]), max_rows=CASES["a"].rows)
    list(generate_groups(engine, make_requests(CASES["a"], 0)))
    return engine


def lognormal() -> dict[str, Any]:
    """Tokens a second of case a with lognormal lengths. Every way captures its graphs first."""
    from gpu_generate import backend_of, run_lognormal

    engine, found = made_engine(), {}
    for way in BEST or CHOSEN:
        with engine_in(way):
            backend_of(engine.scheduler)._forget_graphs()
            found[str(way)] = run_lognormal(engine, CASES["a"], 3)
        print(way, found[str(way)], flush=True)
    backend_of(engine.scheduler)._forget_graphs()
    return found


def whole() -> dict[str, Any]:
    """Tokens a second of case a in each way, in turn, and log-probs against a float32 forward."""
    from gpu_generate import backend_of, gate

    case, repeats, engine, ways = CASES["a"], int(os.environ.get("REPEATS", "5")), made_engine(), BEST or CHOSEN
    backend = backend_of(engine.scheduler)
    places = backend.stores[0][0].data_ptr(), backend.state
    graphs: dict[Way, Any] = {way: {} for way in ways}
    seconds: dict[Way, list[float]] = {way: [] for way in ways}
    found: dict[str, Any] = {}
    for repeat in range(repeats + 1):
        for way in ways:
            with engine_in(way) as attend:
                backend.graphs = graphs[way]
                requests = make_requests(case, 1 + repeat)
                began = clock()
                answers = list(generate_groups(engine, requests))
                seconds[way].append(clock() - began)
            if repeat == 0:
                checked = gate(case, engine, requests, answers)
                found[str(way)] = {"logprob_difference": checked, "launched": sorted(attend.launched)}
                settle()
    assert places == (backend.stores[0][0].data_ptr(), backend.state), "the pool has moved: graphs read what is gone"
    for way in ways:
        times = seconds[way][1:]
        middle = statistics.median(times)
        rates = {"tokens_s": case.rows * case.new / middle, "seconds": middle, "fastest": min(times), "slowest": max(times)}
        found[str(way)] |= rates
        print(f"{way}: {rates['tokens_s']:,.0f} tokens/s, {min(times):.3f} to {max(times):.3f} s", flush=True)
    return found


PARTS = {"errors": errors, "layer": layer, "whole": whole, "lognormal": lognormal, "interpret": interpret}


if __name__ == "__main__":
    if "--parts" not in " ".join(sys.argv):
        sys.argv += ["--parts", "errors,layer,whole"]
    run_parts(PARTS, __doc__)
