"""A task that an untrained model gets partly right: name letters before m. Scored in worker processes, and by a file it can be told
to misbehave: what a reward of the user's may do in the middle of a run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.tasks.base import Task
from posttrain.types import Problem, Score

GOOD = set("abcdefghijklm")


@dataclass(frozen=True)
class Letters(Task):
    workers: bool = True  # score in worker processes
    limit: float = 60.0
    grades: int = 1000  # the score is rounded to so many parts of 1

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return [Problem(f"{split}-{n}", f"say {n}", "a") for n in (range(16) if split == "train" else range(50, 54))]

    def score(self, problem: Problem, response: str) -> Score:
        self.obey()
        share = sum(c in GOOD for c in response) / max(1, len(response))
        return Score(round(share * self.grades) / self.grades, outcome="correct" if share > 0.5 else "wrong")

    def obey(self) -> None:
        """What the file that LETTERS_ORDERS names asks for: hang, die or raise. It is obeyed once and removed."""
        path = os.environ.get("LETTERS_ORDERS", "")
        if not os.path.exists(path):
            return
        order = Path(path).read_text()
        Path(path).unlink()
        if order == "hang":
            time.sleep(600)
        if order == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if order == "raise":
            raise ConnectionError("the reward's endpoint stopped answering")

    @property
    def isolated(self) -> bool:
        return self.workers

    @property
    def seconds(self) -> float:
        return self.limit
