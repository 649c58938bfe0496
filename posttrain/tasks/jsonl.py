"""Problems from a JSONL file of your own: which fields hold the question and the answer, how to ask, and which reward judges.

    task = Jsonl("gsm8k-train.jsonl", test_file="gsm8k-test.jsonl", answer_after="####", reward="math")

A reward is one of `posttrain list rewards`, or a plain function of yours, `(prompt, response, answer) -> float | Score`, as
`file.py:name`; it may be `async`. Yours runs in worker processes with a time limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from posttrain.data.records import read_jsonl
from posttrain.errors import require
from posttrain.tasks._judged import Judged, Part, Row


@dataclass(frozen=True)
class Jsonl(Judged):
    """`file` is for training and `test_file` for evaluation; without one, a share of `file` is held out by its content. Files may be
    compressed with gzip; one that is called .json holds a list."""

    file: str
    test_file: str = ""

    def __post_init__(self) -> None:
        require(bool(self.file), "jsonl: give a file")
        self.check_settings("jsonl")

    def parts(self) -> tuple[Part, Part | None]:
        return self._part(self.file), self._part(self.test_file) if self.test_file else None

    def _part(self, name: str) -> Part:
        """A file with the time of its last change: one that was written anew is read anew."""
        path = Path(name).expanduser()
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        require(path.is_file(), f"there is no data file {name}{where}")
        return Part(name, path.stat().st_mtime_ns, self.rows)

    def rows(self, part: Part) -> Iterator[Row]:
        for where, record in read_jsonl(part.name, lists=True):
            yield where, f"{Path(part.name).name}:{where.rpartition(' ')[2]}", record

    def ready(self) -> tuple[str, ...]:
        self.parts()  # or refuse, where a file is not there
        return super().ready()
