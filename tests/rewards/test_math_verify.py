r"""The grader math_verify: what it says of answers, where it and ours differ, and that tasks score with it in workers."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from posttrain.errors import UserError
from posttrain.rewards.math import grade
from posttrain.rewards.math_verify import math_verify
from posttrain.tasks.aime import Aime
from posttrain.tasks.jsonl import Jsonl
from posttrain.tasks.math import Math
from posttrain.types import Problem, Score


@pytest.fixture
def package() -> None:
    pytest.importorskip("math_verify", reason="needs the package math-verify: pip install 'posttrain[math-verify]'")


@pytest.mark.peers
@pytest.mark.parametrize(
    ("response", "gold", "theirs", "ours"),
    [
        (r"so \boxed{\frac{1}{2}}", "1/2", "correct", "correct"),
        (r"so \boxed{3}", "4", "wrong", "wrong"),
        ("nothing", "4", "unparseable", "unparseable"),
        ("the answer is 5", "5", "correct", "unparseable"),  # it takes a number without a box
        (r"so \boxed{2+3}", "5", "correct", "wrong"),  # and works out what was left to do
        (r"so \boxed{0.333333}", r"\frac{1}{3}", "correct", "wrong"),  # and rounds
    ],
)
def test_verdicts_are_those_of_the_package(package: None, response: str, gold: str, theirs: str, ours: str) -> None:
    assert (math_verify("", response, gold).outcome, grade(response, gold).outcome) == (theirs, ours)


@pytest.mark.peers
def test_it_grades_in_a_thread_and_refuses_a_gold_answer_that_cannot_be_read(package: None) -> None:
    """Its own time limits would raise there."""
    found: list[Score] = []
    thread = threading.Thread(target=lambda: found.append(math_verify("", r"\boxed{1}", "1")))
    thread.start()
    thread.join(30)
    assert found[0].outcome == "correct"
    assert str(math_verify("", r"\boxed{1}", "").failure).startswith("gold answer cannot be read")


@pytest.mark.peers
def test_tasks_that_score_with_it_do_so_in_workers(package: None, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "2+3?", "answer": "5"}\n')
    jsonl = Jsonl(str(tmp_path / "q.jsonl"), reward="math_verify", held_out=0)
    problem = Problem("a", "2+3?", "5")
    for task in (Math(grader="math_verify"), Aime(grader="math_verify"), jsonl):
        assert task.isolated and task.verifiable and task.score(problem, "it is $2+3$").solved
        task.ready()
    assert not Math().isolated and not Math().score(problem, "it is $2+3$").solved
    assert jsonl.wording == "boxed" and jsonl.final(r"\boxed{5}") == "5"


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r"pip install 'posttrain\[math-verify\]'"):
        Math(grader="math_verify").ready()
    with pytest.raises(UserError, match=r"pip install 'posttrain\[math-verify\]'"):
        Jsonl("q.jsonl", reward="math_verify")
    with pytest.raises(UserError, match="grader must be"):
        Math(grader="sympy")  # type: ignore[arg-type]
