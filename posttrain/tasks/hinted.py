"""Any single-turn task with the right answer as a hint in its prompt: rationalisation, as in STaR."""

from __future__ import annotations

from dataclasses import dataclass, replace

from posttrain.tasks._nested import Nested
from posttrain.tasks.base import Task
from posttrain.types import Message, Problem

ANSWER = "{answer}"


@dataclass(frozen=True)
class Hinted(Nested):
    """Problems and scores are those of `task`. Its prompt ends in `hint`, in which {answer} stands for the problem's answer;
    the prompt of a problem without an answer is unchanged."""

    task: Task
    hint: str = "\n\n(The answer is {answer}. Work it out step by step.)"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(ANSWER in self.hint, f"a hint has {ANSWER} in it, unlike {self.hint!r}")

    @property
    def alphabet(self) -> str | None:
        """Return every character that its text can contain, if the task declares its own."""
        own = getattr(self.task, "alphabet", None)
        return None if own is None else own + self.hint.replace(ANSWER, "")

    def prompt(self, problem: Problem) -> tuple[Message, ...]:
        *before, last = self.task.prompt(problem)
        hint = self.hint.replace(ANSWER, problem.answer) if problem.answer else ""
        return (*before, replace(last, content=f"{last.content}{hint}"))
