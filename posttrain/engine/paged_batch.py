"""The host side of generation in pages: who enters, who leaves, which page is whose.

Rows of one request stay neighbours, in order: their common prompt is read once for all of them. What the host keeps is a mirror of the
device's state, brought there when rows come or go; between, the device goes on alone for a burst of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from posttrain.engine.paged import BURST, Paged, bucket
from posttrain.engine.random import signed
from posttrain.engine.rows import INTEGERS, PAGE
from posttrain.engine.work import Work
from posttrain.errors import require
from posttrain.types import Completion

PREFILL_TOKENS = 1 << 15  # prompt tokens computed in one forward
STOPPABLE = 16  # steps between two looks where a response may end at any of them
AHEAD = 1024  # tokens of a response that the pool has room for from the start, where responses may get that far


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


def max_pages(request: Work) -> int:
    """Of a group at its longest."""
    return pages_of(len(request.prompt_ids)) + request.group * pages_of(
        request.sampling.max_new_tokens
    )


def check_room(requests: Sequence[Work], room: int, page_bytes: int) -> None:
    """Each group must fit alone, at its longest; one page of the room is nobody's."""
    need = [max_pages(r) for r in requests]
    worst = int(np.argmax(need))
    one, group = requests[worst], requests[worst].group
    left = max(0, room - 1 - pages_of(len(one.prompt_ids)))
    require(
        need[worst] < room,
        f"a group of {group} responses of up to {one.sampling.max_new_tokens} tokens needs {need[worst] * page_bytes / 2**30:.3g} GiB "
        f"of cache, and there is room for {room * page_bytes / 2**30:.3g} GiB: lower max_new_tokens to {left // group * PAGE}, or "
        f"the group to {left // pages_of(one.sampling.max_new_tokens)}",
    )


class PagedBatch:
    """The state of one call of `generate`: live rows are the first `count`, in the order they entered."""

    def __init__(self, paged: Paged, requests: Sequence[Work], max_rows: int, version: int):
        self.paged, self.requests, self.version = paged, requests, version
        self.waiting = 0
        self.done: list[list[Completion | None]] = [[None] * r.group for r in requests]
        settings = [r.sampling for r in requests]
        self.truncated = any(s.truncated for s in settings)
        self.endless = all(s.min_new_tokens >= s.max_new_tokens for s in settings) or not bool(
            paged.stop_V.any()
        )
        self.room, largest = paged.room(), max(r.group for r in requests)
        check_room(requests, self.room, paged.page_bytes)
        self.capacity = max(min(max_rows, sum(r.group for r in requests)), largest)
        self.tile_size, self.queries = paged.tiling(largest)
        limit, prompt = (
            max(s.max_new_tokens for s in settings),
            max(len(r.prompt_ids) for r in requests),
        )
        self._allocate(limit, prompt)
        assert paged.rows is not None
        rows = paged.rows
        self.integers, self.floats = (
            np.zeros((len(INTEGERS), rows.capacity), np.int64),
            np.zeros((2, rows.capacity), np.float32),
        )
        self.table = np.zeros((rows.capacity, rows.pages), np.int32)
        self.prompt_table = np.zeros((rows.capacity, rows.prompt_pages), np.int32)
        # beside them, what only the host must know: request, sample, where its answer is kept, pages it has, prompt length
        self.host = np.zeros((5, rows.capacity), np.int64)
        self.count, self.homes = 0, list(range(rows.capacity - 1, -1, -1))
        self.ids, self.logprobs = (
            np.zeros((rows.capacity, 0), np.int64),
            np.zeros((rows.capacity, 0), np.float32),
        )
        self.prompts: dict[
            int, tuple[int, np.ndarray]
        ] = {}  # request -> live rows, pages of its prompt
        self.promised = 0  # pages of all live rows at their longest, and of their prompts
        self.stop_V = paged.stop_V.cpu().numpy().astype(bool)
        self.changed, self.shape = (
            True,
            (0, 0),
        )  # the device does not know yet; how many rows and tiles it knew last

    def _allocate(self, limit: int, prompt: int) -> None:
        """A pool for what will be live first; `_reserve` lets it grow."""
        rows_R, pages_R = (
            np.cumsum(counts)
            for counts in zip(*((r.group, max_pages(r)) for r in self.requests), strict=True)
        )
        entering = self.requests[: int(((rows_R <= self.capacity) & (pages_R < self.room)).sum())]
        pool = 1 + sum(
            pages_of(len(r.prompt_ids)) + r.group * pages_of(min(r.sampling.max_new_tokens, AHEAD))
            for r in entering
        )
        self.paged.fit(self.capacity, pages_of(limit), pages_of(prompt), pool, limit + prompt)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.integers[INTEGERS.index(name)]

    def run(self) -> Iterator[tuple[Completion, ...]]:
        answered = 0
        while self.waiting < len(self.requests) or self.count:
            if self._fits():
                self._admit()
            else:
                self._decode()
            while answered < len(self.requests) and all(c is not None for c in self.done[answered]):
                yield tuple(c for c in self.done[answered] if c is not None)
                answered += 1

    def _fits(self) -> bool:
        """Whether the next request can enter: a row for each sample, and pages enough for everyone to get to its limit. A prompt
        keeps its pages until the last row of its group is done."""
        if (
            self.waiting == len(self.requests)
            or self.count + self.requests[self.waiting].group > self.capacity
        ):
            return False
        return self.promised + max_pages(self.requests[self.waiting]) < self.room

    def _admit(self) -> None:
        """Compute waiting prompts, each once, and draw the first token of every row that they make."""
        first, starts, groups = self.count, [0], []
        ids: list[np.ndarray] = []
        slots: list[np.ndarray] = []
        while self._fits() and (
            not ids or starts[-1] + len(self.requests[self.waiting].prompt_ids) <= PREFILL_TOKENS
        ):
            request = self.requests[self.waiting]
            length = len(request.prompt_ids)
            pages = self._take(pages_of(length))
            self.prompts[self.waiting] = (request.group, pages)
            self.promised += max_pages(request)
            self._enter(request, pages)
            at = np.arange(length)
            ids.append(np.array(request.prompt_ids, np.int64))
            slots.append(pages[at // PAGE] * PAGE + at % PAGE)
            starts.append(starts[-1] + length)
            groups.append(request.group)
            self.waiting += 1
        self._reserve(1)
        hidden_PH = self.paged.prefill(np.concatenate(ids), np.array(starts), np.concatenate(slots))
        self._push(self.count, 0)
        which_N = torch.from_numpy(np.repeat(np.arange(len(groups)), groups)).to(self.paged.device)
        self.paged.first(hidden_PH[which_N], first, self.truncated)
        self._collect(first, 1)
        self._retire()

    def _enter(self, request: Work, pages: np.ndarray) -> None:
        """Rows for a request's samples, with nothing written yet."""
        part, one, length = (
            slice(self.count, self.count + request.group),
            request.sampling,
            len(request.prompt_ids),
        )
        for name, value in (
            ("position", length - 1),
            ("limit", one.max_new_tokens),
            ("least", one.min_new_tokens),
            ("top_k", one.top_k),
            ("count", 0),
            ("done", 0),
            ("slot", 0),
            ("last", 0),
        ):
            self[name][part] = value
        self["seed"][part] = [signed(seed) for seed in request.seeds]
        self.floats[0, part], self.floats[1, part] = one.temperature, one.top_p
        self.prompt_table[part, : len(pages)] = pages
        homes = [self.homes.pop() for _ in range(request.group)]
        self.host[:, part] = np.array([self.waiting, 0, 0, 0, length])[:, None]
        self.host[1, part], self.host[2, part] = range(request.group), homes
        self.count += request.group

    def _take(self, number: int) -> np.ndarray:
        """Pages of the pool, which grows where it must: by a quarter, and never past its room, in which `_fits` keeps all."""
        pages = self.paged.pages
        short = number - len(pages.free)
        if short > 0:
            self.paged.grow(min(pages.pages + max(short, pages.pages // 4), self.room))
        return pages.take(number)

    def _reserve(self, steps: int) -> None:
        """Pages for the tokens of the next steps and for where the one after them will be stored."""
        live = slice(0, self.count)
        need = -(-np.minimum(self["count"][live] + steps, self["limit"][live]) // PAGE)
        have = self.host[3, live]
        short = np.flatnonzero(need > have)
        if not len(short):
            return
        more = need[short] - have[short]
        row = np.repeat(short, more)
        column = (
            np.repeat(have[short], more)
            + np.arange(len(row))
            - np.repeat(np.cumsum(more) - more, more)
        )
        self.table[row, column] = self._take(len(row))
        self.host[3, short] = need[short]
        self.changed = True

    def _tiles(self, count: int) -> np.ndarray:
        """[3, tiles]: runs of rows that share a prompt, none longer than a tile."""
        request = self.host[0, :count]
        begin = np.flatnonzero(np.r_[True, request[1:] != request[:-1]])
        length = np.diff(np.r_[begin, count])
        parts = -(-length // self.tile_size)
        offset = (
            np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        ) * self.tile_size
        first = np.repeat(begin, parts) + offset
        rows = np.minimum(np.repeat(length, parts) - offset, self.tile_size)
        return np.stack([first, rows, self.host[4, first]])

    def _push(self, count: int, tiles: int) -> None:
        """Bring the state of the first `count` rows, those past the live ones marked done, and of `tiles` tiles to the device."""
        rows, device = self.paged.rows, self.paged.device
        assert rows is not None
        for target, source in (
            (rows.integers[:, :count], self.integers[:, :count]),
            (rows.floats[:, :count], self.floats[:, :count]),
            (rows.table[:count], self.table[:count]),
        ):
            target.copy_(torch.from_numpy(source).to(device))
        if tiles:
            made = self._tiles(self.count)
            tile, prompt = (
                np.zeros((3, tiles), np.int32),
                np.zeros((tiles, rows.prompt_pages), np.int32),
            )
            tile[:, : made.shape[1]], prompt[: made.shape[1]] = made, self.prompt_table[made[0]]
            rows.tile[:, :tiles].copy_(torch.from_numpy(tile).to(device))
            rows.prompt_table[:tiles].copy_(torch.from_numpy(prompt).to(device))
        self.changed = not tiles

    def _decode(self) -> None:
        """A burst of steps for every live row."""
        most = int((self["limit"][: self.count] - self["count"][: self.count]).max())
        steps = min(BURST if self.endless else STOPPABLE, most)
        self._reserve(steps)
        size = bucket(self.count, self.capacity)
        tiles = bucket(self._tiles(self.count).shape[1], size)

        def push(anew: bool) -> None:
            if anew or self.changed or (size, tiles) != self.shape:
                self._push(size, tiles)
                self.shape = (size, tiles)

        self.paged.steps(steps, size, tiles, self.queries, self.truncated, push)
        self._collect(0, steps)
        self._retire()

    def _collect(self, first: int, steps: int) -> None:
        """Write down what the rows from `first` on drew in the last steps, as far as each went, and follow the device's state."""
        rows, part = self.paged.rows, slice(first, self.count)
        assert rows is not None
        ids_SN = rows.ids[:steps, part].cpu().numpy()
        logprobs_SN = rows.logprobs[:steps, part].cpu().numpy()
        before, limit, least = self["count"][part].copy(), self["limit"][part], self["least"][part]
        written_SN = before + 1 + np.arange(steps)[:, None]
        stopped_SN = self.stop_V[ids_SN] & (written_SN > least)
        over_SN = stopped_SN | (written_SN >= limit)
        ended = over_SN.any(0)
        valid = np.where(ended, over_SN.argmax(0) + 1, steps)
        self._write(self.host[2, part], before, valid, ids_SN, logprobs_SN)
        at = np.arange(len(valid))
        count = self["count"][part] = before + valid
        self["last"][part], self["done"][part] = (
            ids_SN[valid - 1, at],
            np.where(ended, 1 + stopped_SN[valid - 1, at], 0),
        )
        self["position"][part] = self.host[4, part] + count - 1
        page = np.minimum((count - 1) // PAGE, self.table.shape[1] - 1)
        self["slot"][part] = (
            self.table[first + at, page].astype(np.int64) * PAGE + (count - 1) % PAGE
        )

    def _write(
        self,
        home: np.ndarray,
        before: np.ndarray,
        valid: np.ndarray,
        ids_SN: np.ndarray,
        logprobs_SN: np.ndarray,
    ) -> None:
        length = int((before + valid).max())
        if length > self.ids.shape[1]:
            more = ((0, 0), (0, max(length - self.ids.shape[1], self.ids.shape[1])))
            self.ids, self.logprobs = np.pad(self.ids, more), np.pad(self.logprobs, more)
        step, row = np.nonzero(np.arange(len(ids_SN))[:, None] < valid)
        self.ids[home[row], before[row] + step] = ids_SN[step, row]
        self.logprobs[home[row], before[row] + step] = logprobs_SN[step, row]

    def _retire(self) -> None:
        """Take finished rows out; the others close up, in order."""
        live = slice(0, self.count)
        finished = np.flatnonzero(self["done"][live])
        if not len(finished):
            return
        lengths, ends = self["count"][finished].tolist(), self["done"][finished].tolist()
        for row, length, end in zip(self.host[:3, finished].T.tolist(), lengths, ends, strict=True):
            request, sample, home = row
            ids, logprobs = self.ids[home, :length].copy(), self.logprobs[home, :length].copy()
            self.done[request][sample] = Completion(
                ids,
                logprobs,
                np.full(length, self.version, np.int32),
                "stop" if end == 2 else "length",
            )
            self.homes.append(home)
        taken = np.arange(self.table.shape[1]) < self.host[3, finished][:, None]
        self.paged.pages.give(self.table[finished][taken])
        for request, gone in zip(
            *(a.tolist() for a in np.unique(self.host[0, finished], return_counts=True)),
            strict=True,
        ):
            left, pages = self.prompts.pop(request)
            self.promised -= gone * pages_of(self.requests[request].sampling.max_new_tokens)
            if left == gone:
                self.promised -= len(pages)
                self.paged.pages.give(pages)
            else:
                self.prompts[request] = (left - gone, pages)
        self._close_up(np.flatnonzero(self["done"][live] == 0))

    def _close_up(self, keep: np.ndarray) -> None:
        """The given rows become the first ones; the places behind them look like rows that are done."""
        count, was = len(keep), self.count
        for state in (self.integers, self.floats, self.host):
            state[:, :count], state[:, count:was] = state[:, keep], 0
        for table in (self.table, self.prompt_table):
            table[:count], table[count:was] = table[keep], 0
        self["done"][count:] = 1
        self.count, self.changed = count, True
