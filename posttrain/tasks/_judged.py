"""Judging by a reward's name, for tasks whose reward is a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from posttrain import catalogue
from posttrain.rewards.answer import MARKER, after_marker
from posttrain.rewards.compose import Reward, as_score
from posttrain.rewards.judge import judged
from posttrain.rewards.math import final_answer
from posttrain.tasks._questions import Questions, canonical
from posttrain.types import JSON, Problem, Score


class Judged(Questions):
    """Questions whose class declares these three fields as well."""

    reward: str
    options: Mapping[str, JSON]
    score_seconds: float

    def score(self, problem: Problem, response: str) -> Score:
        """What the reward says; one that is `async` is awaited by whoever scores."""
        found: Any = _reward(self.reward)(problem.question, response, problem.answer, **self.options)
        return _later(found) if hasattr(found, "__await__") else as_score(found)  # type: ignore[return-value]

    def score_group(self, problem: Problem, responses: Sequence[str]) -> Sequence[Score] | None:
        """A judge sees the responses to a problem together, so that its endpoint is asked in parallel."""
        return judged(problem.question, responses, **self.options) if self.reward == "judge" else None

    def final(self, response: str) -> str | None:
        """The final answer that a shipped reward would look at; None where a reward looks at the whole response."""
        if self.reward == "math":
            return canonical(final_answer(response))
        return after_marker(response, str(self.options.get("marker", MARKER))) if self.reward == "answer" else None

    @property
    def isolated(self) -> bool:
        return ".py:" in self.reward or self.reward == "code"

    @property
    def seconds(self) -> float:
        return self.score_seconds


async def _later(found: Any) -> Score:
    return as_score(await found)


@lru_cache(maxsize=16)
def _reward(name: str) -> Reward:
    found: Reward = catalogue.load("reward", name)
    return found
