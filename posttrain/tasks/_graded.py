r"""Where a response keeps its mathematical answer, by the style of the question, and how it is graded.

A boxed question wants the answer in \boxed{}. The other styles ask for no form, so the answer is the last box, else what follows the
last ####, else the last number.
"""

from __future__ import annotations

import re

from posttrain.rewards.math import UNPARSEABLE, MathReward, final_answer, grade
from posttrain.tasks._questions import canonical
from posttrain.types import Problem, Score

HASHES = MathReward(marker="####")
NUMBER = re.compile(
    r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,30})(?:\.[0-9]{1,30})?(?:/[0-9]{1,30})?"
)
SEARCHED = 10_000  # characters from the end in which a number is looked for


def found_answer(style: str, response: str) -> str | None:
    r"""The text of the answer, or None.

    >>> found_answer("boxed", "so 12"), found_answer("direct", "so 12 - 5 = 7."), found_answer("direct", r"7 is \boxed{x}")
    (None, '7', 'x')
    >>> found_answer("thinking", "5 and 6\n#### 1,234")
    '1,234'
    """
    boxed = final_answer(response)
    if boxed or style == "boxed":
        return boxed
    marked = final_answer(response, HASHES)
    if marked:
        return marked
    unclosed = "<think>" in response and "</think>" not in response
    numbers = [] if unclosed else NUMBER.findall(response.rpartition("</think>")[2][-SEARCHED:])
    return numbers[-1] if numbers else None


def graded(style: str, problem: Problem, response: str) -> Score:
    """The found answer against the gold one, by the math grader."""
    answer = found_answer(style, response)
    if answer is None and style != "boxed":
        return grade("", problem.answer) if not problem.answer.strip() else UNPARSEABLE
    text = response if style == "boxed" else f"\\boxed{{{answer}}}"
    return grade(text, problem.answer, question=problem.question)


def voted(style: str, response: str) -> str | None:
    """The found answer, spelled in one way."""
    return canonical(found_answer(style, response))
