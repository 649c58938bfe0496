"""Guess a number from 1 to `numbers`: after each guess the policy reads whether the number is smaller or larger.

The prompt is a first hint, `>17`: the number is larger than 17. A move is two digits, `24`; the answer `<24` means that the
number is smaller. Bisection finds every number in time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from random import Random
from typing import Annotated, ClassVar, Literal

from posttrain.errors import Range
from posttrain.tasks._procedural import Procedural, stable_hash
from posttrain.tasks._turns import Environment, Play, Player, Reply, drawn
from posttrain.types import Problem


@dataclass(frozen=True)
class Guess(Environment):
    """The policy has `turns` guesses to find the number. With `pay: turn` a guess also earns its share of the information,
    log2(candidates before / after) / log2(candidates at the start)."""

    alphabet: ClassVar[str] = "0123456789<>"

    numbers: Annotated[int, Range(ge=3, le=99)] = 30  # the numbers are 1 to this
    turns: Annotated[int, Range(ge=1, le=20)] = 5
    pay: Literal["end", "turn"] = "end"  # whether guesses are rewarded too
    seed: int = 0  # which problems are drawn; never which side of the split a problem is on

    def __post_init__(self) -> None:
        super().__post_init__()
        found = 2**self.turns >= self.numbers
        self.check(found, f"{self.turns} turns cannot find each of {self.numbers} numbers")

    @property
    def by_turn(self) -> bool:  # type: ignore[override]
        return self.pay == "turn"

    def problems(self, split: str, level: int | None = None) -> Procedural:
        return drawn("guess", split, self._draw, _problem, self.seed)

    def _draw(self, source: Random) -> tuple[int, int]:
        hidden, probe = source.sample(range(1, self.numbers + 1), 2)
        return hidden, probe

    def teacher(self, problem: Problem) -> Player:
        """A careless player, who ignores the hints every other time."""
        source = Random(stable_hash("teacher", problem.id, problem.question, problem.answer))

        def move(play: Play) -> str:
            assert isinstance(play, _Guessing)
            low, high = (play.low, play.high) if source.random() < 0.5 else (1, self.numbers)
            return f"{source.randint(low, high):02d}"

        return move

    def begin(self, problem: Problem) -> Play:
        hidden, probe = int(problem.answer), int(problem.facts["probe"])
        low, high = (1, probe - 1) if hidden < probe else (probe + 1, self.numbers)
        return _Guessing(self.numbers, self.turns, hidden, low, high)


def _problem(name: str, drawn: tuple[str | int, ...]) -> Problem:
    hidden, probe = int(drawn[0]), int(drawn[1])
    facts = {"probe": probe, "state": hidden}
    return Problem(name, _hint(hidden, probe), f"{hidden:02d}", 0, facts)


def _hint(hidden: int, guess: int) -> str:
    return f"{'<' if hidden < guess else '>'}{guess:02d}"


@dataclass(slots=True)
class _Guessing(Play):
    numbers: int
    left: int
    hidden: int
    low: int
    high: int

    bits: float = 0.0  # the information at the start, in bits

    def __post_init__(self) -> None:
        self.bits = max(1.0, log2(self.high - self.low + 1))

    def move(self, text: str) -> Reply:
        digits = len(text) == 2 and text.isascii() and text.isdigit()
        if not digits or not 1 <= int(text) <= self.numbers:
            return Reply(value=0.0, outcome="no number")
        guess, before = int(text), self.high - self.low + 1
        self.left -= 1
        if guess == self.hidden:
            return Reply(value=1.0, outcome="correct", paid=log2(before) / self.bits)
        if guess > self.hidden:
            self.high = min(self.high, guess - 1)
        else:
            self.low = max(self.low, guess + 1)
        paid = log2(before / (self.high - self.low + 1)) / self.bits
        if not self.left:
            return Reply(value=0.0, outcome="not found", paid=paid)
        return Reply(_hint(self.hidden, guess), paid=paid)

    def best(self) -> str:
        return f"{(self.low + self.high) // 2:02d}"

    def legal(self) -> list[str]:
        return [f"{n:02d}" for n in range(1, self.numbers + 1)]
