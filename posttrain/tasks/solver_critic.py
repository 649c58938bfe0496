"""Two roles of one model: a solver answers a sum, a critic says whether the answer is right, and the solver may answer once more.

The solver reads `47+85=` and answers `132`; the critic reads `47+85=132` and answers `y` or `n`. After `n` the solver answers again.
The solver is paid for its last answer, the critic for its verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, ClassVar

from posttrain.errors import Range, check_fields
from posttrain.tasks._procedural import Procedural, stable_hash
from posttrain.tasks._turns import drawn
from posttrain.tasks.base import Generate, Task
from posttrain.types import Message, Problem, Rollout, Score

YES, NO = "y", "n"


@dataclass(frozen=True)
class SolverCritic(Task):
    """`digits` is how many the numbers have at most."""

    alphabet: ClassVar[str] = "0123456789+=yn"

    digits: Annotated[int, Range(ge=1, le=9)] = 2
    seed: int = 0  # which problems are drawn; never which side of the split a problem is on

    def __post_init__(self) -> None:
        check_fields(self, "solver_critic: ")

    def problems(self, split: str, level: int | None = None) -> Procedural:
        return drawn("solver_critic", split, self._draw, _problem, self.seed)

    def _draw(self, source: Random) -> tuple[int, int]:
        return source.randrange(10**self.digits), source.randrange(10**self.digits)

    async def run(self, problem: Problem, generate: Generate) -> Sequence[Rollout]:
        solver, critic = generate.session("solver"), generate.session("critic")
        first = await solver(self.prompt(problem))
        verdict = await critic([Message("user", problem.question + first.text[:20])], last=True)
        last = first if verdict.text == YES else await solver([Message("user", NO)], last=True)
        judged = verdict.text == (YES if first.text == problem.answer else NO)
        generate.count("agreed", float(verdict.text == YES))
        return [
            solver.rollout(self.score(problem, last.text), answer=last.text),
            critic.rollout(_score(judged)),
        ]

    def score(self, problem: Problem, response: str) -> Score:
        return _score(response == problem.answer)

    def conversation(self, problem: Problem) -> tuple[Message, ...]:
        """By chance an answer, a second answer after a wrong one, or a verdict."""
        kind, right = stable_hash("conversation", problem.question) % 4, problem.answer
        wrong = str(
            max(
                0,
                int(right)
                + Random(stable_hash("wrong", problem.question)).choice((-10, -1, 1, 10)),
            )
        )
        if kind < 2:
            return (*self.prompt(problem), Message("assistant", right))
        said = right if stable_hash("verdict", problem.question) % 2 else wrong
        if kind == 2:
            verdict = Message("assistant", YES if said == right else NO)
            return Message("user", problem.question + said), verdict
        again = Message("user", NO), Message("assistant", right)
        return (*self.prompt(problem), Message("assistant", wrong), *again)


def _problem(name: str, drawn: tuple[str | int, ...]) -> Problem:
    a, b = int(drawn[0]), int(drawn[1])
    return Problem(name, f"{a}+{b}=", str(a + b))


def _score(right: bool) -> Score:
    return Score(float(right), outcome="correct" if right else "wrong")
