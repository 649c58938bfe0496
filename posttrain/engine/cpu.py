"""The CPU backend: computes with the policy's own module or, for a Llama-like model, with a faster decoder, over a cache of rows.

This is how a CPU generates; on other devices it serves models that the CUDA backend does not know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posttrain.engine import fp8
from posttrain.engine.cache import Cache, Decode, Extend, Prefill
from posttrain.engine.decoder import Decoder, cpu_decoder
from posttrain.engine.random import uniforms
from posttrain.engine.rows import RowTable, portions
from posttrain.engine.sampler import Choices, sample
from posttrain.engine.scheduler import Work
from posttrain.models.attention import LAYOUT, Layout
from posttrain.models.policy import Policy

PREFILL_TOKENS = 8192  # prompt tokens computed in one forward
AHEAD = 256  # positions that the cache holds from the start, where responses may get that far: growing means copying
DECODER_TOKENS = 512  # a call for fewer tokens is over before a `Decoder` has paid for itself
PACKED_TOKENS = 2048  # and packing its weights, a few nanoseconds each, takes as many more
UNIFORMS = 16  # made at once for a row: making them takes as many operators for one as for all
KEPT_BYTES = 1 << 30  # limit of the kept caches of sessions, in each process


@dataclass(slots=True, eq=False)
class KeptRow:
    """The keys and values of a session, by layer."""

    number: int
    length: int
    layers: dict[int, Tensor]
    # whether a `Decoder` computed them: its keys have another order than the module's
    decoded: bool

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.layers.values())


class CPUBackend:
    """Computes a step when it is launched. Live rows are the first rows of the cache; rows from the end fill gaps."""

    bursts = 16

    def __init__(self, policy: Policy, precision: fp8.Precision = fp8.AS_TRAINED):
        self.policy, self.device, self.rows = policy, policy.device, RowTable()
        self.precision = precision
        self.kept_bytes = 0
        self.decoder: Decoder | None = None
        self.idle()

    @property
    def prefill_tokens(self) -> int:
        return PREFILL_TOKENS

    def prepare(self, works: Sequence[Work], rows: int, fresh: bool) -> None:
        if fresh:
            requests = [r for work in works for r in work.requests]
            tokens = sum(r.sampling.max_new_tokens for r in requests)
            self.decoder = self.make_decoder(tokens, any(r.keep or r.turn for r in requests))
            self.products = fp8.Emulation(self.policy) if self.precision.products else nullcontext()
            self.cache, self.head = Cache(rows, self.policy.dtype, self.device), self.policy.head
        self.cache.resize(rows)

    def make_decoder(self, tokens: int, lasting: bool = False) -> Decoder | None:
        """A faster decoder with the policy's current weights, if there is one and it pays."""
        if (tokens < DECODER_TOKENS and not lasting) or self.precision.products:
            return None
        return cpu_decoder(self.policy, pack=tokens >= PACKED_TOKENS)

    def fits(self, work: Work | None) -> bool:
        return self.kept_bytes <= KEPT_BYTES

    def enter(self, work: Work, first: int) -> None:
        """Nothing to allocate: the rows of the cache exist already."""

    def prefill(
        self, works: Sequence[Work], caches: Sequence[KeptRow | None], first: int
    ) -> tuple[np.ndarray, np.ndarray]:
        groups = [len(work.requests) for work in works]
        decoded = self.decoder is not None
        usable = [None if c is None or c.decoded != decoded else c for c in caches]
        cached = [0 if cache is None else cache.length for cache in usable]
        new = [work.ids[skip:] for work, skip in zip(works, cached, strict=True)]
        prefix = self.rows.live("prefix", first)
        self._reserve(int(prefix.max()), int((prefix + self.rows.live("limit", first)).max()))
        for row, cache in enumerate(usable):
            if cache is not None:
                self.cache.restore(first + row, cache.layers)
        hidden_TH, starts = self._extend(new, cached, first, groups)
        last_N = torch.from_numpy(np.repeat(np.array(starts[1:]) - 1, groups)).to(self.device)
        self._settle()
        return self._draw(hidden_TH[last_N], first)

    def resume(self, works: Sequence[Work], first: int) -> None:
        prefix, count = (self.rows.live(name, first) for name in ("prefix", "count"))
        limit, row = self.rows.live("limit", first), first
        self._reserve(int((prefix + count).max()), int((prefix + limit).max()))
        for part in portions([len(work.ids) for work in works], PREFILL_TOKENS):
            groups = [len(work.requests) for work in works[part]]
            self._extend([work.ids for work in works[part]], [0] * len(groups), row, groups)
            row += sum(groups)
        rest = [ids[:-1] for work in works for ids, *_ in work.written]
        for part in portions([len(ids) for ids in rest], PREFILL_TOKENS):
            if any(len(ids) for ids in rest[part]):
                self._extend(rest[part], prefix[part].tolist(), first + part.start, [])
        self.settled = False

    def _extend(
        self, new: Sequence[np.ndarray], cached: list[int], first: int, groups: list[int]
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Compute these ids of the rows from `first` on, after `cached` ids of each; or, if none of them has any, prompts of `groups`
        of rows. Returns hidden states, [T, H], and where those of each sequence begin."""
        starts = (0, *np.cumsum([len(ids) for ids in new]).tolist())
        kind, about = (Extend, cached) if any(cached) else (Prefill, groups)
        layout: Layout = kind(self.cache, starts, first, about)
        every = zip(cached, new, strict=True)
        positions = [np.arange(skip, skip + len(ids)) for skip, ids in every]
        ids, position = (torch.from_numpy(np.concatenate(p))[None] for p in (new, positions))
        return self._hidden(ids, position, layout)[0], starts

    def refresh(self) -> None:
        """The decoder stays one: the keys of its caches have another order than the module's."""
        if self.decoder is not None:
            self.decoder = cpu_decoder(self.policy, pack=True)
            assert self.decoder is not None, "the model has changed its kind"
            self._reserve(0, 0)
        if self.precision.products:
            self.products = fp8.Emulation(self.policy)

    def launch(self) -> None:
        """Decode one token for every live row."""
        if not self.settled:
            self._settle()
        position = self.rows.live("prefix") + self.rows.live("count") - 1
        longest = int(position.max())
        self._reserve(longest, 0)
        position_N = torch.from_numpy(position).to(self.device)
        layout = Decode(self.cache, position_N, int(position.min()), longest)
        hidden_NH = self._hidden(self.last_N[:, None], position_N[:, None], layout)[:, 0]
        self.drawn = self._draw(hidden_NH, 0)

    def ahead(self) -> bool:
        return False

    def collect(self) -> tuple[np.ndarray, np.ndarray]:
        return self.drawn

    def routes(self, rows: Sequence[int]) -> list[np.ndarray | None]:
        return [None] * len(rows)

    def keep(self, row: int, number: int) -> KeptRow | None:
        length = int(self.rows["prefix"][row] + self.rows["count"][row]) - 1
        kept = KeptRow(number, length, self.cache.save(row, length), self.decoder is not None)
        self.kept_bytes += kept.bytes
        return kept

    def drop(self, kept: KeptRow) -> None:
        self.kept_bytes -= kept.bytes

    def remove(self, gone: np.ndarray) -> np.ndarray:
        rows = self.rows
        stay = rows.count - len(gone)
        order, leaving = np.arange(stay), gone.tolist()
        holes = [i for i in leaving if i < stay]
        if holes:
            movers = sorted(set(range(stay, rows.count)) - set(leaving))
            length = int((rows["prefix"][movers] + rows["count"][movers]).max())
            self.cache.move(movers, holes, min(length, self.cache.length))
            order[holes] = movers
        self.settled = False
        return order

    def idle(self) -> None:
        self.decoder = None
        self.cache = Cache(0, self.policy.dtype, self.device)
        self.settled = False

    def release(self) -> None:
        self.kept_bytes = 0
        self.idle()

    def _reserve(self, length: int, limit: int) -> None:
        """Make room for rows of `length` tokens and one more, and for up to `AHEAD` further tokens if the rows may reach them."""
        self.cache.reserve(max(length + 1, min(limit, AHEAD)))
        if self.decoder is not None:
            self.decoder.ensure_rope_table(self.cache.length)

    def _hidden(self, ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        ids, position_ids = ids.to(self.device), position_ids.to(self.device)
        if self.decoder is not None:
            return self.decoder.hidden(ids, position_ids, layout)
        with self.products:
            return self.policy.hidden(ids, position_ids, **{LAYOUT: layout})

    def _settle(self) -> None:
        """Update the tensors that describe the live rows; called when these change."""
        rows, count = self.rows, self.rows.count
        temperature, top_p = rows.floats[:, :count]
        self.choices = Choices.of(temperature, rows.live("top_k"), top_p, self.device)
        columns = (torch.from_numpy(rows.live(name).copy()) for name in ("seed", "last"))
        self.seed_N, self.last_N = (column.to(self.device) for column in columns)
        self.uniforms: deque[Tensor] = deque()  # [N] each, for the tokens to come of these rows
        self.settled = True

    def _draw(self, hidden_NH: Tensor, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Sample a token for each row from `first` on."""
        choices = self.choices if not first else self.choices.rest(first)
        if first or not self.uniforms:
            count_NL = self.rows.live("count", first)[:, None] + np.arange(1 if first else UNIFORMS)
            drawn = uniforms(self.seed_N[first:, None], torch.from_numpy(count_NL).to(self.device))
            self.uniforms.extend(drawn.unbind(1))
        id_N, logprob_N = sample(hidden_NH, self.head, choices, self.uniforms.popleft())
        self.last_N = id_N if not first else torch.cat([self.last_N[:first], id_N])
        return id_N.cpu().numpy()[None], logprob_N.cpu().numpy()[None]
