"""The final answer: a call ends the episode, and the task scores its argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.tasks.tools.base import Tool


@dataclass(frozen=True)
class Answer(Tool):
    """Without it, the first turn that calls no tool is the answer."""

    ends = True
    blocks: ClassVar[bool] = False

    def begin(self) -> Callable[..., Any]:
        def answer(text: str) -> str:
            """Give the final answer.

            Args:
                text: the answer alone
            """
            return text

        return answer
