"""Sums in words, for chat models: "What is 47 + 85?", with reasoning between <think> tags and the answer between <answer> tags.

The numbers and the split are those of `arithmetic`. Solved sums before the question show the form; without any, words after it
ask for the form, as R1-Zero's template does. How to reason is left to the policy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar

from posttrain.errors import Seed, Share, Whole
from posttrain.rewards.answer import strict_integer
from posttrain.rewards.compose import weigh
from posttrain.rewards.format import THINK_ANSWER, match
from posttrain.tasks._procedural import Leveled, Procedural
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.types import Message, Problem, Score

FORM = (
    "Think between <think> and </think>, then give the number alone between <answer> and </answer>."
)
TAGGED = re.compile(r"<answer>([^<]*)</answer>")


@dataclass(frozen=True)
class Sums(Leveled):
    """`level` is the number of digits of both numbers."""

    bounds: ClassVar[tuple[int, int]] = (1, 9)

    level: int = 2
    min_level: int = 1
    # solved sums of the target level shown before the question; 0: none, and the form is asked for in words
    examples: Whole = 2
    format_weight: Share = 0.1  # the share of the value that the form earns
    seed: Seed = 0  # which problems are drawn; never which side of the split a pair is on

    def problems(self, split: str, level: int | None = None) -> Procedural:
        numbers = Arithmetic(level=self.level, min_level=self.min_level, seed=self.seed)
        return numbers.problems(split, level).map(in_words)

    def prompt(self, problem: Problem) -> tuple[Message, ...]:
        shown: list[Message] = []
        for number in range(self.examples + 1):
            other = self.problems("train")[number]
            if len(shown) < 2 * self.examples and other.question != problem.question:
                shown.append(Message("user", other.question))
                shown.append(Message("assistant", self.demonstration(other)))
        asked = problem.question if self.examples else f"{problem.question}\n\n{FORM}"
        return (*shown, Message("user", asked))

    def score(self, problem: Problem, response: str) -> Score:
        """`outcome` is correct if the last tagged number is, whatever the form around it."""
        given = self.final(response)
        right = given == problem.answer
        parts = {"answer": float(right), "format": float(match(THINK_ANSWER, response) is not None)}
        outcome = "correct" if right else "unparseable" if given is None else "wrong"
        return weigh(parts, {"format": self.format_weight}, outcome)

    def final(self, response: str) -> str | None:
        found = TAGGED.findall(response)
        given = strict_integer(found[-1].strip()) if found else None
        return None if given is None else str(given)

    def demonstration(self, problem: Problem) -> str:
        steps = f"{problem.facts['a']} + {problem.facts['b']} = {problem.answer}"
        return f"<think>{steps}</think>\n<answer>{problem.answer}</answer>"


def in_words(problem: Problem) -> Problem:
    """Return the sum as a question for a chat model."""
    return replace(problem, question=f"What is {problem.facts['a']} + {problem.facts['b']}?")
