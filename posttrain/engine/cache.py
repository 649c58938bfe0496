"""The key-value cache: rows of tensors that grow, and the two layouts that read and write it."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.models.attention import Packed, Rule, masked

GROWTH = 64  # lengths are allocated in multiples of this


class Cache:
    """Keys and values of live rows, [rows, heads, length, width] a layer. Live rows are always the first ones."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device):
        self.rows, self.length = rows, 0
        self.dtype, self.device = dtype, device
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys.values(), *self.values.values()))

    def reserve(self, length: int) -> None:
        """Make room for rows of `length` tokens, keeping what is there."""
        if length <= self.length:
            return
        self.length = -(-max(length, min(2 * self.length, length + 4 * GROWTH)) // GROWTH) * GROWTH
        for store in (self.keys, self.values):
            for layer, old in store.items():
                new = torch.zeros(self.rows, old.shape[1], self.length, old.shape[3], dtype=self.dtype, device=self.device)
                new[:, :, : old.shape[2]] = old
                store[layer] = new

    def layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Tensors of one layer, made on first use with the layer's own heads and width (they may differ between layers)."""
        if layer not in self.keys:
            shape = (self.rows, like.shape[1], self.length, like.shape[3])
            self.keys[layer] = torch.zeros(shape, dtype=self.dtype, device=self.device)
            self.values[layer] = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return self.keys[layer], self.values[layer]

    def move(self, source: list[int], target: list[int], length: int) -> None:
        """Copy rows, so that live rows stay first when others leave."""
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[target, :, :length] = tensor[source, :, :length]


class Prefill:
    """Packed prompts whose keys and values are stored: each prompt is computed once and written to every row of its group."""

    def __init__(self, cache: Cache, starts: tuple[int, ...], rows: list[tuple[int, int]]):
        self.cache, self.rows = cache, rows  # rows: (first, count) of each prompt's group
        self.packed = Packed(starts, cache.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        keys, values = self.cache.layer(layer, key)
        starts = self.packed.starts
        for i, (first, count) in enumerate(self.rows):
            length = starts[i + 1] - starts[i]
            keys[first : first + count, :, :length] = key[:, :, starts[i] : starts[i + 1]]
            values[first : first + count, :, :length] = value[:, :, starts[i] : starts[i + 1]]
        return self.packed.attend(layer, query, key, value, rule)


class Decode:
    """One new token for each of the first rows of the cache, at each row's own position."""

    def __init__(self, cache: Cache, positions: list[int]):
        self.cache, self.count = cache, len(positions)
        self.longest = max(positions) + 1
        self.even = min(positions) + 1 == self.longest
        self.position_N = torch.tensor(positions, device=cache.device)
        self.row_N = torch.arange(self.count, device=cache.device)
        self.allowed: dict[int | None, Tensor | None] = {}  # by sliding window

    def mask(self, window: int | None) -> Tensor | None:
        """[N, 1, 1, L], or None where every row sees every position of the cut cache."""
        if window is not None and window >= self.longest:
            window = None
        if window not in self.allowed:
            at = torch.arange(self.longest, device=self.cache.device)
            seen = at[None, :] <= self.position_N[:, None]
            if window is not None:
                seen &= at[None, :] > self.position_N[:, None] - window
            self.allowed[window] = None if self.even and window is None else seen[:, None, None, :]
        return self.allowed[window]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        keys, values = self.cache.layer(layer, key)
        if self.even:
            keys[: self.count, :, self.longest - 1] = key[:, :, 0]
            values[: self.count, :, self.longest - 1] = value[:, :, 0]
        else:
            keys[self.row_N, :, self.position_N] = key[:, :, 0]
            values[self.row_N, :, self.position_N] = value[:, :, 0]
        keys, values = keys[: self.count, :, : self.longest], values[: self.count, :, : self.longest]
        rows, heads, _, width = query.shape
        if rule.softcap is None:  # heads of a group become query rows: keys are read once and never repeated
            query = query.reshape(rows, keys.shape[1], heads // keys.shape[1], width)
        out = masked(query, keys, values, self.mask(rule.sliding_window), rule)
        return out.reshape(rows, 1, heads, width)
