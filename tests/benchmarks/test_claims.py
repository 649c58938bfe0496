"""The claims of docs/experiments.md: their toy tasks, their arms, and the table of what was found."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
from scripts_for_tests import ROOT, load_script

from posttrain.errors import UserError
from posttrain.tasks.base import validate


@pytest.fixture(scope="module")
def arms() -> ModuleType:
    return load_script("benchmarks/claim_arms.py")


@pytest.fixture(scope="module")
def claims() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))  # its neighbours
    try:
        return load_script("benchmarks/claims.py")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_demonstrations_of_the_toys_score_1(arms: ModuleType) -> None:
    for task in (
        arms.Direct(level=3),
        arms.Carried(level=3),
        arms.Ruled(level=2, min_level=2),
        arms.Search(style="direct"),
        arms.Search(),
    ):
        validate(task, count=20)


def test_a_wrong_search_has_the_habits_and_never_the_answer(arms: ModuleType) -> None:
    task = arms.Search(style="wrong")
    scores = [task.score(p, task.demonstration(p)) for p in task.problems("train")[:50]]
    assert {score.outcome for score in scores} == {"wrong"}
    assert sum(score.parts["back_track"] for score in scores) > 50 > 1 > sum(score.parts["check"] for score in scores)


def test_a_rule_changes_what_x_stands_for_and_not_the_side_of_a_sum(arms: ModuleType) -> None:
    sides = {}
    for split in ("train", "test"):
        problems = [p for rule in (3, 7) for p in arms.Ruled(level=2, min_level=2, rules=(rule,)).problems(split)[:200]]
        sides[split] = {frozenset((p.facts["a"], p.facts["b"])) for p in problems}
        for p in problems:
            rule, question = p.question[2], p.question[4:]
            assert question.replace("x", rule) == f"{p.facts['a']}+{p.facts['b']}=" and rule not in question
    assert not sides["train"] & sides["test"]


def test_every_attempt_is_worth_what_it_says(arms: ModuleType) -> None:
    task = arms.Search()
    problem = task.problems("train")[0]
    tried = arms.attempts(tuple(problem.facts["numbers"]))
    assert any(a.value == problem.facts["target"] for a in tried)
    for attempt in tried:
        right = attempt.value == problem.facts["target"]
        assert task.score(problem, "#" + attempt.expression).solved == right


def test_answers_in_words_are_read_from_the_last_line(arms: ModuleType) -> None:
    task = arms.CountdownInWords()
    problem = task.problems("train")[0]
    assert task.score(problem, f"I try. Answer: 1\nWait. Answer: `{problem.answer} = {problem.facts['target']}`.").solved
    assert task.score(problem, problem.answer).outcome == "unparseable"


def test_arms_of_a_claim_begin_with_the_same_base_but_where_the_base_is_the_claim(arms: ModuleType, claims: ModuleType) -> None:
    for number, claim in claims.CLAIMS.items():
        made = [getattr(arms, claim.function)(arm=arm).stages for arm in claim.arms]
        assert len({repr(stages[0]) for stages in made}) == (1 if number not in (1, 3, 6, 11) else len(made)), number
        for arm, stages in zip(claim.arms, made, strict=True):
            names = {stage.name for stage in stages}
            missing = {column.stage for column in claim.columns} - names
            assert not missing or claim.function == "thinking", (arm, missing)


def test_an_unknown_arm_is_refused_with_those_there_are(arms: ModuleType) -> None:
    with pytest.raises(UserError, match="no arm 'none'; there are dpo, iterative_dpo, grpo"):
        arms.explore(arm="none")


def test_a_table_has_means_with_intervals_and_seeds_and_says_what_stopped(claims: ModuleType, tmp_path: Path) -> None:
    rows = [
        {"claim": 7, "arm": "grpo", "seed": 0, "stopped": "", "figures": {"accuracy after": [0.5, 0.4, 0.6]}, "curves": {}},
        {"claim": 7, "arm": "grpo", "seed": 1, "stopped": "", "figures": {"accuracy after": [0.7, 0.6, 0.8]}, "curves": {}},
        {"claim": 7, "arm": "dpo", "seed": 1, "stopped": "TimeoutExpired", "figures": {}, "curves": {}},
    ]
    lines = claims.table(7, rows)
    assert lines[:2] == ["| arm | figure | after |", "|---|---|---|"]
    assert "| grpo | accuracy | 0.600 [0.000, 1.000] (0.500, 0.700) |" in lines
    assert "- dpo, seed 1 stopped: TimeoutExpired" in lines
    rows += [{**rows[0], "arm": "dpo", "figures": {"accuracy after": [0.2, 0.1, 0.3]}}]
    rows += [{**rows[1], "arm": "dpo", "figures": {"accuracy after": [0.3, 0.2, 0.4]}}]
    rows[1]["figures"]["accuracy before"] = [0.1, 0.0, 0.2]
    lines = claims.table(7, rows)
    assert "| grpo | accuracy | 0.100 (none, 0.100) | 0.600 [0.000, 1.000] (0.500, 0.700) |" in lines
    assert "| grpo - dpo | accuracy |  | +0.350 [-0.285, +0.985] (+0.300, +0.400) |" in lines
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n<!-- claim 7 -->\nold\n<!-- end -->\n\nAfter.\n")
    claims.paste(page, {7: ["| new |", ""], 8: ["| not there |"]})
    assert page.read_text() == "Before.\n\n<!-- claim 7 -->\n\n| new |\n\n<!-- end -->\n\nAfter.\n"
    claims.draw(7, rows, tmp_path / "claim.png")
    assert (tmp_path / "claim.png").stat().st_size > 1000


def test_the_tables_of_the_page_are_those_of_the_rows(claims: ModuleType, tmp_path: Path) -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "claims.json").read_text())["rows"]
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "experiments.md").read_text())
    claims.paste(page, {n: claims.table(n, [row for row in rows if row["claim"] == n]) for n in claims.CLAIMS})
    assert page.read_text() == (ROOT / "docs" / "experiments.md").read_text()


def test_carried_sums_carry_on_both_sides_of_the_split(arms: ModuleType) -> None:
    for split in ("train", "test"):
        problems = arms.Carried(level=3, min_level=3).problems(split)[:50]
        assert all(arms.carries("+", p.facts["a"], p.facts["b"]) for p in problems), split


def test_budgeted_sums_have_every_number_of_digits_in_turn_and_answer_when_the_work_is_cut(arms: ModuleType) -> None:
    task = arms.Budgeted(level=4, min_level=2, budget=5)
    assert [p.level for p in task.problems("test")[:6]] == [2, 3, 4, 2, 3, 4]

    class Said:
        """A policy that works one digit out and, asked for the answer, gives it."""

        given: ClassVar[list[object]] = []

        async def __call__(self, text: object = None, last: bool = False, *, max_new_tokens: int = 0) -> object:
            self.given.append((text, max_new_tokens))
            return SimpleNamespace(text="132" if text else "75012")

        def rollout(self, answer: str) -> str:
            return answer

    assert asyncio.run(task.run(task.problems("test")[0], Said())) == "75012#132"
    assert Said.given == [(None, 5), ("#", 16)]


def test_wrong_work_has_one_wrong_digit_and_a_wrong_answer(arms: ModuleType) -> None:
    task = arms.Slipped(level=3, min_level=3)
    for problem in task.problems("train")[:50]:
        slipped, right = task.demonstration(problem), arms.Arithmetic(level=3).demonstration(problem)
        assert sum(a != b for a, b in zip(slipped, right, strict=True)) == 2
        judged = task.score(problem, slipped)
        assert not judged.solved and judged.parts["format"] == 1.0 and abs(judged.parts["steps"] - 2 / 3) < 1e-9
