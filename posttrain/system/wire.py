"""The protocol of a sampler in another process: requests and completions as lines of JSON, and the pipes that carry them."""

from __future__ import annotations

import json
import os
import select
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from posttrain.system import processes
from posttrain.types import JSON, Completion, Request, Sampling, Statistics

Finished = list[tuple[Request, Completion]]
ARRAYS = (("ids", np.int64), ("logprobs", np.float32), ("versions", np.int32))
LOOK = 1.0  # seconds between checks of a process that sends nothing
SILENCE = 60.0  # seconds without processor time after which a process with work is hanging


@dataclass(eq=False, kw_only=True)
class PipedProcess:
    """A process at the other end of two pipes, with the messages sent and received."""

    pid: int
    into: int
    out: int
    gone: bool = False  # it died, or waits for something that will not come
    sent: int = 0  # messages to it, and how many of them it had read when it last replied
    seen: int = 0
    received: bytearray = field(default_factory=bytearray)  # the beginning of its next message
    statistics: Statistics = field(default_factory=Statistics)
    # its processor time at the last check, and when that last increased
    worked: tuple[float, float] = (-1.0, 0.0)

    def write(self, message: JSON, read: Callable[[], None]) -> None:
        """Write a message, and read replies meanwhile: a process whose output pipe is full would not read."""
        self.worked, view = (-1.0, time.monotonic()), memoryview(to_line(message))
        while view and not self.gone:
            readable, writable, _ = select.select([self.out], [self.into], [], LOOK)
            if readable:
                read()
            try:
                view = view[os.write(self.into, view) :] if writable else view
            except OSError:
                self.gone = True
            self.gone |= not (readable or writable) and self.hangs()

    def close_pipes(self) -> None:
        """Close the pipes, once: later their numbers may belong to other files."""
        handles, self.into, self.out = (self.into, self.out), -1, -1
        for handle in handles:
            if handle >= 0:
                os.close(handle)

    def idle(self) -> float:
        """Seconds since it last used its core."""
        used, now = processes.processor_time(self.pid), time.monotonic()
        if used != self.worked[0]:
            self.worked = (used, now)
        return now - self.worked[1]

    def hangs(self) -> bool:
        """Whether the process hangs. Work may take any time, but a deadlock uses no processor time."""
        return self.idle() > SILENCE


class Channel:
    """The worker's end of two pipes: messages in, messages out. It ends with the process at the other end."""

    def __init__(self, requests: int, replies: int):
        self.requests, self.replies = requests, replies
        self.received, self.waiting = bytearray(), deque[bytes]()

    def ready(self) -> bool:
        """Whether there is something to read."""
        return bool(self.waiting or select.select([self.requests], [], [], 0)[0])

    def receive(self) -> JSON:
        """The next message; EOFError if the other end is closed."""
        while not self.waiting:
            piece = os.read(self.requests, 1 << 20)
            if not piece:
                raise EOFError
            self.waiting += whole_lines(self.received, piece)
        return from_line(self.waiting.popleft())

    def send(self, *message: JSON) -> None:
        processes.write_all(self.replies, to_line(message))


def to_line(message: JSON) -> bytes:
    """Encode a message as one line. A lone surrogate stays as it is; \\u escapes would join it with its neighbour."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def from_line(line: bytes) -> JSON:
    return json.loads(line.decode("utf-8", "surrogatepass"))


def whole_lines(received: bytearray, piece: bytes) -> list[bytes]:
    """The whole lines received so far; `received` keeps the beginning of the next one.

    >>> rest = bytearray(b"[1")
    >>> whole_lines(rest, b", 2]\\n[3]\\n[4"), rest
    ([b'[1, 2]', b'[3]'], bytearray(b'[4'))
    """
    received += piece
    if b"\n" not in piece:
        return []
    *lines, rest = bytes(received).split(b"\n")
    received[:] = rest
    return lines


def encode_completions(finished: Finished) -> JSON:
    """Encode the arrays of all completions concatenated: encoding each by itself took as long as decoding several tokens."""
    rows = [(r.session, r.turn, c.finish, len(c.ids)) for r, c in finished]
    texts = []
    for name, kind in ARRAYS:
        parts = [np.zeros(0, kind), *(getattr(c, name) for _, c in finished)]
        texts.append(b64encode(np.concatenate(parts).astype(kind).tobytes()).decode())
    return [rows, texts]


def decode_completions(message: JSON) -> list[tuple[tuple[int, int], Completion]]:
    """Completions, each with the session and turn of its request."""
    rows, texts = message
    kinds = [kind for _, kind in ARRAYS]
    arrays = [np.frombuffer(b64decode(t), kind) for t, kind in zip(texts, kinds, strict=True)]
    ends = list(accumulate((length for *_, length in rows), initial=0))
    found = []
    for (session, turn, finish, _), (start, end) in zip(rows, pairwise(ends), strict=True):
        ids, logprobs, versions = (array[start:end].copy() for array in arrays)
        found.append(((session, turn), Completion(ids, logprobs, versions, finish)))
    return found


def encode_requests(requests: Sequence[Request]) -> JSON:
    """Encode requests, sending ids and settings that they share once."""
    settings: dict[Sampling, int] = {}
    prompts: dict[tuple[int, ...], int] = {}
    rows = []
    for r in requests:
        prompt = prompts.setdefault(r.ids, len(prompts))
        which = settings.setdefault(r.sampling, len(settings))
        rows.append((prompt, r.seed, which, r.session, r.turn, r.group, r.keep, r.model))
    return [[list(ids) for ids in prompts], [asdict(sampling) for sampling in settings], rows]


def decode_requests(message: JSON) -> list[Request]:
    prompts = [tuple(ids) for ids in message[0]]
    settings = [Sampling(**sampling) for sampling in message[1]]
    return [
        Request(prompts[prompt], seed, settings[which], *rest)
        for prompt, seed, which, *rest in message[2]
    ]


def changed_by_json(value: object, place: str = "") -> str:
    """Which part of a tree JSON would change, in words; "" if none.

    >>> changed_by_json({"facts": {"grades": {1: 0.5}}}), changed_by_json({"facts": {"pair": (1, 2)}})
    ('facts.grades has the key 1 (int)', 'facts.pair is a tuple')
    """
    if value is None or type(value) in (bool, int, float, str):
        return ""
    if type(value) is list:
        items = enumerate(value)
        return next(filter(None, (changed_by_json(v, f"{place}[{n}]") for n, v in items)), "")
    if type(value) is not dict:
        return f"{place} is a {type(value).__qualname__}"
    for key, item in value.items():
        if type(key) is not str:
            return f"{place} has the key {key!r} ({type(key).__qualname__})"
        if changed := changed_by_json(item, f"{place}.{key}" if place else key):
            return changed
    return ""
