"""Sums with a calculator: in some the digits need only be copied, the others are too hard for a small model.

`500+37=` is answered `#537`. The policy calls the calculator by `calc(587+865)=`, reads `1452`, and then answers `#1452`. A
right answer is worth 1, minus `price` for each call, so a policy learns when to call it.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Annotated, ClassVar, Final

from posttrain.errors import Range, Share
from posttrain.rewards.answer import MARKER, integer_answer
from posttrain.tasks._procedural import Procedural, stable_hash
from posttrain.tasks._turns import drawn
from posttrain.tasks.base import Generate, Limits, Task
from posttrain.tasks.tools.calculator import Calculator
from posttrain.tasks.tools.toolbox import Toolbox
from posttrain.types import Message, Problem, Rollout, Score

NAME: Final = "calc"


@dataclass(frozen=True)
class CalculatorSums(Task):
    """`digits` is the number of digits in a hard sum."""

    alphabet: ClassVar[str] = "0123456789+=#()acelnor: "

    digits: Annotated[int, Range(ge=2, le=9)] = 3
    hard: Share = 0.5  # the share of hard sums
    price: Share = 0.1  # the price of a call
    turns: Annotated[int, Range(ge=1, le=20)] = 4  # the turns of an episode
    tools: bool = True  # False: the same sums without a calculator
    seed: int = 0  # which problems are drawn; never which side of the split a problem is on

    def problems(self, split: str, level: int | None = None) -> Procedural:
        return drawn("calculator", split, self._draw, _problem, self.seed)

    def _draw(self, source: Random) -> tuple[int, int]:
        first = 10 ** (self.digits - 1)
        if source.random() < self.hard:
            return source.randrange(first, 10 * first), source.randrange(first, 10 * first)
        return source.randrange(1, 10) * first, source.randrange(first // 10, first)

    def limits(self, problem: Problem) -> Limits:
        return Limits(self.turns)

    async def run(self, problem: Problem, generate: Generate) -> Rollout:
        box = Toolbox((Calculator(NAME),) if self.tools else (), generate, "call")
        reply, calls = await generate(), 0
        while said := await box.answer(reply.text):
            calls += 1
            reply = await generate(said)
        found = self.score(problem, reply.text)
        value = max(0.0, (found.value or 0.0) - self.price * calls)
        return generate.rollout(Score(value, outcome=found.outcome), answer=reply.text)

    def score(self, problem: Problem, response: str) -> Score:
        return integer_answer(response, int(problem.answer))

    def demonstration(self, problem: Problem) -> str:
        return MARKER + problem.answer

    def conversation(self, problem: Problem) -> tuple[Message, ...]:
        """With or without a call, at random: supervised training shows how to call, and not when."""
        answer = Message("assistant", self.demonstration(problem))
        asked = f"{NAME}({problem.question.removesuffix('=')})="
        call = Message("assistant", asked), Message("user", problem.answer)
        called = self.tools and stable_hash("call", problem.question) % 2 == 0
        return (*self.prompt(problem), *(call if called else ()), answer)


def _problem(name: str, drawn: tuple[str | int, ...]) -> Problem:
    a, b = int(drawn[0]), int(drawn[1])
    easy = set(str(a)[1:]) == {"0"} and b < 10 ** (len(str(a)) - 1)
    return Problem(name, f"{a}+{b}=", str(a + b), 0, {"easy": easy})
