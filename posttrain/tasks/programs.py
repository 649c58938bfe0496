"""Write small functions from a list of operations, graded by running them.

`+3 *2` asks for

    def f(x):
     x=x+3
     x=x*2
     return x

An answer is the program alone. Half of the demonstrations for supervised training have a bug: a policy that imitates them
writes bugs as often, and the unit tests show which of its programs have none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Annotated, ClassVar

from posttrain.errors import Range, Share
from posttrain.rewards.code import code, patience
from posttrain.rewards.sandbox import isolation
from posttrain.tasks._procedural import Procedural, stable_hash
from posttrain.tasks._turns import drawn
from posttrain.tasks.base import Task
from posttrain.types import JSON, Message, Problem, Score

SIGNS = "+-*"
INPUTS = (0, 1, -3, 12)
HEAD, LAST = "def f(x):\n", " return x"


@dataclass(frozen=True)
class Programs(Task):
    """`operations` is the number of operations in a function, one per line."""

    alphabet: ClassVar[str] = "".join(dict.fromkeys("0123456789=" + SIGNS + HEAD + LAST))
    isolated = True

    operations: Annotated[int, Range(ge=1, le=9)] = 3
    bugs: Share = 0.5  # the share of demonstrations in supervised training that have a bug
    sandbox: str = "auto"  # where programs run: docs/rewards-code.md
    wall: Annotated[float, Range(gt=0, le=60)] = 2.0  # time limit of a program, in seconds
    seed: int = 0  # which problems are drawn; never which side of the split a problem is on

    def problems(self, split: str, level: int | None = None) -> Procedural:
        return drawn("programs", split, self._draw, _problem, self.seed)

    def _draw(self, source: Random) -> tuple[str | int, ...]:
        steps = range(self.operations)
        return tuple(f"{source.choice(SIGNS)}{source.randrange(2, 10)}" for _ in steps)

    def score(self, problem: Problem, response: str) -> Score:
        return code(problem.question, response, problem.answer, **self._options, fenced=False)

    @property
    def _options(self) -> dict[str, JSON]:
        return {"sandbox": self.sandbox, "wall": self.wall}

    @property
    def seconds(self) -> float:
        return patience(self._options)

    def ready(self) -> tuple[str, ...]:
        return (isolation.describe(self.sandbox),)

    def demonstration(self, problem: Problem) -> str:
        return str(problem.facts["program"])

    def conversation(self, problem: Problem) -> tuple[Message, ...]:
        source = Random(stable_hash("bug", problem.question))
        program = self.demonstration(problem)
        said = _with_bug(program, source) if source.random() < self.bugs else program
        return (*self.prompt(problem), Message("assistant", said))


def _problem(name: str, drawn: tuple[str | int, ...]) -> Problem:
    words = [str(word) for word in drawn]
    tests: list[JSON] = [["f", [x], _applied(x, words)] for x in INPUTS]
    program = HEAD + "".join(f" x=x{word}\n" for word in words) + LAST
    return Problem(name, " ".join(words), json.dumps(tests), 0, {"program": program})


def _applied(x: int, words: list[str]) -> int:
    for word in words:
        number = int(word[1:])
        x = {"+": x + number, "-": x - number, "*": x * number}[word[0]]
    return x


def _with_bug(program: str, source: Random) -> str:
    """Put a bug into a program: another number, another sign, a missing line or indentation, or no return value."""
    first, *lines, last = program.split("\n")
    place = source.randrange(len(lines))
    line, kind = lines[place], source.randrange(5)
    if kind == 0:
        lines[place] = line[:-1] + str((int(line[-1]) + source.randrange(1, 9)) % 10)
    elif kind == 1:
        other = source.choice([sign for sign in SIGNS if sign != line[-2]])
        lines[place] = f"{line[:-2]}{other}{line[-1]}"
    elif kind == 2:
        del lines[place]
    elif kind == 3:
        lines[place] = line[1:]
    else:
        last = last.strip()
    return "\n".join([first, *lines, last])
