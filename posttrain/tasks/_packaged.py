"""What tasks share whose environments are those of another package: seeds as problems, limits, and one line where it is missing."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.errors import Count, Seed, UserError
from posttrain.tasks._procedural import Procedural, require_split, stable_hash
from posttrain.tasks.base import EpisodeEnd, Generate, Limits, Task
from posttrain.types import Message, Problem, Score, Segment

INVALID = "invalid action"  # the outcome of an episode that the policy ended so


@dataclass(frozen=True, kw_only=True)
class Packaged(Task):
    """A problem is a seed: even ones are for training, odd ones held out; a game may have fewer starts than there are seeds. Episodes
    run in worker processes, so what the package does to its process (block, seed the global generator, crash) is done there."""

    name: ClassVar[str]
    module: ClassVar[str]  # what must be there to be imported, with `pip install 'posttrain[NAME]'`
    isolated = True
    seconds = 60.0

    max_turns: Count = 100  # of the policy, in an episode
    train: Count = 10_000  # problems of each split
    test: Count = 500
    seed: Seed = 0

    @property
    def title(self) -> str:
        """What a problem is called, before its seed."""
        return self.name

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        require_split(split)
        odd, count = int(split == "test"), self.test if split == "test" else self.train

        def problem(index: int) -> Problem:
            seed = 2 * (stable_hash(self.name, self.seed, index) % 2**30) + odd
            return Problem(f"{split}/{index}", f"{self.title}, seed {seed}", facts={"seed": seed})

        return Procedural(problem, range(count))

    def package(self) -> Any:
        return packaged(self.module, self.name)

    @abstractmethod
    def begin(self, seed: int) -> Any:
        """An environment at its start. What it raises before the first stage refuses the settings; later it is an episode without a
        score."""

    def ready(self) -> tuple[str, ...]:
        self.package()
        try:
            self.begin(0)
        except UserError:
            raise
        except Exception as error:  # the package's own check of its arguments
            said = f"{type(error).__name__}: {error}"[:200]
            raise UserError(f"{self.name}: {self.title} cannot be begun: {said}") from None
        return ()

    def limits(self, problem: Problem) -> Limits:
        return Limits(turns=self.max_turns)

    def score(self, problem: Problem, response: str) -> Score:
        """Of an episode that ended at a limit."""
        return Score(0.0)

    def demonstration(self, problem: Problem) -> str:
        raise UserError(f"{self.name} has no worked episodes; it can be trained by reward only")


def packaged(module: str, task: str, extra: str = "") -> Any:
    """A module of an optional package, which an extra called like the task brings unless another is named."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        needs = f"the task {task} needs its package: pip install 'posttrain[{extra or task}]'"
        raise UserError(f"{needs} ({error})") from None


class Tally:
    """What an episode has earned so far, and the invalid actions that were made. With `by_turn` each turn is paid when it is played."""

    def __init__(self, generate: Generate, allowed: int, by_turn: bool = False) -> None:
        self.generate, self.allowed, self.by_turn = generate, allowed, by_turn
        self.total = 0.0

    def pay(self, value: float) -> None:
        self.generate.count("env/steps")
        if self.by_turn:
            self.generate.reward(value)
        else:
            self.total += value

    def score(self, outcome: str = "") -> Score:
        return Score(self.total, outcome=outcome)

    def invalid(self) -> None:
        """An action that the environment cannot take; the end of the episode where no more are allowed."""
        self.generate.count("env/invalid")
        self.allowed -= 1
        if self.allowed < 0:
            raise EpisodeEnd(INVALID, self.score())

    async def ask(self, text: str) -> Segment:
        """The policy's turn after an observation; an end at a limit has what was earned until then."""
        try:
            return await self.generate([Message("user", text)])
        except EpisodeEnd as end:
            end.score = end.score or self.score()
            raise
