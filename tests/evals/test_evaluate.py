"""Figures of an evaluation, on groups made by hand."""

from __future__ import annotations

from math import isclose, sqrt

import pytest
from material_for_tests import rollout, segment

from posttrain.errors import UserError
from posttrain.evals.evaluate import Evaluation, solved_share
from posttrain.stages.evaluate import rows, summarise
from posttrain.types import Group, Problem


def group(name: str, values: list[float | None]) -> Group:
    members = [rollout([segment([1], False), segment([2], True)], value, name, n) for n, value in enumerate(values)]
    return Group(Problem(name, name, "7"), tuple(members))


def evaluation(values: list[list[float | None]], finals: list[list[str | None]]) -> Evaluation:
    groups = tuple(group(f"p{n}", row) for n, row in enumerate(values))
    return Evaluation(groups, tuple(tuple(row) for row in finals))


def test_average_pass_and_majority_by_hand() -> None:
    # 7 is right: two of four say so, the others differ; then one of four, against three that agree
    found = evaluation([[1, 1, 0, 0], [1, 0, 0, 0]], [["7", "7", "8", "9"], ["7", "5", "5", "5"]])
    figures = summarise(found)
    assert figures["avg_at"] == {"4": figures["accuracy"]} and figures["accuracy"][0] == 0.375
    assert isclose(figures["pass_at"]["2"][0], ((1 - 1 / 6) + (1 - 3 / 6)) / 2)
    majority = found.majority(4)
    assert majority is not None and majority.value == 0.5 and figures["majority_at"]["4"][0] == 0.5
    two = found.majority(2)  # two votes a problem: 7 7 and 8 9; then a tie of 7 with 5, and 5 5
    assert two is not None and two.value == ((1 + 0) / 2 + (0.5 + 0) / 2) / 2
    assert isclose(two.high - two.value, 1.96 * sqrt(0.03125 / 2))  # s^2 of 0.5 and 0.25
    assert rows(found)[1]["finals"] == ["7", "5", "5", "5"] and rows(found)[0]["solved"] == [True, True, False, False]


def test_no_final_answers_no_majority() -> None:
    for finals in ([], [[None, None]]):
        found = evaluation([[1, 0]], finals)
        assert found.majority(2) is None and "finals" not in rows(found)[0]
    assert (
        "majority_at" in summarise(evaluation([[1, 0], [0, 0]], []))
        and not summarise(evaluation([[1, 0], [0, 0]], []))["majority_at"]
    )


def test_an_answer_judged_both_ways_votes_apart() -> None:
    # the score looks at more than the answer: 7 was paid once and refused once, so 8 has the most votes
    found = evaluation([[1, 0, 0, 0]], [["7", "7", "8", "8"]]).majority(4)
    assert found is not None and found.value == 0.0


def test_failures_are_in_no_average() -> None:
    found = evaluation([[1, None], [1, 1]], [["7", "7"], ["7", "7"]])
    assert found.passed(1).value == 1.0 and found.failed == 1
    majority = found.majority(2)
    assert majority is not None and majority.value == 1.0
    with pytest.raises(UserError, match="could not be scored"):
        evaluation([[1, None]], []).passed(1)


def test_leaving_problems_out() -> None:
    found = evaluation([[1, 1], [0, 0]], [["7", "7"], ["8", "8"]])
    clean = found.without([False, True])
    assert clean is not None and clean.problems == 1 and clean.finals == (("7", "7"),)
    assert found.without([True, True]) is None


def test_saved_rows_tell_the_share_solved() -> None:
    found = evaluation([[1, 0]], [])
    assert solved_share(rows(found)[0]) == 0.5
    assert solved_share({"outcomes": ["correct", "pass", "wrong", "timeout"]}) == 0.5
