"""Generation on several cores of a CPU: worker processes, forked once, one for each core, decode a share of the works each.

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
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch

from posttrain.engine.scheduler import Scheduler, Work
from posttrain.system import machine, processes
from posttrain.types import JSON, Completion, Request, Sampling, Statistics

CORES = machine.requested_threads() or machine.cores()
MAX_PARAMETERS = 8_000_000  # above, weights leave the shared cache and cores that read them twice are slower than threads
MIN_TOKENS = 2048  # a call for fewer is over before the others are awake
STACKS = "-stacks.txt"  # of the watchdog's file, into which a worker that is asked writes where it stands
LOOK, SILENCE = (
    1.0,
    60.0,
)  # seconds between looks at a worker that sends nothing; how long it may use no processor time
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's
HEAP, LARGE_PAGE = 1 << 26, 1 << 21

Finished = list[tuple[Request, Completion]]


def worthwhile(works: Sequence[Work], parameters: int, count: int) -> bool:
    """Whether a call is long enough, and the model small enough, for shares in processes of their own."""
    able = sys.platform == "linux" and count > 1 and len(works) > 1 and parameters <= MAX_PARAMETERS
    return able and sum(r.sampling.max_new_tokens for w in works for r in w.requests) >= MIN_TOKENS


def shares(works: Sequence[Work], count: int) -> list[Sequence[Work]]:
    """Runs of neighbouring works with about equally many rows."""
    rows = np.cumsum([len(work.requests) for work in works])
    cuts = [int(np.searchsorted(rows, rows[-1] * n / count)) + 1 for n in range(1, count)]
    bounds = sorted({0, *cuts, len(works)})
    return [works[a:b] for a, b in pairwise(bounds)]


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class EngineWorkers:
    """The workers of one engine. They end with `close`, and with this process."""

    def __init__(self) -> None:
        self.workers: list[EngineWorker] = []
        self.past = Statistics()  # of workers that are gone
        self.failed: list[Work] = []
        self.finished: Finished = []
        self.paused = False

    @property
    def busy(self) -> bool:
        return bool(self.failed or self.finished) or any(w.works for w in self.workers)

    @property
    def statistics(self) -> list[Statistics]:
        return [self.past, *(worker.statistics for worker in self.workers)]

    def submit(
        self, works: Sequence[Work], count: int, make: Callable[[], Scheduler]
    ) -> list[tuple[EngineWorker, Sequence[Work]]]:
        """Deal works to up to `count` workers; which got which."""
        parts = shares(works, count)
        with one_thread():
            while len(self.workers) < len(parts):
                self.workers.append(EngineWorker.fork(make))
        dealt = list(zip(self.workers, parts, strict=False))
        messages = [_message("submit", _encode_works(part)) for part in parts]
        for (worker, part), message in zip(
            dealt, messages, strict=True
        ):  # encoded before the first is awake
            worker.submit(part, message)
        return dealt

    def poll(self, timeout: float | None) -> Finished:
        """What workers have finished; waits for one of them up to `timeout` seconds, or until it is time for another look."""
        found, self.finished = self.finished, []
        if self.paused:
            self._send("resume")
        asked = [worker for worker in self.workers if worker.works]
        wait = 0.0 if found else LOOK if timeout is None else min(timeout, LOOK)
        ready = (
            select.select([w.out for w in asked if not w.gone], [], [], wait)[0] if asked else []
        )
        for worker in asked:
            if worker.out in ready:
                found += worker.read()
            elif worker.idle() > SILENCE:
                worker.gone = True
        self._bury()
        return found

    def failed_works(self) -> list[Work]:
        """Works of workers that died or hung, once."""
        works, self.failed = self.failed, []
        return works

    def cancel(self, sessions: Collection[int]) -> None:
        for worker in self.workers:
            worker.cancel(sessions)
        self.finished = [pair for pair in self.finished if pair[0].session not in sessions]
        self.failed = [
            w
            for w in (_subset(w, lambda r: r.session not in sessions) for w in self.failed)
            if w.requests
        ]

    def publish(self, version: int) -> None:
        self._send("publish", version)

    def _send(self, what: str, *about: JSON) -> None:
        for worker in self.workers:
            worker.send(what, *about)
        self.paused = what == "release"

    def release(self) -> None:
        """Let workers stop, drop their caches, and wait until they have. They go on at the next poll."""
        self._send("release")
        for worker in self.workers:
            while worker.seen < worker.sent and not worker.gone:
                if select.select([worker.out], [], [], LOOK)[0]:
                    self.finished += worker.read()
                elif worker.idle() > SILENCE:
                    worker.gone = True
        self._bury()

    def close(self) -> list[Work]:
        """End all workers; the works that they have not finished."""
        left = [work for worker in self.workers for work in worker.unfinished()]
        for worker in self.workers:
            self.past = _sum(self.past, worker.statistics)
            worker.end()
        self.workers.clear()
        return left

    def _bury(self) -> None:
        for worker in [w for w in self.workers if w.gone]:
            self.failed += worker.unfinished()
            self.past = replace(
                _sum(self.past, worker.statistics), failed_workers=self.past.failed_workers + 1
            )
            worker.end()
            self.workers.remove(worker)


@dataclass(eq=False)
class EngineWorker:
    """A process that runs a scheduler until its pipe closes."""

    pid: int
    into: int
    out: int
    gone: bool = False  # it died, or waits for something that will not come
    sent: int = 0  # messages to it, and how many of them it had read when it last wrote
    seen: int = 0
    works: dict[tuple[int, int], tuple[int, Work]] = field(
        default_factory=dict
    )  # by session and turn: in which message
    received: bytearray = field(default_factory=bytearray)  # the beginning of its next message
    statistics: Statistics = field(default_factory=Statistics)
    worked: tuple[float, float] = (
        -1.0,
        0.0,
    )  # its processor time when last looked at, and when it last had less

    @classmethod
    def fork(cls, make: Callable[[], Scheduler]) -> EngineWorker:
        def live(questions: int, answers: int) -> None:
            _close_all_but(questions, answers)
            with suppress(
                OSError
            ):  # so that it does not take this core from the parent, who has not asked the others yet
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            _keep_memory()
            _work(make(), questions, answers)

        return cls(*processes.fork(live))

    def submit(self, works: Sequence[Work], message: bytes = b"") -> None:
        self.worked = (-1.0, time.monotonic())
        self._send(message or _message("submit", _encode_works(works)))
        for work in works:
            self.works |= {(r.session, r.turn): (self.sent, work) for r in work.requests}

    def cancel(self, sessions: Collection[int]) -> None:
        self.works = {key: value for key, value in self.works.items() if key[0] not in sessions}
        self.send("cancel", sorted(sessions))

    def send(self, what: str, *about: JSON) -> None:
        self.worked = (-1.0, time.monotonic())
        self._send(_message(what, *about))

    def _send(self, message: bytes) -> None:
        self.sent += 1
        try:
            _write(self.into, message)
        except OSError:
            self.gone = True

    def read(self) -> Finished:
        """Take what the worker wrote since. Completions of requests that were cancelled meanwhile are left out."""
        piece = os.read(self.out, 1 << 20)
        self.gone = not piece
        self.received += piece
        found: Finished = []
        while len(self.received) >= 8 and len(self.received) >= 8 + (
            size := struct.unpack_from("<Q", self.received)[0]
        ):
            reply = decode(bytes(self.received[8 : 8 + size]))
            del self.received[: 8 + size]
            if reply is None:
                self.gone = True
                break
            self.seen, self.statistics, completions = reply
            for key, completion in completions.items():
                message, work = self.works.get(key, (self.seen + 1, None))
                if work is not None and message <= self.seen:
                    del self.works[key]
                    request = next(r for r in work.requests if r.session == key[0])
                    found.append((request, completion))
        return found

    def unfinished(self) -> list[Work]:
        """Works, without the requests that were finished. Their ids were computed before, there."""
        numbers = {work.number: work for _, work in self.works.values()}
        left = (_subset(w, lambda r: (r.session, r.turn) in self.works) for w in numbers.values())
        return [replace(work, computed=len(work.ids) - 1) for work in left]

    def idle(self) -> float:
        """Seconds since it last used its core. Work may take any time; a lock that nobody will release takes no processor time."""
        with open(f"/proc/{self.pid}/stat") as file:
            columns = file.read().rpartition(")")[2].split()
        used, now = float(columns[11]) + float(columns[12]), time.monotonic()
        if used != self.worked[0]:
            self.worked = (used, now)
        return now - self.worked[1]

    def end(self) -> None:
        processes.end(self.pid, self.into, self.out)


def _sum(one: Statistics, other: Statistics) -> Statistics:
    return Statistics(*(a + b for a, b in zip(astuple(one), astuple(other), strict=True)))


def _subset(work: Work, wanted: Callable[[Request], bool]) -> Work:
    return replace(work, requests=tuple(r for r in work.requests if wanted(r)))


def _keep_memory() -> None:
    """Let this worker's allocator keep what is freed, in large pages. Each call makes its cache and its packed weights anew: asking the
    system for the same pages again took 6% of the time, and finding them among small ones as much."""
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
    """Files that the parent has open, its locks among them, are none of a worker's business."""
    for handle in (int(name) for name in os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if (
                handle > 2
                and handle not in kept
                and not os.readlink(f"/proc/self/fd/{handle}").endswith(STACKS)
            ):
                os.close(handle)


def _work(scheduler: Scheduler, theirs: int, ours: int) -> None:
    """A worker's life: messages in, completions out. An error ends it, and the parent computes its share."""
    seen, paused = 0, False
    while True:
        while paused or not scheduler.busy or select.select([theirs], [], [], 0)[0]:
            data = _read(theirs)
            if data is None:
                return
            what, *about = json.loads(data)
            seen += 1
            paused = what == "release" or (paused and what == "cancel")
            if what == "submit":
                scheduler.submit(_decode_works(about[0]))
            elif what == "cancel":
                scheduler.cancel(about[0])
            elif what == "publish":
                scheduler.publish(about[0])
            elif what == "release":
                scheduler.release()
                _write(ours, encode(seen, scheduler.statistics, []))
        if finished := scheduler.poll():
            _write(ours, encode(seen, scheduler.statistics, finished))


def _message(what: str, *about: JSON) -> bytes:
    return json.dumps([what, *about]).encode()


def _encode_works(works: Sequence[Work]) -> JSON:
    """Rows that are computed again stay in the process that began them: `written` is never sent."""
    return [
        [
            work.number,
            [[r.seed, asdict(r.sampling), r.session, r.turn, r.keep] for r in work.requests],
            work.ids.tolist(),
            work.computed,
        ]
        for work in works
    ]


def _decode_works(fields: JSON) -> list[Work]:
    return [
        Work(
            number,
            tuple(
                Request((0,), seed, Sampling(**sampling), session, turn, keep=keep)
                for seed, sampling, session, turn, keep in requests
            ),
            np.array(ids, np.int64),
            computed,
        )
        for number, requests, ids, computed in fields
    ]


def _write(handle: int, data: bytes) -> None:
    processes.write_all(handle, struct.pack("<Q", len(data)) + data, time.monotonic() + SILENCE)


def _read(handle: int) -> bytes | None:
    """One message; None where the pipe closed before it is whole."""
    pieces, wanted = bytearray(), 8
    while len(pieces) < wanted:
        piece = os.read(handle, min(1 << 20, wanted - len(pieces)))
        if not piece:
            return None
        pieces += piece
        if wanted == 8 and len(pieces) == 8:
            wanted += struct.unpack("<Q", pieces)[0]
    return bytes(pieces[8:])


def encode(seen: int, statistics: Statistics, finished: Finished) -> bytes:
    """A reply as bytes: the length of a JSON header, the header, all ids, all log-probs, all versions."""
    rows = [(r.session, r.turn, len(c.ids), c.finish) for r, c in finished]
    header = json.dumps([seen, astuple(statistics), rows]).encode()
    arrays = (
        np.concatenate([getattr(c, name) for _, c in finished]).astype(kind).tobytes()
        for name, kind in ARRAYS
        if finished
    )
    return struct.pack("<Q", len(header)) + header + b"".join(arrays)


ARRAYS = (("ids", np.int64), ("logprobs", np.float32), ("versions", np.int32))
Reply = tuple[int, Statistics, dict[tuple[int, int], Completion]]


def decode(data: bytes) -> Reply | None:
    """What `encode` was given; None where the bytes are not all there."""
    if len(data) < 8:
        return None
    (size,) = struct.unpack_from("<Q", data)
    if len(data) < 8 + size:
        return None
    seen, statistics, rows = json.loads(data[8 : 8 + size])
    lengths = [length for _, _, length, _ in rows]
    total, at = sum(lengths), 8 + size
    if len(data) != at + total * 16:
        return None
    ends, parts = np.cumsum(lengths)[:-1], []
    for _, kind in ARRAYS:
        parts.append(np.split(np.frombuffer(data, kind, total, at).copy(), ends)[: len(rows)])
        at += total * np.dtype(kind).itemsize
    return (
        seen,
        Statistics(*statistics),
        {
            (session, turn): Completion(arrays[0], arrays[1], arrays[2], finish)
            for (session, turn, _, finish), *arrays in zip(rows, *parts, strict=True)
        },
    )
