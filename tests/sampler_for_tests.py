"""A sampler whose completions a test writes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from random import Random
from typing import Any

import numpy as np

from posttrain.types import Completion, Request, Statistics


def completion(ids: Sequence[int] | np.ndarray, version: int = 0, finish: str = "stop") -> Completion:
    count = len(ids)
    return Completion(np.array(ids, np.int64), np.zeros(count, np.float32), np.full(count, version, np.int32), finish)


def three_lines(tokenizer: Any, letters: str) -> Callable[[Request], Completion]:
    """A policy that writes three lines, each one of the letters by chance; the rest of them where some are there already. Cut off where
    the request says."""

    def reply(request: Request) -> Completion:
        before = tokenizer.decode(list(request.ids)).rpartition("<|assistant|>")[2]
        source = Random(request.seed)
        lines = [source.choice(letters) for _ in range(3 - before.count("\n"))]
        ids = [*tokenizer("\n".join(lines), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        limit = request.sampling.max_new_tokens
        return completion(ids[:limit], finish="stop" if len(ids) <= limit else "length")

    return reply


class ScriptedSampler:
    """Answers each request with what `reply` makes of it, one request a poll."""

    capacity = 4
    statistics = Statistics()

    def __init__(self, reply: Callable[[Request], Completion]):
        self.reply, self.requests, self.waiting, self.version = reply, list[Request](), list[Request](), 0

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests += requests
        self.waiting += requests

    def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
        if not self.waiting:
            return []
        request = self.waiting.pop(0)
        return [(request, self.reply(request))]

    def cancel(self, sessions: Collection[int]) -> None:
        self.waiting = [r for r in self.waiting if r.session not in sessions]

    def publish(self, version: int, weights: Iterable[tuple[str, Any]] | None = None) -> None:
        self.version = version

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass
