"""What the device knows of the rows that are being written: tensors of a fixed place, so that a captured graph can read them."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

PAGE = 64  # tokens of a page of keys and values
INTEGERS = ("last", "count", "position", "slot", "limit", "least", "seed", "done", "top_k")


@dataclass(slots=True, eq=False)
class Rows:
    """State of up to `capacity` rows. A row's next input is the token `last` at `position`; its key and value go to `slot`; `count`
    tokens are written, the next one included. `tile` says which neighbouring rows share a prompt: [first row, rows, length]."""

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
        return self.integers[INTEGERS.index(name)]

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
