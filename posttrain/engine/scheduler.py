"""Continuous batching: decides which requests are decoded when, the same way on every device. A `Backend` computes.

Requests wait in order of arrival. As soon as there are rows and memory for the next one, it is prefilled, and its rows are decoded
together with all others until each is done. The random draws of a row depend on its request alone, so neither the order nor the other
rows of a batch change what is sampled.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from posttrain.engine.random import MASK
from posttrain.engine.rows import RowTable, pages_of
from posttrain.models.policy import Policy
from posttrain.types import Completion, Request, Statistics

Tokens = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids, log-probs, versions
STOPPED, CANCELLED = 2, 3  # values of a row's `done`; 0: live, 1: at its length limit


@dataclass(slots=True, eq=False)
class Work:
    """Requests that are prefilled as one sequence: the samples of a group, or a turn of a session."""

    number: int  # in order of arrival
    requests: tuple[Request, ...]
    ids: np.ndarray  # int64: all ids before the first token, including the session's history
    computed: int = 0  # how many of the ids were computed before
    written: tuple[Tokens, ...] = ()  # what each row had sampled, if the rows were suspended
    done: list[int] = field(init=False)  # how many tokens these are, of each row
    limits: list[int] = field(init=False)  # how many tokens each row may sample
    pages: int = field(init=False)  # of its tokens at full length

    def __post_init__(self) -> None:
        self.done = [len(ids) for ids, *_ in self.written] or [0] * len(self.requests)
        self.limits = [r.sampling.max_new_tokens for r in self.requests]
        self.pages = pages_of(len(self.ids)) + sum(map(pages_of, self.limits))

    @property
    def session(self) -> int:
        return self.requests[0].session


class Kept(Protocol):
    """The cache of a session between two turns."""

    number: int  # the number of its last work
    length: int  # in tokens


class Backend(Protocol):
    """Holds the caches and computes. It sees rows, works and kept caches, and makes no scheduling decisions."""

    rows: RowTable
    bursts: int  # the number of bursts in a poll in which nothing finishes

    @property
    def prefill_tokens(self) -> int:
        """How many tokens are prefilled in one forward pass."""

    def prepare(self, works: Sequence[Work], rows: int, fresh: bool) -> None:
        """Prepare for newly arrived works and `rows` rows at once. `fresh` says to read the current weights."""

    def fits(self, work: Work | None) -> bool:
        """Whether there is memory for one more work at its full length; None: for the works that are in already."""

    def enter(self, work: Work, first: int) -> None:
        """Allocate what the rows of a work, which begin at `first`, need from the start."""

    def prefill(
        self, works: Sequence[Work], caches: Sequence[Any], first: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compute the ids of works, after their cached ones. Returns ids and log-probs of the first sampled tokens of the rows from
        `first` on, [1, N]. Either all works have a cache, or none."""

    def resume(self, works: Sequence[Work], first: int) -> None:
        """Compute the ids of suspended works and what their rows, which begin at `first`, had sampled; of each row all but the last
        token, which the next step computes."""

    def refresh(self) -> None:
        """Read the current weights, while rows are live. Their caches stay."""

    def launch(self) -> None:
        """Start a burst of decoding steps for the live rows."""

    def ahead(self) -> bool:
        """Wait for the burst and, if the host need not see its tokens first, start the next one for the rows that go on. Returns
        whether it did; `collect` then returns the burst that is over."""

    def collect(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probs of the burst, [S, N]. Entries after the end of a row are undefined."""

    def routes(self, rows: Sequence[int]) -> list[np.ndarray | None]:
        """The experts of the tokens of each row, [prompt and response, L K], -1 where unknown. None if not recorded."""

    def keep(self, row: int, number: int) -> Kept | None:
        """Keep the cache of a finished row, which is removed next, if it can be kept."""

    def drop(self, kept: Any) -> None: ...

    def remove(self, gone: np.ndarray) -> np.ndarray:
        """Free what these rows hold. Returns the remaining rows in their new order."""

    def idle(self) -> None:
        """Called when no work is left, to free temporary memory."""

    def release(self) -> None:
        """Free all memory. No row is live and no cache is kept."""


class Scheduler:
    """Decodes works with one policy in one process. Works enter in order; completions are returned as they finish. With `keep_caches`
    new weights continue on the caches of the old ones."""

    def __init__(self, policy: Policy, backend: Backend, max_rows: int, keep_caches: bool = False):
        self.policy, self.max_rows, self.keep_caches = policy, max_rows, keep_caches
        self.backend, self.rows = backend, backend.rows
        self.version, self.limit = 0, max_rows
        self.waiting: deque[Work] = deque()
        self.arrived: list[Work] = []  # works that the backend has not prepared for
        # prepare anew, with the current weights; read these alone; a burst is running
        self.fresh, self.outdated, self.launched = True, False, False
        self.was_training = False  # whether the model was in training mode before
        self.finished: list[tuple[Request, Completion]] = []
        self.kept: dict[int, Kept] = {}  # by session
        # by output slot: the work and the index of the request in it
        self.members: dict[int, tuple[Work, int]] = {}
        self.free: list[int] = []  # unused output slots
        self.tokens = tuple(np.zeros((0, 32), kind) for kind in (np.int64, np.float32, np.int32))
        self.stop_V = np.zeros(policy.head.weight_VH.shape[0], bool)
        self.stop_V[list(policy.stop_ids)] = True
        self.counts: Counter[str] = Counter()

    @property
    def statistics(self) -> Statistics:
        return Statistics(**self.counts)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.rows.count)

    def submit(self, works: Sequence[Work]) -> None:
        self.fresh |= not self.busy
        self.waiting.extend(works)
        self.arrived.extend(works)

    @torch.inference_mode()
    def poll(self) -> list[tuple[Request, Completion]]:
        """Collect the burst that was launched, admit waiting works, launch the next burst, and return the finished requests."""
        if self.busy:
            if self.policy.model.training:  # restored when all is done: a switch walks all modules
                self.policy.model.eval()
                self.was_training = True
            try:
                self._advance()
            except BaseException:
                self._reset()
                raise
            self._finish_if_idle()
        found, self.finished = self.finished, []
        return found

    @torch.inference_mode()
    def cancel(self, sessions: Collection[int]) -> None:
        """Remove the rows, waiting works, completions and caches of these sessions."""
        self._collect()
        self.finished = [pair for pair in self.finished if pair[0].session not in sessions]
        kept = (without(work, sessions) for work in self.waiting)
        self.waiting = deque(work for work in kept if work.requests)
        for row, slot in enumerate(self.rows.live("output").tolist()):
            work, member = self.members[slot]
            if work.requests[member].session in sessions:
                self.rows["done"][row] = CANCELLED
        self._retire()
        for session in self.kept.keys() & set(sessions):
            self.backend.drop(self.kept.pop(session))
        self._finish_if_idle()

    def written(self, sessions: Collection[int]) -> dict[int, Completion]:
        """The tokens so far of the live rows of these sessions."""
        live = [self.members[slot] for slot in self.rows.live("output").tolist()]
        keys = [work.requests[member].session for work, member in live]
        asked = [row for row, session in enumerate(keys) if session in sessions]
        tokens = self._tokens(asked)
        return {keys[n]: Completion(*own, "") for n, own in zip(asked, tokens, strict=True)}

    @torch.inference_mode()
    def publish(self, version: int) -> None:
        """Sample with the current weights from now on, as `version`. All caches are of the old weights, so live rows go back to the
        queue, unless `keep_caches`."""
        if self.keep_caches:
            self._collect()
            self.version, self.outdated = version, True
            return
        self._suspend()
        self.version, self.fresh, self.arrived = version, True, list(self.waiting)

    @torch.inference_mode()
    def release(self) -> None:
        """Free all memory. Live rows go back to the queue and are recomputed."""
        self._suspend()
        self.fresh, self.arrived = True, list(self.waiting)
        self.backend.release()

    def _advance(self) -> None:
        new = self.waiting or self.fresh or self.outdated
        if self.launched and not new and self.backend.ahead():
            self._collect()  # while the device computes the next burst
            # if all rows have ended by now, the next burst has nothing to collect
            self.launched = self.rows.count > 0
            return
        self._collect()  # first: `prepare` may move the memory that the burst wrote to
        if self.outdated and not self.fresh:
            self.backend.refresh()
        self.outdated = False
        if self.arrived or self.fresh:
            largest = max((len(work.requests) for work in self.waiting), default=0)
            self.limit = max(self.max_rows if self.fresh else self.limit, largest)
            wanted = self.rows.count + sum(len(work.requests) for work in self.waiting)
            self.rows.reserve(min(self.limit, wanted))
            self.backend.prepare(self.arrived, min(self.limit, wanted), self.fresh)
            self.fresh, self.arrived = False, []
        for _ in range(self.backend.bursts):
            self._collect()
            while self._fits():
                self._admit()
            if not self.rows.count:
                return
            self.backend.launch()
            self.launched = True
            if self.finished:
                return

    def _collect(self) -> None:
        if self.launched:
            self.launched = False
            self._record(0, *self.backend.collect())
            self._retire()

    def _fits(self) -> bool:
        """Whether the next work can enter: there is a row for each sample, and memory for all rows at full length. Drops kept caches of
        other sessions to make room, the oldest first."""
        if not self.waiting or self.rows.count + len(self.waiting[0].requests) > self.limit:
            return False
        work = self.waiting[0]
        while not self.backend.fits(work):
            if not self._drop_oldest(work.session):
                return False
        return True

    def _drop_oldest(self, spared: int = -1) -> bool:
        sessions = [session for session in self.kept if session != spared]
        if not sessions:
            return False
        oldest = min(sessions, key=lambda session: self.kept[session].number)
        self.backend.drop(self.kept.pop(oldest))
        self.counts["dropped_sessions"] += 1
        return True

    def _admit(self) -> None:
        """Prefill as many of the next works as fit, in order, and sample the first token of each of their rows."""
        first, works, caches, tokens = self.rows.count, list[Work](), list[Kept | None](), 0
        at_once, kind = self.backend.prefill_tokens, (False, False)
        while self._fits():
            work = self.waiting[0]
            cache = self.kept.get(work.session)
            cached = 0 if cache is None else cache.length
            new, again = len(work.ids) - cached, max(0, work.computed - cached)
            if work.written:
                new = again = len(work.ids) + sum(work.done) - len(work.done)
            before, kind = kind, (cache is None, bool(work.written))
            if works and (kind != before or tokens > at_once - new):
                break
            self.waiting.popleft()
            self.kept.pop(work.session, None)
            self.rows.count += len(work.requests)
            self.backend.enter(work, self.rows.count - len(work.requests))
            works.append(work)
            caches.append(cache)
            tokens += 0 if work.written else new  # the backend divides these itself
            self.counts["prefilled"] += new - again
            self.counts["recomputed"] += again
        self._enter(works, first)
        if works[0].written:
            self.backend.resume(works, first)
        else:
            self._record(first, *self.backend.prefill(works, caches, first))
        for cache in caches:
            if cache is not None:
                self.backend.drop(cache)
        self._retire()

    def _enter(self, works: Sequence[Work], first: int) -> None:
        """Fill the rows of these works' samples, which begin at `first`. A suspended row continues after what it has sampled."""
        rows, part = self.rows, slice(first, self.rows.count)
        requests = [request for work in works for request in work.requests]
        every = [request.sampling for request in requests]
        # one entry for all rows where they are sampled alike
        settings = every[:1] if every.count(every[0]) == len(every) else every
        rows["done"][part] = 0
        rows["prefix"][part] = [len(work.ids) for work in works for _ in work.requests]
        rows["limit"][part] = [limit for work in works for limit in work.limits]
        rows["min"][part] = [one.min_new_tokens for one in settings]
        rows["top_k"][part] = [one.top_k for one in settings]
        rows["seed"][part] = np.array([r.seed & MASK for r in requests], np.uint64).view(np.int64)
        rows.floats[0, part] = [one.temperature for one in settings]
        rows.floats[1, part] = [one.top_p for one in settings]
        while len(self.free) < len(every):
            size = len(self.tokens[0])
            self._grow(max(size, 16), 0)
            self.free.extend(range(len(self.tokens[0]) - 1, size - 1, -1))
        slots = rows["output"][part] = [self.free.pop() for _ in every]
        members = ((work, member) for work in works for member in range(len(work.requests)))
        self.members.update(zip(slots, members, strict=True))
        for row, had in enumerate((own for work in works for own in work.written), first):
            count = rows["count"][row] = len(had[0])
            rows["last"][row] = had[0][-1]
            self._reserve(count)
            for column, own in zip(self.tokens, had, strict=True):
                column[rows["output"][row], :count] = own

    def _reserve(self, length: int) -> None:
        """Make room for responses of this length."""
        if length > (width := self.tokens[0].shape[1]):
            self._grow(0, max(length - width, width))

    def _grow(self, slots: int, width: int) -> None:
        self.tokens = tuple(np.pad(column, ((0, slots), (0, width))) for column in self.tokens)

    def _record(self, first: int, ids_SN: np.ndarray, logprobs_SN: np.ndarray) -> None:
        """Store the tokens that the rows from `first` on sampled, up to the end of each, and mark finished rows."""
        rows, steps = self.rows, len(ids_SN)
        count, output = rows.live("count", first), rows.live("output", first)
        written_SN = count + 1 + np.arange(steps)[:, None]
        stopped_SN = self.stop_V[ids_SN] & (written_SN > rows.live("min", first))
        over_SN = stopped_SN | (written_SN >= rows.live("limit", first))
        self._reserve(int(written_SN[-1].max()))
        ids, logprobs, versions = self.tokens
        if steps == 1:
            ids[output, count], logprobs[output, count] = ids_SN[0], logprobs_SN[0]
            versions[output, count] = self.version
            last: tuple[int | np.ndarray, slice | np.ndarray] = (0, slice(None))
            count += 1
        else:
            valid = np.where(over_SN.any(0), over_SN.argmax(0) + 1, steps)
            last = (valid - 1, np.arange(len(valid)))
            begin = int(count[0])
            # rows that entered together are written as a block, in an eighth of the time
            alike = bool((count == begin).all())
            where = slice(begin, begin + steps) if alike else written_SN.T - 1
            place = (output if alike else output[:, None], where)
            # entries after the end of a row are written, too, and never read
            ids[place], logprobs[place], versions[place] = ids_SN.T, logprobs_SN.T, self.version
            count += valid
        rows.live("last", first)[:] = ids_SN[last]
        np.add(over_SN[last], stopped_SN[last], out=rows.live("done", first), dtype=np.int64)

    def _retire(self) -> None:
        """Remove finished rows, and queue their completions."""
        rows = self.rows
        gone = np.flatnonzero(rows.live("done"))
        if not len(gone):
            return
        leaving, slots, ends = gone.tolist(), *(rows[n][gone].tolist() for n in ("output", "done"))
        self.free += slots
        self.counts["sampled"] += int(rows["count"][gone].sum())
        made = (self._tokens(gone), self.backend.routes(leaving))
        for row, slot, end, tokens, routes in zip(leaving, slots, ends, *made, strict=True):
            work, member = self.members.pop(slot)
            if end == CANCELLED:
                continue
            request = work.requests[member]
            finish = "stop" if end == STOPPED else "length"
            self.finished.append((request, Completion(*tokens, finish, routes)))
            if request.keep and (kept := self.backend.keep(row, work.number)) is not None:
                self.kept[request.session] = kept
        rows.take(self.backend.remove(gone))
        while not self.backend.fits(None) and self._drop_oldest():
            pass

    def _tokens(self, rows: Sequence[int] | np.ndarray) -> list[Tokens]:
        """What these rows have sampled: parts of one copy for all of them."""
        slots, lengths = self.rows["output"][rows], self.rows["count"][rows]
        longest = int(lengths.max(initial=0))
        ids, logprobs, versions = (column[slots, :longest] for column in self.tokens)
        return [
            (ids[n, :k], logprobs[n, :k], versions[n, :k]) for n, k in enumerate(lengths.tolist())
        ]

    def _suspend(self) -> None:
        """Move the live rows back to the head of the queue, with their tokens so far, and drop all caches."""
        self._collect()
        rows, found = self.rows, dict[Work, list[tuple[Request, Tokens]]]()
        tokens = self._tokens(np.arange(rows.count))
        for slot, own in zip(rows.live("output").tolist(), tokens, strict=True):
            work, member = self.members.pop(slot)
            self.free.append(slot)
            found.setdefault(work, []).append((work.requests[member], own))
        works = list[Work]()
        for work, live in sorted(found.items(), key=lambda pair: pair[0].number):
            requests, written = zip(*live, strict=True)
            works.append(replace(work, requests=requests, written=written))
        if rows.count:
            rows.take(self.backend.remove(np.arange(rows.count)))
        self.waiting.extendleft(reversed(works))
        while self.kept:
            self.backend.drop(self.kept.popitem()[1])

    def _finish_if_idle(self) -> None:
        if not self.busy:
            self.backend.idle()
            self._restore_mode()

    def _restore_mode(self) -> None:
        if self.was_training:
            self.was_training = False
            self.policy.model.train()

    def _reset(self) -> None:
        """Drop everything after an error, so that the scheduler can be used again."""
        self.waiting.clear()
        self.arrived, self.finished, self.launched, self.fresh = [], [], False, True
        self.members.clear()
        self.kept.clear()
        self.free = list(range(len(self.tokens[0]) - 1, -1, -1))
        self.rows.take(np.zeros(0, np.int64))
        self.backend.release()
        self._restore_mode()


def without(work: Work, sessions: Collection[int]) -> Work:
    """The work without the requests of these sessions."""
    if not any(r.session in sessions for r in work.requests):
        return work
    stay = [n for n, r in enumerate(work.requests) if r.session not in sessions]
    written = tuple(work.written[n] for n in stay) if work.written else ()
    return replace(work, requests=tuple(work.requests[n] for n in stay), written=written)
