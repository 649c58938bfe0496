"""Countdown: make a target from given numbers with + - * / and brackets, each number used exactly once.

The question `3,7,4=40:` is answered by any expression worth exactly 40, such as `(3+7)*4`. A response may reason first: the
expression is the text after its last `#`, or the whole response if there is none. Problems are made from a solution.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, ClassVar

from posttrain.errors import Range, Seed
from posttrain.rewards._expression import Unparseable, evaluate
from posttrain.rewards.answer import MARKER
from posttrain.tasks._procedural import Dice, Leveled, Procedural, side, stable_hash
from posttrain.types import Problem, Score

ALPHABET = "0123456789+-*/()=,:" + MARKER
TRAIN_COUNT, TEST_COUNT = 1_000_000, 1_000
# the list of test problems is complete when this many draws in a row give nothing new
PATIENCE = 500


@dataclass(frozen=True)
class Countdown(Leveled):
    """`level` is how many numbers are given."""

    bounds: ClassVar[tuple[int, int]] = (2, 6)
    # every character that a question or a demonstration can contain
    alphabet: ClassVar[str] = ALPHABET

    level: int = 3
    min_level: int = 2
    max_number: Annotated[int, Range(ge=2, le=999)] = 12  # numbers are 1 to this
    max_target: Annotated[int, Range(ge=10, le=99_999)] = 100
    seed: Seed = 0  # which problems are drawn; never which side of the split a problem is on

    def problems(self, split: str, level: int | None = None) -> Procedural:
        """Return the problems. Item i depends only on (split, level, i, settings). Train problems are independent draws, so
        small levels repeat; test problems are all different, and fewer than 1,000 if the level has fewer."""
        level = self.checked_level(split, level)
        count = TRAIN_COUNT if split == "train" else len(_test_draws(self, level))
        return Procedural(partial(self._problem, split, level), range(count))

    def _problem(self, split: str, level: int, index: int) -> Problem:
        draw = index if split == "train" else _test_draws(self, level)[index]
        numbers, target, solution = self._draw(split, level, draw)
        question = ",".join(map(str, numbers)) + f"={target}:"
        facts = {"numbers": list(numbers), "target": target}
        return Problem(f"{split}/{level}/{index}", question, solution, level, facts)

    def _draw(self, split: str, level: int, index: int) -> tuple[tuple[int, ...], int, str]:
        for attempt in range(10_000):
            dice = Dice(stable_hash("countdown", self.seed, split, level, index, attempt))
            numbers = tuple(1 + dice.roll(self.max_number) for _ in range(level))
            target, solution = _combine(numbers, dice)
            if 1 <= target <= self.max_target and problem_side(numbers, target) == split:
                return numbers, target, solution
        raise AssertionError(f"no {split} problem of level {level} found")

    def score(self, problem: Problem, response: str) -> Score:
        """1 if the expression uses each number once and is worth the target; `wrong` for any other expression."""
        try:
            value, used = evaluate(response.rpartition(MARKER)[2])
        except Unparseable:
            return Score(0.0, parts={"answer": 0.0, "numbers": 0.0}, outcome="unparseable")
        numbers = sorted(used) == sorted(problem.facts["numbers"])
        right = numbers and value == problem.facts["target"]
        parts = {"answer": float(right), "numbers": float(numbers)}
        return Score(float(right), parts, outcome="correct" if right else "wrong")


def problem_side(numbers: tuple[int, ...], target: int) -> str:
    """Return the split of a problem, whatever the order of its numbers.

    >>> problem_side((3, 7, 4), 40) == problem_side((4, 3, 7), 40)
    True
    """
    return side("countdown", *sorted(numbers), target)


def _combine(numbers: tuple[int, ...], dice: Dice) -> tuple[int, str]:
    """Join the numbers two by two into one expression whose every part is a positive integer."""
    parts = [(n, str(n)) for n in numbers]
    while len(parts) > 1:
        x, first = dice.take(parts)
        y, second = dice.take(parts)
        choices = [(x + y, "+"), (x * y, "*")]
        choices += [(x - y, "-")] if x > y else []
        choices += [(x // y, "/")] if x % y == 0 else []
        value, sign = dice.draw(choices)
        joined = f"{first}{sign}{second}"
        parts.append((value, f"({joined})" if parts else joined))
    return parts[0]


@lru_cache(maxsize=64)
def _test_draws(task: Countdown, level: int) -> tuple[int, ...]:
    """Return the numbers of the draws that give test problems not among earlier draws."""
    seen: set[tuple[tuple[int, ...], int]] = set()
    kept: list[int] = []
    draw = barren = 0
    while len(kept) < TEST_COUNT and barren < PATIENCE:
        numbers, target, _ = task._draw("test", level, draw)
        canonical = (tuple(sorted(numbers)), target)
        barren = barren + 1 if canonical in seen else 0
        if canonical not in seen:
            seen.add(canonical)
            kept.append(draw)
        draw += 1
    return tuple(kept)
