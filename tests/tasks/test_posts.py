"""The simulated people who compare summaries: points by hand, posts of the two splits, and a judge made of their rules."""

from __future__ import annotations

import pytest

from posttrain.rewards.judge import Judge
from posttrain.stages._judged import RuleJudge
from posttrain.tasks.base import validate
from posttrain.tasks.posts import Posts

POST = "cat fire job sun"


def test_demonstrations_of_writer_and_reader_earn_the_full_score() -> None:
    for annotator in ("writer", "reader"):
        validate(Posts(annotator=annotator))  # type: ignore[arg-type]


def test_people_write_one_to_three_facts_of_the_post_and_miss_what_is_important() -> None:
    task, counts, values = Posts("any"), set(), []
    for problem in task.problems("train")[:300]:
        score = task.score(problem, task.demonstration(problem))
        assert score.parts["invented"] == 0 and score.value is not None
        counts.add(score.parts["facts"])
        values.append(score.value)
    assert counts == {1, 2, 3} and 0.6 < sum(values) / 300 < 0.8


def test_no_post_is_in_both_splits() -> None:
    train, test = ({p.question for p in Posts().problems(split)[:500]} for split in ("train", "test"))
    assert len(train) > 450 and not train & test


def test_a_judge_of_rules_is_asked_as_others_are_and_errs_as_it_is_told() -> None:
    good, bad = "fire, job.", "cat."
    exact = Judge(RuleJudge(Posts()))
    assert [v.winner for v in exact.compare([(POST, good, bad), (POST, bad, good), (POST, good, good)])] == ["A", "B", "tie"]
    assert [s.value for s in exact.points(POST, [good, "none"])] == pytest.approx([1.0, 0.0])
    biased = Judge(RuleJudge(Posts(), position_bias=0.45))
    near = biased.compare([(POST, "fire.", good), (POST, good, bad)])
    assert [(v.winner, v.agreed) for v in near] == [("tie", False), ("A", True)], "only what is near is decided by the order"
    posts = [(f"fire cat {n}", "fire.", "cat.") for n in range(60)]
    wrong = Judge(RuleJudge(Posts(), noise=100.0)).compare(posts)
    assert all(v.agreed for v in wrong) and 15 < sum(v.winner == "A" for v in wrong) < 45, "an error is the same in both orders"
