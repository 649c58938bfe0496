"""Two roles of one model: a solver answers, a critic judges the answer, and the solver may answer once more.

The question is which of two numbers is larger. The solver reads `47 85=` and answers `85`; the critic reads `47 85=85` and
answers `y` or `n`. After `n` the solver answers again. The solver is rewarded for its last answer, the critic for its verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, ClassVar

from posttrain.errors import Range
from posttrain.rewards.compose import CORRECT, WRONG
from posttrain.tasks._procedural import Procedural, stable_hash
from posttrain.tasks._turns import drawn
from posttrain.tasks.base import Generate, Task
from posttrain.types import Message, Problem, Rollout, Score

YES, NO = "y", "n"


@dataclass(frozen=True)
class SolverCritic(Task):
    """`digits` is the number of digits, with leading zeros: `07 85=`."""

    alphabet: ClassVar[str] = "0123456789 =yn"

    digits: Annotated[int, Range(ge=1, le=9)] = 2
    seed: int = 0  # which problems are drawn; never which side of the split a problem is on

    def problems(self, split: str, level: int | None = None) -> Procedural:
        return drawn("solver_critic", split, self._draw, self._problem, self.seed)

    def _draw(self, source: Random) -> tuple[int, int]:
        a, b = source.sample(range(10**self.digits), 2)
        return a, b

    async def run(self, problem: Problem, generate: Generate) -> Sequence[Rollout]:
        solver, critic = generate.session("solver"), generate.session("critic")
        first = await solver(self.prompt(problem))
        verdict = await critic([Message("user", problem.question + first.text[:20])], last=True)
        last = first if verdict.text == YES else await solver([Message("user", NO)], last=True)
        judged = verdict.text == (YES if first.text == problem.answer else NO)
        generate.count("agreed", float(verdict.text == YES))
        solved = solver.rollout(self.score(problem, last.text), answer=last.text)
        return [solved, critic.rollout(CORRECT if judged else WRONG)]

    def score(self, problem: Problem, response: str) -> Score:
        return CORRECT if response == problem.answer else WRONG

    def conversation(self, problem: Problem) -> tuple[Message, ...]:
        """Return, at random, an answer (guessed half of the time), a right answer after a wrong one, or a verdict."""
        source, right = Random(stable_hash("conversation", problem.question)), problem.answer
        wrong = next(n for n in problem.question.removesuffix("=").split() if n != right)
        kind, guesses = source.randrange(4), source.random() < 0.5
        said = source.choice((right, wrong))
        if kind == 0:
            return (*self.prompt(problem), Message("assistant", said if guesses else right))
        if kind < 3:
            verdict = Message("assistant", YES if said == right else NO)
            return Message("user", problem.question + said), verdict
        again = Message("user", NO), Message("assistant", right)
        return (*self.prompt(problem), Message("assistant", wrong), *again)

    def _problem(self, name: str, drawn: tuple[str | int, ...]) -> Problem:
        a, b = (f"{number:0{self.digits}d}" for number in drawn)
        return Problem(name, f"{a} {b}=", max(a, b))
