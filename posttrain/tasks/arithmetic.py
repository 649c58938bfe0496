"""Addition and subtraction of long numbers, character by character, with a written scratchpad.

The response works digit by digit from the least significant. A step is five digits: the two operands' digits, the incoming
carry, and the step's two-digit sum (the outgoing carry, and the digit). Commas separate steps; the answer follows `#`. 47+85=
is answered `75012,48113#132`: 7+5+0=12, 4+8+1=13, so 132. `steps="spelled"` writes `7+5+0=12,4+8+1=13#132` instead. For
subtraction the carry is a borrow: 52-17= is answered `27015,51103#35`: 2-7-0 is 5 with a borrow of 1, 5-1-1 is 3 with none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import gcd, isqrt
from typing import ClassVar, Literal

from posttrain.errors import Seed, Share
from posttrain.rewards.answer import INTEGER, MARKER, after_marker, integer_answer, strict_integer
from posttrain.rewards.compose import weigh
from posttrain.tasks._procedural import Leveled, Procedural, side, stable_hash
from posttrain.types import Message, Problem, Score

SEPARATOR = ","
ALPHABET = "0123456789+-=" + SEPARATOR + MARKER
TRAIN_COUNT, TEST_COUNT = 1_000_000, 20_000
ENUMERATED = 10_000  # levels with at most this many pairs list all their test pairs
# the fewest pairs of a test stratum: with one pair in five in the test split, none is empty
STRATUM = 160
STEPS = {"short": "{a}{b}{carry}{sum:02d}", "spelled": "{a}{sign}{b}{sign}{carry}={sum:02d}"}


@dataclass(frozen=True)
class Arithmetic(Leveled):
    """`level` is the number of digits of both operands."""

    bounds: ClassVar[tuple[int, int]] = (1, 18)
    # every character that a question or a demonstration can contain
    alphabet: ClassVar[str] = ALPHABET

    operation: Literal["+", "-"] = "+"
    level: int = 4
    min_level: int = 1
    steps: Literal["short", "spelled"] = "short"  # short (five digits a step) or spelled
    format_weight: Share = 0.0  # the share of the value that well-formed work earns
    # the share that right steps earn, divided among them; the answer earns the rest
    steps_weight: Share = 0.0
    # the kind of train problems, by carries into the next digit: any, none or some; held-out problems are always of any kind
    carry: Literal["any", "none", "some"] = "any"
    # the share of carries that demonstrations in supervised training forget, in the steps and so in the answer
    forgotten: Share = 0.0
    seed: Seed = 0  # which problems are drawn; never which side of the split a pair is on

    def __post_init__(self) -> None:
        super().__post_init__()
        together = self.format_weight + self.steps_weight <= 1
        self.check(together, "format_weight and steps_weight lie between 0 and 1 together")
        adds = self.operation == "+" or self.forgotten == 0
        self.check(adds, "forgotten is of sums; set operation=+")

    def problems(self, split: str, level: int | None = None) -> Procedural:
        """Return the problems. Item i depends only on (split, level, i, seed).

        Train problems are independent draws, so small levels repeat. Test problems are all different: small levels list every
        test pair, larger ones draw one pair from each of many strata.
        """
        level = self.checked_level(split, level)
        pairs = pair_count(self.operation, level)
        if split == "train":
            count = TRAIN_COUNT
        elif pairs <= ENUMERATED:
            count = len(_test_pairs(self.operation, level, self.seed))
        else:
            count = min(TEST_COUNT, pairs // STRATUM)
        return Procedural(partial(self._problem, split, level, count), range(count))

    def _problem(self, split: str, level: int, count: int, index: int) -> Problem:
        pairs = pair_count(self.operation, level)
        if split == "train":
            a, b = self._draw(split, level, index, 0, pairs)
        elif pairs <= ENUMERATED:
            a, b = _test_pairs(self.operation, level, self.seed)[index]
        else:
            # the first few problems are already spread evenly over all strata
            stratum = (index * _stride(count) + stable_hash("scatter", self.seed)) % count
            start, end = stratum * pairs // count, (stratum + 1) * pairs // count
            a, b = self._draw(split, level, index, start, end)
        result = a + b if self.operation == "+" else a - b
        question = f"{a}{self.operation}{b}="
        return Problem(f"{split}/{level}/{index}", question, str(result), level, {"a": a, "b": b})

    def _draw(self, split: str, level: int, index: int, start: int, end: int) -> tuple[int, int]:
        """Draw a pair of `split` uniformly from the pairs numbered [start, end): again until it is on the right side."""
        for attempt in range(10_000):
            number = stable_hash("draw", self.seed, self.operation, split, level, index, attempt)
            a, b = numbered_pair(self.operation, level, start + number % (end - start))
            if pair_side(self.operation, a, b) != split:
                continue
            every = split == "test" or self.carry == "any"
            if every or (self.carry == "some") == carries(self.operation, a, b):
                return a, b
        raise AssertionError(f"no {split} pair of level {level} between {start} and {end}")

    def demonstration(self, problem: Problem) -> str:
        return SEPARATOR.join(self._work(problem)) + MARKER + problem.answer

    def conversation(self, problem: Problem) -> tuple[Message, ...]:
        said = self.demonstration(problem)
        if self.forgotten:
            steps = self._work(problem, self.forgotten)
            said = SEPARATOR.join(steps) + MARKER + _answer(steps)
        return (*self.prompt(problem), Message("assistant", said))

    def _work(self, problem: Problem, forgotten: float = 0.0) -> list[str]:
        """Return the steps from the least significant digit; `forgotten` is the probability that a carry is left out, and 0
        written."""
        a, b, carry, steps = int(problem.facts["a"]), int(problem.facts["b"]), 0, []
        for step in range(problem.level):
            (a, x), (b, y) = divmod(a, 10), divmod(b, 10)
            if stable_hash("forgotten", problem.id, step) % 1000 < 1000 * forgotten:
                carry = 0
            if self.operation == "+":
                total = x + y + carry
                carry_out = total // 10
            else:
                carry_out = int(x - y - carry < 0)
                total = 10 * carry_out + (x - y - carry) % 10
            numbers = {"a": x, "b": y, "carry": carry, "sum": total, "sign": self.operation}
            steps.append(STEPS[self.steps].format(**numbers))
            carry = carry_out
        return steps

    def final(self, response: str) -> str | None:
        given = strict_integer(after_marker(response))
        return None if given is None else str(given)

    def score(self, problem: Problem, response: str) -> Score:
        """Score the answer alone, unless `steps_weight` or `format_weight` add the share of right steps or the form of the
        work.

        `outcome` is correct if the answer is, whatever the weights; held-out accuracy counts it.
        """
        judged = integer_answer(response, int(problem.answer))
        shape = _shape(self.operation, self.steps, problem.level)
        written = response.split(MARKER, 1)[0].split(SEPARATOR)
        right = [given == step for given, step in zip(written, self._work(problem), strict=False)]
        parts = {
            "answer": judged.value or 0.0,
            "format": float(shape.fullmatch(response.rstrip()) is not None),
            "steps": sum(right) / problem.level,
        }
        weights = {"format": self.format_weight, "steps": self.steps_weight}
        return weigh(parts, weights, judged.outcome)


def _answer(steps: Sequence[str]) -> str:
    """Return the sum that the steps give.

    >>> _answer(["75012", "48113"])
    '132'
    """
    digits = [step[-1] for step in steps]
    return str(int("".join([steps[-1][-2], *reversed(digits)])))


def pair_side(operation: str, a: int, b: int) -> str:
    """Return the split of a pair of operands, in either order.

    >>> pair_side("+", 47, 85) == pair_side("+", 85, 47)
    True
    """
    return side(operation, min(a, b), max(a, b))


def carries(operation: str, a: int, b: int) -> bool:
    """Whether any digit passes a carry (or a borrow) on to the next one. An overflow of the first digit does not count.

    >>> carries("+", 823, 456), carries("+", 128, 453), carries("-", 50, 17)
    (False, True, True)
    """
    pairs = list(zip(str(a)[1:], str(b).zfill(len(str(a)))[1:], strict=True))
    return any(int(x) + int(y) > 9 if operation == "+" else int(x) < int(y) for x, y in pairs)


def _smallest(level: int) -> tuple[int, int]:
    """Return the smallest number with `level` digits, and how many such numbers there are. Level 1 includes 0."""
    first = 10 ** (level - 1) if level > 1 else 0
    return first, 10**level - first


def pair_count(operation: str, level: int) -> int:
    """Return how many questions a level has: ordered pairs for addition, pairs with a >= b for subtraction.

    >>> pair_count("+", 1), pair_count("-", 1), pair_count("+", 2)
    (100, 55, 8100)
    """
    numbers = _smallest(level)[1]
    return numbers * numbers if operation == "+" else numbers * (numbers + 1) // 2


def numbered_pair(operation: str, level: int, number: int) -> tuple[int, int]:
    """Return the pair with a number in [0, pair_count): a bijection.

    >>> numbered_pair("+", 2, 0), numbered_pair("+", 2, 8099), numbered_pair("-", 1, 2)
    ((10, 10), (99, 99), (1, 1))
    """
    first, numbers = _smallest(level)
    if operation == "+":
        a, b = divmod(number, numbers)
    else:
        a = (isqrt(8 * number + 1) - 1) // 2
        b = number - a * (a + 1) // 2
    return first + a, first + b


@lru_cache(maxsize=64)
def _test_pairs(operation: str, level: int, seed: int) -> tuple[tuple[int, int], ...]:
    """Return every test pair of a small level, in an order given by the seed."""
    pairs = [numbered_pair(operation, level, n) for n in range(pair_count(operation, level))]
    mine = [(a, b) for a, b in pairs if pair_side(operation, a, b) == "test"]
    return tuple(sorted(mine, key=lambda pair: stable_hash("order", seed, operation, *pair)))


@lru_cache(maxsize=64)
def _stride(count: int) -> int:
    """Return the first number from count / golden ratio on that shares no factor with count."""
    return next(s for s in range(int(count * 0.6180339887), count + 2) if gcd(s, count) == 1)


@lru_cache(maxsize=64)
def _shape(operation: str, steps: str, level: int) -> re.Pattern[str]:
    """Well-formed work: exactly `level` steps, one marker, an integer. Fixed widths, so matching never backtracks."""
    sign = re.escape(operation)
    step = "[0-9]{2}[01][01][0-9]" if steps == "short" else f"[0-9]{sign}[0-9]{sign}[01]=[01][0-9]"
    return re.compile(f"(?:{step}{SEPARATOR}){{{level - 1}}}{step}{MARKER}(?:{INTEGER.pattern})")
