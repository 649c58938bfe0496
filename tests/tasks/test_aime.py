"""AIME: whole numbers from 0 to 999 in a box, asked several times each, and the interval over problems."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from material_for_tests import rollout, segment

from posttrain.errors import UserError
from posttrain.evals.evaluate import Evaluation
from posttrain.stages.evaluate import summarise
from posttrain.tasks.aime import Aime
from posttrain.tasks.base import validate
from posttrain.types import Group

ROWS = [{"problem": f"Find {n}.", "answer": f"{n:03d}", "solution": "It is so."} for n in (7, 33, 204)]


@pytest.fixture
def task(tmp_path: Path) -> Aime:
    (tmp_path / "aime-2024.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return Aime(data=str(tmp_path))


def test_answers_are_compared_as_numbers_and_all_problems_are_held_out(task: Aime) -> None:
    validate(task)
    problem = task.problems("test")[1]
    assert (problem.answer, task.problems("train")) == ("33", ())
    assert task.prompt(problem)[0].content.startswith("Find 33.\n") and "\\boxed{}" in task.prompt(problem)[0].content
    said = ("so \\boxed{33}", "\\boxed{033}", "33", "\\boxed{34}")
    assert [task.score(problem, text).outcome for text in said] == ["correct", "correct", "unparseable", "wrong"]


def test_there_is_no_training_part_to_take_a_share_of(task: Aime) -> None:
    with pytest.raises(UserError, match="aime has none"):
        replace(task, held_out=0.1)


def test_many_samples_of_few_problems_are_few_observations(task: Aime) -> None:
    """64 samples each: avg@64, pass@64 and majority, and an interval as wide as three problems allow."""
    groups, finals = [], []
    for problem, right in zip(task.problems("test"), (64, 16, 0), strict=True):
        texts = [f"\\boxed{{{problem.answer if n < right else 1}}}" for n in range(64)]
        blank = rollout([segment([1], False), segment([2], True)], 0.0)
        groups.append(Group(problem, tuple(replace(blank, score=task.score(problem, text)) for text in texts)))
        finals.append(tuple(task.final(text) for text in texts))
    found = summarise(Evaluation(tuple(groups), tuple(finals)))
    assert found["avg_at"]["64"][0] == pytest.approx((1 + 0.25) / 3) and found["pass_at"]["64"][0] == pytest.approx(2 / 3)
    assert found["majority_at"]["64"][0] == pytest.approx(1 / 3)
    _, low, high = found["accuracy"]
    assert high - low > 0.5, "192 independent answers would give 0.14"


@pytest.mark.parametrize("answer", ["", "1000", "-3", "x", None])
def test_an_answer_that_is_no_such_number_is_refused(answer: str | None) -> None:
    with pytest.raises(UserError, match="row 2: the answer .* is no whole number from 0 to 999"):
        Aime.make({"problem": "Find it.", "answer": answer}, "row 2", "test/0")
