"""GSM8K: word problems of grade school, answered by a number (Cobbe et al. 2021, arXiv:2110.14168).

task = Gsm8k(data="folder")                     # gsm8k-train.jsonl and gsm8k-test.jsonl, also as .gz
task = Gsm8k(style="thinking", examples=4)      # openai/gsm8k through `datasets`: posttrain[data]
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from posttrain.errors import require
from posttrain.tasks._graded import found_answer, graded, voted
from posttrain.tasks._questions import Questions, make_problem, read_sides
from posttrain.types import Problem, Score

CALCULATOR = re.compile(r"<<[^<>]*>>")  # notes for a calculator within the worked answers
SOURCES = dict.fromkeys(("train", "test"), ("openai/gsm8k", "main"))
FILES = {split: (f"gsm8k-{split}", f"gsm8k_{split}", split) for split in SOURCES}


@dataclass(frozen=True)
class Gsm8k(Questions):
    """Train and test as published. `data` is a folder, or the training file beside `test_data`; without it the hub's copy is read."""

    data: str = ""
    test_data: str = ""
    style: str = "boxed"  # boxed, thinking (the last number counts) or direct (likewise; demonstrations are the answer alone)
    system: str = ""
    examples: int = 0  # solved training problems shown before the question: few-shot
    format_weight: float = (
        0.0  # the share of the value that an answer in the asked form earns, right or wrong
    )

    def __post_init__(self) -> None:
        self.check_style("gsm8k")
        require(
            0 <= self.format_weight <= 1,
            f"gsm8k: format_weight is a share between 0 and 1, not {self.format_weight}",
        )
        require(
            bool(self.data) or not self.test_data,
            "gsm8k: test_data goes with data, the training file",
        )

    def pool(self, split: str) -> tuple[Problem, ...]:
        return _read(self.data, self.test_data)[split == "test"]

    def score(self, problem: Problem, response: str) -> Score:
        """`outcome` is correct where the answer is, whatever the weight of the form: that is what a held-out accuracy counts."""
        judged = graded(self.style, problem, response)
        if judged.value is None:
            return judged
        parts = {
            "answer": judged.value,
            "format": float(found_answer(self.style, response) is not None),
        }
        lost = self.format_weight * (1 - parts["format"]) + (1 - self.format_weight) * (
            1 - parts["answer"]
        )
        return Score(1 - lost, parts, outcome=judged.outcome)

    def final(self, response: str) -> str | None:
        return voted(self.style, response)

    def demonstration(self, problem: Problem) -> str:
        if self.style == "direct":
            return problem.answer
        worked = str(problem.facts.get("worked") or problem.answer)
        return (
            f"{worked}\n\\boxed{{{problem.answer}}}"
            if self.style == "boxed"
            else f"{worked}\n#### {problem.answer}"
        )


@lru_cache(maxsize=4)
def _read(data: str, test_data: str) -> tuple[tuple[Problem, ...], ...]:
    return read_sides("gsm8k", data, test_data, SOURCES, FILES, _problem)


def _problem(row: dict[str, Any], where: str, name: str) -> Problem:
    """The gold answer follows ####; the steps before it are the worked answer, without the calculator's notes."""
    made = make_problem(row, where, name, answer_after="####")
    steps = CALCULATOR.sub("", str(made.facts["worked"])).rpartition("####")[0].strip()
    return Problem(made.id, made.question, made.answer, facts={"worked": steps})
