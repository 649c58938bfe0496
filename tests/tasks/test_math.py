r"""MATH from files: gold answers from a field or the last box, levels and subjects, a JSON list beside JSONL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.errors import UserError
from posttrain.tasks.base import validate
from posttrain.tasks.math import Math

TRAIN = [
    {"problem": "What is $1/2+1/2$?", "solution": "It is $\\boxed{1}$.", "level": "Level 1", "type": "Prealgebra"},
    {"problem": "Solve $x^2=4$.", "solution": "So \\boxed{2} or \\boxed{-2}.", "level": "Level 5", "type": "Algebra"},
    {"problem": "What is half of one?", "answer": "\\frac{1}{2}", "difficulty": 2.0, "type": "Algebra"},
    {"problem": "Nobody knows.", "answer": "", "difficulty": 2.0, "type": "Algebra"},
    {"problem": "What is none?", "answer": 0, "solution": "It is not \\boxed{1}.", "level": 1, "type": "Zero"},
]
TEST = [{"problem": "What is $3!$?", "solution": "$3\\cdot 2=\\boxed{6}$", "answer": "6", "level": 3, "subject": "Counting"}]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "math-train.json").write_text(json.dumps(TRAIN))
    (tmp_path / "math-500.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEST))
    return str(tmp_path)


def test_gold_answers(folder: str) -> None:
    task = Math(folder)
    assert [p.answer for p in task.problems("train")] == ["1", "2, -2", "\\frac{1}{2}", "", "0"]
    validate(task, "test")
    first, second, third, unknown, _ = task.problems("train")
    for problem in (first, second, third):
        assert task.score(problem, task.demonstration(problem)).outcome == "correct"
    assert task.score(third, "\\boxed{0.5}").value == 1.0
    assert task.score(third, "0.5").outcome == "unparseable"
    assert Math(folder, style="thinking").score(third, "it is 0.5").outcome == "correct"
    assert not task.score(unknown, "\\boxed{1}").valid, "without a gold answer there is no score, not a score of 0"
    assert not Math(folder, style="thinking").score(unknown, "no idea").valid


def test_a_share_of_the_chosen_training_problems_takes_the_tests_place(folder: str) -> None:
    task = Math(folder, max_level=2, held_out=0.5)
    sides = [{p.question for p in task.problems(split)} for split in ("train", "test")]
    assert all(sides) and not sides[0] & sides[1]
    assert sides[0] | sides[1] == {str(row["problem"]) for row in TRAIN} - {"Solve $x^2=4$."}


def test_levels_and_subjects(folder: str) -> None:
    assert [p.answer for p in Math(folder, max_level=1).problems("train")] == ["1", "0"]
    assert [p.answer for p in Math(folder, min_level=2, subjects=("Algebra",)).problems("train")] == [
        "2, -2",
        "\\frac{1}{2}",
        "",
    ]
    with pytest.raises(UserError, match="no test problem has a level from 5 to 5"):
        Math(folder, min_level=5).problems("test")
    with pytest.raises(UserError, match="levels go from 1 to 5"):
        Math(folder, min_level=0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "expected a list"),
        ("[1]", "entry 1: expected a JSON object"),
        ('[{"question": "q"}]', "entry 1: no field 'problem'; it has question"),
        ('[{"problem": "q", "solution": "none"}]', "entry 1: no answer"),
    ],
)
def test_bad_files_are_named(folder: str, text: str, said: str) -> None:
    (Path(folder) / "math-train.json").write_text(text)
    with pytest.raises(UserError, match=said):
        Math(folder).problems("train")
