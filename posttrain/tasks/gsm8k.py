"""GSM8K: grade school word problems with a number as the answer (Cobbe et al. 2021, arXiv:2110.14168).

task = Gsm8k(data="folder")                     # gsm8k-train.jsonl and gsm8k-test.jsonl, also as .gz
task = Gsm8k(style="thinking", examples=4)      # openai/gsm8k through `datasets`: posttrain[data]
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.errors import Share
from posttrain.rewards.compose import UNPARSEABLE, weigh
from posttrain.tasks import _questions
from posttrain.tasks._programs import as_program
from posttrain.types import Problem, Score

CALCULATOR = re.compile(r"<<[^<>]*>>")  # calculator notes within the solutions


@dataclass(frozen=True)
class Gsm8k(_questions.Published):
    """A row has `question`, and `answer` with the gold one after ####."""

    sources: ClassVar = dict.fromkeys(("train", "test"), ("openai/gsm8k", "main"))
    # in the style `marked`, only the text after #### counts
    styles: ClassVar = _questions.Questions.styles
    files: ClassVar = {split: (f"gsm8k-{split}", f"gsm8k_{split}", split) for split in sources}

    # the share of the value that an answer in the requested form earns, right or wrong
    format_weight: Share = 0.0

    @classmethod
    def make(cls, row: dict[str, Any], where: str, name: str) -> Problem:
        """Read the gold answer after ####; the text before it is the solution, without the calculator notes."""
        made = _questions.make_problem(row, where, name, answer_after="####", chosen=False)
        worked = str(made.facts["solution"])
        steps = CALCULATOR.sub("", worked).rpartition("####")[0].strip()
        facts = {"solution": steps, "worked": worked}
        return Problem(made.id, made.question, made.answer, facts=facts)

    def score(self, problem: Problem, response: str) -> Score:
        """`outcome` is correct if the answer is, whatever the weight of the form; held-out accuracy counts it."""
        judged = super().score(problem, response)
        if judged.value is None:
            return judged
        read = judged.outcome != UNPARSEABLE.outcome
        formed = read or _questions.found_answer(self.style, response) is not None
        parts = {"answer": judged.value, "format": float(formed)}
        return weigh(parts, {"format": self.format_weight}, judged.outcome)

    def program(self, problem: Problem) -> tuple[str, str] | None:
        return as_program(str(problem.facts.get("worked", "")), problem.question, problem.answer)

    def demonstration(self, problem: Problem) -> str:
        if self.style == "direct":
            return problem.answer
        solution = str(problem.facts.get("solution") or problem.answer)
        end = f"\\boxed{{{problem.answer}}}" if self.style == "boxed" else f"#### {problem.answer}"
        return f"{solution}\n{end}"
