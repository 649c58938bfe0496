"""The device side of generation in pages: the key-value pool, the rows' state, and decode steps captured in CUDA graphs.

One graph holds a whole step, from embedding to the sampled id, its log-prob, the length and the done flag; the host looks after a burst
of steps. There is a graph for each bucket of rows and tiles, so that the long tail of a batch runs at its own size. Elsewhere than on
CUDA the same step runs without a graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from posttrain.engine.fused import Fused, packed_attend
from posttrain.engine.kernels import advance, attend, choose, tile_rows
from posttrain.engine.rows import PAGE, Rows
from posttrain.models.attention import Packed, Rule
from posttrain.models.layers import Heads
from posttrain.models.varlen import available, offsets, varlen
from posttrain.ops.logprobs import head_logits

BURST = 64  # most steps between two looks of the host
MARGIN = 0.08  # of the device's memory that the cache leaves to others


def bucket(count: int, capacity: int) -> int:
    """The size of the graph for `count` rows: eighths of the next power of two, and no more than there are.

    >>> [bucket(n, 1000) for n in (1, 3, 17, 130, 700, 999)]
    [1, 4, 20, 160, 768, 1000]
    """
    power = 1 << max(0, count - 1).bit_length()
    grain = max(1, power // 8) if count > 4 else power
    return min(-(-count // grain) * grain, capacity)


class Pages:
    """Which pages of the pool are free. Page 0 is never given: rows that are done, or not there, write to it."""

    def __init__(self, pages: int):
        self.pages = pages
        self.free = np.arange(pages - 1, 0, -1)  # a stack; the top is its end

    def take(self, count: int) -> np.ndarray:
        assert count <= len(self.free)
        taken, self.free = (
            self.free[len(self.free) - count :][::-1],
            self.free[: len(self.free) - count],
        )
        return taken

    def give(self, pages: np.ndarray) -> None:
        self.free = np.concatenate([self.free, pages])

    def grow(self, pages: int) -> None:
        self.free = np.concatenate([np.arange(pages - 1, self.pages - 1, -1), self.free])
        self.pages = pages


class Paged:
    """What stays from call to call of `generate`: the fused decoder, the pool, the rows and the graphs."""

    def __init__(self, decoder: Fused, stop_ids: tuple[int, ...]):
        self.decoder, self.policy = decoder, decoder.policy
        self.device, self.dtype = self.policy.device, self.policy.dtype
        self.stop_V = torch.zeros(
            self.policy.head.weight_VH.shape[0], dtype=torch.int64, device=self.device
        )
        self.stop_V[list(stop_ids)] = 1
        self.stores: list[tuple[Tensor, Tensor]] = []
        self.pages = Pages(1)
        self.rows: Rows | None = None
        self.graphs: dict[tuple[int, int, int, bool], torch.cuda.CUDAGraph] = {}
        self.memory = None  # the graphs' common pool: they never run at the same time
        self.capture_seconds = 0.0

    @property
    def page_bytes(self) -> int:
        size = torch.tensor([], dtype=self.dtype).element_size()
        return sum(2 * PAGE * h.keys * h.width * size for h in self.decoder.heads)

    @property
    def bytes(self) -> int:
        return self.pages.pages * self.page_bytes

    def room(self) -> int:
        """Pages that the memory at hand can hold, those of the pool included."""
        if self.device.type != "cuda":
            return 1 << 40
        free, total = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return max(0, int(free - MARGIN * total)) // self.page_bytes + self.pages.pages

    def fit(self, capacity: int, pages: int, prompt_pages: int, pool: int, positions: int) -> None:
        """Room for that many rows, pages a row and a prompt, pages in all. What is moved makes captured graphs worthless."""
        rows = self.rows
        if (
            rows is None
            or capacity > rows.capacity
            or pages > rows.pages
            or prompt_pages > rows.prompt_pages
        ):
            old = (rows.capacity, rows.pages, rows.prompt_pages) if rows is not None else (0, 0, 0)
            capacity, pages, prompt_pages = (
                max(a, b) for a, b in zip(old, (capacity, pages, prompt_pages), strict=True)
            )
            self.rows = Rows(capacity, pages, prompt_pages, BURST, self.device)
            self._forget()
        if self.decoder.ensure_rope_table(positions):
            self._forget()
        self.pages = Pages(self.pages.pages)
        if pool > self.pages.pages:
            self.grow(pool)

    def grow(self, pool: int) -> None:
        """A larger pool with the same contents, moved layer by layer."""
        kept = self.pages.pages * PAGE if self.stores else 0
        for layer, heads in enumerate(self.decoder.heads):
            made = []
            for side in range(2):
                new = torch.zeros(
                    pool * PAGE, heads.keys, heads.width, dtype=self.dtype, device=self.device
                )
                if kept:
                    new[:kept] = self.stores[layer][side]
                made.append(new)
            if kept:
                self.stores[layer] = (made[0], made[1])
            else:
                self.stores.append((made[0], made[1]))
        self.pages.grow(pool)
        self._forget()

    def release(self) -> None:
        """Give the pool, the graphs and the copied weights back; the next call makes them anew."""
        self.stores, self.pages, self.rows = [], Pages(1), None
        self._forget()
        self.decoder.release()

    def _forget(self) -> None:
        """Drop the graphs: what they read has moved."""
        self.graphs.clear()
        self.memory = None

    def prefill(self, ids: np.ndarray, starts: np.ndarray, slots: np.ndarray) -> Tensor:
        """Store the prompts that lie end to end in `ids`, each token in its slot; the last hidden state of each, [P, H]."""
        lengths = np.diff(starts)
        position = np.arange(len(ids)) - np.repeat(starts[:-1], lengths)
        id_T, position_T, slot_T = (
            torch.from_numpy(a).to(self.device) for a in (ids, position, slots)
        )
        heads = self.decoder.heads[0]
        plain = any(layer.rule.softcap is not None for layer in self.decoder.layers)
        if not plain and available(self.stores[0][0], heads.width, None):
            cut, longest = offsets(lengths.tolist(), self.device), int(lengths.max())

            def attend_packed(layer: int, qkv: Tensor, heads: Heads, rule: Rule) -> Tensor:
                split = qkv.view(qkv.shape[0], -1, heads.width)
                query, key, value = split.split_with_sizes([heads.heads, heads.keys, heads.keys], 1)
                out = varlen(query, key, value, cut, cut, longest, longest, rule)
                return out.reshape(qkv.shape[0], -1)

            how = attend_packed
        else:
            how = packed_attend(Packed(tuple(starts.tolist()), self.device))
        hidden_TH = self.decoder.hidden(id_T, position_T, slot_T, self.stores, how)
        return hidden_TH[torch.from_numpy(starts[1:] - 1).to(self.device)]

    def first(self, hidden_NH: Tensor, first: int, truncated: bool) -> None:
        """Draw the first token of the rows from `first` on."""
        assert self.rows is not None
        rows = self.rows.after(first)
        rows.step.zero_()
        advance(
            *choose(head_logits(hidden_NH, self.policy.head), rows, truncated), self.stop_V, rows
        )

    def step(self, count: int, tiles: int, queries: int, truncated: bool) -> None:
        """One token for each of the first `count` rows."""
        rows = self.rows
        assert rows is not None

        def attend_pages(layer: int, qkv: Tensor, heads: Heads, rule: Rule) -> Tensor:
            return attend(qkv, self.stores[layer], rows, heads, rule, count, tiles, queries)

        hidden_NH = self.decoder.hidden(
            rows["last"][:count],
            rows["position"][:count],
            rows["slot"][:count],
            self.stores,
            attend_pages,
        )
        advance(
            *choose(head_logits(hidden_NH, self.policy.head), rows, truncated), self.stop_V, rows
        )

    def steps(
        self,
        number: int,
        count: int,
        tiles: int,
        queries: int,
        truncated: bool,
        push: Callable[[bool], None],
    ) -> None:
        """`number` steps of the first `count` rows, which lie in `tiles` tiles. `push` brings the host's state to the device where it
        changed; called with true, whatever the device knew is lost."""
        assert self.rows is not None and number <= BURST
        if self.device.type != "cuda":
            push(False)
            self.rows.step.zero_()
            for _ in range(number):
                self.step(count, tiles, queries, truncated)
            return
        key = (count, tiles, queries, truncated)
        new = key not in self.graphs
        if new:
            self.graphs[key] = self._capture(*key)
        push(new)
        self.rows.step.zero_()
        for _ in range(number):
            self.graphs[key].replay()

    def _capture(
        self, count: int, tiles: int, queries: int, truncated: bool
    ) -> torch.cuda.CUDAGraph:
        """The graph of one step. The step that warms it up finds every row done, and changes nothing."""
        began = time.perf_counter()
        assert self.rows is not None
        self.rows["done"].fill_(1)
        for state in (self.rows["slot"], self.rows.tile, self.rows.step):
            state.zero_()
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self.step(count, tiles, queries, truncated)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            self.step(count, tiles, queries, truncated)
        self.memory = self.memory or graph.pool()
        torch.cuda.synchronize(self.device)
        self.capture_seconds += time.perf_counter() - began
        return graph

    def tiling(self, group: int) -> tuple[int, int]:
        """(rows of a tile, queries of its program) where the largest group has that many samples."""
        return tile_rows(self.decoder.heads[0], group)
