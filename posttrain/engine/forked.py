"""Generation on several CPU cores: worker processes, forked once, one for each core, decode a share of the works each.

A small model's decode step is a few hundred operators of microseconds each. Threads that split every one of them wait for each other
more than they work; processes that split the rows do not meet before the end. The weights lie in memory that parent and workers share,
so a worker reads what the optimizer wrote without being sent anything, and randomness belongs to the request, so it draws what this
process would have drawn. Each worker runs a scheduler of its own, takes new works while it decodes, and keeps the caches of its
sessions. One that dies or hangs costs its time only: its works and sessions are prefilled again in this process. (Forking for each call
would be simpler, and was: every page that the parent writes afterwards then costs a fault, which took more from training than it gave.)
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch

from posttrain.engine.scheduler import Scheduler, Work, without
from posttrain.system import machine, processes, wire
from posttrain.types import JSON, Request, Sampling, Statistics

CORES = machine.requested_threads() or machine.cores()
MAX_PARAMETERS = 8_000_000  # above, weights leave the shared cache and cores that read them twice are slower than threads
MIN_TOKENS = 2048  # a call for fewer is over before the others are awake
# the ending of the watchdog's file to which a worker writes its stacks on a signal
STACKS = "-stacks.txt"
REPLY_SECONDS = 0.02  # between replies of a worker: each wakes the parent, which may take its core
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's
HEAP, LARGE_PAGE = 1 << 26, 1 << 21


def worthwhile(works: Sequence[Work], parameters: int, count: int) -> bool:
    """Whether a call is long enough, and the model small enough, to pay for worker processes."""
    able = sys.platform == "linux" and count > 1 and len(works) > 1 and parameters <= MAX_PARAMETERS
    return able and sum(r.sampling.max_new_tokens for w in works for r in w.requests) >= MIN_TOKENS


def shares(works: Sequence[Work], count: int) -> list[Sequence[Work]]:
    """Cut the works into contiguous shares with about equal numbers of rows."""
    rows = np.cumsum([len(work.requests) for work in works])
    cuts = [int(np.searchsorted(rows, rows[-1] * n / count)) + 1 for n in range(1, count)]
    return [works[a:b] for a, b in pairwise(sorted({0, *cuts, len(works)}))]


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class EngineWorkers:
    """The worker processes of one engine. They end with `close`, and with this process."""

    def __init__(self) -> None:
        self.workers: list[EngineWorker] = []
        self.past = Statistics()  # statistics of ended workers
        self.failed: list[Work] = []
        self.finished: wire.Finished = []
        self.paused = False

    @property
    def busy(self) -> bool:
        return bool(self.failed or self.finished) or any(w.works for w in self.workers)

    @property
    def statistics(self) -> Statistics:
        return sum((worker.statistics for worker in self.workers), self.past)

    def submit(
        self, works: Sequence[Work], count: int, make: Callable[[], Scheduler]
    ) -> list[tuple[EngineWorker, Sequence[Work]]]:
        """Distribute works to up to `count` workers, which run the scheduler that `make` returns. Returns the share of each worker."""
        parts = shares(works, count)
        with one_thread():
            while len(self.workers) < len(parts):
                self.workers.append(EngineWorker.fork(make, self.finished))
        dealt = list(zip(self.workers, parts, strict=False))
        encoded = [_encode_works(part) for part in parts]  # before the first is awake
        for (worker, part), message in zip(dealt, encoded, strict=True):
            worker.submit(part, message)
        return dealt

    def poll(self, timeout: float | None) -> wire.Finished:
        """The completions of the workers. Waits for one of them up to `timeout` seconds, or until the next check for failed workers."""
        if self.paused:
            self._send("resume")
        wait = wire.LOOK if timeout is None else min(timeout, wire.LOOK)
        self._read([w for w in self.workers if w.works], 0.0 if self.finished else wait)
        found = self.finished.copy()
        self.finished.clear()
        return found

    def failed_works(self) -> list[Work]:
        """The works of workers that died or hung, returned once."""
        works, self.failed = self.failed, []
        return works

    def cancel(self, sessions: Collection[int]) -> None:
        for worker in self.workers:
            worker.cancel(sessions)
        self.finished[:] = [pair for pair in self.finished if pair[0].session not in sessions]
        left = (without(work, sessions) for work in self.failed)
        self.failed = [work for work in left if work.requests]

    def publish(self, version: int) -> None:
        self._send("publish", version)

    def pause(self, how: str = "pause") -> None:
        """Make the workers stop, for `release` without their caches, and wait until they have. They continue at the next poll."""
        self._send(how)
        while waiting := [w for w in self.workers if w.seen < w.sent]:
            self._read(waiting, wire.LOOK)

    def close(self) -> list[Work]:
        """End all workers, and return their unfinished works."""
        left = [work for worker in self.workers for work in worker.unfinished()]
        for worker in list(self.workers):
            self._end(worker)
        return left

    def _send(self, what: str, *about: JSON) -> None:
        for worker in self.workers:
            worker.send(what, *about)
        self.paused = what in ("pause", "release")

    def _read(self, workers: Sequence[EngineWorker], wait: float) -> None:
        """Read what these workers wrote. A worker that died, or has not used its core for long, is marked failed."""
        alive = [worker for worker in workers if not worker.gone]
        ready = select.select([worker.out for worker in alive], [], [], wait)[0] if alive else []
        for worker in alive:
            if worker.out in ready:
                worker.read()
            else:
                worker.gone |= worker.hangs()
        for worker in [worker for worker in self.workers if worker.gone]:
            self.failed += worker.unfinished()
            self._end(worker)
            self.past += Statistics(failed_workers=1)

    def _end(self, worker: EngineWorker) -> None:
        self.past += worker.statistics
        self.workers.remove(worker)
        processes.end(worker.pid, worker.into, worker.out)


@dataclass(eq=False, kw_only=True)
class EngineWorker(wire.PipedProcess):
    """A process that runs a scheduler until its pipe closes."""

    finished: wire.Finished  # receives completions
    # by (session, turn): the number of the message that sent it, and the work
    works: dict[tuple[int, int], tuple[int, Work]] = field(default_factory=dict)

    @classmethod
    def fork(cls, make: Callable[[], Scheduler], finished: wire.Finished) -> EngineWorker:
        def live(requests: int, replies: int) -> None:
            _close_all_but(requests, replies)
            # batch scheduling, so that it does not take the core from the parent, which still sends to the others
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            _keep_memory()
            _work(make(), requests, replies)

        pid, into, out = processes.fork(live)
        return cls(pid=pid, into=into, out=out, finished=finished)

    def submit(self, works: Sequence[Work], encoded: JSON = None) -> None:
        self.send("submit", encoded or _encode_works(works))
        for work in works:
            self.works |= {(r.session, r.turn): (self.sent, work) for r in work.requests}

    def cancel(self, sessions: Collection[int]) -> None:
        self.works = {key: value for key, value in self.works.items() if key[0] not in sessions}
        self.send("cancel", sorted(sessions))

    def send(self, *message: JSON) -> None:
        self.sent += 1
        self.write(message, self.read)

    def read(self) -> None:
        """Read what the worker wrote since the last call, without completions of requests cancelled meanwhile."""
        piece = os.read(self.out, 1 << 20)
        self.gone = not piece
        for line in wire.whole_lines(self.received, piece):
            self.seen, counts, finished = json.loads(line)
            self.statistics = Statistics(*counts)
            for key, completion in wire.decode_completions(finished):
                message, work = self.works.get(key, (self.seen + 1, None))
                if work is None or message > self.seen:
                    continue
                del self.works[key]
                request = next(r for r in work.requests if r.session == key[0])
                self.finished.append((request, completion))

    def unfinished(self) -> list[Work]:
        """The unfinished works, without their finished requests. The worker has computed their ids once."""
        left = {work.number: work for _, work in self.works.values()}
        return [
            replace(
                work,
                requests=tuple(r for r in work.requests if (r.session, r.turn) in self.works),
                computed=len(work.ids) - 1,
            )
            for work in left.values()
        ]


def _keep_memory() -> None:
    """Make this worker's allocator keep freed memory, in large pages. Each call allocates its cache and packed weights again:
    asking the system for the same pages took 6% of the time, and finding them among small pages as much."""
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):  # not glibc
        for option in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            libc.mallopt(option, ctypes.c_int(1 << 30))
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        block = libc.malloc(HEAP)
        if block:
            first = -(-block // LARGE_PAGE) * LARGE_PAGE
            libc.madvise(first, HEAP - LARGE_PAGE, mmap.MADV_HUGEPAGE)
            libc.free(block)


def _close_all_but(*kept: int) -> None:
    """Close the files that the parent has open, its locks among them."""
    for handle in (int(name) for name in os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if (
                handle > 2
                and handle not in kept
                and not os.readlink(f"/proc/self/fd/{handle}").endswith(STACKS)
            ):
                os.close(handle)


def _work(scheduler: Scheduler, requests: int, replies: int) -> None:
    """The main loop of a worker: messages in, completions out. An error ends it, and the parent computes its share."""
    channel, seen, paused = wire.Channel(requests, replies), 0, False
    finished, sent = wire.Finished(), 0.0  # not sent yet, and when it last sent
    while True:
        while paused or not scheduler.busy or channel.ready():
            try:
                what, *about = channel.receive()
            except EOFError:
                return
            seen += 1
            paused = what in ("pause", "release") or (paused and what == "cancel")
            if what == "submit":
                scheduler.submit(_decode_works(about[0]))
            elif what == "cancel":
                scheduler.cancel(about[0])
            elif what == "publish":
                scheduler.publish(about[0])
            elif paused:
                if what == "release":
                    scheduler.release()
                channel.send(*_reply(seen, scheduler.statistics, finished))
                finished, sent = [], time.monotonic()
        finished += scheduler.poll()
        late = time.monotonic() - sent > REPLY_SECONDS
        if finished and (late or not scheduler.busy):
            channel.send(*_reply(seen, scheduler.statistics, finished))
            finished, sent = [], time.monotonic()


def _reply(seen: int, statistics: Statistics, finished: wire.Finished) -> JSON:
    return seen, astuple(statistics), wire.encode_completions(finished)


def _encode_works(works: Sequence[Work]) -> JSON:
    """Encode works, sending settings that requests share once. `written` is never sent: a suspended row stays in the process that
    started it."""
    settings: dict[Sampling, int] = {}
    rows = []
    for work in works:
        requests = [
            [r.seed, settings.setdefault(r.sampling, len(settings)), r.session, r.turn, r.keep]
            for r in work.requests
        ]
        rows.append([work.number, requests, work.ids.tolist(), work.computed])
    return [[asdict(sampling) for sampling in settings], rows]


def _decode_works(message: JSON) -> list[Work]:
    settings = [Sampling(**sampling) for sampling in message[0]]
    return [
        Work(
            number,
            tuple(
                Request((0,), seed, settings[which], session, turn, keep=keep)
                for seed, which, session, turn, keep in requests
            ),
            np.array(ids, np.int64),
            computed,
        )
        for number, requests, ids, computed in message[1]
    ]
