"""Generation on several cores of a CPU: helpers, forked once, each answer a share of the requests.

A small model's decode step is a few hundred operators of microseconds each. Threads that split every one of them wait for each other
more than they work; processes that split the rows do not meet before the end. The weights lie in memory that parent and helpers share,
so a helper reads what the optimizer wrote without being sent anything, and randomness belongs to the request, so it draws what this
process would have drawn. A helper that dies or hangs costs its time only: its share is answered here. (Forking for each call would be
simpler, and was: every page that the parent writes afterwards then costs a fault, which took more from training than it gave.)
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
import torch

from posttrain.types import Completion, Request, Sampling

CORES = int(os.environ.get("OMP_NUM_THREADS", "0")) or len(getattr(os, "sched_getaffinity", lambda _: [0])(0))
LARGEST = 8_000_000  # parameters: above, weights leave the shared cache and cores that read them twice are slower than threads
LEAST_TOKENS = 2048  # a call for fewer is over before the others are awake
PATIENCE, SHORTEST_PATIENCE = (
    10.0,
    60.0,
)  # a helper may take so many times what this process took for its share, and so many seconds
DEATH_SIGNAL = 1  # prctl: be killed when the parent dies

Answer = tuple[Completion, ...]
Serve = Callable[[Sequence[Request], int], Iterator[Answer]]  # requests and the policy's version


def worthwhile(requests: Sequence[Request], parameters: int, processes: int) -> bool:
    """Whether a call is long enough, and the model small enough, for shares in processes of their own."""
    tokens = sum(r.group * r.sampling.max_new_tokens for r in requests)
    able = sys.platform == "linux" and processes > 1 and len(requests) > 1
    return able and parameters <= LARGEST and tokens >= LEAST_TOKENS


def shares(requests: Sequence[Request], processes: int) -> list[Sequence[Request]]:
    """Runs of neighbouring requests with about equally many responses."""
    reached = np.cumsum([r.group for r in requests])
    cuts = [int(np.searchsorted(reached, reached[-1] * n / processes)) + 1 for n in range(1, processes)]
    bounds = sorted({0, *cuts, len(requests)})
    return [requests[a:b] for a, b in pairwise(bounds)]


class Crew:
    """The helpers of one engine. Whoever holds it ends it with `close`; helpers also end with this process."""

    def __init__(self, processes: int):
        self.processes, self.lost = processes, 0  # helpers that died or hung: their shares were answered here, more slowly
        self.helpers: list[_Helper] = []

    def generate(self, serve: Serve, requests: Sequence[Request], version: int) -> Iterator[Answer]:
        """What `serve` yields for the requests, in their order, worked out on several cores of one thread each."""
        own, *others = shares(requests, self.processes)
        threads, began, finished = torch.get_num_threads(), time.monotonic(), False
        torch.set_num_threads(1)
        try:
            while len(self.helpers) < len(others):
                self.helpers.append(_Helper.fork(serve))
            asked = [helper.ask(share, version) for helper, share in zip(self.helpers, others, strict=False)]
            yield from serve(own, version)
            limit = max(SHORTEST_PATIENCE, PATIENCE * (time.monotonic() - began))
            lost = []
            for helper, share, heard in zip(list(self.helpers), others, asked, strict=False):
                answers = helper.collect(limit) if heard else None
                if answers is None:
                    lost.append(helper)
                yield from serve(share, version) if answers is None else answers
            for helper in lost:  # the next call has a new one
                helper.end()
                self.helpers.remove(helper)
                self.lost += 1
            finished = True
        finally:
            torch.set_num_threads(threads)
            if not finished:  # the caller stopped listening, or failed: what the helpers still write is of no use
                self.close()

    def close(self) -> None:
        for helper in self.helpers:
            helper.end()
        self.helpers.clear()


@dataclass(eq=False)
class _Helper:
    """A process that answers what it is asked until its pipe closes."""

    pid: int
    into: int
    out: int

    @classmethod
    def fork(cls, serve: Serve) -> _Helper:
        theirs, into = os.pipe()
        out, ours = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python warns of forks beside threads. A helper runs on one thread, prints nothing, and is not waited for forever.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            os.close(theirs)
            os.close(ours)
            return cls(pid, into, out)
        code = 1
        try:
            ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() == parent:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                _close_all_but(theirs, ours)
                _work(serve, theirs, ours)
            code = 0
        finally:
            os._exit(code)

    def ask(self, share: Sequence[Request], version: int) -> bool:
        """Whether the helper could be told."""
        fields = [[r.prompt_ids, r.group, r.seed, asdict(r.sampling)] for r in share]
        try:
            _write(self.into, json.dumps([version, fields]).encode())
        except OSError:
            return False
        return True

    def collect(self, limit: float) -> list[Answer] | None:
        """What the helper wrote; None where it died or took longer than `limit` seconds."""
        data = _read(self.out, time.monotonic() + limit)
        return None if data is None else decode(data)

    def end(self) -> None:
        os.close(self.into)
        os.close(self.out)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _close_all_but(*kept: int) -> None:
    """Files that the parent has open, its locks among them, are none of a helper's business."""
    for handle in (int(name) for name in os.listdir("/proc/self/fd")):
        if handle > 2 and handle not in kept:
            with suppress(OSError):
                os.close(handle)


def _work(serve: Serve, theirs: int, ours: int) -> None:
    """A helper's life: requests in, completions out. An error ends it, and its share is answered by the parent."""
    while (data := _read(theirs)) is not None:
        version, fields = json.loads(data)
        requests = [Request(tuple(ids), group, seed, Sampling(**sampling)) for ids, group, seed, sampling in fields]
        with torch.inference_mode():
            answers = list(serve(requests, version))
        _write(ours, encode(answers))


def _write(handle: int, data: bytes) -> None:
    view = memoryview(struct.pack("<Q", len(data)) + data)
    while view:
        view = view[os.write(handle, view) :]


def _read(handle: int, deadline: float | None = None) -> bytes | None:
    """One message; None where the pipe closed or the time is over before it is whole."""
    pieces, wanted = bytearray(), 8
    while len(pieces) < wanted:
        if deadline is not None and not select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        piece = os.read(handle, min(1 << 20, wanted - len(pieces)))
        if not piece:
            return None
        pieces += piece
        if wanted == 8 and len(pieces) == 8:
            wanted += struct.unpack("<Q", pieces)[0]
    return bytes(pieces[8:])


def encode(answers: Sequence[Answer]) -> bytes:
    """Completions as bytes: the length of a JSON header, the header, all ids, all log-probs."""
    flat = [c for answer in answers for c in answer]
    rows = [(len(c.ids), c.finish, c.version) for c in flat]
    header = json.dumps({"groups": [len(answer) for answer in answers], "rows": rows}).encode()
    ids = np.concatenate([c.ids for c in flat]).astype(np.int64).tobytes()
    logprobs = np.concatenate([c.logprobs for c in flat]).astype(np.float32).tobytes()
    return struct.pack("<Q", len(header)) + header + ids + logprobs


def decode(data: bytes) -> list[Answer] | None:
    """What `encode` was given; None where the bytes are not all there."""
    if len(data) < 8:
        return None
    (size,) = struct.unpack_from("<Q", data)
    if len(data) < 8 + size:
        return None
    header = json.loads(data[8 : 8 + size])
    lengths = [length for length, _, _ in header["rows"]]
    total, at = sum(lengths), 8 + size
    if len(data) != at + total * 12:
        return None
    ends = np.cumsum(lengths)[:-1]
    ids = np.split(np.frombuffer(data, np.int64, total, at).copy(), ends)
    logprobs = np.split(np.frombuffer(data, np.float32, total, at + 8 * total).copy(), ends)
    rows = iter(
        Completion(i, p, finish, version) for i, p, (_, finish, version) in zip(ids, logprobs, header["rows"], strict=True)
    )
    return [tuple(next(rows) for _ in range(group)) for group in header["groups"]]
