"""An episode in a worker process: it sends the policy's inputs as messages to the parent, which keeps the ids for training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from posttrain.rewards.compose import as_score
from posttrain.tasks._rollouts import as_rollouts, score_row
from posttrain.tasks.base import FAULTS, ContextFull, EpisodeEnd, Generate, Given, Task, failed
from posttrain.types import JSON, Message, Problem, Rollout, Score, Segment


@dataclass(slots=True, eq=False)
class Remote:
    """The `generate` of `Task.run`, in the worker."""

    exchange: Callable[[JSON], JSON]
    problem: Problem
    template: str
    notes: list[JSON]  # sent to the parent with the next message: sessions, rewards, counts
    number: int = 0
    role: str = ""
    siblings: list[Remote] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.siblings.append(self)

    @property
    def decoder(self) -> Any:
        raise RuntimeError("an isolated episode has no tokenizer: it runs in a process of its own")

    async def __call__(
        self,
        given: Given | None = None,
        last: bool = False,
        *,
        tools: Sequence[JSON] | None = None,
        max_new_tokens: int = 0,
        written: int = 0,
    ) -> Segment:
        items, text = given, given if isinstance(given, str) else ""
        if given is not None and not isinstance(given, str):
            items = [_message_row(one) for one in given]
        how = {"last": last, "tools": tools, "max_new_tokens": max_new_tokens, "written": written}
        notes, self.notes[:] = [*self.notes], []
        found = self.exchange({"generate": self.number, "given": items, "how": how, "notes": notes})
        if "end" in found:
            raise ContextFull(found["text"]) if found["full"] else EpisodeEnd(found["end"])
        if "error" in found:
            raise TypeError(found["error"])
        ids = np.array(found["ids"], np.int64)
        reply = Segment(ids, found["text"], True, finish=found["finish"])
        self.segments += [Segment(np.zeros(0, np.int64), text, False), reply]
        return reply

    def reward(self, value: float) -> None:
        self.notes.append(["reward", self.number, float(value)])

    def count(self, name: str, amount: float = 1.0) -> None:
        self.notes.append(["count", self.number, str(name), float(amount)])

    def session(self, role: str) -> Remote:
        self.notes.append(["session", role])
        return replace(self, number=len(self.siblings), role=role, segments=[])

    def rollout(
        self, score: Score | float | None = None, outcome: str = "", answer: str | None = None
    ) -> Rollout:
        if not self.segments:
            raise ValueError("a rollout needs a turn that was sampled: await generate() first")
        found = Score.pending(outcome) if score is None else as_score(score)
        return Rollout(self.problem, self.number, tuple(self.segments), found, self.role, answer)


async def run(task: Task, problem: Problem, exchange: Callable[[JSON], JSON]) -> JSON:
    """Run an episode to its end and return what the parent makes rollouts from."""
    notes: list[JSON] = []
    generate = Remote(exchange, problem, exchange({"template": True})["template"], notes)
    try:
        made = as_rollouts(await task.run(problem, generate))
        rows = [[one.sample, score_row(one.score), one.answer] for one in made]
        return {"notes": notes, "rollouts": rows}
    except EpisodeEnd as end:
        full = isinstance(end, ContextFull)
        score = None if end.score is None else score_row(end.score)
        return {"notes": notes, "end": end.outcome, "score": score, "text": str(end), "full": full}
    except FAULTS as error:
        name, _, text = str(failed(error).failure).partition(": ")
        return {"notes": notes, "raised": name, "text": text}


class Host:
    """In the parent: answers an episode's messages with its conversations, and makes its rollouts."""

    def __init__(self, generate: Generate) -> None:
        self.talks = [generate]

    async def answer(self, message: JSON) -> JSON:
        if "template" in message:
            return {"template": self.talks[0].template}
        self.note(message["notes"])
        given, how = message["given"], message["how"]
        if isinstance(given, list) and any(isinstance(one, list) for one in given):
            given = [Message(*one) if isinstance(one, list) else one for one in given]
        try:
            reply = await self.talks[message["generate"]](given, **how)
        except EpisodeEnd as end:
            return {"end": end.outcome, "text": str(end), "full": isinstance(end, ContextFull)}
        except (TypeError, ValueError) as error:
            return {"error": str(error)}
        return {"ids": reply.ids.tolist(), "text": reply.text, "finish": reply.finish}

    def note(self, notes: JSON) -> None:
        for kind, *rest in notes:
            if kind == "session":
                self.talks.append(self.talks[0].session(*rest))
            else:
                number, *values = rest
                getattr(self.talks[number], "reward" if kind == "reward" else "count")(*values)

    def rollouts(self, found: JSON) -> object:
        """Return what `run` would have returned in this process, or raise what it would have raised."""
        self.note(found["notes"])
        if "raised" in found:
            raise type(str(found["raised"]), (Exception,), {})(found["text"])
        if "end" in found:
            score = None if found["score"] is None else Score(*found["score"])
            raise ContextFull(found["text"]) if found["full"] else EpisodeEnd(found["end"], score)
        return [self.rollout(*row) for row in found["rollouts"]]

    def rollout(self, number: int, parts: JSON, answer: str | None) -> Rollout:
        score = Score(*parts)
        pending = score == Score.pending(score.outcome)
        paid, outcome = (None, score.outcome) if pending else (score, "")
        return self.talks[number].rollout(paid, outcome, answer)


def _message_row(one: object) -> JSON:
    if isinstance(one, Message):
        return [one.role, one.content, dict(one.more)]
    if isinstance(one, int | np.integer):
        return int(one)
    raise TypeError("generate takes text, ids, or messages, such as [Message('user', ...)]")
