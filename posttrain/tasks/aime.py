"""AIME: competition problems whose answers are whole numbers from 0 to 999 (American Invitational Mathematics Examination).

task = Aime(data="aime-2024.jsonl.gz")          # or a folder that holds it; without it the hub's set through `datasets`
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from posttrain.data.records import read_set
from posttrain.errors import require
from posttrain.tasks._questions import Published, pick_text
from posttrain.types import Problem

FILES = ("aime-2024", "aime-2025", "aime_2024", "aime_2025", "aime")


@dataclass(frozen=True)
class Aime(Published):
    """A row has `problem` (or `question`) and `answer`. There are thirty problems a year, all held out: ask each several times
    (`samples=32 temperature=0.6`); the interval is over the problems."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.held_out, "aime: held_out is a share of a training part; aime has none")

    def pool(self, split: str) -> tuple[Problem, ...]:
        return _read(self.data) if split == "test" else ()

    @classmethod
    def make(cls, row: dict[str, Any], where: str, name: str) -> Problem:
        asked = pick_text(row, "problem" if "problem" in row else "question", where)
        gold = str(row.get("answer", "")).strip()
        fine = gold.isdecimal() and int(gold) < 1000
        require(fine, f"{where}: the answer {gold!r} is no whole number from 0 to 999")
        facts = {"solution": str(row.get("solution", ""))}
        return Problem(name, asked, str(int(gold)), facts=facts)

    def demonstration(self, problem: Problem) -> str:
        return f"\\boxed{{{problem.answer}}}"


@lru_cache(maxsize=4)
def _read(data: str) -> tuple[Problem, ...]:
    rows = read_set("aime", data, FILES, "HuggingFaceH4/aime_2024")
    return tuple(Aime.make(row, where, f"test/{n}") for n, (where, row) in enumerate(rows))
