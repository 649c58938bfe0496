"""Makes pairs with models while people label: samples answers, and finds the pairs on which reward models disagree. Each job is a
thread that sends requests to `serve`; the pairs made so far can be labelled meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from math import exp
from pathlib import Path
from statistics import fmean, pvariance

from posttrain.data.labels import Item
from posttrain.data.preferences import spoken
from posttrain.errors import UserError, require
from posttrain.studio.models import Server
from posttrain.system.files import atomic_write
from posttrain.types import JSON

TOKENS = 512  # limit of an answer
TRIES = 4  # attempts to get two different answers to a prompt
EACH = 8  # pairs between two writes of the file
SCORED = 32  # items in one scoring request
JOBS = 4  # threads at once


@dataclass(slots=True)
class Progress:
    """The progress of a thread, and why it ended early."""

    total: int
    done: int = 0
    error: str = ""
    thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def tree(self) -> JSON:
        state = {"total": self.total, "done": self.done, "error": self.error}
        return {**state, "running": self.running}

    def start(self, work: Callable[[], None], seconds: float) -> None:
        """Start the thread and wait for it for a short time, in which it often finishes."""

        def guarded() -> None:
            try:
                work()
            except (UserError, OSError, ValueError) as error:
                self.error = str(error)

        self.thread = threading.Thread(target=guarded, daemon=True)
        self.thread.start()
        self.thread.join(seconds)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Samples two answers of one model to each of `prompts`, repeatedly, until there are `count` pairs."""

    server: Server
    model: str
    prompts: Sequence[str]
    count: int
    temperature: float

    def write(self, file: Path, progress: Progress) -> None:
        """Sample, and rewrite the file after every few pairs."""
        lines: list[str] = []
        pairs = self.pairs(progress)
        while some := [*islice(pairs, EACH)]:
            lines += [json.dumps(row) + "\n" for row in some]
            atomic_write(file, "".join(lines), folder=True)
            progress.done = len(lines)
        require(lines, "no two answers to one prompt differ; raise the temperature")

    def pairs(self, progress: Progress) -> Iterator[JSON]:
        for number in range(self.count):
            prompt = self.prompts[number % len(self.prompts)]
            said = [{"role": "user", "content": prompt}]
            for attempt in range(TRIES):
                options = {"temperature": self.temperature, "max_tokens": TOKENS, "n": 2}
                options["seed"] = number * TRIES + attempt
                two = {answer["text"] for answer in self.server.answers(self.model, said, options)}
                if len(two) == 2:
                    yield {"prompt": prompt, "responses": sorted(two), "model": self.model}
                    break
            else:
                progress.total -= 1  # all attempts gave the same answer


def score_items(
    server: Server, items: Sequence[Item], found: dict[str, float], progress: Progress
) -> None:
    """Compute how much the reward models of a server disagree on each item. Writes to `found`, by item id."""
    models = [name for name, kind in server.scorers().items() if kind == "reward_model"]
    require(models, "this run has no reward model yet")
    for start in range(0, len(items), SCORED):
        some = items[start : start + SCORED]
        pairs = [(item.prompt, response) for item in some for response in item.responses]
        asked = [{"messages": _messages(prompt), "answer": spoken(r)} for prompt, r in pairs]
        scores = iter(zip(*[server.score(name, asked) for name in models], strict=True))
        for item in some:
            members = [_members(one) for one in islice(scores, len(item.responses))]
            found[item.id] = disagreement(members)
        progress.done += len(some)


def _messages(prompt: JSON) -> JSON:
    return prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]


def _members(scores: Sequence[Mapping[str, JSON]]) -> list[float]:
    """The score of one answer by each reward model. Each member of an ensemble counts as a model."""
    found: list[float] = []
    for score in scores:
        if score.get("reward") is None:
            raise UserError(f"a reward model gave no score: {score.get('failure')}")
        parts = score.get("parts") or {}
        each = [float(v) for name, v in sorted(parts.items()) if name.startswith("member/")]
        found += each or [float(score["reward"])]
    return found


def disagreement(members: Sequence[Sequence[float]]) -> float:
    """How much reward models disagree, given their scores of each response. For a pair of responses: with several models, the
    variance over the models of the difference of scores; with one model, 0.5 - |p - 0.5|, where p is its probability of
    preferring the first response. The result is the mean over all pairs.

    >>> disagreement([[1.0, 0.0], [0.0, 1.0]]), disagreement([[1.0, 3.0], [0.0, 2.0]])
    (1.0, 0.0)
    >>> disagreement([[2.0], [2.0]]), round(disagreement([[4.0], [0.0]]), 3)
    (0.5, 0.018)
    """
    values = []
    for first, second in combinations(members, 2):
        apart = [a - b for a, b in zip(first, second, strict=True)]
        chance = 1 / (1 + exp(-max(-500.0, min(500.0, apart[0]))))
        values.append(pvariance(apart) if len(apart) > 1 else 0.5 - abs(chance - 0.5))
    return fmean(values)


@dataclass(slots=True)
class Background:
    """The threads of a studio, by id: files that are being sampled, and files that the reward models of a run are scoring."""

    sampled: dict[str, Progress] = field(default_factory=dict)
    scored: dict[tuple[str, str], tuple[Progress, dict[str, float]]] = field(default_factory=dict)
    mutex: threading.Lock = field(default_factory=threading.Lock)

    def sample(self, name: str, file: Path, work: Sampled, seconds: float) -> Progress:
        with self.mutex:
            self._room()
            progress = self.sampled[name] = Progress(work.count)
            progress.start(lambda: work.write(file, progress), seconds)
        return progress

    def score(
        self,
        key: tuple[str, str],
        server: Callable[[], Server],
        items: Sequence[Item],
        seconds: float,
    ) -> tuple[Progress, dict[str, float]]:
        """Score the new items of a file in the background. Returns the scores known so far."""
        with self.mutex:
            progress, found = self.scored.get(key) or (Progress(0), {})
            new = [item for item in items if item.id not in found]
            if not progress.running and new:
                self._room()
                progress = Progress(len(items), len(items) - len(new))
                self.scored[key] = progress, found
                progress.start(lambda: score_items(server(), new, found, progress), seconds)
        return progress, found

    def _room(self) -> None:
        every = [*self.sampled.values(), *(progress for progress, _ in self.scored.values())]
        running = sum(progress.running for progress in every)
        require(running < JOBS, f"{JOBS} files are being sampled or scored; wait for one")
