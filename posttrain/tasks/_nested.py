"""Shared by tasks that put another task's problems into their own episodes."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, ClassVar

from posttrain.tasks.base import Task
from posttrain.types import Message, Problem


def of_task(name: str) -> Any:
    """Make an attribute of a task that is the same one of the task in its field `task`."""
    return property(attrgetter(f"task.{name}"))


class Nested(Task):
    """Problems, prompts and scores are those of `task`, a field of the class."""

    task: Task
    has_episodes: ClassVar[bool] = True  # of its own, so `task` must have none

    ready = of_task("ready")
    levels = of_task("levels")
    problems = of_task("problems")
    prompt = of_task("prompt")
    score = of_task("score")
    score_group = of_task("score_group")
    final = of_task("final")
    demonstration = of_task("demonstration")
    program = of_task("program")
    verifiable = of_task("verifiable")
    scores = of_task("scores")
    limits = of_task("limits")
    isolated = of_task("isolated")
    isolates = of_task("isolates")
    resettable = of_task("resettable")
    seconds = of_task("seconds")

    def __post_init__(self) -> None:
        super().__post_init__()
        single = not self.has_episodes or type(self.task).run is Task.run
        self.check(single, "the task has episodes of its own; give one of a single turn")

    def conversation(self, problem: Problem) -> tuple[Message, ...]:
        """Its own prompt, and then what the task's conversation says after the prompt of the task. Nothing if that begins otherwise."""
        own, asked = self.prompt(problem), self.task.prompt(problem)
        said = self.task.conversation(problem)
        if own == asked:
            return said
        return (*own, *said[len(asked) :]) if said and said[: len(asked)] == asked else ()

    def isolates_run(self, problem: Problem) -> bool:
        return False  # the calls of such an episode have their own time limits
