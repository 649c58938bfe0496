"""IFEval: prompts with instructions that a program verifies (Zhou et al. 2023, arXiv:2311.07911).

task = IFEval(data="ifeval-prompts.jsonl.gz")   # or a folder that holds it; without it google/IFEval through `datasets`

A row has `key`, `prompt`, `instruction_id_list` and `kwargs`. Every prompt is held out: there is nothing to train on. In an
evaluation, the parts `prompt_strict` (the accuracy), `prompt_loose`, `instruction_strict` and `instruction_loose` are the four
published metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from posttrain.data.records import read_set
from posttrain.errors import require
from posttrain.tasks._instructions import follows, loosened, read_instruction
from posttrain.tasks._procedural import require_split
from posttrain.tasks._questions import pick, pick_text
from posttrain.tasks.base import Task
from posttrain.types import COUNTED, Message, Problem, Score

FILES = ("ifeval-prompts", "ifeval", "input_data")


@dataclass(frozen=True)
class IFEval(Task):
    """A response is right if it follows every instruction of its prompt, strictly. Parts of the score are the loose verdict,
    and the share of instructions that it follows; these are averaged over instructions, not over prompts."""

    data: str = ""  # the published file, or a folder that holds it; "": the hub's copy
    system: str = ""

    def problems(self, split: str, level: int | None = None) -> tuple[Problem, ...]:
        require_split(split)
        return _read(self.data) if split == "test" else ()

    def prompt(self, problem: Problem) -> tuple[Message, ...]:
        before = (Message("system", self.system),) if self.system else ()
        return (*before, *super().prompt(problem))

    def score(self, problem: Problem, response: str) -> Score:
        instructions, texts = problem.facts["instructions"], loosened(response)
        strict = [follows(name, asked, response) for name, asked in instructions]
        loose = [any(follows(name, asked, text) for text in texts) for name, asked in instructions]
        parts = {
            "prompt_strict": float(all(strict)),
            "prompt_loose": float(all(loose)),
            "instruction_strict": sum(strict) / len(strict),
            "instruction_loose": sum(loose) / len(loose),
        }
        return Score(parts["prompt_strict"], parts, outcome="correct" if all(strict) else "wrong")

    def conversation(self, problem: Problem) -> tuple[Message, ...]:
        return ()  # the set has no demonstrations


def make(row: dict[str, Any], where: str) -> Problem:
    names, given = (pick(row, key, where) for key in ("instruction_id_list", "kwargs"))
    paired = isinstance(names, list) and isinstance(given, list) and len(names) == len(given) > 0
    fine = paired and all(isinstance(one, dict) for one in given)
    require(fine, f"{where}: instruction_id_list and kwargs are two lists of the same length")
    pairs = zip(names, given, strict=True)
    read = [[name, read_instruction(str(name), asked, where)] for name, asked in pairs]
    counted = dict.fromkeys(("instruction_strict", "instruction_loose"), len(read))
    facts = {"instructions": read, COUNTED: counted}
    name = f"ifeval/{pick(row, 'key', where)}"
    return Problem(name, pick_text(row, "prompt", where), "", facts=facts)


@lru_cache(maxsize=4)
def _read(data: str) -> tuple[Problem, ...]:
    rows = read_set("ifeval", data, FILES, "google/IFEval")
    return tuple(make(row, where) for where, row in rows)
