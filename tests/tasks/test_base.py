"""What a task has from its base: its fields are checked, and what it refuses begins with what it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from posttrain.errors import Share, UserError
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Task
from posttrain.tasks.hinted import Hinted
from posttrain.tasks.reviews import Reviews
from posttrain.tasks.shop import Shop
from posttrain.tasks.tool_use import ToolUse
from posttrain.tasks.tools.base import Tool
from posttrain.tasks.tools.calculator import Calculator
from posttrain.types import Message, Problem, Score

if TYPE_CHECKING:
    from decimal import Decimal


class Plain(Task):
    def problems(self, split: str, level: int | None = None) -> list[Problem]:
        return []

    def score(self, problem: Problem, response: str) -> Score:
        return Score(1.0)


class Other(Plain):
    """Its demonstrations begin otherwise than with its prompt."""

    def conversation(self, problem: Problem) -> tuple[Message, ...]:
        return (Message("user", "is 2 right?"), Message("assistant", "y"))


class Silent(Plain):
    def conversation(self, problem: Problem) -> tuple[Message, ...]:
        return ()


@dataclass(frozen=True)
class Mine(Plain):
    share: Share = 0.5


@dataclass(frozen=True)
class Typed(Plain):
    price: Decimal | None = None  # a name that does not exist while the program runs


@dataclass(frozen=True)
class Untyped(Plain):
    day: int = 0


def test_fields_are_checked_and_the_task_is_named() -> None:
    with pytest.raises(UserError, match=r"^reviews: mood must be kind or any, not 'sad'"):
        Reviews(mood="sad")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^Mine: share must be in \[0, 1\], not 2"):
        Mine(share=2.0)
    assert Typed().price is None, "a type that only a checker imports is left to it"
    assert Untyped(day=20_261_116).day, "no bound is known of a user's number"


def test_problems_must_be_a_sequence() -> None:
    made = Problem("a", "1+1=", "2")
    refused = {"generator": (made for _ in "ab"), "dict": {0: made}, "set": {1}, "NoneType": None, "list of str": ["1+1="]}
    for kind, value in refused.items():

        class Other(Plain):
            def problems(self, split: str, level: int | None = None) -> Any:
                return value  # noqa: B023

        with pytest.raises(UserError, match=f"^Other: problems returns a {kind}; return a list or a tuple of Problem"):
            Other().problems("train")
        value = [made]
        assert Other().problems("train", level=0) == [made]
        value = [Problem("a", [Message("user", "1+1=")], "2")]  # type: ignore[arg-type]
        with pytest.raises(UserError, match="^Other: a question is text, not list; messages are what `prompt` returns"):
            Other().problems("train")


class Steps(Plain):
    """Says the levels of its problems or not."""

    own: ClassVar[bool] = True
    levels: ClassVar[tuple[int, ...]] = (1, 2)  # type: ignore[assignment]

    def problems(self, split: str, level: int | None = None) -> Any:
        return [Problem("a", "1+1=", "2", level=(level or 2) if self.own else 0)]


def test_problems_of_several_levels_say_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the curriculum would never open a level."""
    for asked in ({}, {"level": None}, {"level": 1}, {"level": 2}):
        assert Steps().problems("train", **asked)[0].level == (asked.get("level") or 2)
    monkeypatch.setattr(Steps, "own", False)
    assert Steps().problems("train") and Steps().problems("test", None), "the target level may be any"
    for given, named in ((("train", 1), {}), (("train",), {"level": 1}), ((), {"split": "train", "level": 1})):
        with pytest.raises(UserError, match="^Steps: a problem of level 1 says level 0; give each Problem its level, by which"):
            Steps().problems(*given, **named)


@dataclass(frozen=True)
class Look(Tool):
    price: Decimal | None = None

    def begin(self) -> Callable[..., str]:
        raise AssertionError


def test_a_tool_with_a_type_that_only_a_checker_imports_can_be_made() -> None:
    assert Look().price is None


@pytest.mark.parametrize("outer", [partial(Hinted, hint="{answer}="), partial(ToolUse, tools=(Calculator(),))])
def test_a_nested_task_demonstrates_what_its_task_does(outer: Callable[[Task], Task]) -> None:
    task = outer(Arithmetic(level=2, forgotten=1.0))
    problem = Problem("p", "47+85=", "132", 2, {"a": 47, "b": 85})
    *prompt, said = task.conversation(problem)
    assert tuple(prompt) == task.prompt(problem) and said == Message("assistant", "75012,48012#122")


def test_what_has_no_demonstration_has_none_when_it_is_nested() -> None:
    assert Hinted(Silent()).conversation(Problem("p", "1+1=", "2")) == ()
    assert Hinted(Other(), hint="{answer}").conversation(Problem("p", "1+1=", "2")) == ()
    unchanged = Problem("p", "1+1=")  # without an answer there is no hint: its own conversation
    assert Hinted(Other()).conversation(unchanged) == Other().conversation(unchanged)


def test_a_task_with_episodes_of_its_own_is_not_nested() -> None:
    with pytest.raises(UserError, match="^hinted: the task has episodes of its own"):
        Hinted(Shop())
