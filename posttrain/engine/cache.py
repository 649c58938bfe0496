"""The KV cache of the CPU backend: tensors of rows that grow, and the attention layouts that read and write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.models.attention import Packed, Rule, masked

GROWTH = 16  # lengths are allocated in multiples of this


class Cache:
    """Keys and values of live rows, by layer, [rows, heads, 2, length, width]. Live rows are always the first ones."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device):
        self.rows, self.length = rows, 0
        self.dtype, self.device = dtype, device
        self.layers: dict[int, Tensor] = {}

    def reserve(self, length: int) -> None:
        """Make room for rows of `length` tokens, keeping the contents."""
        if length > self.length:
            ahead = max(length, min(2 * self.length, length + 4 * GROWTH))
            self._grow(self.rows, -(-ahead // GROWTH) * GROWTH)

    def resize(self, rows: int) -> None:
        """Make room for `rows` rows, keeping the contents."""
        if rows > self.rows:
            self._grow(rows, self.length)

    def _grow(self, rows: int, length: int) -> None:
        more = (0, 0, 0, length - self.length, 0, 0, 0, 0, 0, rows - self.rows)
        for layer, store in self.layers.items():  # each is freed before the next one grows
            self.layers[layer] = F.pad(store, more)
        self.rows, self.length = rows, length

    def layer(self, layer: int, heads: int, width: int) -> Tensor:
        """The tensor of one layer, created on first use with the layer's own heads and width (they may differ between layers)."""
        if layer not in self.layers:
            shape = (self.rows, heads, 2, self.length, width)
            self.layers[layer] = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return self.layers[layer]

    def save(self, row: int, length: int) -> dict[int, Tensor]:
        """A copy of a row's keys and values, by layer: [heads, 2, length, width]."""
        return {layer: store[row, :, :, :length].clone() for layer, store in self.layers.items()}

    def restore(self, row: int, saved: dict[int, Tensor]) -> None:
        for layer, one in saved.items():
            self.layer(layer, one.shape[0], one.shape[3])[row, :, :, : one.shape[2]] = one

    def move(self, source: list[int], target: list[int], length: int) -> None:
        """Copy rows, so that live rows stay first when others leave."""
        for store in self.layers.values():
            store[target, :, :, :length] = store[source, :, :, :length]


class Prefill:
    """Packed prompts whose keys and values are stored: each prompt is computed once and written to every row of its group."""

    def __init__(self, cache: Cache, starts: tuple[int, ...], first: int, groups: list[int]):
        # rows first..first+rows-1, `groups` of them a prompt
        self.cache, self.first, self.rows = cache, first, sum(groups)
        self.packed = Packed(starts, cache.device)
        bounds = torch.tensor([starts[:-1], starts[1:]])
        start_N, end_N = bounds.repeat_interleave(torch.tensor(groups), 1)
        self.longest = int((end_N - start_N).max())
        # a shorter prompt's last token is repeated to the end of its row, where nothing looks before it is overwritten
        from_NL = torch.minimum(start_N[:, None] + torch.arange(self.longest), end_N[:, None] - 1)
        self.from_NL = from_NL.to(cache.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        store = self.cache.layer(layer, key.shape[1], key.shape[3])
        rows = store[self.first : self.first + self.rows, :, :, : self.longest]
        for side, fresh in enumerate((key, value)):
            rows[:, :, side] = fresh[0].transpose(0, 1)[self.from_NL].transpose(1, 2)
        return self.packed.attend(layer, query, key, value, rule)


class Extend:
    """Packed new tokens of rows with a cached prefix. The tokens of a row attend to its prefix and to each other."""

    def __init__(self, cache: Cache, starts: tuple[int, ...], first: int, cached: list[int]):
        self.cache, self.first, self.rows = cache, first, len(cached)
        start_N, end_N = torch.tensor(starts[:-1]), torch.tensor(starts[1:])
        length_N, cached_N = end_N - start_N, torch.tensor(cached)
        step_S = torch.arange(int(length_N.max()))
        row_T = torch.arange(self.rows).repeat_interleave(length_N)
        step_T = torch.arange(starts[-1]) - start_N[row_T]
        self.longest = int((length_N + cached_N).max())
        self.device = cache.device
        self.row_T = (first + row_T).to(self.device)
        self.position_T = (cached_N[row_T] + step_T).to(self.device)
        self.order_T = (row_T * len(step_S) + step_T).to(self.device)
        # the last token of a shorter row is repeated, and the repetitions are left out of what is returned
        self.from_NS = torch.minimum(start_N[:, None] + step_S, end_N[:, None] - 1).to(self.device)
        self.position_NS = (cached_N[:, None] + step_S).to(self.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        sides = self.cache.layer(layer, key.shape[1], key.shape[3]).unbind(2)
        for side, fresh in zip(sides, (key, value), strict=True):
            side[self.row_T, :, self.position_T] = fresh[0].transpose(0, 1)
        part = slice(self.first, self.first + self.rows)
        keys, values = (side[part, :, : self.longest] for side in sides)
        at = torch.arange(self.longest, device=self.device)
        allowed = at <= self.position_NS[..., None]
        if rule.sliding_window is not None:
            allowed &= at > self.position_NS[..., None] - rule.sliding_window
        rows = query[0].transpose(0, 1)[self.from_NS].transpose(1, 2)  # [N, H, S, D]
        out = masked(rows, keys, values, allowed[:, None], rule)
        return out.transpose(1, 2).flatten(0, 1)[self.order_T][None]


class Decode:
    """One new token for each of the first rows of the cache, at each row's own position."""

    def __init__(self, cache: Cache, position_N: Tensor, shortest: int, longest: int):
        self.cache, self.count, self.position_N = cache, position_N.shape[0], position_N
        # positions lie between shortest and longest
        self.longest, self.even = longest + 1, shortest == longest
        self.masks: dict[int | None, Tensor] = {}  # by sliding window
        # by number of heads: where the new keys go in a flattened layer
        self.places: dict[int, Tensor] = {}

    def mask(self, window: int | None) -> Tensor | None:
        """[N, 1, 1, L], true where a row must not attend, or None if every row sees every position."""
        if window is not None and window >= self.longest:
            window = None
        if self.even and window is None:
            return None
        if window not in self.masks:
            at = torch.arange(self.longest, device=self.cache.device)
            hidden = at[None, :] > self.position_N[:, None]
            if window is not None:
                hidden |= at[None, :] <= self.position_N[:, None] - window
            self.masks[window] = hidden[:, None, None, :]
        return self.masks[window]

    def place(self, heads: int) -> Tensor:
        """[N * heads * 2]: the row of each new key and value among the layer's rows * heads * 2 * length."""
        if heads not in self.places:
            row = torch.arange(2 * self.count * heads, device=self.cache.device).view(-1, 2 * heads)
            place = row * self.cache.length + self.position_N[:, None]
            self.places[heads] = place.view(-1)
        return self.places[heads]

    def write(self, layer: int, fresh: Tensor) -> Tensor:
        """Store the new keys and values, [N, heads, 2, width]. Returns the layer's tensor."""
        heads, width, length = fresh.shape[1], fresh.shape[3], self.cache.length
        store = self.cache.layer(layer, heads, width)
        if self.even:
            step = 2 * length * width
            size, strides = fresh.shape, (heads * step, step, length * width, 1)
            store.as_strided(size, strides, (self.longest - 1) * width).copy_(fresh)
        else:
            store.view(-1, width).index_copy_(0, self.place(heads), fresh.reshape(-1, width))
        return store

    def attend_grouped(self, layer: int, qkv: Tensor, rule: Rule) -> Tensor:
        """[N, Hk, G + 2, D]: the queries of each key head, its key and its value -> [N * Hk, G, D], as two products and a softmax. For
        one-token queries, torch's own attention takes twice as long on a CPU."""
        rows, heads, members, width = qkv.shape
        group, length = members - 2, self.cache.length
        store = self.write(layer, qkv.narrow(2, group, 2))
        count, step = rows * heads, 2 * length * width
        # each view in one call: several take as long as the copy or product after them
        keys = store.as_strided((count, width, self.longest), (step, 1, width))
        values = store.as_strided((count, self.longest, width), (step, width, 1), length * width)
        query = qkv.as_strided((count, group, width), (members * width, width, 1))
        score = torch.bmm(query, keys)
        if rule.scaling != 1.0:
            score.mul_(rule.scaling)
        if (mask := self.mask(rule.sliding_window)) is not None:
            score.view(rows, -1, self.longest).masked_fill_(mask[:, 0], -torch.inf)
        return torch.bmm(score.softmax(-1), values)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        rows, heads, width = key.shape[0], key.shape[1], key.shape[3]
        grouped = query.shape[1] // heads
        if query.device.type == "cpu" and query.dtype == torch.float32 and rule.plain:
            query = query.reshape(rows, heads, grouped, width)
            qkv = torch.cat([query, key, value], 2)
            return self.attend_grouped(layer, qkv, rule).view(rows, 1, -1, width)
        store = self.write(layer, torch.cat([key, value], 2))
        keys, values = store[: self.count, :, :, : self.longest].unbind(2)
        mask = self.mask(rule.sliding_window)
        # heads of a group become query rows: keys are read once and never repeated
        if rule.plain:
            query = query.reshape(rows, heads, grouped, width)
        allowed = None if mask is None else ~mask
        return masked(query, keys, values, allowed, rule).reshape(rows, 1, heads * grouped, width)
