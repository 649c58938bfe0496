r"""MATH: competition problems with answers in LaTeX, of five levels (Hendrycks et al. 2021, arXiv:2103.03874); held out is MATH-500.

task = Math(data="folder")                      # math-train.json(l) and math-500.jsonl, or train and test; also as .gz
task = Math(max_level=3, subjects=("Algebra",)) # the hub's copies through `datasets`: posttrain[data]
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from posttrain.errors import require
from posttrain.rewards.math import final_answer
from posttrain.tasks._questions import Published, pick_text
from posttrain.types import JSON, Problem


@dataclass(frozen=True)
class Math(Published):
    """A row has `problem`, and `answer` or a `solution` with a box; also `level` and `subject` (or `type`) if they are filtered
    by."""

    sources: ClassVar = {
        "train": ("DigitalLearningGmbH/MATH-lighteval", ""),
        "test": ("HuggingFaceH4/MATH-500", ""),
    }
    files: ClassVar = {
        "train": ("math-train", "math_train", "train"),
        "test": ("math-500", "math-test", "math_test", "test"),
    }

    min_level: int = 1
    max_level: int = 5  # rows of unknown level are kept only if all levels are wanted
    subjects: tuple[str, ...] = ()  # such as Algebra; none: all

    def __post_init__(self) -> None:
        super().__post_init__()
        inside = 1 <= self.min_level <= self.max_level <= 5
        given = f"from {self.min_level} to {self.max_level}"
        require(inside, f"math: levels go from 1 to 5, not {given}")

    def pool(self, split: str) -> tuple[Problem, ...]:
        return _chosen(self, split)

    @classmethod
    def make(cls, row: dict[str, Any], where: str, name: str) -> Problem:
        asked, solution = pick_text(row, "problem", where), str(row.get("solution") or "")
        # An empty gold answer is kept: no response can be graded against it, which is counted as a failure and never as a 0.
        gold = row.get("answer")
        if gold in (None, ""):
            gold = final_answer(solution) or ("" if "answer" in row else None)
        missing = f"{where}: no answer: neither a field 'answer' nor a solution with a \\boxed{{}}"
        require(gold is not None, missing)
        level = re.search(r"[1-5]", str(row.get("level", row.get("difficulty", ""))))
        facts: dict[str, JSON] = {
            "solution": solution,
            "level": int(level[0]) if level else None,
            "subject": row.get("subject", row.get("type")),
        }
        return Problem(name, asked, str(gold).strip(), facts=facts)

    def demonstration(self, problem: Problem) -> str:
        solution, boxed = str(problem.facts.get("solution") or ""), f"\\boxed{{{problem.answer}}}"
        if self.style == "direct" or not solution:
            return boxed
        return solution if final_answer(solution) == problem.answer else f"{solution}\n{boxed}"


@lru_cache(maxsize=8)
def _chosen(task: Math, split: str) -> tuple[Problem, ...]:
    low, high, subjects = task.min_level, task.max_level, task.subjects

    def wanted(problem: Problem) -> bool:
        level, subject = problem.facts["level"], problem.facts["subject"]
        inside = (low, high) == (1, 5) or (level is not None and low <= level <= high)
        return inside and (not subjects or subject in subjects)

    found = tuple(p for p in Published.pool(task, split) if wanted(p))
    about = f" and a subject of {', '.join(subjects)}" if subjects else ""
    require(found, f"math: no {split} problem has a level from {low} to {high}{about}")
    return found
