"""Problems made on demand: a lazy sequence, and the stable hash that draws them and separates train from test."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar, overload

from posttrain.errors import require
from posttrain.tasks.base import Task
from posttrain.types import Problem

SPLITS = ("train", "test")
TEST_BUCKETS = 5  # one bucket in five is test
TRAIN_COUNT = 100_000


def stable_hash(*parts: str | int) -> int:
    """Return 128 bits that depend only on the parts: the same in every process, Python version and machine.

    >>> stable_hash("+", 3, 5) == stable_hash("+", 3, 5) != stable_hash("+", 35)
    True
    """
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")


def side(*canonical: str | int) -> str:
    """Return the split of a problem's canonical form. No seed or setting changes it."""
    return "test" if stable_hash("split", *canonical) % TEST_BUCKETS == 0 else "train"


def words(text: str, after: str = "") -> tuple[str, ...]:
    """Return the words of a text, each with `after` appended."""
    return tuple(word + after for word in text.split())


def require_split(split: str) -> None:
    require(split in SPLITS, f"unknown split {split!r}; a task has 'train' and 'test'")


class Leveled(Task):
    """A task with levels of difficulty: `level` is the target, and a curriculum goes from `min_level` to it."""

    bounds: ClassVar[tuple[int, int]]  # the lowest and the highest level
    level: int
    min_level: int

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.bounds
        fine = low <= self.min_level <= self.level <= high
        require(fine, f"{self.known_as()} needs {low} <= min_level <= level <= {high}")

    @property
    def levels(self) -> tuple[int, ...]:
        return tuple(range(self.min_level, self.level + 1))

    def checked_level(self, split: str, level: int | None) -> int:
        """Return the requested level, or the target. Raises an error for a level or a split that the task does not have."""
        require_split(split)
        chosen, levels = self.level if level is None else level, self.levels
        known = f"levels {levels[0]} to {levels[-1]} with these settings"
        require(chosen in levels, f"{self.known_as()} has {known}, not {level}")
        return chosen


def listed(
    task: str, split: str, count: int, make: Callable[[int], str], repeats: int
) -> Procedural:
    """Return the questions `make(0)` to `make(count - 1)`, each on one side of the split: repeated cyclically in training,
    `repeats` times in test."""
    require_split(split)
    places = [place for place in range(count) if side(task, place) == split]

    def problem(index: int) -> Problem:
        return Problem(f"{split}/{index}", make(places[index % len(places)]), "")

    return Procedural(problem, range(TRAIN_COUNT if split == "train" else repeats * len(places)))


Choice = TypeVar("Choice")


@dataclass(slots=True)
class Dice:
    """Small random draws from one 128-bit number."""

    left: int

    def roll(self, sides: int) -> int:
        self.left, face = divmod(self.left, sides)
        return face

    def draw(self, choices: Sequence[Choice]) -> Choice:
        return choices[self.roll(len(choices))]

    def take(self, choices: list[Choice]) -> Choice:
        """Draw one of the choices and remove it from the list."""
        return choices.pop(self.roll(len(choices)))


@dataclass(frozen=True, slots=True)
class Procedural(Sequence[Problem]):
    """A sequence whose item i is `make(i)`, made on access. A slice is lazy too.

    >>> squares = Procedural(lambda i: Problem(str(i), f"{i}*{i}="), range(1_000_000))
    >>> squares[3].question, squares[-1].id, len(squares[10:20])
    ('3*3=', '999999', 10)
    """

    make: Callable[[int], Problem] = field(repr=False)
    indices: range

    def map(self, change: Callable[[Problem], Problem]) -> Procedural:
        """Return the same problems, each changed on access."""
        return Procedural(lambda index: change(self.make(index)), self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> Procedural: ...
    def __getitem__(self, index: int | slice) -> Problem | Procedural:
        if isinstance(index, slice):
            return Procedural(self.make, self.indices[index])
        return self.make(self.indices[index])
