"""Judging by a reward's name, for tasks whose reward is a setting."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from posttrain import catalogue
from posttrain.rewards.answer import MARKER, after_marker
from posttrain.rewards.compose import Reward, as_score
from posttrain.rewards.math import final_answer
from posttrain.tasks._questions import canonical
from posttrain.types import JSON, Problem, Score


def judge(reward: str, options: Mapping[str, JSON], problem: Problem, response: str) -> Score:
    """What the reward called `reward` says; one that is `async` is awaited by whoever scores."""
    found: Any = _reward(reward)(problem.question, response, problem.answer, **options)
    return _later(found) if hasattr(found, "__await__") else as_score(found)  # type: ignore[return-value]


def final_by(reward: str, options: Mapping[str, JSON], response: str) -> str | None:
    """The final answer that a shipped reward would look at; None where a reward looks at the whole response."""
    if reward == "math":
        return canonical(final_answer(response))
    return after_marker(response, str(options.get("marker", MARKER))) if reward == "answer" else None


def is_isolated(reward: str) -> bool:
    return ".py:" in reward or reward == "code"


async def _later(found: Any) -> Score:
    return as_score(await found)


@lru_cache(maxsize=16)
def _reward(name: str) -> Reward:
    found: Reward = catalogue.load("reward", name)
    return found
