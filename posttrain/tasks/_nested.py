"""What tasks share that put another task's problems into episodes of their own."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.tasks.base import Task
from posttrain.types import Message, Problem, Score


class Nested(Task):
    """Problems, prompts and scores are those of `task`, a field of the class."""

    task: Task

    def ready(self) -> tuple[str, ...]:
        return self.task.ready()

    @property
    def levels(self) -> tuple[int, ...]:
        return self.task.levels

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return self.task.problems(split, level)

    def prompt(self, problem: Problem) -> tuple[Message, ...]:
        return self.task.prompt(problem)

    def score(self, problem: Problem, response: str) -> Score:
        return self.task.score(problem, response)

    def score_group(self, problem: Problem, responses: Sequence[str]) -> Sequence[Score] | None:
        return self.task.score_group(problem, responses)

    def final(self, response: str) -> str | None:
        return self.task.final(response)

    def demonstration(self, problem: Problem) -> str:
        return self.task.demonstration(problem)

    def program(self, problem: Problem) -> tuple[str, str] | None:
        return self.task.program(problem)

    @property
    def verifiable(self) -> bool:
        return self.task.verifiable

    @property
    def scores(self) -> bool:
        return self.task.scores

    @property
    def isolated(self) -> bool:
        return self.task.isolated

    def isolates(self, problem: Problem) -> bool:
        return self.task.isolates(problem)

    def isolates_run(self, problem: Problem) -> bool:
        return False  # what an episode of this kind calls has time limits of its own

    @property
    def resettable(self) -> bool:
        return self.task.resettable

    @property
    def seconds(self) -> float:
        return self.task.seconds
