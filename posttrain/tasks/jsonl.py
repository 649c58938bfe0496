"""Problems from a JSONL file of your own: which fields hold the question and the answer, how to ask, and which reward judges.

    task = Jsonl("gsm8k-train.jsonl", test_file="gsm8k-test.jsonl", answer_after="####", style="boxed", reward="math")

A reward is one of `posttrain list rewards`, or a plain function of yours, `(prompt, response, answer) -> float | Score`, as
`file.py:name`; it may be `async`. Yours runs in worker processes with a time limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from posttrain.errors import require
from posttrain.tasks._judged import Judged
from posttrain.tasks._questions import make_problem, one_side, read_records, require_apart
from posttrain.types import JSON, Code, Problem


@dataclass(frozen=True)
class Jsonl(Judged):
    """`file` is for training and `test_file` for evaluation; without one, a share of `file` is held out by its content. Files may be
    compressed with gzip; one that is called .json holds a list."""

    file: str
    test_file: str = ""
    question: str = "question"  # the field that holds it, or a path; a list of messages is taken as the conversation so far
    answer: str = "answer"
    answer_after: str = ""  # take what follows the last of these in the answer, such as "####"
    reward: Code = "math"
    options: Mapping[str, JSON] = field(default_factory=dict)  # keyword arguments of the reward
    style: str = "direct"
    system: str = ""
    examples: int = 0  # solved training problems shown before the question: few-shot
    held_out: float = 0.1  # the share of `file` for evaluation, where there is no test_file
    score_seconds: float = 10.0  # the time limit of a reward of yours

    def __post_init__(self) -> None:
        require(bool(self.file), "jsonl: give a file")
        self.check_style("jsonl")
        require(0 < self.held_out < 1, f"jsonl: held_out is a share between 0 and 1, not {self.held_out}")
        require(self.score_seconds > 0, f"jsonl: score_seconds must be positive, not {self.score_seconds}")

    def pool(self, split: str) -> tuple[Problem, ...]:
        train = self._read(self.file)
        if not self.test_file:
            return one_side(train, self.held_out, split, self.file)
        if split == "train":
            return train
        require_apart(train, self._read(self.test_file), self.file, self.test_file)
        return self._read(self.test_file)

    def _read(self, file: str) -> tuple[Problem, ...]:
        path = Path(file).expanduser()
        require(path.is_file(), f"there is no data file {file}")
        return read_problems(file, path.stat().st_mtime_ns, self.question, self.answer, self.answer_after)


@lru_cache(maxsize=8)
def read_problems(file: str, changed: int, question: str, answer: str, answer_after: str) -> tuple[Problem, ...]:
    """The problems of a file; `changed` is its time of change, so that one which was written anew is read anew."""
    name = Path(file).name
    found = tuple(
        make_problem(record, where, f"{name}:{where.rpartition(' ')[2]}", question, answer, answer_after)
        for where, record in read_records(file)
    )
    require(bool(found), f"{file} is empty: expected one JSON object a line")
    return found
