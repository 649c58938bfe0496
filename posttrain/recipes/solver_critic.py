"""Two roles of one model learn together: a solver, and a critic that judges whether an answer is right."""

from __future__ import annotations

from posttrain.recipes._episodes import episodes
from posttrain.recipes.base import Recipe
from posttrain.tasks.solver_critic import SolverCritic


def solver_critic(size: str = "nano") -> Recipe:
    """The question is which of two numbers is larger. SFT shows verdicts, corrections, and answers, half of which are guessed.
    In RL a solver whose answer the critic rejects may answer once more; it is rewarded for its last answer, the critic for its
    verdict, each compared within its own role."""
    task = SolverCritic()
    return episodes("solver_critic", size, task, 5, steps=150, shown=8000, sft_steps=600)
