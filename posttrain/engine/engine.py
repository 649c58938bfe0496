"""Generation on the training module itself: prompts prefilled once and forked, rows leave when done, waiting requests enter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from posttrain.engine.cache import Cache, Decode, Prefill
from posttrain.engine.random import derive, signed
from posttrain.engine.sampler import Choices, sample
from posttrain.models.attention import LAYOUT
from posttrain.models.policy import Policy
from posttrain.types import Completion, Request, Sampling

PREFILL_TOKENS = 8192  # prompt tokens computed in one forward


class Row:
    """One response being written."""

    __slots__ = ("ids", "length", "logprobs", "prompt", "request", "sample", "sampling", "seed")

    def __init__(self, request: int, sample: int, prompt: int, seed: int, sampling: Sampling):
        self.request, self.sample, self.prompt, self.seed, self.sampling = request, sample, prompt, seed, sampling
        self.ids: list[int] = []
        self.logprobs: list[float] = []


class Engine:
    """A `Sampler` in this process. It shares the policy's parameters, so an optimizer step is seen by the next token."""

    def __init__(self, policy: Policy, max_rows: int = 256):
        self.policy, self.max_rows, self.version = policy, max_rows, 0

    def update(self, version: int) -> None:
        """The weights are the policy's own: there is nothing to copy, only to count."""
        self.version = version

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[Completion, ...]]:
        yield from _Batch(self, requests).run()


class _Batch:
    """The state of one call of `generate`: the live rows, the cache, and the answers that wait for their turn."""

    def __init__(self, engine: Engine, requests: Sequence[Request]):
        self.policy, self.version = engine.policy, engine.version
        self.requests = requests
        self.waiting = 0  # the next request to enter
        self.live: list[Row] = []
        self.done: list[list[Completion | None]] = [[None] * r.group for r in requests]
        self.stop_ids = frozenset(self.policy.stop_ids)
        rows = sum(r.group for r in requests)
        self.capacity = max(min(engine.max_rows, rows), max((r.group for r in requests), default=0))
        self.cache = Cache(self.capacity, self.policy.dtype, self.policy.device)
        self.choices: Choices | None = None

    def run(self) -> Iterator[tuple[Completion, ...]]:
        was_training = self.policy.model.training
        self.policy.model.eval()
        answered = 0
        try:
            while self.waiting < len(self.requests) or self.live:
                if self._fits():
                    self._admit()
                else:
                    self._decode()
                self._retire()
                while answered < len(self.requests) and all(c is not None for c in self.done[answered]):
                    yield tuple(c for c in self.done[answered] if c is not None)
                    answered += 1
        finally:  # also when the caller stops listening half-way
            self.policy.model.train(was_training)

    def _fits(self) -> bool:
        return self.waiting < len(self.requests) and len(self.live) + self.requests[self.waiting].group <= self.capacity

    def _admit(self) -> None:
        """Prefill the next requests, in order, as many as fit; fork each to its group and sample the first tokens."""
        ids: list[int] = []
        starts, rows, fresh = [0], [], []
        while self._fits() and (not ids or len(ids) + len(self.requests[self.waiting].prompt_ids) <= PREFILL_TOKENS):
            request = self.requests[self.waiting]
            rows.append((len(self.live) + len(fresh), request.group))
            ids.extend(request.prompt_ids)
            starts.append(len(ids))
            for number in range(request.group):
                seed = signed(derive(request.seed, number))
                fresh.append(Row(self.waiting, number, len(request.prompt_ids), seed, request.sampling))
            self.waiting += 1
            if len(self.live) + len(fresh) >= self.capacity:
                break
            if (
                self.waiting < len(self.requests)
                and len(self.live) + len(fresh) + self.requests[self.waiting].group > self.capacity
            ):
                break
        self.cache.reserve(max(b - a for a, b in zip(starts, starts[1:], strict=False)) + 1)
        position = torch.cat([torch.arange(b - a) for a, b in zip(starts, starts[1:], strict=False)])
        layout = Prefill(self.cache, tuple(starts), rows)
        device = self.policy.device
        hidden_TH = self.policy.hidden(torch.tensor(ids, device=device)[None], position.to(device)[None], **{LAYOUT: layout})[0]
        last = torch.tensor([starts[i + 1] - 1 for i, (_, count) in enumerate(rows) for _ in range(count)], device=device)
        first = len(self.live)
        self.live.extend(fresh)
        self._gather()
        self._draw(hidden_TH[last], first)

    def _decode(self) -> None:
        """One token for every live row."""
        positions = [row.prompt + len(row.ids) - 1 for row in self.live]
        self.cache.reserve(max(positions) + 1)
        layout = Decode(self.cache, positions)
        ids = torch.tensor([[row.ids[-1]] for row in self.live], device=self.policy.device)
        hidden = self.policy.hidden(ids, layout.position_N[:, None], **{LAYOUT: layout})
        self._draw(hidden[:, 0], 0)

    def _gather(self) -> None:
        """Settings of the live rows as tensors, remade when the rows change."""
        settings = [row.sampling for row in self.live]
        self.choices = Choices.of(settings, self.policy.device)
        self.plain = all(s.temperature == 1.0 and not s.truncated for s in settings)
        self.seed_N = torch.tensor([row.seed for row in self.live], device=self.policy.device)

    def _draw(self, hidden_NH: Tensor, first: int) -> None:
        rows = self.live[first:]
        assert self.choices is not None
        part = Choices(self.choices.temperature_N[first:], self.choices.top_k_N[first:], self.choices.top_p_N[first:])
        position_N = torch.tensor([len(row.ids) for row in rows], device=self.policy.device)
        id_N, logprob_N = sample(hidden_NH, self.policy.head, part, self.seed_N[first:], position_N, self.plain)
        for row, token, logprob in zip(rows, id_N.tolist(), logprob_N.tolist(), strict=True):
            row.ids.append(token)
            row.logprobs.append(logprob)

    def _retire(self) -> None:
        """Take finished rows out; rows from the end fill the holes, so that live rows stay the first of the cache."""
        finished = [i for i, row in enumerate(self.live) if self._finish(row)]
        if not finished:
            return
        for i in finished:
            row = self.live[i]
            self.done[row.request][row.sample] = Completion(
                np.array(row.ids, dtype=np.int64), np.array(row.logprobs, dtype=np.float32), self._finish(row), self.version
            )
        keep = len(self.live) - len(finished)
        gone = set(finished)
        holes = [i for i in finished if i < keep]
        movers = [i for i in range(keep, len(self.live)) if i not in gone]
        if holes:
            length = max(self.live[i].prompt + len(self.live[i].ids) for i in movers)
            self.cache.move(movers, holes, min(length, self.cache.length))
            for source, target in zip(movers, holes, strict=True):
                self.live[target] = self.live[source]
        del self.live[keep:]
        if self.live:
            self._gather()

    def _finish(self, row: Row) -> str:
        count = len(row.ids)
        if row.ids[-1] in self.stop_ids and count > row.sampling.min_new_tokens:
            return "stop"
        return "length" if count >= row.sampling.max_new_tokens else ""
