"""Decides which requests are decoded when, the same way on every device; a `Backend` computes.

Requests wait in the order in which they came. As soon as there are rows and memory for the next one it is prefilled, and its rows
are decoded together with all others until each is done. What a row draws depends on its request alone, so neither the order nor the
company changes what is sampled.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from posttrain.engine.random import GOLDEN, signed
from posttrain.engine.rows import RowTable
from posttrain.models.policy import Policy
from posttrain.types import Completion, Request, Statistics

STOPPED, CANCELLED = 2, 3  # ends of a row; 1: its length limit


@dataclass(slots=True, eq=False)
class Work:
    """Requests that are prefilled as one sequence: the samples of a group, a turn of a session, or a row that is computed again."""

    number: int  # in the order of arrival
    requests: tuple[Request, ...]
    ids: np.ndarray  # int64: everything before the next token, the session's history included
    computed: int = 0  # how many of the ids were prefilled before
    written: Completion | None = None  # what the row had sampled before it was interrupted

    @property
    def session(self) -> int:
        return self.requests[0].session

    @property
    def limits(self) -> list[int]:
        """Tokens that each row may still sample."""
        done = 0 if self.written is None else len(self.written.ids)
        return [r.sampling.max_new_tokens - done for r in self.requests]


class Kept(Protocol):
    """The cache of a session between two turns."""

    number: int  # of the work that left it
    length: int  # tokens


class Backend(Protocol):
    """Holds the caches and computes. It does not know requests: rows, works and kept caches are all that it is given."""

    rows: RowTable
    bursts: int  # how often `launch` and `collect` are called in a poll in which nothing finishes

    @property
    def prefill_tokens(self) -> int:
        """Tokens prefilled in one forward pass."""

    def prepare(self, works: Sequence[Work], rows: int, fresh: bool) -> None:
        """Get ready for works that arrived and `rows` rows at once; `fresh`: with the weights of this moment."""

    def fits(self, work: Work | None) -> bool:
        """Whether there is memory for one more work, at its longest; None: for what is held already."""

    def enter(self, work: Work, first: int) -> None:
        """Take what the work's rows, those from `first` on, need from the start."""

    def prefill(
        self, works: Sequence[Work], caches: Sequence[Any], first: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compute the works' ids, after the cached ones; ids and log-probs of the first tokens of the rows from `first` on, [1, N].
        Either all of the works have a cache, or none."""

    def launch(self) -> None:
        """Start a burst of steps for the live rows."""

    def ahead(self) -> bool:
        """Wait for the burst, and start another one of the rows that go on where that needs nothing of what was drawn; then the one
        that is over is collected next."""

    def collect(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probs of the burst, [S, N]; what comes after a row's end has no meaning."""

    def routes(self, row: int) -> np.ndarray | None:
        """The experts that the tokens of a row went to, [prompt and response, L K], -1 where that is not known."""

    def keep(self, row: int, number: int) -> Kept:
        """Keep a finished row's cache. The row is removed next."""

    def drop(self, kept: Any) -> None: ...

    def remove(self, gone: np.ndarray) -> np.ndarray:
        """Free what these rows hold; the rows that stay, in the order that they have from now on."""

    def idle(self) -> None:
        """Nothing is left to do: what each new call makes anew can go."""

    def release(self) -> None:
        """Give all memory back. No row is live and nothing is kept."""


class Scheduler:
    """Decodes works with one policy in one process. `waiting` works enter in order; completions leave as they are done."""

    def __init__(self, policy: Policy, backend: Backend, max_rows: int):
        self.policy, self.max_rows = policy, max_rows
        self.backend, self.rows = backend, backend.rows
        self.version, self.limit = 0, max_rows
        self.waiting: deque[Work] = deque()
        self.arrived: list[Work] = []  # those that the backend has not prepared for
        self.fresh, self.launched = True, False
        self.was_training = False  # the model, before it was set to evaluate
        self.finished: list[tuple[Request, Completion]] = []
        self.kept: dict[int, Kept] = {}  # by session
        self.members: dict[int, tuple[Work, int]] = {}  # by output slot: whose sample it is
        self.free: list[int] = []  # output slots
        self.ids, self.logprobs = np.zeros((0, 32), np.int64), np.zeros((0, 32), np.float32)
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
        """Finish the burst that was launched, let waiting works in, launch the next; what is finished."""
        if self.busy:
            if self.policy.model.training:  # until nothing is left: a switch walks all modules
                self.policy.model.eval()
                self.was_training = True
            try:
                self._advance()
            except BaseException:
                self._reset()
                raise
            self._rest()
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
        self._rest()

    def written(self, sessions: Collection[int]) -> dict[int, Completion]:
        """What the live rows of these sessions have sampled so far."""
        lengths, found = self.rows.live("count").tolist(), dict[int, Completion]()
        for slot, length in zip(self.rows.live("output").tolist(), lengths, strict=True):
            work, member = self.members[slot]
            if (session := work.requests[member].session) in sessions:
                found[session] = self._completion(work, slot, length)
        return found

    @torch.inference_mode()
    def publish(self, version: int) -> None:
        """Sample with the weights of this moment from now on. Every cache is of the old ones: rows go back to the queue."""
        self._suspend()
        self.version, self.fresh, self.arrived = version, True, list(self.waiting)

    @torch.inference_mode()
    def release(self) -> None:
        """Give all memory back; rows that are being decoded are computed again."""
        self._suspend()
        self.fresh, self.arrived = True, list(self.waiting)
        self.backend.release()

    def _advance(self) -> None:
        if self.launched and not (self.waiting or self.fresh) and self.backend.ahead():
            self._collect()  # while the device is at the next burst
            # of rows that had all ended before it, without that the backend knew, there is nothing to collect
            self.launched = self.rows.count > 0
            return
        self._collect()  # first: the backend may move what the burst was written to
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
        """Whether the next work can enter: a row for each sample, and memory for everyone to get to its limit. Kept caches make
        room, the oldest first, its own excepted."""
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
        """Prefill the next works, in order, as many as fit, and draw the first token of every row that they make."""
        first, works, caches, tokens = self.rows.count, list[Work](), list[Kept | None](), 0
        while self._fits():
            work = self.waiting[0]
            cache = self.kept.get(work.session)
            new = len(work.ids) - (0 if cache is None else cache.length)
            alike = not works or (cache is None) == (caches[0] is None)
            if not alike or (works and tokens + new > self.backend.prefill_tokens):
                break
            self.waiting.popleft()
            self.kept.pop(work.session, None)
            self._enter(work)
            works.append(work)
            caches.append(cache)
            tokens += new
            again = max(0, work.computed - len(work.ids) + new)
            self.counts.update(prefilled=new - again, recomputed=again)
        self._record(first, *self.backend.prefill(works, caches, first))
        for cache in caches:
            if cache is not None:
                self.backend.drop(cache)
        self._retire()

    def _enter(self, work: Work) -> None:
        """Rows for a work's samples. One that was interrupted goes on in its stream of random numbers."""
        rows, first = self.rows, self.rows.count
        rows.count += len(work.requests)
        part, settings = slice(first, rows.count), [r.sampling for r in work.requests]
        done = 0 if work.written is None else len(work.written.ids)
        rows.integers[:, part] = 0
        rows["prefix"][part], rows["limit"][part] = len(work.ids), work.limits
        rows["min"][part] = [one.min_new_tokens - done for one in settings]
        rows["top_k"][part] = [one.top_k for one in settings]
        rows["seed"][part] = [signed(r.seed + done * GOLDEN) for r in work.requests]
        rows.floats[0, part] = [one.temperature for one in settings]
        rows.floats[1, part] = [one.top_p for one in settings]
        for member, row in enumerate(range(first, rows.count)):
            if not self.free:
                size = len(self.ids)
                more = ((0, max(size, 16)), (0, 0))
                self.ids, self.logprobs = np.pad(self.ids, more), np.pad(self.logprobs, more)
                self.free.extend(range(len(self.ids) - 1, size - 1, -1))
            slot = self.free.pop()
            rows["output"][row], self.members[slot] = slot, (work, member)
        self.backend.enter(work, first)

    def _record(self, first: int, ids_SN: np.ndarray, logprobs_SN: np.ndarray) -> None:
        """Write down what the rows from `first` on drew, as far as each went, and which of them are done."""
        rows, steps = self.rows, len(ids_SN)
        count, output = rows.live("count", first), rows.live("output", first)
        written_SN = count + 1 + np.arange(steps)[:, None]
        stopped_SN = self.stop_V[ids_SN] & (written_SN > rows.live("min", first))
        over_SN = stopped_SN | (written_SN >= rows.live("limit", first))
        length, width = int(written_SN[-1].max()), self.ids.shape[1]
        if length > width:
            more = ((0, 0), (0, max(length - width, width)))
            self.ids, self.logprobs = np.pad(self.ids, more), np.pad(self.logprobs, more)
        if steps == 1:
            self.ids[output, count], self.logprobs[output, count] = ids_SN[0], logprobs_SN[0]
            last: tuple[int | np.ndarray, slice | np.ndarray] = (0, slice(None))
            count += 1
        else:
            valid = np.where(over_SN.any(0), over_SN.argmax(0) + 1, steps)
            # what comes after a row's end is written too, and never read
            place, last = (output, written_SN - 1), (valid - 1, np.arange(len(valid)))
            self.ids[place], self.logprobs[place] = ids_SN, logprobs_SN
            count += valid
        rows.live("last", first)[:] = ids_SN[last]
        np.add(over_SN[last], stopped_SN[last], out=rows.live("done", first), dtype=np.int64)

    def _retire(self) -> None:
        """Take finished rows out."""
        rows = self.rows
        gone = np.flatnonzero(rows.live("done"))
        if not len(gone):
            return
        columns = (rows[name][gone].tolist() for name in ("output", "count", "done"))
        for row, slot, length, end in zip(gone.tolist(), *columns, strict=True):
            work, member = self.members.pop(slot)
            self.free.append(slot)
            self.counts["sampled"] += length
            if end == CANCELLED:
                continue
            request = work.requests[member]
            finish = "stop" if end == STOPPED else "length"
            made = self._completion(work, slot, length, finish, self.backend.routes(row))
            self.finished.append((request, made))
            if request.keep:
                self.kept[request.session] = self.backend.keep(row, work.number)
        rows.take(self.backend.remove(gone))
        while not self.backend.fits(None) and self._drop_oldest():
            pass

    def _completion(
        self, work: Work, slot: int, length: int, finish: str = "", routes: np.ndarray | None = None
    ) -> Completion:
        """What a row has sampled so far, before it was interrupted included."""
        parts: tuple[np.ndarray, ...] = (
            self.ids[slot, :length].copy(),
            self.logprobs[slot, :length].copy(),
            np.full(length, self.version, np.int32),
        )
        if (had := work.written) is not None:
            before = (had.ids, had.logprobs, had.versions)
            parts = tuple(np.concatenate(pair) for pair in zip(before, parts, strict=True))
        return Completion(parts[0], parts[1], parts[2], finish, routes=routes)

    def _suspend(self) -> None:
        """Put the live rows back to the head of the queue, with what they have sampled, and drop every cache."""
        self._collect()
        works, rows = list[Work](), self.rows
        for slot, length in zip(
            rows.live("output").tolist(), rows.live("count").tolist(), strict=True
        ):
            work, member = self.members.pop(slot)
            self.free.append(slot)
            self.counts["sampled"] += length
            ids = np.concatenate([work.ids, self.ids[slot, :length]])
            written = self._completion(work, slot, length)
            works.append(Work(work.number, (work.requests[member],), ids, len(ids) - 1, written))
        if rows.count:
            rows.take(self.backend.remove(np.arange(rows.count)))
        self.waiting.extendleft(reversed(works))
        while self.kept:
            self.backend.drop(self.kept.popitem()[1])

    def _rest(self) -> None:
        if not self.busy:
            self.backend.idle()
            self._restore_mode()

    def _restore_mode(self) -> None:
        if self.was_training:
            self.was_training = False
            self.policy.model.train()

    def _reset(self) -> None:
        """After an error: forget everything, so that the next call finds a scheduler that works."""
        self.waiting.clear()
        self.arrived, self.finished, self.launched, self.fresh = [], [], False, True
        self.members.clear()
        self.kept.clear()
        self.free = list(range(len(self.ids) - 1, -1, -1))
        self.rows.take(np.zeros(0, np.int64))
        self.backend.release()
        self._restore_mode()


def without(work: Work, sessions: Collection[int]) -> Work:
    """The work without the requests of these sessions."""
    if not any(r.session in sessions for r in work.requests):
        return work
    return replace(work, requests=tuple(r for r in work.requests if r.session not in sessions))
