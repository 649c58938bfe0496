"""Countdown: its solutions score 1, cheating does not, and hostile text is answered quickly with 0."""

from __future__ import annotations

import time
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.errors import UserError
from posttrain.rewards._expression import Unparseable, evaluate
from posttrain.tasks.base import validate
from posttrain.tasks.countdown import Countdown, problem_side
from posttrain.types import Problem

PROBLEM = Problem("x", "3,7,4=40:", "(3+7)*4", 3, {"numbers": [3, 7, 4], "target": 40})


def test_its_own_solutions_score_one() -> None:
    task = Countdown(level=5)
    validate(task, "test", 100)
    validate(task, "train", 100)


def test_questions_say_what_the_facts_say_in_the_alphabet() -> None:
    task = Countdown(level=4, max_number=25, max_target=500)
    for problem in islice(task.problems("train"), 100):
        numbers, target = problem.question.rstrip(":").split("=")
        assert [int(n) for n in numbers.split(",")] == problem.facts["numbers"]
        assert int(target) == problem.facts["target"] <= 500
        assert set(problem.question + problem.answer) <= set(task.alphabet)


def test_train_and_test_are_disjoint_whatever_the_order_of_numbers() -> None:
    task = Countdown(level=3)
    for level in task.levels:
        test = [(tuple(sorted(p.facts["numbers"])), p.facts["target"]) for p in task.problems("test", level)]
        train = {(tuple(sorted(p.facts["numbers"])), p.facts["target"]) for p in islice(task.problems("train", level), 4_000)}
        assert len(set(test)) == len(test) > 20
        assert not set(test) & train
        assert all(problem_side(numbers, target) == "test" for numbers, target in test)


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        ("(3+7)*4", "correct"),
        ("4*(7+3)", "correct"),
        ("( 3 + 7 ) * 4\n", "correct"),
        ("7+3 is 10, times 4 # (3+7)*4", "correct"),
        ("#1#(3+7)*4", "correct"),
        ("((3+7))*(4)", "correct"),
        ("40", "wrong"),
        ("(3+7)*4*1", "wrong"),
        ("(3+7)*4+3-3", "wrong"),
        ("3*7+4", "wrong"),
        ("(37)*4", "wrong"),
        ("", "unparseable"),
        ("#", "unparseable"),
        ("(3+7)*4=40", "unparseable"),
        ("(3+7)*4 (3+7)*4", "unparseable"),
        ("-3+7*4", "unparseable"),
        ("(3+7*4", "unparseable"),
        ("3+7)*4", "unparseable"),
        ("3+7*", "unparseable"),
        ("2**3", "unparseable"),
        ("7//3", "unparseable"),
        ("3.0+7", "unparseable"),
        ("3e1+7", "unparseable"),
        ("4/(3-3)", "unparseable"),
        ("（3+7）*4", "unparseable"),
        ("３+7", "unparseable"),
        ("__import__('os')", "unparseable"),
        ("()", "unparseable"),
        ("1234567", "unparseable"),
    ],
)
def test_scores_by_hand(response: str, outcome: str) -> None:
    score = Countdown().score(PROBLEM, response)
    assert score.outcome == outcome
    assert score.value == (1.0 if outcome == "correct" else 0.0)


def test_fractions_are_exact() -> None:
    thirds = Problem("x", "", "", 4, {"numbers": [8, 3, 8, 3], "target": 24})
    assert Countdown().score(thirds, "8/(3-8/3)").outcome == "correct"
    assert evaluate("8/(3-8/3)") == (Fraction(24), [8, 3, 8, 3])


@pytest.mark.parametrize(
    "hostile", ["(" * 10**6, "-" * 10**6, "9" * 10**6, "9*" * 10**5 + "9", " " * 10**6, "#" * 10**6, "(" * 199, "9/" * 99 + "9"]
)
def test_hostile_text_is_quick_and_worthless(hostile: str) -> None:
    started = time.perf_counter()
    score = Countdown().score(PROBLEM, hostile)
    assert time.perf_counter() - started < 0.1
    assert score.value == 0.0


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet="0123456789+-*/() ", max_size=30))
def test_the_parser_agrees_with_python_where_both_have_a_value(text: str) -> None:
    try:
        value, _ = evaluate(text)
    except Unparseable:
        return
    plain = "".join(f"Fraction({t})" if t.isdigit() else t for t in _tokens(text))
    assert eval(plain, {"Fraction": Fraction}) == value  # noqa: S307


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    for before, character in zip(" " + text, text, strict=False):
        if character.isdigit() and before.isdigit():
            tokens[-1] += character
        elif character != " ":
            tokens.append(character)
    return [str(int(t)) if t.isdigit() else t for t in tokens]


def test_bad_settings_are_refused() -> None:
    for bad in ({"level": 7}, {"min_level": 1}, {"max_number": 1}, {"max_target": 1}):
        with pytest.raises(UserError):
            Countdown(**bad)
