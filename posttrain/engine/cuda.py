"""The CUDA backend: a paged KV cache, with decode steps captured in CUDA graphs.

One graph holds a whole step, from embedding to the sampled id, its log-prob, the length and the done flag; the host looks after a burst
of steps. There is a graph for each bucket of rows and tiles, so that the long tail of a batch runs at its own size. Rows of one prompt
stay neighbours, in order: it is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.engine.fused import Fused, advance, attend_pages, fused, sample, tile_rows
from posttrain.engine.rows import INTEGERS, PAGE, Drawn, Pages, Rows, RowTable, pages_of, portions
from posttrain.engine.scheduler import Work
from posttrain.errors import require
from posttrain.models.attention import Rule, attend_packed
from posttrain.models.policy import Policy
from posttrain.ops.device import MARGIN, device_bytes, free_bytes, sent, usable_bytes
from posttrain.ops.fused import power_of_two

PREFILL_TOKENS = 1 << 15  # prompt tokens computed in one forward
BURST = 64  # max steps between two looks of the host
STOPPABLE = 16  # the same where a response may end at any of them
LOOK = 2  # steps of a burst that the device still has when the host looks which rows are done
LAST = 4  # steps of the last burst: while it is computed, the host writes down those before
FEW = 128  # rows; a step of fewer takes hardly less time
PROMPT_PAGES = 32  # room from the start for the pages of what is before a response
# the ids of a sequence, their slots, and how many of them are stored already
Stored = tuple[np.ndarray, np.ndarray, int]
AHEAD = 1024  # tokens of a response that the pool has room for from the start, where responses may get that far


def slots_of(pages: np.ndarray, length: int) -> np.ndarray:
    """The slots in the pool of the tokens of a sequence that begins with the first of these pages."""
    at = np.arange(length)
    return pages[at // PAGE].astype(np.int64) * PAGE + at % PAGE


def bucket(count: int, capacity: int) -> int:
    """The size of the graph for `count` rows: a multiple of an eighth of the next power of two, at most `capacity`.

    >>> [bucket(n, 1000) for n in (1, 3, 17, 130, 700, 999)]
    [1, 4, 20, 160, 768, 1000]
    """
    power = 1 << max(0, count - 1).bit_length()
    grain = max(1, power // 8) if count > 4 else power
    return min(-(-count // grain) * grain, capacity)


@dataclass(slots=True, eq=False)
class KeptPages:
    """The cache of a session: a prompt, which others may share, and pages of its own."""

    number: int
    length: int
    prompt: int
    slots: np.ndarray  # the slots of its tokens
    own: np.ndarray


class CUDABackend:
    """The pool, the rows and the graphs, which persist from burst to burst and from call to call."""

    bursts = 1

    def __init__(self, policy: Policy, decoder: Fused):
        self.policy, self.decoder, self.rows = policy, decoder, RowTable()
        self.device = policy.device
        size = policy.head.weight_VH.shape[0]
        self.stop_V = torch.zeros(size, dtype=torch.int64, device=self.device)
        self.stop_V[list(policy.stop_ids)] = 1
        self.stoppable = bool(policy.stop_ids)
        self.graphs: dict[tuple[int, int, int, bool], torch.cuda.CUDAGraph] = {}
        self._clear()

    def _clear(self) -> None:
        self.stores: list[tuple[Tensor, Tensor]] = []
        self.choices: Tensor | None = None  # the routers' choices, by slot, if recorded
        self.pages = Pages(1)
        self.state: Rows | None = None
        self._forget_graphs()
        self.table, self.prompt_table = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.int32)
        self.prompts: dict[int, tuple[int, np.ndarray]] = {}  # references, pages
        self.numbers = count()
        # pages of all live rows at their longest, of their prompts, and of kept sessions
        self.promised = 0
        # the device does not know yet; rows and tiles it knew last, and where it has each live row
        self.changed, self.shape, self.order = True, (0, 0), np.arange(0)
        self.drawn: list[Drawn] = []  # the results of the last burst, and of the one before
        # the device's row of each host row in an earlier burst that is not collected yet
        self.over: np.ndarray | None = None

    @property
    def prefill_tokens(self) -> int:
        """As many tokens as fit through the widest layer within the memory margin that the cache leaves free."""
        width = max(sum(product.projection.sizes) for product in self.decoder.products)
        if self.device.type != "cuda":
            return PREFILL_TOKENS
        size = 2 * width * self.policy.dtype.itemsize
        room = min(MARGIN * device_bytes(self.device), free_bytes(self.device)) / size
        return min(PREFILL_TOKENS, max(PAGE, int(room)))

    @property
    def page_bytes(self) -> int:
        return sum(
            2 * PAGE * h.keys * h.width * self.policy.dtype.itemsize for h in self.decoder.heads
        )

    def room(self) -> int:
        """How many pages fit into the memory that is left, including those of the pool."""
        return int(usable_bytes(self.device)) // self.page_bytes + self.pages.pages

    def check_room(self, works: Sequence[Work]) -> None:
        """Raise an error for a work that would not fit alone at its full length; one page is reserved."""
        if not works:
            return
        need, room = [work.pages for work in works], self.room()
        worst = works[int(np.argmax(need))]
        size, limit = len(worst.requests), max(worst.limits)
        left = max(0, room - 1 - pages_of(len(worst.ids)))
        fewer = f", or the group to {group}" if (group := left // pages_of(limit)) else ""
        fitting = f"lower max_new_tokens to {left // size * PAGE}{fewer}"
        full = "the device's memory is taken; end what else runs on it, or choose another one or shorter prompts"
        require(
            max(need) < room,
            f"a group of {size} responses of up to {limit} tokens needs {max(need) * self.page_bytes / 2**30:.3g} GiB "
            f"of cache, and there is room for {room * self.page_bytes / 2**30:.3g} GiB: {fitting if left >= size else full}",
        )

    def prepare(self, works: Sequence[Work], rows: int, fresh: bool) -> None:
        """Read the current weights if `fresh`, and make room for the works' rows, pages and positions."""
        if fresh:
            self.refresh()
            self.room_pages, self.capacity = self.room(), 0
            self.truncated, self.endless, self.largest = False, True, 1
        if not works:
            return
        # many requests have the same one
        settings = {id(r.sampling): r.sampling for work in works for r in work.requests}.values()
        self.truncated |= any(s.truncated for s in settings)
        ends = self.stoppable and any(s.min_new_tokens < s.max_new_tokens for s in settings)
        self.endless &= not ends
        self.largest = max(self.largest, *(len(work.requests) for work in works))
        self.tile_size, self.queries = tile_rows(self.decoder.heads[0], self.largest)
        self.capacity = max(self.capacity, rows)
        rows_R = np.cumsum([len(w.requests) for w in works])
        pages_R = np.cumsum([w.pages for w in works])
        fitting = (rows_R <= self.capacity) & (pages_R < self.room_pages)
        begun = works[: int(fitting.sum())]
        limit_R = np.array([limit for w in begun for limit in w.limits], np.int64)
        ahead_R = np.minimum(limit_R, [done + AHEAD for w in begun for done in w.done])
        pool = 1 + int((-(-ahead_R // PAGE)).sum()) + sum(pages_of(len(w.ids)) for w in begun)
        pages = pages_of(max(max(w.limits) for w in works))
        positions = max(len(w.ids) + max(w.limits) for w in works)
        # a history grows from turn to turn: by powers of two, so that graphs are seldom captured anew
        prompt_pages = max(PROMPT_PAGES, power_of_two(pages_of(max(len(w.ids) for w in works))))
        self._allocate(pages, prompt_pages, pool, positions)

    def refresh(self) -> None:
        if self.decoder.places == self.decoder.addresses():
            self.decoder.refresh()
            return
        # parameters were moved: captured graphs read the old
        decoder, reason = fused(self.policy, self.decoder.precision)
        require(decoder is not None, f"the model cannot be decoded in pages any more: {reason}")
        assert decoder is not None
        if self.decoder.rope is not None:
            decoder.ensure_rope_table(len(self.decoder.rope[0]))
        self.decoder = decoder
        self._forget_graphs()

    def _allocate(self, pages: int, prompt_pages: int, pool: int, positions: int) -> None:
        """Make room for rows, pages of a row, pages of a prompt and pages of the pool. Moving a tensor invalidates captured graphs."""
        state = self.state
        old = (0, 0, 0) if state is None else (state.capacity, state.pages, state.prompt_pages)
        wanted = (self.capacity, pages, prompt_pages)
        new = tuple(max(pair) for pair in zip(old, wanted, strict=True))
        if new != old:
            self.state = Rows(new[0], new[1], new[2], BURST, self.device)
            self.drawn = [Drawn(self.state), Drawn(self.state)]
            more = [(0, b - a) for a, b in zip(old, new, strict=True)]
            self.table = np.pad(self.table, more[:2])
            self.prompt_table = np.pad(self.prompt_table, (more[0], more[2]))
            self.changed = True
            self._forget_graphs()
        self.rows.reserve(new[0])
        if self.decoder.ensure_rope_table(positions):
            self._forget_graphs()
        if pool > self.pages.pages:
            self.grow(pool)

    def grow(self, pool: int) -> None:
        """Grow the pool and copy its contents, layer by layer."""
        kept = self.pages.pages * PAGE
        for layer, heads in enumerate(self.decoder.heads):
            shape = (pool * PAGE, heads.keys, heads.width)
            keys = torch.zeros(shape, dtype=self.policy.dtype, device=self.device)
            values = torch.zeros_like(keys)
            if layer < len(self.stores):
                keys[:kept], values[:kept] = self.stores[layer]
                self.stores[layer] = keys, values
            else:
                self.stores.append((keys, values))
        gates = self.policy.routers.values() if self.policy.router_replay else ()
        if gates:
            width = sum(gate.top_k for gate in gates)
            old = self.choices
            self.choices = torch.full(
                (pool * PAGE, width), -1, dtype=torch.int16, device=self.device
            )
            if old is not None:
                self.choices[:kept] = old
        self.pages.grow(pool)
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        """Drop the graphs, because the memory that they read has moved."""
        self.graphs.clear()
        self.missed: tuple[int, int] | None = None  # the shape of one that was not there
        self.memory: Any = None  # the graphs' common pool: they never run at the same time

    def fits(self, work: Work | None) -> bool:
        return work is None or self.promised + work.pages < self.room_pages

    def enter(self, work: Work, first: int) -> None:
        pages, number = self._take(pages_of(len(work.ids))), next(self.numbers)
        self.prompts[number] = (len(work.requests), pages)
        self.promised += work.pages
        self.rows.live("prompt", first)[:] = number
        self.prompt_table[first : self.rows.count, : len(pages)] = pages

    def _take(self, number: int) -> np.ndarray:
        """Take pages from the pool. It grows if needed, by a quarter, and never beyond its room, within which `fits` keeps all
        works."""
        pages = self.pages
        short = number - len(pages.free)
        if short > 0:
            self.grow(min(pages.pages + max(short, pages.pages // 4), self.room_pages))
        return pages.take(number)

    def _reserve(self, steps: int) -> None:
        """Take pages for the tokens of the next steps, and for the slot of the token after them."""
        rows = self.rows
        need = -(-np.minimum(rows.live("count") + steps, rows.live("limit")) // PAGE)
        have = rows.live("pages")
        short = np.flatnonzero(need > have)
        if not len(short):
            return
        more = need[short] - have[short]
        row = np.repeat(short, more)
        column = np.repeat(have[short] - np.cumsum(more) + more, more) + np.arange(len(row))
        self.table[row, column] = self._take(len(row))
        have[short] = need[short]
        self.changed = True

    def prefill(
        self, works: Sequence[Work], caches: Sequence[KeptPages | None], first: int
    ) -> tuple[np.ndarray, np.ndarray]:
        groups = [len(work.requests) for work in works]
        row = first + np.cumsum([0, *groups[:-1]])
        self._reserve(1)
        tables = self.prompt_table[row]
        slots = [slots_of(table, len(w.ids)) for table, w in zip(tables, works, strict=True)]
        cached = [0 if cache is None else cache.length for cache in caches]
        if any(cached):
            old = np.concatenate([cache.slots for cache in caches if cache is not None])
            self._copy(old, np.concatenate([s[:n] for s, n in zip(slots, cached, strict=True)]))
        hidden_PH = self._hidden([work.ids for work in works], slots, cached)
        self._upload(self.rows.count, 0)
        which_N = sent(np.repeat(np.arange(len(groups)), groups), self.device)
        assert self.state is not None
        state = self.state.after(first)
        state.step.zero_()
        found = sample(hidden_PH[which_N], self.policy.head, state, self.truncated)
        advance(*found, self.stop_V, state)
        drawn = (state.ids, state.logprobs)
        ids, logprobs = (t[:1, : self.rows.count - first].cpu().numpy() for t in drawn)
        return ids, logprobs

    def resume(self, works: Sequence[Work], first: int) -> None:
        """Prompts come first, once each. What rows have sampled reads them from the pool."""
        self._reserve(0)
        self.changed, row = True, first
        prompts, rest = list[Stored](), list[Stored]()
        for work in works:
            slots = slots_of(self.prompt_table[row], len(work.ids))
            prompts.append((work.ids, slots, 0))
            for ids, *_ in work.written:
                own = slots_of(self.table[row], len(ids) - 1)
                both = np.append(work.ids, ids[:-1]), np.append(slots, own)
                rest += [(*both, len(work.ids))] if len(own) else []
                row += 1
        for every in (prompts, rest):
            # keys that are read are gathered, which takes memory, too
            sizes = [max(len(ids) - cached, len(ids) // 8) for ids, _, cached in every]
            for part in portions(sizes, self.prefill_tokens):
                self._hidden(*zip(*every[part], strict=True))

    def _copy(self, source: np.ndarray, target: np.ndarray) -> None:
        source_T, target_T = sent(source, self.device), sent(target, self.device)
        for store in (side for pair in self.stores for side in pair):
            store[target_T] = store[source_T]
        if self.choices is not None:
            self.choices[target_T] = self.choices[source_T]

    def _hidden(
        self, ids: Sequence[np.ndarray], slots: Sequence[np.ndarray], cached: Sequence[int]
    ) -> Tensor:
        """Compute whole sequences whose first `cached` tokens are stored already, and store their keys and values. Returns the last
        hidden state of each, [P, H]."""
        every = [len(i) for i in ids]
        new = [length - skip for length, skip in zip(every, cached, strict=True)]
        columns = (ids, [np.arange(length) for length in every], slots)
        skipped = ([a[n:] for a, n in zip(column, cached, strict=True)] for column in columns)
        id_T, position_T, slot_T = (sent(np.concatenate(column), self.device) for column in skipped)
        slot_L = sent(np.concatenate(slots), self.device) if any(cached) else None
        within = attend_packed(tuple(every), self.device, tuple(new) if any(cached) else None)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
            """Attention in which keys that were stored before come from the pool."""
            if slot_L is not None:
                key, value = (side[slot_L] for side in self.stores[layer])
            return within(layer, query, key, value, rule)

        given = (id_T, position_T, slot_T, self.stores, attend, self.choices)
        hidden_TH = self.decoder.hidden(*given)
        return hidden_TH[sent(np.cumsum(new) - 1, self.device)]

    def launch(self) -> None:
        rows = self.rows
        steps = self._burst(0)
        self._reserve(steps)
        size = bucket(rows.count, self.capacity)
        shape = self._shape(np.arange(rows.count), size)
        missed, self.missed = self.missed or shape, None
        for one in (missed, shape):
            key = (*one, self.queries, self.truncated)
            if key not in self.graphs:
                self.graphs[key] = self._capture(*one)
                self.changed = True  # the device's state was overwritten
        if self.changed or shape != self.shape:
            self._upload(*shape)
            self.shape = shape
        self._replay(steps)

    def _shape(self, which: np.ndarray, size: int) -> tuple[int, int]:
        """Rows and tiles of the graph for these rows. There are few sizes: later turns have prompts of their own among those that a
        group shares, and a tile without rows costs nothing."""
        return size, min(power_of_two(self._tiles(which).shape[1]), size)

    def _burst(self, before: int) -> int:
        """The number of steps of a burst that begins `before` steps after those that the host has seen."""
        rows = self.rows
        left = int((rows.live("limit") - rows.live("count")).max()) - before
        longest = BURST if self.endless else STOPPABLE
        return left - LAST if 2 * LAST < left <= longest else min(longest, left)

    def _replay(self, steps: int) -> None:
        assert self.state is not None
        self.state.step.zero_()
        graph = self.graphs[(*self.shape, self.queries, self.truncated)]
        self.drawn.reverse()
        for step in range(1, steps + 1):
            graph.replay()
            if step == max(1, steps - LOOK):
                self.drawn[0].look()
        self.drawn[0].take(steps)

    def ahead(self) -> bool:
        """Finished rows are removed from the device first, if the others fit a smaller graph. Rows that end in the last steps,
        which the device computes meanwhile, are removed a burst later."""
        last = self.drawn[0]
        last.wait(last.looked)
        size, steps, before = self.shape[0], self._burst(last.steps), self.order
        stay = np.flatnonzero(last.done.numpy()[before] == 0)
        if steps < 1 or not len(stay):
            return False
        fewer = bucket(len(stay), self.capacity)
        # few rows cost as much as fewer
        leave = fewer < size and (size > FEW or 2 * fewer <= size)
        shape = self._shape(stay, fewer) if leave else self.shape
        if (*shape, self.queries, self.truncated) not in self.graphs:
            self.missed = shape
            return False
        changed, self.changed = self.changed, False
        self._reserve(last.steps + steps)
        if not self.graphs:  # the pool has grown
            return False
        if leave:
            self._compact(stay, *shape)
        elif self.changed:  # pages alone: the device's state of the rows is newer than ours
            assert self.state is not None
            table = np.zeros((size, self.table.shape[1]), np.int32)
            table[before] = self.table[: len(before)]
            self.state.table[:size].copy_(sent(table, self.device))
        self.changed |= changed
        self.shape = shape
        self._replay(steps)
        self.over = before
        return True

    def _compact(self, stay: np.ndarray, size: int, tiles: int) -> None:
        """Move the device's state of these rows, which is newer than the host's, to its first rows."""
        state, count = self.state, len(stay)
        assert state is not None
        at = sent(self.order[stay], self.device)
        for part in (state.integers, state.floats):
            part[:, :count] = part[:, at]
        state["done"][count:size], state["slot"][count:size] = 1, 0
        self._place(stay, size, tiles)
        self.order = np.full(len(self.order), -1)  # -1: finished rows, until they are collected
        self.order[stay] = np.arange(count)

    def collect(self) -> tuple[np.ndarray, np.ndarray]:
        before, self.over = self.over, None
        return self.drawn[0].of(self.order) if before is None else self.drawn[1].of(before)

    def _tiles(self, which: np.ndarray) -> np.ndarray:
        """[3, tiles]: runs of rows that share a prompt, none longer than a tile."""
        prompt = self.rows["prompt"][which]
        begin = np.flatnonzero(np.r_[True, prompt[1:] != prompt[:-1]])
        length = np.diff(np.r_[begin, len(which)])
        parts = -(-length // self.tile_size)
        part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        offset = part * self.tile_size
        first = np.repeat(begin, parts) + offset
        rows = np.minimum(np.repeat(length, parts) - offset, self.tile_size)
        return np.stack([first, rows, self.rows["prefix"][which[first]]])

    def _upload(self, size: int, tiles: int) -> None:
        """Copy the state of the first `size` rows and of `tiles` tiles to the device. Rows after the live ones are marked done."""
        state, rows = self.state, self.rows
        assert state is not None
        written = rows.live("count") - 1
        page = np.clip(written // PAGE, 0, self.table.shape[1] - 1)
        own = self.table[np.arange(rows.count), page].astype(np.int64)
        rows.live("position")[:] = rows.live("prefix") + written
        rows.live("slot")[:] = np.where(written < 0, 0, own * PAGE + written % PAGE)
        pairs = (state.integers, rows.integers[: len(INTEGERS)]), (state.floats, rows.floats)
        for target, source in pairs:
            target[:, :size].copy_(sent(np.ascontiguousarray(source[:, :size]), self.device))
        self._place(np.arange(rows.count), size, tiles)
        self.changed, self.order = not tiles, np.arange(rows.count)

    def _place(self, which: np.ndarray, size: int, tiles: int) -> None:
        """Copy to the device where the tokens of these rows are stored, and which rows share a prompt."""
        state = self.state
        assert state is not None
        table = np.zeros((size, state.pages), np.int32)
        table[: len(which)] = self.table[which]
        state.table[:size].copy_(sent(table, self.device))
        if tiles:
            made = self._tiles(which)
            tile = np.zeros((3, tiles), np.int32)
            prompt = np.zeros((tiles, state.prompt_pages), np.int32)
            tile[:, : made.shape[1]] = made
            prompt[: made.shape[1]] = self.prompt_table[which[made[0]]]
            state.tile[:, :tiles].copy_(sent(tile, self.device))
            state.prompt_table[:tiles].copy_(sent(prompt, self.device))

    def _step(self, size: int, tiles: int) -> None:
        """Decode one token for each of the first rows."""
        state = self.state
        assert state is not None

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
            store, heads = self.stores[layer], self.decoder.heads[layer]
            return attend_pages(query, store, state, heads, rule, tiles, self.queries)

        last, position, slot = (state[name][:size] for name in ("last", "position", "slot"))
        given = (last, position, slot, self.stores, attend, self.choices)
        found = sample(self.decoder.hidden(*given), self.policy.head, state, self.truncated)
        advance(*found, self.stop_V, state)

    def _capture(self, size: int, tiles: int) -> torch.cuda.CUDAGraph:
        """Capture the graph of one step. The warm-up step finds every row done and changes nothing."""
        assert self.state is not None
        self.state["done"].fill_(1)
        for state in (self.state["slot"], self.state.tile, self.state.step):
            state.zero_()
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._step(size, tiles)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            self._step(size, tiles)
        self.memory = self.memory or graph.pool()
        torch.cuda.synchronize(self.device)
        return graph

    def _stored(self, row: int) -> np.ndarray:
        """The slots of a row's tokens. That of its last input is left out: the rest of the burst in which the row ended has
        overwritten it."""
        pages, count = self.prompts[int(self.rows["prompt"][row])][1], int(self.rows["count"][row])
        own = slots_of(self.table[row], max(0, count - 2))
        return np.concatenate([slots_of(pages, int(self.rows["prefix"][row])), own])

    def routes(self, rows: Sequence[int]) -> list[np.ndarray | None]:
        """Copied for many rows at once, because each copy waits for the device."""
        if self.choices is None:
            return [None] * len(rows)
        slots, found = list(map(self._stored, rows)), list[np.ndarray | None]()
        lengths = (self.rows["prefix"] + self.rows["count"])[rows].tolist()
        for part in portions(lengths, PREFILL_TOKENS):
            joined = self.choices[sent(np.concatenate(slots[part]), self.device)].cpu().numpy()
            ends = np.cumsum([len(own) for own in slots[part]])
            for own, length in zip(np.split(joined, ends[:-1]), lengths[part], strict=True):
                rest = ((0, length - len(own)), (0, 0))
                found.append(np.pad(own, rest, constant_values=-1))
        return found

    def keep(self, row: int, number: int) -> KeptPages:
        """Keep the row's pages, without unused ones, and a reference to its prompt."""
        rows, prompt, slots = self.rows, int(self.rows["prompt"][row]), self._stored(row)
        own = self.table[row, : rows["pages"][row]].copy()
        used = pages_of(len(slots) - int(rows["prefix"][row]))
        self.pages.give(own[used:])
        rows["pages"][row] = 0
        references, pages = self.prompts[prompt]
        self.prompts[prompt] = (references + 1, pages)
        self.promised += used
        return KeptPages(number, len(slots), prompt, slots, own[:used])

    def drop(self, kept: KeptPages) -> None:
        self.promised -= len(kept.own)
        self.pages.give(np.concatenate([kept.own, self._dereference(kept.prompt, 1)]))

    def _dereference(self, prompt: int, number: int) -> np.ndarray:
        """Remove references to a prompt. Returns the pages that this frees: those of the prompt, when its last row, live or kept, is
        gone."""
        references, pages = self.prompts.pop(prompt)
        if references > number:
            self.prompts[prompt] = (references - number, pages)
            return pages[:0]
        self.promised -= len(pages)
        return pages

    def remove(self, gone: np.ndarray) -> np.ndarray:
        """Remaining rows keep their order."""
        rows = self.rows
        taken = np.arange(self.table.shape[1]) < rows["pages"][gone][:, None]
        self.promised -= int((-(-rows["limit"][gone] // PAGE)).sum())
        counted = np.unique(rows["prompt"][gone], return_counts=True)
        ended = zip(*(a.tolist() for a in counted), strict=True)
        freed = [self._dereference(prompt, number) for prompt, number in ended]
        self.pages.give(np.concatenate([self.table[gone][taken], *freed]))
        stay = np.delete(np.arange(rows.count), gone)
        for table in (self.table, self.prompt_table):
            table[: len(stay)], table[len(stay) : rows.count] = table[stay], 0
        self.changed, self.order = True, self.order[stay[stay < len(self.order)]]
        return stay

    def idle(self) -> None:
        """Nothing to free: the pool, the graphs and the copied weights stay for the next call."""

    def release(self) -> None:
        """Free the pool, the graphs and the copied weights; the next call allocates them again."""
        self._clear()
        self.decoder.release()
        torch.cuda.empty_cache()  # to the device: a private pool of graphs would not serve the trainer
