"""The simulated people who compare summaries: points by hand, posts of the two splits, and a judge made of their rules."""

from __future__ import annotations

import pytest

from posttrain.rewards.judge import Judge
from posttrain.tasks._rules import RuleJudge
from posttrain.tasks.base import validate
from posttrain.tasks.posts import Posts, facts_of

POST = "*rain -tea +job *dog -cat"


def test_demonstrations_of_writer_and_reader_earn_the_full_score() -> None:
    for annotator in ("writer", "reader"):
        validate(Posts(annotator=annotator))  # type: ignore[arg-type]


def test_people_write_one_to_three_facts_of_the_post_and_stress_what_is_stressed() -> None:
    task, counts, points, given = Posts("any"), set(), [], []
    for problem in task.problems("train")[:300]:
        facts, said = facts_of(problem.question), facts_of(task.demonstration(problem))
        assert said.items() <= facts.items()
        counts.add(len(said))
        points.append(sum(said.values()) / len(said))
        given.append(sum(facts.values()) / len(facts))
    assert counts == {1, 2, 3} and sum(points) / 300 > sum(given) / 300 + 0.1


def test_no_post_is_in_both_splits() -> None:
    train, test = ({p.question for p in Posts().problems(split)[:500]} for split in ("train", "test"))
    assert len(train) == 500 and not train & test


def test_a_judge_of_rules_is_asked_as_others_are_and_errs_as_it_is_told() -> None:
    good, bad = "*rain *dog +job.", "-tea."
    exact = Judge(RuleJudge(Posts()))
    assert [v.winner for v in exact.compare([(POST, good, bad), (POST, bad, good), (POST, good, good)])] == ["A", "B", "tie"]
    assert [s.value for s in exact.points(POST, [good, "none"])] == pytest.approx([1.0, 0.0])
    biased = Judge(RuleJudge(Posts(), position_bias=0.3))
    near = biased.compare([(POST, "*rain *dog.", good), (POST, good, bad)])
    assert [(v.winner, v.agreed) for v in near] == [("tie", False), ("A", True)], "only what is near is decided by the order"
    wrong = Judge(RuleJudge(Posts(), noise=100.0)).compare([(f"*rain +job -n{n}", "*rain.", "+job.") for n in range(60)])
    assert all(v.agreed for v in wrong) and 15 < sum(v.winner == "A" for v in wrong) < 45, "an error is the same in both orders"
