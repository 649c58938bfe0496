"""What a task has from its base: its fields are checked, and what it refuses begins with what it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from posttrain.errors import Share, UserError
from posttrain.tasks.base import Task
from posttrain.tasks.hinted import Hinted
from posttrain.tasks.reviews import Reviews
from posttrain.tasks.shop import Shop
from posttrain.tasks.tools.base import Tool
from posttrain.types import Problem, Score

if TYPE_CHECKING:
    from decimal import Decimal


class Plain(Task):
    def problems(self, split: str, level: int | None = None) -> list[Problem]:
        return []

    def score(self, problem: Problem, response: str) -> Score:
        return Score(1.0)


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


@dataclass(frozen=True)
class Look(Tool):
    price: Decimal | None = None

    def begin(self) -> Callable[..., str]:
        raise AssertionError


def test_a_tool_with_a_type_that_only_a_checker_imports_can_be_made() -> None:
    assert Look().price is None


def test_a_task_with_episodes_of_its_own_is_not_nested() -> None:
    with pytest.raises(UserError, match="^hinted: the task has episodes of its own"):
        Hinted(Shop())
