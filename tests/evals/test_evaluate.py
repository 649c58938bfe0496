"""Figures of an evaluation, on groups made by hand."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

import pytest
from material_for_tests import rollout, segment

from posttrain.errors import UserError
from posttrain.evals.evaluate import Evaluation, compare_rows, same_problems, solved_share
from posttrain.evals.statistics import share_interval, wilson
from posttrain.stages.evaluate import rows, summarise
from posttrain.types import Group, Problem, Score


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
    assert two == share_interval([0.5, 0.25], means=True)
    assert rows(found)[1]["finals"] == ["7", "5", "5", "5"] and rows(found)[0]["solved"] == [True, True, False, False]


def test_as_many_as_were_sampled_is_among_the_ks() -> None:
    found = summarise(evaluation([[1, 0, 0, 0, 0, 0], [0] * 6], [["7"] * 6, ["8"] * 6]))
    assert [*found["pass_at"]] == ["1", "2", "4", "6"] and [*found["majority_at"]] == ["4", "6"]
    assert found["pass_at"]["6"][0] == 0.5, "at least one of six: of the first problem, not of the second"


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


def test_scores_that_are_more_than_right_or_wrong_are_also_averaged() -> None:
    """A task of one's own that pays 6 points is not just 100% right, nor one that pays a half 0%."""
    assert set(evaluation([[1.0, 0.0], [None, 1.0]], []).headlines(True)) == {"accuracy"}
    for value in (6.0, 0.5, -1.0):
        found = evaluation([[value, value], [value, None]], []).headlines(True)
        assert [*found] == ["reward", "accuracy"] and found["reward"].value == value


def test_an_episode_that_ends_by_name_does_not_hide_its_points() -> None:
    """An illegal move for -1, or turns that paid 0.4: the accuracy, 0, is not the mean reward, and must not decide alone."""
    one, right = group("p", [-1.0]), group("q", [0.7])
    for outcome, paid, value, names in (
        ("illegal move", 0.0, -1.0, ["reward", "accuracy"]),
        ("illegal move", 0.4, 0.4, ["reward", "accuracy"]),
        ("illegal move", 0.0, 0.0, ["accuracy"]),
        ("wrong answer", 0.0, 0.5, ["accuracy"]),  # the share of tests passed
    ):
        (first, turn), score = one.rollouts[0].segments, Score(value, outcome=outcome)
        ended = replace(one.rollouts[0], score=score, segments=(first, replace(turn, reward=paid)))
        assert [*Evaluation((replace(one, rollouts=(ended,)),)).headlines(True)] == names
    graded = replace(right.rollouts[0], score=Score(0.7, outcome="correct"))
    assert [*Evaluation((replace(right, rollouts=(graded,)),)).headlines(True)] == ["accuracy"]


def test_leaving_problems_out() -> None:
    found = evaluation([[1, 1], [0, 0]], [["7", "7"], ["8", "8"]])
    clean = found.without([False, True])
    assert clean is not None and clean.problems == 1 and clean.finals == (("7", "7"),)
    assert found.without([True, True]) is None


def test_saved_rows_tell_the_share_solved() -> None:
    found = evaluation([[1, 0]], [])
    assert solved_share(rows(found)[0]) == 0.5
    assert solved_share({"outcomes": ["correct", "pass", "wrong", "timeout"]}) == 0.5


def test_problems_with_the_same_prompt_are_one_observation() -> None:
    """29 prompts asked 17 times: the interval is that of 29 problems, for every figure."""
    once = evaluation([[n % 2] for n in range(29)], [])
    copies = tuple(Group(replace(g.problem, id=f"{g.problem.id}/{n}"), g.rollouts) for g in once.groups for n in range(17))
    many = Evaluation(copies)
    assert many.accuracy == once.accuracy == wilson(14, 29) and many.reward == once.reward == wilson(14, 29)


def test_rewards_between_0_and_1_stay_there_and_never_collapse() -> None:
    found = evaluation([[1.0]] * 9 + [[0.99]], []).reward
    assert found is not None and found == wilson(9.99, 10) and found.low < 0.8 and found.high <= 1.0
    odd = evaluation([[1.0], [3.0]], []).reward
    assert odd is not None and odd.row() == pytest.approx([2.0, 2 - 12.7062, 2 + 12.7062], abs=1e-3)


def test_different_numbers_of_problems_are_compared_on_those_of_both() -> None:
    before, after = rows(evaluation([[0], [0], [1]], [])), rows(evaluation([[1], [0], [1], [1], [1]], []))
    pairs = same_problems(before, after)
    assert [(a["problem"], b["problem"]) for a, b in pairs] == [("p0", "p0"), ("p1", "p1"), ("p2", "p2")]
    found = compare_rows(pairs)
    assert found is not None and (found.wins, found.losses, found.ties) == (1, 0, 2)
    assert compare_rows([]) is None and compare_rows(same_problems(rows(evaluation([[None]], [])), after)) is None
    moved = [{**row, "question": "another"} for row in after]
    assert same_problems(before, moved) == []


def test_roles_of_an_episode_are_counted_and_compared_apart() -> None:
    def both(solver: list[list[float | None]], critic: list[list[float | None]]) -> Evaluation:
        sides = {"solver": evaluation(solver, []), "critic": evaluation(critic, [])}
        return Evaluation(tuple(replace(g, role=role) for role, side in sides.items() for g in side.groups))

    before, after = both([[0], [0], [0]], [[1], [1], [None]]), both([[1], [0], [0]], [[1], [1], [1]])
    assert summarise(after)["parts"] == {"critic": wilson(3, 3).row(), "solver": wilson(1, 3).row()}
    assert summarise(before)["parts"]["critic"] == wilson(2, 2).row() and not summarise(evaluation([[1], [0]], []))["parts"]
    found = compare_rows(same_problems(rows(before), rows(after)))
    assert found is not None and found.difference.value == 1 / 5, "of five pairs, none of two roles"
