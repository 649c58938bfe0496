"""HumanEval: complete a Python function, graded by running the data set's own tests (Chen et al. 2021, arXiv:2107.03374)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.tasks._code_data import checked, fenced, local, parsed
from posttrain.tasks._judged import Part
from posttrain.tasks._questions import pick_text
from posttrain.tasks.hub import Hub
from posttrain.types import Problem

FIELDS = ("prompt", "entry_point", "canonical_solution", "test")


@dataclass(frozen=True, kw_only=True)
class HumanEval(Hub):
    """The set has no training part: a share of it, `held_out`, is for evaluation; 1 is all of it. `data` is a file in place of
    the hub's copy, or a folder with humaneval.jsonl, also as .gz."""

    dataset: str = "openai/openai_humaneval"
    train_split: str = "test"
    test_split: str = ""
    data: str = ""  # a file in place of the hub's copy, or a folder that holds it
    reward: str = "code"
    held_out: float = 0.5

    def parts(self) -> tuple[Part, Part | None]:
        return local(self.data, "humaneval", "humaneval") if self.data else super().parts()

    @staticmethod
    def make(row: dict[str, Any], where: str, name: str, *_: object) -> Problem:
        """Make the problem of a row: `prompt` is the beginning of a program, `canonical_solution` its rest, and `test` defines
        `check`."""
        prompt, function, solution, test = (pick_text(row, field, where) for field in FIELDS)
        parsed(test, where)
        # the check may call functions of the prompt; the one under test has no body there, so its name stands for the candidate
        check = f"{prompt}\n{function} = candidate\n{test}\ncheck(candidate)\n"
        question = f"Complete this program and give all of it:\n\n{fenced(prompt.rstrip())}"
        return checked(name, question, prompt + solution, check, ["candidate"], [function])
