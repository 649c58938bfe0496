"""HumanEval: the reference solution passes the data set's own check, a stub fails it, and a broken record is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import UserError
from posttrain.rewards.sandbox import isolation
from posttrain.tasks._code_data import fenced
from posttrain.tasks.base import validate
from posttrain.tasks.humaneval import HumanEval

pytestmark = pytest.mark.usefixtures("sandbox")
HUMANEVAL = {
    "task_id": "Fixture/0",
    "prompt": 'def add(a: int, b: int) -> int:\n    """The sum."""\n',
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "METADATA = {}\ndef check(candidate):\n    assert True\n    assert candidate(1, 2) == 3\n    assert candidate(1, 1) == 2",
}
HUMANEVAL_LOOP = {
    "task_id": "Fixture/1",
    "prompt": 'def twice(n):\n    return 2 * n\n\n\ndef half(n):\n    """The inverse of twice."""\n',
    "entry_point": "half",
    "canonical_solution": "    return n // 2\n",
    "test": "def check(candidate):\n    for n in range(9):\n        assert candidate(twice(n)) == n\n    assert half(4) == 2\n",
}


@pytest.mark.parametrize(
    ("record", "stub"), [(HUMANEVAL, "def add(*args): return 3"), (HUMANEVAL_LOOP, "def half(*args): return 0")]
)
def test_a_reference_solution_passes_and_a_stub_fails(record: dict[str, Any], stub: str) -> None:
    task, problem = HumanEval(), HumanEval.make(record, "row 0", "test/0")
    assert task.score(problem, task.demonstration(problem)).outcome == "pass"
    for program in (stub, "", "pass"):
        assert task.score(problem, fenced(program)).value == 0.0
    assert task.isolated and task.ready() == (isolation.describe(),)


def test_the_one_split_is_shared_between_training_and_evaluation(data_set: Callable[[Any], str]) -> None:
    rows = [{**HUMANEVAL, "prompt": HUMANEVAL["prompt"].replace("sum", f"sum, version {n}")} for n in range(20)]
    task = HumanEval(dataset=data_set({"test": rows}))
    train, test = ({p.question for p in task.problems(split)} for split in ("train", "test"))
    assert len(train) + len(test) == 20 and train and test and not train & test
    validate(task, count=2)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"test": "def check(:"}, "row 0: its tests are not Python"),
        ({"prompt": None}, "row 0: the field 'prompt' is empty or no text"),
    ],
)
def test_broken_records_are_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        HumanEval.make({**HUMANEVAL, **change}, "row 0", "test/0")


def test_all_of_a_local_file_can_be_held_out(tmp_path: Path) -> None:
    rows = [{**HUMANEVAL, "prompt": HUMANEVAL["prompt"].replace("sum", f"sum, version {n}")} for n in range(4)]
    (tmp_path / "humaneval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = HumanEval(data=str(tmp_path), held_out=1.0)
    assert [len(task.problems(split)) for split in ("train", "test")] == [0, 4]
    with pytest.raises(UserError, match="there is no data file nowhere"):
        HumanEval(data="nowhere").problems("test")
