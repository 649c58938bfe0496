"""A calculator: + - * / and brackets over numbers, exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from posttrain.rewards._expression import Unparseable, evaluate
from posttrain.tasks.tools.base import Tool, ToolError


@dataclass(frozen=True)
class Calculator(Tool):
    """`called` is the tool's name for the model; short ones suit tiny models."""

    blocks: ClassVar[bool] = False

    called: Literal["calculator", "calc"] = "calculator"

    def begin(self) -> Callable[..., Any]:
        def calculator(expression: str) -> str:
            """Compute the value of an expression with + - * / and brackets.

            Args:
                expression: such as (12.5 + 3) * 4
            """
            try:
                value, _ = evaluate(expression.replace(",", ""), decimals=True)
            except Unparseable as problem:
                raise ToolError(f"cannot compute that: {problem}") from None
            whole = value.denominator == 1
            return str(value.numerator) if whole else f"{float(value):.6f}".rstrip("0")

        calculator.__name__ = self.called
        return calculator
