"""The KV cache of the CPU backend: tensors of rows that grow, and the attention layouts that read and write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.models.attention import Packed, Rule, masked

GROWTH = 16  # lengths are allocated in multiples of this


class Cache:
    """Keys and values of live rows, by layer, [rows, heads, length, width] each. Live rows are always the first ones."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device):
        self.rows, self.length = rows, 0
        self.dtype, self.device = dtype, device
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

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
        more = (0, 0, 0, length - self.length, 0, 0, 0, rows - self.rows)
        for layer, (keys, values) in self.layers.items():
            self.layers[layer] = F.pad(keys, more), F.pad(values, more)
        self.rows, self.length = rows, length

    def layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors of one layer, created on first use with the layer's own heads and width (they may differ between layers)."""
        if layer not in self.layers:
            shape = (self.rows, like.shape[1], self.length, like.shape[3])
            empty = torch.zeros(shape, dtype=self.dtype, device=self.device)
            self.layers[layer] = empty, empty.clone()
        return self.layers[layer]

    def save(self, row: int, length: int) -> dict[int, tuple[Tensor, Tensor]]:
        """A copy of a row's keys and values, by layer: [heads, length, width] each."""
        return {
            layer: (keys[row, :, :length].clone(), values[row, :, :length].clone())
            for layer, (keys, values) in self.layers.items()
        }

    def restore(self, row: int, saved: dict[int, tuple[Tensor, Tensor]]) -> None:
        for layer, pair in saved.items():
            for store, one in zip(self.layer(layer, pair[0][None]), pair, strict=True):
                store[row, :, : one.shape[1]] = one

    def move(self, source: list[int], target: list[int], length: int) -> None:
        """Copy rows, so that live rows stay first when others leave."""
        for tensor in (side for pair in self.layers.values() for side in pair):
            tensor[target, :, :length] = tensor[source, :, :length]


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
        for store, fresh in zip(self.cache.layer(layer, key), (key, value), strict=True):
            rows = store[self.first : self.first + self.rows, :, : self.longest]
            rows.copy_(fresh[0].transpose(0, 1)[self.from_NL].transpose(1, 2))
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
        stores = self.cache.layer(layer, key)
        for store, fresh in zip(stores, (key, value), strict=True):
            store[self.row_T, :, self.position_T] = fresh[0].transpose(0, 1)
        part = slice(self.first, self.first + self.rows)
        keys, values = (store[part, :, : self.longest] for store in stores)
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
        self.masks: dict[int | None, Tensor | None] = {}  # by sliding window
        # by number of heads: where the new keys go in a flattened layer
        self.places: dict[int, Tensor] = {}

    def mask(self, window: int | None) -> Tensor | None:
        """[N, 1, 1, L], true where a row must not attend, or None if every row sees every position."""
        if window is not None and window >= self.longest:
            window = None
        if window not in self.masks:
            at = torch.arange(self.longest, device=self.cache.device)
            hidden = at[None, :] > self.position_N[:, None]
            if window is not None:
                hidden |= at[None, :] <= self.position_N[:, None] - window
            self.masks[window] = None if self.even and window is None else hidden[:, None, None, :]
        return self.masks[window]

    def place(self, heads: int) -> Tensor:
        """[N * heads]: the row of each new key among the layer's rows * heads * length."""
        if heads not in self.places:
            row = torch.arange(self.count * heads, device=self.cache.device).view(-1, heads)
            place = row * self.cache.length + self.position_N[:, None]
            self.places[heads] = place.view(-1)
        return self.places[heads]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        stores, heads, width = self.cache.layer(layer, key), key.shape[1], key.shape[3]
        for store, fresh in zip(stores, (key, value), strict=True):
            # by methods: an index of several slices takes longer to read than the copy
            if self.even:
                store.select(2, self.longest - 1).narrow(0, 0, self.count).copy_(fresh.squeeze(2))
            else:
                store.view(-1, width).index_copy_(0, self.place(heads), fresh.reshape(-1, width))
        rows, grouped = query.shape[0], query.shape[1] // heads
        mask = self.mask(rule.sliding_window)
        if query.device.type == "cpu" and query.dtype == torch.float32 and rule.softcap is None:
            whole, size = (-1, self.cache.length, width), rows * heads
            flat = (store.view(whole).narrow(0, 0, size) for store in stores)
            keys, values = (store.narrow(1, 0, self.longest) for store in flat)
            return _by_products(query, keys, values, mask, rule.scaling).view(rows, 1, -1, width)
        keys, values = (store[: self.count, :, : self.longest] for store in stores)
        # heads of a group become query rows: keys are read once and never repeated
        if rule.softcap is None:
            query = query.reshape(rows, heads, grouped, width)
        allowed = None if mask is None else ~mask
        return masked(query, keys, values, allowed, rule).reshape(rows, 1, heads * grouped, width)


def _by_products(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """[N, Hq, 1, D] queries with [N * Hk, L, D] keys and values -> [N * Hk, G, D], as two products and a softmax. For one-token
    queries, torch's own attention takes twice as long on a CPU."""
    rows = query.shape[0]
    query = query.reshape(keys.shape[0], -1, keys.shape[2])
    score = torch.bmm(query, keys.transpose(1, 2))
    if scaling != 1.0:
        score.mul_(scaling)
    if mask is not None:
        score.view(rows, -1, score.shape[-1]).masked_fill_(mask[:, 0], -torch.inf)
    return torch.bmm(score.softmax(-1), values)
