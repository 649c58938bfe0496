"""MBPP: the reference solution passes the data set's own assertions, a stub fails them, and a broken record is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from material_for_tests import rollout, segment

from posttrain.errors import UserError
from posttrain.evals.evaluate import Evaluation
from posttrain.tasks._code_data import fenced
from posttrain.tasks.base import validate
from posttrain.tasks.mbpp import Mbpp
from posttrain.types import Group

pytestmark = pytest.mark.usefixtures("sandbox")
MBPP = {
    "task_id": 7,
    "prompt": "Write a function to find the shared elements of two lists.",
    "code": "import math\ndef shared(a, b):\n    return tuple(set(a) & set(b))",
    "test_imports": [],
    "test_list": [
        "assert set(shared((3, 4), (4, 5))) == set((4,))",
        "assert shared([1], [1]) == (1,)",
        "assert math.fabs(len(shared([], []))) == 0",
    ],
}


def test_a_reference_solution_passes_and_a_stub_fails() -> None:
    task, problem = Mbpp(), Mbpp.make(MBPP, "row 0", "train/0")
    assert task.score(problem, task.demonstration(problem)).outcome == "pass"
    for program in ("def shared(*args): return (1,)", "", "pass"):
        assert task.score(problem, fenced(program)).value == 0.0
    assert task.prompt(problem)[-1].content.endswith("Name it shared.") and task.isolated


def test_splits_are_those_of_the_data_set(data_set: Callable[[Any], str]) -> None:
    rows = [{**MBPP, "prompt": f"{MBPP['prompt']} Version {n}."} for n in range(3)]
    task = Mbpp(dataset=data_set({"train": rows[:2], "test": rows[2:]}), config="")
    assert [len(task.problems(split)) for split in ("train", "test")] == [2, 1]
    validate(task, count=1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"test_list": []}, "row 0: no assertion calls"),
        ({"test_list": ["assert other(1) == 2"]}, "no assertion calls a function of the reference"),
        ({"test_list": ["assert ("]}, "row 0: its tests are not Python"),
        ({"code": None}, "row 0: the field 'code' is empty or no text"),
    ],
)
def test_broken_records_are_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Mbpp.make({**MBPP, **change}, "row 0", "train/0")


@pytest.mark.parametrize(
    ("expected", "returned", "same"),
    [
        ("(1, 2)", "[1, 2]", False),
        ("2", "2.0", True),
        ("1", "True", True),
        ("0.3", "0.1 + 0.2", False),
        ("float('nan')", "float('nan')", False),
        ("{1, 2}", "frozenset([2, 1])", True),
        ("{1: 2}", "__import__('collections').Counter([1, 1])", True),
        ("[0, 1]", "range(2)", False),
    ],
)
def test_an_assertion_compares_as_python_does(expected: str, returned: str, same: bool) -> None:
    """Unlike tests of calls, which allow rounding and either kind of sequence: figures are those of the published harness."""
    record = {**MBPP, "code": f"def f(x):\n    return {expected}", "test_list": [f"assert f(0) == {expected}"]}
    problem = Mbpp.make(record, "row 0", "train/0")
    assert Mbpp().score(problem, fenced(f"def f(x):\n    return {returned}")).solved == same


def test_pass_at_k_of_programs() -> None:
    task, problem = Mbpp(), Mbpp.make(MBPP, "row 0", "train/0")
    programs = [task.demonstration(problem), fenced("def shared(*args): return (1,)")]
    scores = [task.score(problem, program) for program in programs]
    made = [replace(rollout([segment([1], False), segment([2], True)], 0.0), score=score) for score in scores]
    found = Evaluation((Group(problem, (made[0], made[1], made[1], made[1])),))
    assert (found.accuracy.value, found.passed(2).value, found.passed(4).value) == (0.25, 0.5, 1.0)


def test_a_file_or_its_folder_takes_the_place_of_the_hub_and_a_share_is_held_out(tmp_path: Path) -> None:
    rows = [{**MBPP, "prompt": f"{MBPP['prompt']} Version {n}."} for n in range(40)]
    file = tmp_path / "mbpp-sanitized.json"
    file.write_text(json.dumps(rows))
    for place in (tmp_path, file):
        task = Mbpp(data=str(place), test_split="", held_out=0.25)
        train, test = ({p.question for p in task.problems(split)} for split in ("train", "test"))
        assert len(train) + len(test) == 40 and len(test) > 2 and not train & test


def test_the_prompt_shows_as_many_assertions_as_asked_and_the_others_stay_hidden() -> None:
    problem, tests = Mbpp.make(MBPP, "row 0", "train/0"), MBPP["test_list"]
    shown = [[test in Mbpp(shown=n).prompt(problem)[-1].content for test in tests] for n in (0, 1, 2)]
    assert shown == [[False] * 3, [True, False, False], [True, True, False]]
    with pytest.raises(UserError, match="shown must not be negative"):
        Mbpp(shown=-1)
