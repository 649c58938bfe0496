"""What a task is: problems, a prompt for each, and a score for a response. It imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from posttrain.types import Message, Problem, Score


class Task(ABC):
    """A frozen dataclass whose fields are its settings. Its own gold answers must score 1: `posttrain.tasks.base.validate`."""

    @property
    def levels(self) -> tuple[int, ...]:
        """Difficulties that a curriculum may move up through; one level where there is nothing to choose from."""
        return (0,)

    @abstractmethod
    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        """Problems of `split` ("train" or "test"; the two never share one), of one level or of the task's target level."""

    def prompt(self, problem: Problem) -> tuple[Message, ...]:
        """The conversation so far, ready to be answered."""
        return (Message("user", problem.question),)

    @abstractmethod
    def score(self, problem: Problem, response: str) -> Score:
        """Judge a response. Parts are named; a response that cannot be judged is a failure, not a 0."""

    def final(self, response: str) -> str | None:
        """The final answer within a response, spelled in one way: what a majority is counted over. None where none can be found."""
        return None

    def score_group(self, problem: Problem, responses: Sequence[str]) -> Sequence[Score] | None:
        """Judge the responses to one problem together, where a score depends on the others; None: each by itself."""
        return None

    @property
    def isolated(self) -> bool:
        """Whether to score in worker processes with a time limit: for rewards that are slow, or that might hang or crash."""
        return False

    def isolates(self, problem: Problem) -> bool:
        """The same of one problem, where they differ in it."""
        return self.isolated

    @property
    def seconds(self) -> float:
        """The time limit of one isolated score."""
        return 10.0

    def ready(self) -> tuple[str, ...]:
        """Make ready what scoring needs, in the process that starts the workers, or refuse in words; lines for a person to read."""
        return ()

    def demonstration(self, problem: Problem) -> str:
        """A worked response that scores 1, for supervised training."""
        return problem.answer


def validate(task: Task, split: str = "test", count: int = 50) -> None:
    """Prove that the task scores its own demonstrations 1 and an empty response less, on every level."""
    for level in task.levels:
        problems = task.problems(split, level)
        for problem in problems[: min(count, len(problems))]:
            good, empty = task.score(problem, task.demonstration(problem)), task.score(problem, "")
            if good.value != 1.0:
                raise AssertionError(f"the demonstration of {problem.id} scores {good}")
            if empty.value is not None and empty.value >= 1.0:
                raise AssertionError(f"an empty response to {problem.id} scores {empty}")
