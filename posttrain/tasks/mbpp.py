"""MBPP: write a Python function, graded by running the data set's own assertions (Austin et al. 2021, arXiv:2108.07732)."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import Any

from posttrain.errors import require
from posttrain.tasks._code_data import checked, local, parsed
from posttrain.tasks._judged import Part
from posttrain.tasks._questions import pick_text
from posttrain.tasks.hub import Hub
from posttrain.types import Message, Problem


@dataclass(frozen=True, kw_only=True)
class Mbpp(Hub):
    """The sanitized configuration unless `config` is `full`. `data` is a file in place of the hub's copy, or a folder with
    mbpp-sanitized.json, also as .gz; it has all problems in one file, of which a share `held_out` is for evaluation."""

    dataset: str = "google-research-datasets/mbpp"
    config: str = "sanitized"
    data: str = ""  # a file in place of the hub's copy, or a folder that holds it
    reward: str = "code"
    shown: int = 0  # assertions that the prompt shows; they show the form of the arguments

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.shown >= 0, f"mbpp: shown must not be negative, not {self.shown}")

    def parts(self) -> tuple[Part, Part | None]:
        return local(self.data, "mbpp-sanitized", "mbpp") if self.data else super().parts()

    def prompt(self, problem: Problem) -> tuple[Message, ...]:
        tests = problem.facts["tests"][: self.shown]
        said = "\n".join([problem.question, *(["It must pass:"] if tests else []), *tests])
        return super().prompt(replace(problem, question=said))

    @staticmethod
    def make(row: dict[str, Any], where: str, name: str, *_: object) -> Problem:
        """Make the problem of a row with `prompt` (or `text`), `code`, `test_list` (assertions), `test_imports` (or
        `test_setup_code`)."""
        question = pick_text(row, "prompt" if "prompt" in row else "text", where)
        solution = pick_text(row, "code", where)
        program, tests = parsed(solution, where), "\n".join(map(str, row.get("test_list") or ()))
        # some assertions use a module that only the solution imports
        imports = [ast.unparse(n) for n in program if isinstance(n, ast.Import | ast.ImportFrom)]
        imports += map(str, row.get("test_imports") or [row.get("test_setup_code") or ""])
        defined = {n.name for n in program if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        places = [place for line in parsed(tests, where) for place in ast.walk(line)]
        used = sorted({place.id for place in places if isinstance(place, ast.Name)} & defined)
        require(used, f"{where}: no assertion calls a function of the reference solution")
        question += f"\nName it {' and '.join(used)}."
        made = checked(name, question, solution, "\n".join([*imports, tests, ""]), used, used)
        return replace(made, facts={**made.facts, "tests": tests.split("\n")})
