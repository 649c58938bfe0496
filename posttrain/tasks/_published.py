r"""Published sets of mathematical questions, and where a response keeps its answer, by the style of the question.

A boxed question wants the answer in \boxed{}. The other styles ask for no form, so the answer is the last box, else what follows the
last ####, else the last number.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from posttrain.data.hub import read_split
from posttrain.errors import require
from posttrain.rewards.math import UNPARSEABLE, MathReward, final_answer, grade
from posttrain.tasks._questions import Pool, Questions, canonical, require_apart
from posttrain.types import Problem, Score

HASHES = MathReward(marker="####")
NUMBER = re.compile(
    r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,30})(?:\.[0-9]{1,30})?(?:/[0-9]{1,30})?"
)
SEARCHED = 10_000  # characters from the end in which a number is looked for


@dataclass(frozen=True)
class Published(Questions):
    """Train and test as published. `data` is a folder, or the training file where `test_data` is the other; without it the hub's copy
    is read."""

    name: ClassVar[str]
    # the hub's data set and configuration of each split
    sources: ClassVar[dict[str, tuple[str, str]]]
    files: ClassVar[dict[str, tuple[str, ...]]]  # what the file of a split may be called

    data: str = ""
    test_data: str = ""
    style: str = "boxed"  # boxed, thinking (the last number counts) or direct (likewise; demonstrations are the answer alone)
    system: str = ""
    examples: int = 0  # solved training problems shown before the question: few-shot

    def __post_init__(self) -> None:
        self.check_style(self.name)
        paired = bool(self.data) or not self.test_data
        require(paired, f"{self.name}: test_data goes with data, the training file")

    @classmethod
    @abstractmethod
    def make(cls, row: dict[str, Any], where: str, name: str) -> Problem:
        """The problem of a row."""

    def pool(self, split: str) -> tuple[Problem, ...]:
        return _read(type(self), self.data, self.test_data)[split == "test"].problems

    def score(self, problem: Problem, response: str) -> Score:
        """The found answer against the gold one, by the math grader."""
        if self.style == "boxed":
            return grade(response, problem.answer, question=problem.question)
        answer = found_answer(self.style, response)
        if answer is None:
            return UNPARSEABLE if problem.answer.strip() else grade("", problem.answer)
        return grade(f"\\boxed{{{answer}}}", problem.answer, question=problem.question)

    def final(self, response: str) -> str | None:
        return canonical(found_answer(self.style, response))


@lru_cache(maxsize=8)
def _read(task: type[Published], data: str, test_data: str) -> tuple[Pool, Pool]:
    pools = []
    for split in ("train", "test"):
        rows = read_split(task.name, split, data, test_data, task.sources, task.files)
        made = (task.make(row, where, f"{split}/{n}") for n, (where, row) in enumerate(rows))
        pools.append(Pool(tuple(made)))
    require_apart(*pools, "the training part", f"{task.name}'s test part")
    return pools[0], pools[1]


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
