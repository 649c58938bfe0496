"""Generation on several cores of a CPU: for the length of one call the process forks, and each child answers a share of the requests.

A small model's decode step is a few hundred operators of microseconds each. Threads that split every one of them wait for each other
more than they work; processes that split the rows do not meet before the end. A child is a copy of this process at this moment, so it
has the present weights without being sent any, and randomness belongs to the request, so it draws what this process would have drawn.
A child that dies or hangs costs its time only: its share is answered here.
"""

from __future__ import annotations

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
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from posttrain.types import Completion, Request

CORES = torch.get_num_threads()  # what torch found, before anyone changed it
LARGEST = 8_000_000  # parameters: above, weights leave the shared cache and cores that read them twice are slower than threads
LEAST_TOKENS = 2048  # a call for fewer is over before a fork, of some milliseconds, has paid
PATIENCE, SHORTEST_PATIENCE = (
    10.0,
    60.0,
)  # a child may take so many times what this process took for its share, and so many seconds

Answer = tuple[Completion, ...]
Alone = Callable[[Sequence[Request]], Iterator[Answer]]


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


def generate(alone: Alone, requests: Sequence[Request], processes: int) -> Iterator[Answer]:
    """What `alone` yields for the requests, in their order, worked out on `processes` cores of one thread each."""
    own, *others = shares(requests, processes)
    threads, began = torch.get_num_threads(), time.monotonic()
    children: list[_Child] = []
    torch.set_num_threads(1)
    try:
        children += [_Child.fork(alone, share) for share in others]
        yield from alone(own)
        limit = max(SHORTEST_PATIENCE, PATIENCE * (time.monotonic() - began))
        for child, share in zip(children, others, strict=True):
            answers = child.collect(limit)
            yield from alone(share) if answers is None else answers
    finally:  # also when the caller stops listening half-way
        for child in children:
            child.end()
        torch.set_num_threads(threads)


@dataclass(eq=False)
class _Child:
    """A process that answers its share and writes it to a pipe."""

    pid: int
    pipe: int

    @classmethod
    def fork(cls, alone: Alone, share: Sequence[Request]) -> _Child:
        out, into = os.pipe()
        with warnings.catch_warnings():
            # Python warns of forks beside threads. A child runs operators on one thread, prints nothing, and is not waited for forever.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            os.close(into)
            return cls(pid, out)
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
            data = encode(list(alone(share)))
            while data:
                data = data[os.write(into, data) :]
            code = 0
        finally:
            os._exit(code)

    def collect(self, limit: float) -> list[Answer] | None:
        """What the child wrote; None where it died or took longer than `limit` seconds."""
        deadline, pieces = time.monotonic() + limit, []
        while True:
            ready, _, _ = select.select([self.pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            piece = os.read(self.pipe, 1 << 20)
            if not piece:
                return decode(b"".join(pieces))
            pieces.append(piece)

    def end(self) -> None:
        os.close(self.pipe)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def encode(answers: Sequence[Answer]) -> memoryview:
    """Completions as bytes: the length of a JSON header, the header, all ids, all log-probs."""
    flat = [c for answer in answers for c in answer]
    header = json.dumps(
        {
            "groups": [len(answer) for answer in answers],
            "rows": [(len(c.ids), c.finish, c.version) for c in flat],
        }
    ).encode()
    ids = np.concatenate([c.ids for c in flat]).astype(np.int64).tobytes()
    logprobs = np.concatenate([c.logprobs for c in flat]).astype(np.float32).tobytes()
    return memoryview(struct.pack("<Q", len(header)) + header + ids + logprobs)


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
