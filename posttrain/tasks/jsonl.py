"""Problems from a JSONL file of your own: which fields hold the question and the answer, how to ask, and which reward judges.

    task = Jsonl("gsm8k-train.jsonl", test_file="gsm8k-test.jsonl", answer_after="####", style="boxed", reward="math")

A reward is one of `posttrain list rewards`, or a plain function of yours, `(prompt, response, answer) -> float | Score`, as
`file.py:name`; it may be `async`. Yours runs in worker processes with a time limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from posttrain.data.records import read_jsonl
from posttrain.errors import require
from posttrain.tasks._judged import Judged
from posttrain.tasks._questions import make_problem
from posttrain.types import Problem


@dataclass(frozen=True)
class Jsonl(Judged):
    """`file` is for training and `test_file` for evaluation; without one, a share of `file` is held out by its content. Files may be
    compressed with gzip; one that is called .json holds a list."""

    file: str
    test_file: str = ""

    def __post_init__(self) -> None:
        require(bool(self.file), "jsonl: give a file")
        self.check_settings("jsonl")

    def parts(self) -> tuple[str, str]:
        return self.file, self.test_file

    def ready(self) -> tuple[str, ...]:
        for part in filter(None, self.parts()):
            self.place(part)
        return super().ready()

    def place(self, part: str) -> Path:
        path = Path(part).expanduser()
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        require(path.is_file(), f"there is no data file {part}{where}")
        return path

    def read(self, part: str) -> tuple[Problem, ...]:
        changed = self.place(part).stat().st_mtime_ns
        return read_problems(part, changed, self.question, self.answer, self.answer_after)


@lru_cache(maxsize=8)
def read_problems(
    file: str, changed: int, question: str, answer: str, answer_after: str
) -> tuple[Problem, ...]:
    """The problems of a file; `changed` is its time of change, so that one which was written anew is read anew."""
    name = Path(file).name
    return tuple(
        make_problem(
            record, where, f"{name}:{where.rpartition(' ')[2]}", question, answer, answer_after
        )
        for where, record in read_jsonl(file, lists=True)
    )
