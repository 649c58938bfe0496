"""What the types of fields refuse, and that every name of the first edition is known or named with what to use instead."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from posttrain import catalogue
from posttrain.algorithms.base import Algorithm
from posttrain.errors import RENAMED, Checked, Count, Positive, Range, UserError, unknown
from posttrain.stages.base import Stage
from posttrain.tasks.base import Task

FIRST: dict[str, str] = json.loads((Path(__file__).parent / "first_edition.json").read_text())
BASES: dict[str, type | None] = {"algorithm": Algorithm, "task": Task, "stage": Stage, "recipe": None, "reward": None}


@dataclass(frozen=True)
class Settings(Checked):
    count: Count = 1
    share: Annotated[float, Range(gt=0, le=1)] | None = None
    rate: Positive = 1.0
    weight: Annotated[float, Range()] = 1.0
    norm: Annotated[float, Range(gt=0, text="positive (inf for none)", infinite=True)] = 1.0
    mode: Literal["a", "b", "c"] = "a"
    modes: tuple[Literal["x", "y"], ...] = ()
    free: str = ""
    size: int = 2
    several: Annotated[int, Range(ge=1, le=9)] = 1
    last: int | None = None
    flag: bool = False


class Undecorated(Settings):
    count: Count = 5
    more: int = 3


@dataclass(frozen=True)
class Untyped(Settings):
    rate = 2.0


@pytest.mark.parametrize(("kind", "field"), [(Undecorated, "count"), (Untyped, "rate")])
def test_a_default_that_dataclasses_do_not_read_is_refused(kind: type[Settings], field: str) -> None:
    """It would be ignored: `Undecorated().count` would be 1."""
    with pytest.raises(
        UserError, match=f"{kind.__name__} sets {field} in a way that dataclasses do not read: write @dataclass"
    ):
        kind()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "count must be at least 1, not 0"),
        ({"count": "3"}, "count must be at least 1, not '3'"),
        ({"count": math.inf}, "count must be finite and at least 1, not inf"),
        ({"rate": math.inf}, "rate must be finite and above 0, not inf"),
        ({"rate": -math.inf}, "rate must be above 0, not -inf"),
        ({"weight": math.inf}, "weight must be a finite number, not inf"),
        ({"share": math.inf}, "share must be in (0, 1], not inf"),
        ({"share": 0.0}, "share must be in (0, 1], not 0.0"),
        ({"share": math.nan}, "share must be in (0, 1], not nan"),
        ({"norm": 0.0}, "norm must be positive (inf for none), not 0.0"),
        ({"norm": math.nan}, "norm must be positive (inf for none), not nan"),
        ({"mode": "d"}, "mode must be a, b or c, not 'd'"),
        ({"size": 2.5}, "size must be a whole number, not 2.5"),
        ({"count": 2.5}, "count must be a whole number, not 2.5"),
        ({"several": 2.0}, "several must be a whole number, not 2.0"),
        ({"last": "5"}, "last must be a whole number, not '5'"),
        ({"flag": "false"}, "flag must be true or false, not 'false'"),
        ({"flag": 2}, "flag must be true or false, not 2"),
        ({"modes": ("x", "z")}, "modes must be x or y, not ('x', 'z')"),
    ],
)
def test_a_value_outside_of_its_type_is_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Settings(**settings)
    assert str(caught.value) == message


def test_values_of_their_types_pass() -> None:
    given: dict[str, Any] = {"count": np.int64(2), "share": 1, "norm": math.inf, "mode": "c", "modes": ("x", "y")}
    Settings(**given, free="anything")
    given = {"size": np.int32(3), "flag": np.True_}
    Settings(**given, last=None, several=True)


@pytest.mark.parametrize("name", FIRST)
def test_names_of_the_first_edition_are_known_or_lead_to_the_new_ones(name: str) -> None:
    """tests/first_edition.json has every algorithm, task, stage, recipe and reward of version 0.1.0 with its keys."""
    kind, _, entry = name.partition(".")
    if entry not in catalogue.names(kind):
        assert name in RENAMED
        with pytest.raises(UserError, match=f"^unknown {kind} '{entry}'; an earlier version had it, use "):
            catalogue.load(kind, entry)
        return
    if kind == "reward":
        return
    made = catalogue.load(kind, entry, BASES[kind])
    keys = list(inspect.signature(made).parameters) if kind == "recipe" else [f.name for f in fields(made)]
    for key in FIRST[name].split():
        assert key in keys or f"{entry}.{key}" in RENAMED, f"{entry}.{key} is gone without a word"


@pytest.mark.parametrize("name", RENAMED)
def test_nothing_that_is_renamed_exists(name: str) -> None:
    owner, _, key = name.partition(".")
    for kind, base in BASES.items():
        if base is not None and owner in catalogue.names(kind):
            assert key not in {f.name for f in fields(catalogue.load(kind, owner, base))}
    assert str(unknown("key", key, [], [owner])).endswith(f"use {RENAMED[name]}")


def test_a_long_list_of_known_names_is_cut() -> None:
    said = str(unknown("key", "zzz", [f"name{n:03d}" for n in range(110)]))
    assert "name000, " in said and "name029 and 80 more; posttrain list" in said and "name030" not in said
