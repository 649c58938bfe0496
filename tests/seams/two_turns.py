"""A task of two turns with an observation and a tool between them, paid by turn, which can end its process in the middle of an
episode."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.tasks.base import Generate, Task
from posttrain.tasks.tools.calculator import Calculator
from posttrain.tasks.tools.toolbox import Toolbox
from posttrain.types import Message, Problem, Rollout, Score


@dataclass(frozen=True)
class TwoTurns(Task):
    """Letters before m score, in both turns."""

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return [Problem(f"{split}-{n}", f"say {n}", "a") for n in (range(8) if split == "train" else range(50, 52))]

    async def run(self, problem: Problem, generate: Generate) -> Rollout:
        box = Toolbox([Calculator("calc")], generate, "call")
        first = await generate()
        generate.reward(self.score(problem, first.text).value or 0.0)
        (said,) = await box.answer(f"calc({len(first.text)}+1)=")
        self.count_episodes()
        await generate([Message("user", f"{len(first.text)} letters. again"), said], last=True)
        return generate.rollout()

    def score(self, problem: Problem, response: str) -> Score:
        return Score(sum(c in "abcdefghijkl" for c in response) / max(1, len(response)))

    def count_episodes(self) -> None:
        """Between the turns of the episode that TWO_TURNS_KILL counts down to, SIGKILL."""
        place = os.environ.get("TWO_TURNS_KILL")
        if place:
            left = int(Path(place).read_text()) - 1
            Path(place).write_text(str(left))
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
