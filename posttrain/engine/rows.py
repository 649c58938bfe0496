"""State of the rows that are being decoded: the host's table of them, and the device's tensors, which a captured graph reads."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

PAGE = 64  # tokens of a page of keys and values
INTEGERS = ("last", "count", "position", "slot", "limit", "min", "seed", "done", "top_k")
# what only the host must know: where the row's output is kept, the length of what was prefilled, which prompt it is, pages it has
HOST = ("output", "prefix", "prompt", "pages")
COLUMNS = {name: n for n, name in enumerate((*INTEGERS, *HOST))}


class RowTable:
    """The host's state of the rows: the first `count` are live. `count` tokens of a row are sampled, the last one is `last`; it
    ends at `limit`, or at a stop id after `min` tokens; `done` is 1 (length), 2 (stop) or 3 (cancelled) where it has ended."""

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
        """Have room for so many rows."""
        if capacity <= self.capacity:
            return
        more = ((0, 0), (0, capacity - self.capacity))
        self.integers, self.floats = np.pad(self.integers, more), np.pad(self.floats, more)
        self["done"][self.count :] = 1

    def take(self, order: np.ndarray) -> None:
        """The given rows become the live ones, in that order; the places behind them look like rows that are done."""
        count, before = len(order), self.count
        for state in (self.integers, self.floats):
            state[:, :count], state[:, count:before] = state[:, order], 0
        self["done"][count:before] = 1
        self.count = count


@dataclass(slots=True, eq=False)
class Rows:
    """The device's state of up to `capacity` rows. A row's next input is the token `last` at `position`; its key and value go to
    `slot`; `count` tokens are written, the next one included. `tile` says which neighbouring rows share a prompt: [first row, rows,
    length]."""

    capacity: int
    pages: int  # of a row's own tokens
    prompt_pages: int
    burst: int  # steps between two looks of the host
    device: torch.device
    integers: Tensor = field(init=False)  # [len(INTEGERS), capacity]
    floats: Tensor = field(init=False)  # [2, capacity]: temperature, top_p
    table: Tensor = field(init=False)  # [capacity, pages]: where a row's own tokens lie
    tile: Tensor = field(init=False)  # [3, capacity]
    prompt_table: Tensor = field(init=False)  # [capacity, prompt_pages]: where a tile's prompt lies
    step: Tensor = field(init=False)
    ids: Tensor = field(init=False)  # [burst, capacity]: what was drawn since the host last looked
    logprobs: Tensor = field(init=False)

    def __post_init__(self) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.integers = zeros(len(INTEGERS), self.capacity, dtype=torch.int64)
        self.floats = zeros(2, self.capacity, dtype=torch.float32)
        self.table = zeros(self.capacity, self.pages, dtype=torch.int32)
        self.tile = zeros(3, self.capacity, dtype=torch.int32)
        self.prompt_table = zeros(self.capacity, self.prompt_pages, dtype=torch.int32)
        self.step = zeros(1, dtype=torch.int64)
        self.ids = zeros(self.burst, self.capacity, dtype=torch.int64)
        self.logprobs = zeros(self.burst, self.capacity, dtype=torch.float32)
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
        """The same state without its first rows: views."""
        rest = copy(self)
        rest.integers, rest.floats = self.integers[:, first:], self.floats[:, first:]
        rest.table, rest.ids, rest.logprobs = (
            self.table[first:],
            self.ids[:, first:],
            self.logprobs[:, first:],
        )
        return rest
