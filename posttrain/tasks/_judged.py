"""Judging by a reward's name, for tasks whose reward is a setting."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from posttrain import catalogue
from posttrain.errors import UserError, require
from posttrain.rewards.answer import MARKER, after_marker
from posttrain.rewards.compose import Gate, Part, Product, Reward, Weighted, as_score
from posttrain.rewards.judge import check_judge, judged
from posttrain.rewards.math import final_answer
from posttrain.rewards.sandbox import isolation
from posttrain.tasks._questions import Questions, canonical, one_side, require_apart
from posttrain.trust import code_place
from posttrain.types import JSON, Problem, Score


def check_code(name: str, path: Path) -> None:
    """Refuse FILE.py:NAME where the file is not there or is no Python; nothing in it is run."""
    try:
        ast.parse(path.read_bytes())
    except OSError as error:
        raise UserError(f"reward {name}: cannot read {path}: {error.strerror}") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        where = f" line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(
            f"reward {name}: {path}{where} is not Python: {getattr(error, 'msg', error)}"
        ) from None


@dataclass(frozen=True, kw_only=True)
class Judged(Questions):
    """Questions of records in one or two parts, whose class says where those are."""

    question: str = "question"  # the field that holds it, or a path such as `qa.question`; a list of messages is a conversation
    answer: str = "answer"
    answer_after: str = ""  # take what follows the last of these in the answer, such as "####"
    reward: str = "math"
    options: Mapping[str, JSON] = field(default_factory=dict)  # keyword arguments of the reward
    style: str = "direct"
    system: str = ""
    examples: int = 0  # solved training problems shown before the question: few-shot
    held_out: float = 0.1  # the share for evaluation, where there is no part for it
    score_seconds: float = 10.0  # the time limit of a reward of yours

    def check_settings(self, task: str) -> None:
        self.check_style(task)
        require(
            0 < self.held_out < 1,
            f"{task}: held_out is a share between 0 and 1, not {self.held_out}",
        )
        require(
            self.score_seconds > 0,
            f"{task}: score_seconds must be positive, not {self.score_seconds}",
        )

    @abstractmethod
    def parts(self) -> tuple[str, str]:
        """The part to train on and the one for evaluation; without the second, a share of the first is held out by its content."""

    def called(self, part: str) -> str:
        """What a part is called in words."""
        return part

    @abstractmethod
    def read(self, part: str) -> tuple[Problem, ...]:
        """The problems of a part."""

    def pool(self, split: str) -> tuple[Problem, ...]:
        one, other = self.parts()
        train = self.read(one)
        if not other:
            return one_side(train, self.held_out, split, self.called(one))
        if split == "train":
            return train
        test = self.read(other)
        require_apart(train, test, self.called(one), self.called(other))
        return test

    def score(self, problem: Problem, response: str) -> Score:
        """What the reward says; one that is `async` is awaited by whoever scores. A judge takes options that only a group has."""
        if self.reward == "judge":
            return judged(problem.question, [response], **self.options)[0]
        if self.reward == "compose":
            return composed(self.options)(problem.question, response, problem.answer)
        found: Any = _reward(self.reward)(
            problem.question, response, problem.answer, **self.options
        )
        return _later(found) if hasattr(found, "__await__") else as_score(found)  # type: ignore[return-value]

    def score_group(self, problem: Problem, responses: Sequence[str]) -> Sequence[Score] | None:
        """A judge sees the responses to a problem together, so that its endpoint is asked in parallel."""
        return (
            judged(problem.question, responses, **self.options) if self.reward == "judge" else None
        )

    def final(self, response: str) -> str | None:
        """The final answer that a shipped reward would look at; None where a reward looks at the whole response."""
        if self.reward == "math":
            return canonical(final_answer(response))
        return (
            after_marker(response, str(self.options.get("marker", MARKER)))
            if self.reward == "answer"
            else None
        )

    def ready(self) -> tuple[str, ...]:
        """Where programs are run, their sandbox is chosen and tested before the first of them: workers inherit the choice. A reward of
        the user's own must at least parse: in the workers a mistake is found with the first answer."""
        for name, options in self.rewards():
            require(
                isinstance(options, Mapping),
                f"{self.reward}: the options of {name} are not a mapping: {str(options)[:80]}",
            )
            if (place := code_place(name)) is not None:
                check_code(name, place[0])
            else:
                _reward(name)
            if name == "judge":
                check_judge(**options)
        if self.reward == "compose":
            composed(self.options)
        given = [(name, options) for name, options in self.rewards() if name == "code"]
        return tuple(
            isolation.describe(str(options.get("sandbox", "auto"))) for _, options in given
        )

    def rewards(self) -> list[tuple[str, Mapping[str, JSON]]]:
        """The reward, or those that it is composed of, with the options of each."""
        if self.reward != "compose":
            return [(self.reward, self.options)]
        parts = [part for part in self.options.get("parts", []) if isinstance(part, Mapping)]
        return [(str(part.get("reward", "")), part.get("options", {})) for part in parts]

    @property
    def isolated(self) -> bool:
        return any(code_place(name) is not None or name == "code" for name, _ in self.rewards())

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
        raise UserError(
            f"{name} combines models and is no reward of a task: see reward_models of the rl stage"
        ) from None
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
    require(
        isinstance(parts, list | tuple) and bool(parts),
        "compose: give a list of parts, each with a reward",
    )
    made = [_part(part) for part in parts]
    require(
        how in ("weighted", "product", "gate"),
        f"compose: how is weighted, product or gate, not {how!r}",
    )
    if how == "weighted":
        return Weighted(tuple(made))
    if how == "product":
        return Product(tuple(made))
    require(
        len(made) == 2,
        f"compose: a gate has two parts, the gate and what is behind it, not {len(made)}",
    )
    return Gate(
        made[0], made[1], float(options.get("least", 1.0)), float(options.get("otherwise", 0.0))
    )


def _part(settings: JSON) -> Part:
    known = {"reward", "name", "weight", "options"}
    fine = isinstance(settings, Mapping) and "reward" in settings and set(settings) <= known
    fine = fine and isinstance(
        settings.get("options", {}), Mapping
    )  # a list of pairs would hide what it names from trust.py
    require(
        fine,
        f"compose: a part is a reward with, as needed, a name, a weight and options, not {str(settings)[:80]}",
    )
    # options may come from any file, and code may not: a mix with a function of yours is a function of yours
    shipped = ":" not in str(settings["reward"])
    require(
        shipped,
        f"compose: a part is a shipped reward, not {settings['reward']!r}; mix it in a file of yours, and name that",
    )
    reward, given = _reward(str(settings["reward"])), dict(settings.get("options", {}))
    return Part(
        str(settings.get("name", settings["reward"])),
        partial(reward, **given),
        float(settings.get("weight", 1.0)),
    )
