"""Judging by a reward's name, for tasks whose reward is a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from posttrain import catalogue
from posttrain.errors import UserError, require
from posttrain.rewards.answer import MARKER, after_marker
from posttrain.rewards.compose import Gate, Part, Product, Reward, Weighted, as_score
from posttrain.rewards.judge import judged
from posttrain.rewards.math import final_answer
from posttrain.rewards.sandbox import isolation
from posttrain.tasks._questions import Questions, canonical
from posttrain.types import JSON, Problem, Score


class Judged(Questions):
    """Questions whose class declares these three fields as well."""

    reward: str
    options: Mapping[str, JSON]
    score_seconds: float

    def score(self, problem: Problem, response: str) -> Score:
        """What the reward says; one that is `async` is awaited by whoever scores. A judge takes options that only a group has."""
        if self.reward == "judge":
            return judged(problem.question, [response], **self.options)[0]
        if self.reward == "compose":
            return composed(self.options)(problem.question, response, problem.answer)
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

    def ready(self) -> tuple[str, ...]:
        """Where programs are run, their sandbox is chosen and tested before the first of them: workers inherit the choice."""
        given = (
            [(self.reward, self.options)]
            if self.reward != "compose"
            else [
                (part.get("reward"), part.get("options", {}))
                for part in self.options.get("parts", [])
                if isinstance(part, Mapping)
            ]
        )
        return tuple(isolation.describe(str(options.get("sandbox", "auto"))) for reward, options in given if reward == "code")

    @property
    def isolated(self) -> bool:
        parts = self.options.get("parts", []) if self.reward == "compose" else []
        names = [self.reward, *(part.get("reward", "") for part in parts if isinstance(part, Mapping))]
        return any(".py:" in name or name == "code" for name in names)

    @property
    def seconds(self) -> float:
        return self.score_seconds


async def _later(found: Any) -> Score:
    return as_score(await found)


@lru_cache(maxsize=16)
def _reward(name: str) -> Reward:
    try:
        found: Reward = catalogue.load("reward", name)
    except AttributeError:
        raise UserError(f"{name} combines models and is no reward of a task: see reward_models of the rl stage") from None
    return found


def composed(options: Mapping[str, JSON]) -> Weighted | Product | Gate:
    """The reward `compose` from plain settings: how (weighted, product, gate) and parts, each with a reward and, as needed, a name,
    a weight and options. A gate has two parts: what must be passed, and what is then paid.

    >>> mix = composed({"how": "gate", "parts": [{"reward": "format"}, {"reward": "math"}]})
    >>> mix("1+1?", "so \\\\boxed{2}", "2").value
    0.0
    """
    known = {"how", "parts", "least", "otherwise"}
    require(
        set(options) <= known,
        f"compose: unknown option {min(set(options) - known, default='')!r}; known: {', '.join(sorted(known))}",
    )
    how, parts = options.get("how", "weighted"), options.get("parts", [])
    require(isinstance(parts, list | tuple) and bool(parts), "compose: give a list of parts, each with a reward")
    made = [_part(part) for part in parts]
    require(how in ("weighted", "product", "gate"), f"compose: how is weighted, product or gate, not {how!r}")
    if how == "weighted":
        return Weighted(tuple(made))
    if how == "product":
        return Product(tuple(made))
    require(len(made) == 2, f"compose: a gate has two parts, the gate and what is behind it, not {len(made)}")
    return Gate(made[0], made[1], float(options.get("least", 1.0)), float(options.get("otherwise", 0.0)))


def _part(settings: JSON) -> Part:
    known = {"reward", "name", "weight", "options"}
    fine = isinstance(settings, Mapping) and "reward" in settings and set(settings) <= known
    require(fine, f"compose: a part is a reward with, as needed, a name, a weight and options, not {str(settings)[:80]}")
    # options may come from any file, and code may not: a mix with a function of yours is a function of yours
    shipped = ":" not in str(settings["reward"])
    require(
        shipped, f"compose: a part is a shipped reward, not {settings['reward']!r}; mix it in a file of yours, and name that"
    )
    reward, given = _reward(str(settings["reward"])), dict(settings.get("options", {}))
    return Part(str(settings.get("name", settings["reward"])), partial(reward, **given), float(settings.get("weight", 1.0)))
