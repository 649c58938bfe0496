r"""MATH: competition problems with answers in LaTeX, of five levels (Hendrycks et al. 2021, arXiv:2103.03874); held out is MATH-500.

task = Math(data="folder")                      # math-train.json(l) and math-500.jsonl, or train and test; also as .gz
task = Math(max_level=3, subjects=("Algebra",)) # the hub's copies through `datasets`: posttrain[data]
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from posttrain.errors import require
from posttrain.rewards.math import final_answer
from posttrain.tasks._graded import graded, voted
from posttrain.tasks._questions import Questions, normalised, pick, read_sides
from posttrain.types import JSON, Problem, Score

SOURCES = {
    "train": ("DigitalLearningGmbH/MATH-lighteval", ""),
    "test": ("HuggingFaceH4/MATH-500", ""),
}
FILES = {
    "train": ("math-train", "math_train", "train"),
    "test": ("math-500", "math-test", "math_test", "test"),
}
LEVELS = range(1, 6)


@dataclass(frozen=True)
class Math(Questions):
    """`data` is a folder, or the training file beside `test_data`; without it the hub's copies are read. A row has `problem`, and
    `answer` or a `solution` with a box; `level` and `subject` (or `type`) where it is filtered by them."""

    data: str = ""
    test_data: str = ""
    min_level: int = 1
    max_level: int = 5  # rows of unknown level are kept only where all levels are asked for
    subjects: tuple[str, ...] = ()  # such as Algebra; none: all
    style: str = "boxed"
    system: str = ""
    examples: int = 0  # solved training problems shown before the question: few-shot

    def __post_init__(self) -> None:
        self.check_style("math")
        require(
            bool(self.data) or not self.test_data,
            "math: test_data goes with data, the training file",
        )
        require(
            self.min_level in LEVELS
            and self.max_level in LEVELS
            and self.min_level <= self.max_level,
            f"math: levels go from 1 to 5, not from {self.min_level} to {self.max_level}",
        )

    def pool(self, split: str) -> tuple[Problem, ...]:
        return _chosen(
            self.data, self.test_data, split, self.min_level, self.max_level, self.subjects
        )

    def score(self, problem: Problem, response: str) -> Score:
        return graded(self.style, problem, response)

    def final(self, response: str) -> str | None:
        return voted(self.style, response)

    def demonstration(self, problem: Problem) -> str:
        worked = str(problem.facts.get("worked") or "")
        if self.style == "direct" or not worked:
            return f"\\boxed{{{problem.answer}}}"
        return (
            worked
            if final_answer(worked) == problem.answer
            else f"{worked}\n\\boxed{{{problem.answer}}}"
        )


@lru_cache(maxsize=8)
def _chosen(
    data: str, test_data: str, split: str, low: int, high: int, subjects: tuple[str, ...]
) -> tuple[Problem, ...]:
    def wanted(problem: Problem) -> bool:
        level, subject = problem.facts["level"], problem.facts["subject"]
        inside = (low, high) == (1, 5) or (level is not None and low <= level <= high)
        return inside and (not subjects or subject in subjects)

    found = tuple(p for p in _read(data, test_data)[split == "test"] if wanted(p))
    about = f" and a subject of {', '.join(subjects)}" if subjects else ""
    require(bool(found), f"math: no {split} problem has a level from {low} to {high}{about}")
    return found


@lru_cache(maxsize=4)
def _read(data: str, test_data: str) -> tuple[tuple[Problem, ...], ...]:
    return read_sides("math", data, test_data, SOURCES, FILES, _problem)


def _problem(row: dict[str, Any], where: str, name: str) -> Problem:
    asked, worked = pick(row, "problem", where), str(row.get("solution") or "")
    require(
        isinstance(asked, str) and bool(normalised(asked)),
        f"{where}: the field 'problem' is empty or no text",
    )
    # An empty gold answer is kept: no response can be graded against it, which is counted as a failure and never as a 0.
    given = row.get("answer")
    gold = (
        given
        if given not in (None, "")
        else final_answer(worked) or ("" if "answer" in row else None)
    )
    require(
        gold is not None,
        f"{where}: no answer: neither a field 'answer' nor a solution with a \\boxed{{}}",
    )
    level = re.search(r"[1-5]", str(row.get("level", row.get("difficulty", ""))))
    facts: dict[str, JSON] = {
        "worked": worked,
        "level": int(level[0]) if level else None,
        "subject": row.get("subject", row.get("type")),
    }
    return Problem(name, asked, str(gold).strip(), facts=facts)
