"""The formats of rows: which columns each has, which stage reads it, and one example. The readers in demonstrations.py and
preferences.py recognise a row by this table (formats.yaml); `posttrain list formats` and docs/data-formats.md print it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from posttrain.data.records import header_hint
from posttrain.errors import UserError
from posttrain.types import JSON

SFT = "sft, pretrain"
# columns of other conventions, by the column of ours that holds the same
ALIKE = {
    "prompt": "question query problem instruction input user human",
    "completion": "answer response output solution target assistant reply",
    "instruction": "task",
    "input": "context passage",
    "output": "answer response completion target reply",
    "messages": "chat dialog dialogue turns message",
    "text": "content document sentence body",
    "chosen": "preferred accepted better winner positive",
    "rejected": "dispreferred worse loser negative",
}


@dataclass(frozen=True, slots=True)
class Format:
    """A row has every column of `fields`, where "a|b" is one of the two, and may have those of `optional`."""

    name: str
    title: str
    stages: str  # that read it
    fields: Sequence[str]
    example: Mapping[str, JSON]
    optional: Sequence[str] = ()
    # a row with all of these is of this format; () where all of its fields are needed
    revealing: Sequence[str] = ()
    note: str = ""

    @property
    def choices(self) -> list[str]:
        return [choice for field in self.fields for choice in field.split("|")]

    @property
    def columns(self) -> set[str]:
        """Every column that is read."""
        return {"tools", *self.choices, *self.optional}

    def missing(self, row: Collection[str]) -> list[str]:
        """The fields that a row lacks."""
        return [f for f in self.fields if not any(choice in row for choice in f.split("|"))]

    def shown(self) -> str:
        """Its columns in words."""
        return " and ".join(field.replace("|", " or ") for field in self.fields)


_ROWS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
FORMATS = tuple(Format(**row) for row in _ROWS)
DEMONSTRATIONS = {f.name: f for f in FORMATS if f.stages == SFT}
PREFERENCES = {f.name: f for f in FORMATS if f.stages != SFT}


def revealed(row: Collection[str], formats: Iterable[Format] = FORMATS) -> Format | None:
    """The first of the formats that a row is of."""
    return next((f for f in formats if set(f.revealing or f.fields) <= set(row)), None)


def unrecognised(row: Collection[str], where: str, known: Mapping[str, Format]) -> UserError:
    """An error for a row of none of the `known` formats: its columns, the nearest format and what to change, or who reads such rows.

    >>> text = str(unrecognised(["question", "answer"], "f line 1", DEMONSTRATIONS))
    >>> print(text.replace("; ", "\\n"))
    f line 1: a row of question, answer has no format that is read here
    nearest is prompt_completion, with prompt and completion: rename question to prompt, answer to completion
    or give columns={prompt: question, completion: answer}
    see 'posttrain list formats'
    """
    given = f"{where}: a row of {', '.join(map(_quoted, row)) or 'no columns'}"
    other = revealed(row)
    if other is not None:
        stage = other.stages.partition(",")[0]
        return UserError(f"{given} is one of {other.title}; use the stage {stage} for it")
    none = f"{given} has no format that is read here"
    renames = {f.name: _renames(f, row) for f in known.values()}

    def likeness(f: Format) -> float:
        needed = [field for field in renames[f.name] if field in f.fields]
        return 1 - (len(f.missing(row)) - 0.9 * len(needed)) / len(f.fields)

    nearest = max(known.values(), key=likeness)
    if likeness(nearest) == 0:
        names = ", ".join(f"{f.name} ({f.shown()})" for f in known.values())
        rows = [k for k, v in row.items() if _objects(v)] if isinstance(row, Mapping) else []
        alone = " holds a list of objects: if they are the rows, write that list alone"
        inner = "".join(f"; {name}{alone}" for name in rows[:1])
        inner += header_hint(where)
        return UserError(f"{none}: {names}{inner}; see 'posttrain list formats'")
    found = {to: _quoted(was) for to, was in renames[nearest.name].items()}
    advice = f"rename {', '.join(f'{was} to {to}' for to, was in found.items())}" if found else ""
    added = [f.replace("|", " or ") for f in nearest.missing(row) if f not in found]
    named = ", ".join(f"{to}: {was}" for to, was in found.items())
    more = f"add {', '.join(added)} (absent or null here)" if added else ""
    advice = " and ".join(filter(None, (advice, more)))
    advice += "" if added else f"; or give columns={{{named}}}"
    near = f"nearest is {nearest.name}, with {nearest.shown()}: {advice}"
    return UserError(f"{none}; {near}; see 'posttrain list formats'")


def _quoted(name: str) -> str:
    return name if name.isidentifier() else repr(name)


def _objects(value: JSON) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def meant(field: str, row: Collection[str]) -> str:
    """The column of a row that another convention has in place of ours; "" where there is none."""
    return next((name for name in row if name.lower() in ALIKE[field].split()), "")


def _renames(format: Format, row: Collection[str]) -> dict[str, str]:
    """For missing fields, the column of a row that seems to be meant; of optional ones where it has the other convention's name."""
    free = {name.lower(): name for name in row if name not in format.columns}
    found: dict[str, str] = {}
    for field in format.missing(row):
        choices = [word for f in field.split("|") for word in (f, *ALIKE.get(f, "").split())]
        near = [n for word in choices for n in difflib.get_close_matches(word, free, 1, 0.8)]
        if near:
            found[field] = free.pop(near[0])
    for field in set(format.optional) & ALIKE.keys() - set(row):
        if was := meant(field, free.values()):
            found[field] = was
    return found
