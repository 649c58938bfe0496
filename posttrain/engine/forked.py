"""Generation on several cores of a CPU: helpers, forked once, one for each core, answer a share of the requests each.

A small model's decode step is a few hundred operators of microseconds each. Threads that split every one of them wait for each other
more than they work; processes that split the rows do not meet before the end. The weights lie in memory that parent and helpers share,
so a helper reads what the optimizer wrote without being sent anything, and randomness belongs to the request, so it draws what this
process would have drawn. A helper that dies or hangs costs its time only: its share is answered here. This process only listens,
so what its own memory and threads look like after training is no matter. (Forking for each call would be
simpler, and was: every page that the parent writes afterwards then costs a fault, which took more from training than it gave.)
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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import numpy as np
import torch

from posttrain.engine.work import Work
from posttrain.system import machine
from posttrain.system import processes as children
from posttrain.types import Completion, Sampling

CORES = machine.requested_threads() or machine.cores()
LARGEST = 8_000_000  # parameters: above, weights leave the shared cache and cores that read them twice are slower than threads
MIN_TOKENS = 2048  # a call for fewer is over before the others are awake
STACKS = "-stacks.txt"  # of the watchdog's file, into which a helper that is asked writes where it stands
LOOK, SILENCE = (
    1.0,
    60.0,
)  # seconds between looks at a helper that says nothing; how long it may use no processor time
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's
HEAP, LARGE_PAGE = 1 << 26, 1 << 21

Answer = tuple[Completion, ...]
Serve = Callable[[Sequence[Work], int], Iterator[Answer]]  # requests and the policy's version


def worthwhile(requests: Sequence[Work], parameters: int, processes: int) -> bool:
    """Whether a call is long enough, and the model small enough, for shares in processes of their own."""
    tokens = sum(r.group * r.sampling.max_new_tokens for r in requests)
    able = sys.platform == "linux" and processes > 1 and len(requests) > 1
    return able and parameters <= LARGEST and tokens >= MIN_TOKENS


def shares(requests: Sequence[Work], processes: int) -> list[Sequence[Work]]:
    """Runs of neighbouring requests with about equally many responses."""
    reached = np.cumsum([r.group for r in requests])
    cuts = [
        int(np.searchsorted(reached, reached[-1] * n / processes)) + 1 for n in range(1, processes)
    ]
    bounds = sorted({0, *cuts, len(requests)})
    return [requests[a:b] for a, b in pairwise(bounds)]


class Crew:
    """The helpers of one engine. Whoever holds it ends it with `close`; helpers also end with this process."""

    def __init__(self, processes: int):
        self.processes, self.lost = (
            processes,
            0,
        )  # helpers that died or hung: their shares were answered here, more slowly
        self.helpers: list[_Helper] = []

    def generate(self, serve: Serve, requests: Sequence[Work], version: int) -> Iterator[Answer]:
        """What `serve` yields for the requests, in their order, worked out on several cores of one thread each."""
        parts, finished = shares(requests, self.processes), False
        try:
            with _one_thread():
                while len(self.helpers) < len(parts):
                    self.helpers.append(_Helper.fork(serve))
            busy = self.helpers[: len(parts)]
            messages = [
                _message(part, version) for part in parts
            ]  # before the first is awake and wants this core
            for helper, message in zip(busy, messages, strict=True):
                helper.ask(message)
            for helper, part in zip(busy, parts, strict=True):
                told = 0
                while told < len(part) and (answer := _next(helper, busy)) is not None:
                    yield answer
                    told += 1
                if told < len(part):
                    with _one_thread():  # sums come out as they would have there
                        yield from serve(part[told:], version)
            for helper in [h for h in busy if h.gone]:  # the next call has a new one
                helper.end()
                self.helpers.remove(helper)
                self.lost += 1
            finished = True
        finally:
            if (
                not finished
            ):  # the caller stopped listening, or failed: what the helpers still write is of no use
                self.close()

    def close(self) -> None:
        for helper in self.helpers:
            helper.end()
        self.helpers.clear()


def _message(share: Sequence[Work], version: int) -> bytes:
    return json.dumps(
        [version, [[r.prompt_ids, r.seeds, asdict(r.sampling)] for r in share]]
    ).encode()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _next(helper: _Helper, busy: Sequence[_Helper]) -> Answer | None:
    """The next answer of a helper, while everyone is listened to: a helper whose pipe is full would wait. None where it is gone."""
    while not helper.answers and not helper.gone:
        speaking = select.select([h.out for h in busy if not h.gone], [], [], LOOK)[0]
        for other in busy:
            if other.out in speaking:
                other.listen()
        if helper.out not in speaking and helper.idle() > SILENCE:
            helper.gone = True
    return helper.answers.popleft() if helper.answers else None


@dataclass(eq=False)
class _Helper:
    """A process that answers what it is asked until its pipe closes."""

    pid: int
    into: int
    out: int
    gone: bool = False  # it died, or waits for something that will not come
    heard: bytearray = field(default_factory=bytearray)  # the beginning of its next message
    answers: deque[Answer] = field(default_factory=deque)
    worked: tuple[float, float] = (
        -1.0,
        0.0,
    )  # its processor time when last looked at, and when it last had less

    @classmethod
    def fork(cls, serve: Serve) -> _Helper:
        def live(questions: int, answers: int) -> None:
            _close_all_but(questions, answers)
            with suppress(
                OSError
            ):  # so that it does not take this core from the parent, who has not asked the others yet
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            _keep_memory()
            _work(serve, questions, answers)

        return cls(*children.fork(live))

    def ask(self, message: bytes) -> None:
        self.worked = (-1.0, time.monotonic())
        try:
            _write(self.into, message)
        except OSError:
            self.gone = True

    def listen(self) -> None:
        """Take what the helper wrote since."""
        piece = os.read(self.out, 1 << 20)
        self.gone = not piece
        self.heard += piece
        while len(self.heard) >= 8 and len(self.heard) >= 8 + (
            size := struct.unpack_from("<Q", self.heard)[0]
        ):
            answer = decode(bytes(self.heard[8 : 8 + size]))
            del self.heard[: 8 + size]
            if answer is None:
                self.gone = True
                return
            self.answers.append(answer)

    def idle(self) -> float:
        """Seconds since it last used its core. Work may take any time; a lock that nobody will release takes no processor time."""
        with open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        used, now = float(fields[11]) + float(fields[12]), time.monotonic()
        if used != self.worked[0]:
            self.worked = (used, now)
        return now - self.worked[1]

    def end(self) -> None:
        children.end(self.pid, self.into, self.out)


def _keep_memory() -> None:
    """Let this helper's allocator keep what is freed, in large pages. Each call makes its cache and its packed weights anew: asking the
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
    """Files that the parent has open, its locks among them, are none of a helper's business."""
    for handle in (int(name) for name in os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if (
                handle > 2
                and handle not in kept
                and not os.readlink(f"/proc/self/fd/{handle}").endswith(STACKS)
            ):
                os.close(handle)


def _work(serve: Serve, theirs: int, ours: int) -> None:
    """A helper's life: requests in, completions out. An error ends it, and its share is answered by the parent."""
    while (data := _read(theirs)) is not None:
        version, fields = json.loads(data)
        requests = [
            Work(tuple(ids), tuple(seeds), Sampling(**sampling)) for ids, seeds, sampling in fields
        ]
        with torch.inference_mode():
            for answer in serve(requests, version):
                _write(ours, encode(answer))


def _write(handle: int, data: bytes) -> None:
    children.write_all(handle, struct.pack("<Q", len(data)) + data, time.monotonic() + SILENCE)


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


def encode(answer: Answer) -> bytes:
    """Completions as bytes: the length of a JSON header, the header, all ids, all log-probs."""
    header = json.dumps([(len(c.ids), c.finish, int(c.versions[0])) for c in answer]).encode()
    ids = np.concatenate([c.ids for c in answer]).astype(np.int64).tobytes()
    logprobs = np.concatenate([c.logprobs for c in answer]).astype(np.float32).tobytes()
    return struct.pack("<Q", len(header)) + header + ids + logprobs


def decode(data: bytes) -> Answer | None:
    """What `encode` was given; None where the bytes are not all there."""
    if len(data) < 8:
        return None
    (size,) = struct.unpack_from("<Q", data)
    if len(data) < 8 + size:
        return None
    rows = json.loads(data[8 : 8 + size])
    lengths = [length for length, _, _ in rows]
    total, at = sum(lengths), 8 + size
    if len(data) != at + total * 12:
        return None
    ends = np.cumsum(lengths)[:-1]
    ids = np.split(np.frombuffer(data, np.int64, total, at).copy(), ends)
    logprobs = np.split(np.frombuffer(data, np.float32, total, at + 8 * total).copy(), ends)
    return tuple(
        Completion(i, p, np.full(len(i), version, np.int32), finish)
        for i, p, (_, finish, version) in zip(ids, logprobs, rows, strict=True)
    )
