"""Labels by a person: which of the responses to a prompt is best. They are shown in random order, and each choice is written at once,
so that labelling can be left and continued."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.data.preferences import spoken
from posttrain.data.records import read_rows
from posttrain.data.stream import permutation
from posttrain.errors import UserError, require
from posttrain.types import JSON


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt with its responses in the order in which they are shown."""

    prompt: Any
    responses: tuple[Any, ...]

    @property
    def key(self) -> str:
        """The same in any order."""
        return json.dumps([self.prompt, sorted(map(json.dumps, self.responses))])

    def lines(self) -> list[str]:
        texts = [f"prompt: {spoken(self.prompt)}"]
        texts += [f"[{n}] {spoken(one)}" for n, one in enumerate(self.responses, 1)]
        return [line for text in texts for line in text.splitlines()]

    def label(self, best: int) -> JSON:
        """As a pair or, of more responses, with scores: 1 for the best, 0 for the others."""
        if len(self.responses) == 2:
            chosen, rejected = self.responses[best], self.responses[1 - best]
            return {"prompt": self.prompt, "chosen": chosen, "rejected": rejected}
        scores = [float(n == best) for n in range(len(self.responses))]
        return {"prompt": self.prompt, "responses": list(self.responses), "scores": scores}


@dataclass(slots=True)
class Labels:
    """The rows of a file, and the file of what was chosen."""

    rows: list[Row]
    out: Path
    done: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, file: str, out: str = "") -> Labels:
        rows = [_row(record, where, n) for n, (where, record) in enumerate(read_rows(file))]
        place = Path(out) if out else Path(file).with_suffix(".labels.jsonl")
        require(place.parent.is_dir(), f"out {place}: there is no directory {place.parent}")
        require(place.resolve() != Path(file).resolve(), f"out {place} is the file itself")
        labels = cls(rows, place)
        if place.is_file() and place.stat().st_size:
            labels.done = {_row(record, where, 0).key for where, record in read_rows(place)}
        return labels

    @property
    def count(self) -> int:
        return len(self.done)

    def open_rows(self) -> Iterator[Row]:
        """Those that have no label yet."""
        return (row for row in self.rows if row.key not in self.done)

    def ask(self, row: Row, answers: Iterator[str]) -> bool:
        """Take the answers of a person until one labels or skips the row; False where there is no more."""
        choices = {str(n + 1): n for n in range(len(row.responses))}
        for answer in answers:
            word = answer.strip().lower()
            if word in ("q", "s"):
                return word == "s"
            if word in choices:
                with self.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row.label(choices[word])) + "\n")
                self.done.add(row.key)
                return True
        return False


def _row(record: Any, where: str, number: int) -> Row:
    require(isinstance(record, dict) and "prompt" in record, f"{where}: no prompt")
    found = record.get("responses", record.get("completions"))
    if found is None and {"chosen", "rejected"} <= set(record):
        found = [record["chosen"], record["rejected"]]
    if not isinstance(found, list) or len(found) < 2:
        raise UserError(f"{where}: give responses (a list of two or more), or chosen and rejected")
    order = permutation(len(found), "label", number)
    return Row(record["prompt"], tuple(found[place] for place in order))
