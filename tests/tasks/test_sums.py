"""Sums in words: how they are asked and shown, what counts as the form and as the answer, and that the two sides stay apart."""

from __future__ import annotations

import pytest

from posttrain.errors import UserError
from posttrain.tasks.arithmetic import pair_side
from posttrain.tasks.base import validate
from posttrain.tasks.sums import Sums
from posttrain.types import Problem

PROBLEM = Problem("p", "What is 47 + 85?", "132", 2, {"a": 47, "b": 85})


def test_own_demonstrations_score_one_and_sides_are_those_of_the_pairs() -> None:
    task = Sums(level=2, min_level=1)
    validate(task)
    for split in ("train", "test"):
        for problem in task.problems(split)[:50]:
            a, b = problem.facts["a"], problem.facts["b"]
            assert pair_side("+", a, b) == split
            assert (problem.question, problem.answer) == (f"What is {a} + {b}?", str(a + b))


def test_solved_training_sums_stand_before_the_question_but_never_the_question_itself() -> None:
    task = Sums(examples=2)
    messages = task.prompt(PROBLEM)
    assert [m.role for m in messages] == ["user", "assistant"] * 2 + ["user"]
    first = task.problems("train")[0]
    assert messages[0].content == first.question and messages[1].content == task.demonstration(first)
    assert first.question not in [m.content for m in task.prompt(first)[:-1]]
    assert len(task.prompt(first)) == 5
    assert messages[-1].content == PROBLEM.question


def test_without_solved_sums_the_form_is_asked_for_in_words_and_no_sum_is_shown() -> None:
    (asked,) = Sums(examples=0).prompt(PROBLEM)
    assert asked.role == "user" and asked.content.startswith(PROBLEM.question)
    assert all(tag in asked.content for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    assert "47 + 85 =" not in asked.content


@pytest.mark.parametrize(
    ("response", "answer", "form", "outcome"),
    [
        ("<think>47 + 85 = 132</think>\n<answer>132</answer>", 1, 1, "correct"),
        ("so <answer>132</answer>", 1, 0, "correct"),
        ("<think>?</think><answer>131</answer>", 0, 1, "wrong"),
        ("<answer>131</answer> no, <answer>132</answer>", 1, 0, "correct"),
        ("<answer>132</answer><answer>131</answer>", 0, 0, "wrong"),
        ("<think>a</think><answer>0132</answer>", 0, 1, "unparseable"),
        ("132", 0, 0, "unparseable"),
    ],
)
def test_answer_and_form_are_judged_apart(response: str, answer: int, form: int, outcome: str) -> None:
    score = Sums(format_weight=0.25).score(PROBLEM, response)
    assert dict(score.parts) == {"answer": answer, "format": form}
    assert score.value == pytest.approx(0.75 * answer + 0.25 * form)
    assert score.outcome == outcome


def test_votes_and_bad_settings() -> None:
    assert [Sums().final(r) for r in ("<answer> 7 </answer>", "7", "<answer>seven</answer>")] == ["7", None, None]
    for settings in ({"level": 0}, {"level": 1, "min_level": 2}, {"examples": -1}, {"format_weight": 1.5}):
        with pytest.raises(UserError, match="sums"):
            Sums(**settings)
