"""Problems from your own JSONL file: which fields hold question and answer, how to ask, and which reward scores.

    task = Jsonl("gsm8k-train.jsonl", test_file="gsm8k-test.jsonl", answer_after="####", reward="math")

A reward is one of `posttrain list rewards`, or your own function, `(prompt, response, answer) -> float | Score`, as
`file.py:name`; it may be `async`. Your own function runs in worker processes with a time limit.
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
    """`file` is for training and `test_file` for evaluation; without one, a share of `file` is held out by a hash of the
    questions. Files may be compressed with gzip; a file named .json holds a list."""

    file: str
    test_file: str = ""

    def __post_init__(self) -> None:
        self.check(bool(self.file), "give a file")
        super().__post_init__()

    def parts(self) -> tuple[Part, Part | None]:
        return self._part(self.file), self._part(self.test_file) if self.test_file else None

    def _part(self, name: str) -> Part:
        """Return a file with its modification time: a changed file is read again."""
        path = Path(name).expanduser()
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        require(path.is_file(), f"there is no data file {name}{where}")
        return Part(name, path.stat().st_mtime_ns, self.rows)

    def rows(self, part: Part) -> Iterator[Row]:
        for where, record in read_jsonl(part.name, lists=True):
            yield where, f"{Path(part.name).name}:{where.rpartition(' ')[2]}", record

    def ready(self) -> tuple[str, ...]:
        self.parts()  # raises an error if a file is missing
        return super().ready()
