"""Shared by tasks whose environments come from another package: seeds as problems, limits, and one line if it is missing."""

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

# the outcome of an episode that ended because of the policy's invalid actions
INVALID = "invalid action"


@dataclass(frozen=True, kw_only=True)
class Packaged(Task):
    """A problem is a seed: even seeds are for training, odd ones held out; a game may have fewer starts than there are seeds.
    Episodes run in worker processes, so the package can block, seed the global generator or crash only there."""

    name: ClassVar[str]
    # the module that must be importable, from `pip install 'posttrain[NAME]'`
    module: ClassVar[str]
    shorthand: ClassVar[str]  # the field that names the environment
    isolated = True
    seconds = 60.0

    max_turns: Count = 100  # turns of the policy in an episode
    train: Count = 10_000  # problems of each split
    test: Count = 500
    seed: Seed = 0

    @property
    def title(self) -> str:
        """Return the name of the environment, which stands before a problem's seed."""
        return str(getattr(self, self.shorthand))

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
        """Return an environment at its start. An error here before the first stage refuses the settings; later it is an episode
        without a score."""

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
        """The score of an episode that ended at a limit."""
        return Score(0.0)

    def demonstration(self, problem: Problem) -> str:
        raise UserError(f"{self.name} has no worked episodes; it can be trained by reward only")


def packaged(module: str, task: str, extra: str = "") -> Any:
    """Import a module of an optional package. The extra that installs it has the task's name unless `extra` names another."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        needs = f"the task {task} needs its package: pip install 'posttrain[{extra or task}]'"
        raise UserError(f"{needs} ({error})") from None


class Tally:
    """The rewards of an episode so far, and its invalid actions. With `by_turn` each turn gets its reward at once."""

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
        """Count an action that the environment cannot take; end the episode if no more are allowed."""
        self.generate.count("env/invalid")
        self.allowed -= 1
        if self.allowed < 0:
            raise EpisodeEnd(INVALID, self.score())

    async def ask(self, text: str) -> Segment:
        """Sample the policy's turn after an observation. If a limit ends the episode, it gets the reward so far."""
        try:
            return await self.generate([Message("user", text)])
        except EpisodeEnd as end:
            end.score = end.score or self.score()
            raise
