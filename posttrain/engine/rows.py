"""The state of the rows being decoded: a table on the host, and tensors on the device that a captured graph reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

PAGE = 64  # tokens of a page of keys and values
INTEGERS = ("last", "count", "position", "slot", "limit", "min", "seed", "done", "top_k")
# fields that only the host needs: the output slot, the prefilled length, the prompt's number, the number of pages
HOST = ("output", "prefix", "prompt", "pages")
COLUMNS = {name: n for n, name in enumerate((*INTEGERS, *HOST))}


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


def portions(sizes: Sequence[int], limit: int) -> Iterator[slice]:
    """Cut items of these sizes into consecutive parts of at most `limit` in all; an item that is larger is a part of its own.

    >>> [(part.start, part.stop) for part in portions([3, 4, 9, 1, 1], 7)]
    [(0, 2), (2, 3), (3, 5)]
    """
    first = total = 0
    for n, size in enumerate(sizes):
        if n > first and total + size > limit:
            yield slice(first, n)
            first, total = n, 0
        total += size
    if first < len(sizes):
        yield slice(first, len(sizes))


class Pages:
    """The free pages of the pool. Page 0 is never handed out: rows that are done or absent write to it."""

    def __init__(self, pages: int):
        self.pages = pages
        self.free = np.arange(pages - 1, 0, -1)  # a stack; the top is its end

    def take(self, count: int) -> np.ndarray:
        assert count <= len(self.free)
        kept = len(self.free) - count
        taken, self.free = self.free[kept:][::-1], self.free[:kept]
        return taken

    def give(self, pages: np.ndarray) -> None:
        self.free = np.concatenate([self.free, pages])

    def grow(self, pages: int) -> None:
        self.free = np.concatenate([np.arange(pages - 1, self.pages - 1, -1), self.free])
        self.pages = pages


class RowTable:
    """The host's state of the rows, of which the first `count` are live. For each row: `count` sampled tokens, of which the last is
    `last`; it ends at `limit` tokens, or at a stop id after `min` tokens; `done` is 0 while it is live, else 1 (length), 2 (stop)
    or 3 (cancelled). After the live ones `done` is 1 and all else is 0."""

    def __init__(self) -> None:
        self.count = 0
        self.integers = np.zeros((len(COLUMNS), 0), np.int64)
        self.floats = np.zeros((2, 0), np.float32)  # temperature, top_p

    @property
    def capacity(self) -> int:
        return int(self.integers.shape[1])

    def __getitem__(self, name: str) -> np.ndarray:
        column: np.ndarray = self.integers[COLUMNS[name]]
        return column

    def live(self, name: str, first: int = 0) -> np.ndarray:
        return self[name][first : self.count]

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows."""
        if capacity <= self.capacity:
            return
        more = ((0, 0), (0, capacity - self.capacity))
        self.integers, self.floats = np.pad(self.integers, more), np.pad(self.floats, more)
        self["done"][self.count :] = 1

    def take(self, order: np.ndarray) -> None:
        """Make the given rows the live ones, in that order. Entries after them look like finished rows."""
        count, before = len(order), self.count
        for state in (self.integers, self.floats):
            state[:, :count], state[:, count:before] = state[:, order], 0
        self["done"][count:before] = 1
        self.count = count


class Rows:
    """The device's state of up to `capacity` rows. The next input of a row is the token `last` at `position`; its key and value are
    stored in `slot`; `count` tokens are written, including the next one. `pages` hold the row's own tokens, `prompt_pages` its
    prompt. The host looks at the state every `burst` steps."""

    def __init__(
        self, capacity: int, pages: int, prompt_pages: int, burst: int, device: torch.device
    ):
        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.capacity, self.pages, self.prompt_pages = capacity, pages, prompt_pages
        self.integers = zeros(torch.int64, len(INTEGERS), capacity)
        self.floats = zeros(torch.float32, 2, capacity)  # temperature, top_p
        self.table = zeros(torch.int32, capacity, pages)  # pages of a row's own tokens
        # neighbouring rows that share a prompt, [first row, rows, length], and the pages of the prompt
        self.tile = zeros(torch.int32, 3, capacity)
        self.prompt_table = zeros(torch.int32, capacity, prompt_pages)
        self.step = zeros(torch.int64, 1)
        self.ids = zeros(torch.int64, burst, capacity)  # tokens since the host last looked
        self.logprobs = zeros(torch.float32, burst, capacity)
        self["done"].fill_(1)

    def __getitem__(self, name: str) -> Tensor:
        return self.integers[COLUMNS[name]]

    @property
    def temperature(self) -> Tensor:
        return self.floats[0]

    @property
    def top_p(self) -> Tensor:
        return self.floats[1]

    def after(self, first: int) -> Rows:
        """The same state without its first rows, as views."""
        rest = copy(self)
        rest.integers, rest.floats = self.integers[:, first:], self.floats[:, first:]
        rest.ids, rest.logprobs = self.ids[:, first:], self.logprobs[:, first:]
        rest.table = self.table[first:]
        return rest


class Drawn:
    """The tokens of a burst and the rows that were done at a `look` before its end, copied to the host. `take` starts the copy,
    `wait` waits for it."""

    def __init__(self, rows: Rows):
        self.source, self.steps = rows, 0
        self.on_cuda = rows.ids.is_cuda
        sources = (rows.ids, rows.logprobs, rows["done"])
        self.ids, self.logprobs, self.done = (
            torch.empty(t.shape, dtype=t.dtype, pin_memory=self.on_cuda) for t in sources
        )
        self.looked, self.taken = (
            torch.cuda.Event() if self.on_cuda else None  # type: ignore[no-untyped-call]
            for _ in range(2)
        )

    def look(self) -> None:
        self.done.copy_(self.source["done"], non_blocking=True)
        if self.looked is not None:
            self.looked.record()

    def take(self, steps: int) -> None:
        rows, self.steps = self.source, steps
        self.ids[:steps].copy_(rows.ids[:steps], non_blocking=True)
        self.logprobs[:steps].copy_(rows.logprobs[:steps], non_blocking=True)
        if self.taken is not None:
            self.taken.record()

    @staticmethod
    def wait(event: torch.cuda.Event | None) -> None:
        if event is not None:
            event.synchronize()

    def of(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probs of these rows, [S, N]."""
        self.wait(self.taken)
        ids, logprobs = (t[: self.steps].numpy() for t in (self.ids, self.logprobs))
        return ids.take(order, 1), logprobs.take(order, 1)
