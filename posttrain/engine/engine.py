"""Generation on the training module itself: prompts prefilled once and forked, rows leave when done, waiting requests enter."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from posttrain.engine import forked
from posttrain.engine.cache import Cache, Decode, Prefill
from posttrain.engine.decoder import Decoder, cpu_decoder
from posttrain.engine.pager import Pager
from posttrain.engine.random import signed, uniforms
from posttrain.engine.sampler import Choices, sample
from posttrain.engine.work import Work
from posttrain.errors import require
from posttrain.models.attention import LAYOUT, Layout
from posttrain.models.policy import Policy
from posttrain.system.machine import check_threads
from posttrain.types import Completion, Request, Statistics

PREFILL_TOKENS = 8192  # prompt tokens computed in one forward
AHEAD = 256  # positions that the cache holds from the start, where responses may get that far: growing means copying
DECODER_TOKENS = 512  # a call for fewer tokens is over before a `Decoder` has paid for itself
DRAWN_AHEAD = (
    16  # uniforms made at once for a row: making them takes as many operators for one as for all
)
PACKED_TOKENS = 2048  # and packing its weights, a few nanoseconds each, takes as many more

# One response being written. Its ids and log-probs are beside it, in `_Batch.ids` and `_Batch.logprobs`.
ROW = np.dtype(
    [
        (name, np.int64)
        for name in ("request", "sample", "seed", "prompt", "count", "limit", "least", "top_k")
    ]
    + [("temperature", np.float32), ("top_p", np.float32)]
)


class Engine:
    """A `Sampler` in this process. It shares the policy's parameters: what the optimizer did is in the next call's tokens.

    `processes` are the cores that it may use on a CPU, 0 for all; see engine/forked.py.
    """

    def __init__(self, policy: Policy, max_rows: int = 256, processes: int = 0):
        self.policy, self.max_rows, self.processes, self.version = (
            policy,
            max_rows,
            processes or forked.CORES,
            0,
        )
        check_threads(self.processes, "processes")
        self.helpers: forked.Crew | None = None
        self.memory: tuple[int, ...] = ()  # where the weights lie that the helpers see
        self.pager = Pager(policy)
        self.queue: list[Request] = []
        self.running: Generator[list[tuple[Request, Completion]], None, None] | None = None
        self.sessions: dict[int, tuple[int, ...]] = {}  # ids of sessions that may go on
        self.held: set[int] = set()
        self.cancelled: set[int] = set()
        self.prefilled = self.sampled = 0

    @property
    def capacity(self) -> int:
        return self.max_rows

    @property
    def statistics(self) -> Statistics:
        failed = 0 if self.helpers is None else self.helpers.lost
        return Statistics(self.prefilled, self.sampled, failed_workers=failed)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            require(not request.model, f"this sampler has no model {request.model!r}")
            known = self.sessions.get(request.session, ())
            require(
                bool(request.turn) == bool(known),
                f"session {request.session} cannot go on with turn {request.turn}",
            )
            self.policy.check_length(
                len(known) + len(request.ids) + request.sampling.max_new_tokens
            )
            self.queue.append(request)

    @torch.inference_mode()
    def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
        if self.running is None and self.queue:
            self.running, self.queue = self._answers(self.queue), []
        if self.running is None:
            return []
        training = self.policy.model.training
        self.policy.model.eval()
        try:
            found = next(self.running, [])
            if not self.held:
                next(self.running, None)  # to its end
                self.running = None
        finally:
            self.policy.model.train(training)
        return found

    def cancel(self, sessions: Collection[int]) -> None:
        self.queue = [r for r in self.queue if r.session not in sessions]
        for session in sessions:
            self.sessions.pop(session, None)
        self.cancelled |= set(sessions)
        if self.running is not None and self.held <= self.cancelled:
            self.running.close()
            self.running = None

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """The weights are the policy's own: there is nothing to copy, only to count."""
        require(weights is None, "the engine samples with the policy's own parameters")
        self.version = version

    def release(self) -> None:
        self.pager.release()

    def close(self) -> None:
        if self.helpers is not None:
            self.helpers.close()

    def _answers(
        self, requests: Sequence[Request]
    ) -> Generator[list[tuple[Request, Completion]], None, None]:
        groups = [
            list(members)
            for _, members in groupby(
                enumerate(requests),
                lambda pair: (
                    (pair[1].group, pair[1].sampling)
                    if pair[1].group >= 0 and not pair[1].turn
                    else pair[0]
                ),
            )
        ]
        whole = [
            self.sessions.get(members[0][1].session, ()) + members[0][1].ids for members in groups
        ]
        self.held, self.cancelled = {r.session for r in requests}, set()
        work = [
            Work(ids, tuple(r.seed for _, r in members), members[0][1].sampling)
            for ids, members in zip(whole, groups, strict=True)
        ]
        for ids, members, completions in zip(whole, groups, self.generate(work), strict=True):
            self.prefilled += len(ids)
            self.sampled += sum(len(c.ids) for c in completions)
            found = [
                (r, c)
                for (_, r), c in zip(members, completions, strict=True)
                if r.session not in self.cancelled
            ]
            for request, completion in found:
                self.held.discard(request.session)
                self.sessions.pop(request.session, None)
                if request.keep:
                    self.sessions[request.session] = (*ids, *completion.ids.tolist())
            yield found

    def generate(self, requests: Sequence[Work]) -> Iterator[tuple[Completion, ...]]:
        if self.pager.takes(requests):
            yield from self.pager.generate(requests, self.max_rows, self.version)
            return
        on_cpu = self.policy.device.type == "cpu"
        if on_cpu and forked.worthwhile(requests, self.policy.parameters, self.processes):
            yield from self.crew(requests).generate(self.serve, requests, self.version)
        else:
            yield from self.serve(requests, self.version)

    def serve(self, requests: Sequence[Work], version: int) -> Iterator[tuple[Completion, ...]]:
        """Answer requests in this process with the weights of this moment."""
        return _Batch(self, requests, self.decoder(requests), version).run()

    def crew(self, requests: Sequence[Work]) -> forked.Crew:
        """Helpers that see this policy's weights: new ones where the weights have moved to other memory, as with adapters."""
        if self.helpers is None or self.memory != self._memory():
            if self.helpers is not None:
                self.helpers.close()
            self.decoder(requests)  # what it proves of the model is then known to the helpers too
            for tensor in (*self.policy.model.parameters(), *self.policy.model.buffers()):
                tensor.untyped_storage().share_memory_()
            self.memory, self.helpers = self._memory(), forked.Crew(self.processes)
            weakref.finalize(self, self.helpers.close)
        return self.helpers

    def _memory(self) -> tuple[int, ...]:
        model = self.policy.model
        return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))

    def decoder(self, requests: Sequence[Work]) -> Decoder | None:
        """A faster way through the policy's module with its present weights, where there is one and it pays."""
        tokens = sum(r.group * r.sampling.max_new_tokens for r in requests)
        if tokens < DECODER_TOKENS:
            return None
        return cpu_decoder(self.policy, pack=tokens >= PACKED_TOKENS)


class _Batch:
    """The state of one call of `generate`: the live rows, the cache, and the answers that wait for their turn."""

    def __init__(
        self, engine: Engine, requests: Sequence[Work], decoder: Decoder | None, version: int
    ):
        self.policy, self.version, self.decoder = engine.policy, version, decoder
        self.device, self.head = self.policy.device, self.policy.head
        self.requests = requests
        self.waiting = 0  # the next request to enter
        self.done: list[list[Completion | None]] = [[None] * r.group for r in requests]
        rows = sum(r.group for r in requests)
        self.capacity = max(min(engine.max_rows, rows), max((r.group for r in requests), default=0))
        self.cache = Cache(self.capacity, self.policy.dtype, self.device)
        self.rows, self.count = (
            np.zeros(self.capacity, ROW),
            0,
        )  # the first `count` are live, in the order of the cache
        self.ids, self.logprobs = (
            np.zeros((self.capacity, 0), np.int64),
            np.zeros((self.capacity, 0), np.float32),
        )
        self.stop_V = np.zeros(self.head.weight_VH.shape[0], bool)
        self.stop_V[list(self.policy.stop_ids)] = True

    @property
    def live(self) -> np.ndarray:
        return self.rows[: self.count]

    def run(self) -> Iterator[tuple[Completion, ...]]:
        answered = 0
        while self.waiting < len(self.requests) or self.count:
            if self._fits():
                self._admit()
            else:
                self._decode()
            self._retire()
            while answered < len(self.requests) and all(c is not None for c in self.done[answered]):
                yield tuple(c for c in self.done[answered] if c is not None)
                answered += 1

    def _fits(self) -> bool:
        return (
            self.waiting < len(self.requests)
            and self.count + self.requests[self.waiting].group <= self.capacity
        )

    def _admit(self) -> None:
        """Prefill the next requests, in order, as many as fit; fork each to its group and sample the first tokens."""
        ids: list[int] = []
        starts, groups, first = [0], [], self.count
        while self._fits() and (
            not ids or len(ids) + len(self.requests[self.waiting].prompt_ids) <= PREFILL_TOKENS
        ):
            request = self.requests[self.waiting]
            ids.extend(request.prompt_ids)
            starts.append(len(ids))
            groups.append(request.group)
            self._enter(request)
            self.waiting += 1
        rows = self.rows[first : self.count]
        self._reserve(int(rows["prompt"].max()), int((rows["prompt"] + rows["limit"]).max()))
        lengths = np.diff(starts)
        position = torch.from_numpy(np.arange(len(ids)) - np.repeat(starts[:-1], lengths))
        layout = Prefill(self.cache, tuple(starts), first, groups)
        hidden_TH = self._hidden(torch.tensor(ids)[None], position[None], layout)[0]
        last_N = torch.from_numpy(np.repeat(np.array(starts[1:]) - 1, groups)).to(self.device)
        self._settle()
        self._draw(hidden_TH[last_N], first)

    def _enter(self, request: Work) -> None:
        """Rows for a request's samples."""
        one = request.sampling
        for number in range(request.group):
            seed = signed(request.seeds[number])
            self.rows[self.count] = (
                self.waiting,
                number,
                seed,
                len(request.prompt_ids),
                0,
                one.max_new_tokens,
                one.min_new_tokens,
                one.top_k,
                one.temperature,
                one.top_p,
            )
            self.count += 1

    def _reserve(self, length: int, limit: int) -> None:
        """Room for rows of `length` tokens and one more, and for those to come as far as `AHEAD`, if they may come."""
        self.cache.reserve(max(length + 1, min(limit, AHEAD)))
        if self.decoder is not None:
            self.decoder.ensure_rope_table(self.cache.length)

    def _hidden(self, ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        ids, position_ids = ids.to(self.device), position_ids.to(self.device)
        if self.decoder is not None:
            return self.decoder.hidden(ids, position_ids, layout)
        return self.policy.hidden(ids, position_ids, **{LAYOUT: layout})

    def _decode(self) -> None:
        """One token for every live row."""
        position = self.live["prompt"] + self.live["count"] - 1
        longest = int(position.max())
        self._reserve(longest, 0)
        position_N = torch.from_numpy(position).to(self.device)
        layout = Decode(self.cache, position_N, int(position.min()), longest)
        self._draw(self._hidden(self.last_N[:, None], position_N[:, None], layout)[:, 0], 0)

    def _settle(self) -> None:
        """What the device must know of the live rows, remade when they change."""
        live = self.live
        self.choices = Choices.of(live["temperature"], live["top_k"], live["top_p"], self.device)
        self.seed_N = torch.from_numpy(live["seed"].copy()).to(self.device)
        last = (
            self.ids[np.arange(self.count), live["count"] - 1]
            if self.ids.size
            else np.zeros(0, np.int64)
        )
        self.last_N = torch.from_numpy(last).to(self.device)
        self.uniforms: deque[Tensor] = deque()  # [N] each, for the tokens to come of these rows

    def _draw(self, hidden_NH: Tensor, first: int) -> None:
        """Sample a token for each row from `first` on, and write it down."""
        rows = self.live[first:]
        choices = self.choices if not first else self.choices.rest(first)
        if first or not self.uniforms:
            ahead = 1 if first else DRAWN_AHEAD
            count_NL = torch.from_numpy(rows["count"][:, None] + np.arange(ahead)).to(self.device)
            self.uniforms.extend(uniforms(self.seed_N[first:, None], count_NL).unbind(1))
        id_N, logprob_N = sample(
            hidden_NH, self.head, choices, self.uniforms.popleft(), choices.plain
        )
        self._write(first, rows["count"], id_N.cpu().numpy(), logprob_N.cpu().numpy())
        rows["count"] += 1
        self.last_N = id_N if not first else torch.cat([self.last_N[:first], id_N])

    def _write(self, first: int, at: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> None:
        length = int(at.max()) + 1
        if length > self.ids.shape[1]:
            more = ((0, 0), (0, max(length, 32)))
            self.ids, self.logprobs = np.pad(self.ids, more), np.pad(self.logprobs, more)
        rows = np.arange(first, self.count)
        self.ids[rows, at], self.logprobs[rows, at] = ids, logprobs

    def _retire(self) -> None:
        """Take finished rows out; rows from the end fill the holes, so that live rows stay the first of the cache."""
        live = self.live
        count, last = live["count"], self.ids[np.arange(self.count), live["count"] - 1]
        stopped = self.stop_V[last] & (count > live["least"])
        finished = (stopped | (count >= live["limit"])).nonzero()[0].tolist()
        if not finished:
            return
        for i in finished:
            row = live[i]
            ids, logprobs = (
                self.ids[i, : row["count"]].copy(),
                self.logprobs[i, : row["count"]].copy(),
            )
            finish = "stop" if stopped[i] else "length"
            self.done[row["request"]][row["sample"]] = Completion(
                ids, logprobs, np.full(len(ids), self.version, np.int32), finish
            )
        keep = self.count - len(finished)
        gone = set(finished)
        holes = [i for i in finished if i < keep]
        movers = [i for i in range(keep, self.count) if i not in gone]
        if holes:
            length = int((live["prompt"][movers] + count[movers]).max())
            self.cache.move(movers, holes, min(length, self.cache.length))
            for state in (self.rows, self.ids, self.logprobs):
                state[holes] = state[movers]
        self.count = keep
        if keep:
            self._settle()
