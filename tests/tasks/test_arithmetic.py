"""Arithmetic: its own work scores 1, wrong work does not, and no test pair is ever a train problem."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.errors import UserError
from posttrain.tasks.arithmetic import ALPHABET, Arithmetic, carries, numbered_pair, pair_count, pair_side
from posttrain.tasks.base import validate
from posttrain.types import Problem

ROOT = Path(__file__).parents[2]


def question(a: int, b: int, level: int, sign: str = "+") -> Problem:
    return Problem("x", f"{a}{sign}{b}=", str(a + b if sign == "+" else a - b), level, {"a": a, "b": b})


@pytest.mark.parametrize("operation", ["+", "-"])
@pytest.mark.parametrize("steps", ["short", "spelled"])
@pytest.mark.parametrize("weight", [0.0, 0.1, 1.0])
def test_its_own_work_scores_one(operation: str, steps: str, weight: float) -> None:
    task = Arithmetic(operation=operation, level=7, steps=steps, format_weight=weight)
    validate(task, "test", 30)
    validate(task, "train", 30)


def test_demonstrations_worked_by_hand() -> None:
    plus, minus = Arithmetic(), Arithmetic(operation="-")
    assert plus.demonstration(question(47, 85, 2)) == "75012,48113#132"
    assert plus.demonstration(question(999, 1, 3)) == "91010,90110,90110#1000"
    assert plus.demonstration(question(0, 0, 1)) == "00000#0"
    assert minus.demonstration(question(52, 17, 2, "-")) == "27015,51103#35"
    assert minus.demonstration(question(100, 1, 3, "-")) == "01019,00119,10100#99"
    assert Arithmetic(steps="spelled").demonstration(question(47, 85, 2)) == "7+5+0=12,4+8+1=13#132"


def test_forgotten_carries_are_shown_in_training_and_never_asked_for() -> None:
    task = Arithmetic(level=3, min_level=3, forgotten=1.0)
    shown = task.conversation(question(661, 696, 3))[-1].content
    assert shown == "16007,69015,66012#1257", "6 + 6 and no 1: the answer follows from the steps"
    assert task.demonstration(question(661, 696, 3)) == "16007,69015,66113#1357"
    assert task.score(question(661, 696, 3), shown).parts["steps"] == pytest.approx(2 / 3)
    half = [Arithmetic(level=3, min_level=3, forgotten=0.5), Arithmetic(level=3, min_level=3, carry="some")]
    sums = half[1].problems("train")[:400]
    right = sum(half[0].conversation(p)[-1].content == half[0].demonstration(p) for p in sums)
    assert 0.3 < right / len(sums) < 0.5, "one carry or two, each forgotten one time in two"
    with pytest.raises(UserError, match="forgotten is of sums; set operation="):
        Arithmetic(operation="-", forgotten=0.5)


def test_everything_is_written_in_the_alphabet() -> None:
    for operation in "+-":
        for steps in ("short", "spelled"):
            task = Arithmetic(operation=operation, level=5, steps=steps)
            for level in task.levels:
                for problem in islice(task.problems("train", level), 50):
                    assert set(problem.question + task.demonstration(problem)) <= set(ALPHABET) == set(task.alphabet)


def test_operands_have_exactly_the_levels_digits() -> None:
    for operation in "+-":
        task = Arithmetic(operation=operation, level=12)
        for level in task.levels:
            for split in ("train", "test"):
                for problem in islice(task.problems(split, level), 20):
                    a, b = problem.question.rstrip("=").split(operation)
                    assert len(a) == len(b) == level == problem.level
                    assert int(problem.answer) == (int(a) + int(b) if operation == "+" else int(a) - int(b)) >= 0


@pytest.mark.parametrize("operation", ["+", "-"])
@pytest.mark.parametrize("level", [1, 2])
def test_small_levels_are_split_without_overlap_and_without_gap(operation: str, level: int) -> None:
    task = Arithmetic(operation=operation, level=level)
    everything = {numbered_pair(operation, level, n) for n in range(pair_count(operation, level))}
    assert len(everything) == pair_count(operation, level)
    test = [(p.facts["a"], p.facts["b"]) for p in task.problems("test", level)]
    train = {(p.facts["a"], p.facts["b"]) for p in islice(task.problems("train", level), 40_000 if level == 2 else 2_000)}
    assert len(set(test)) == len(test) > 0
    assert not set(test) & train
    assert not {(b, a) for a, b in test} & train
    assert len(everything - set(test) - train) < 0.02 * len(everything)  # 40,000 draws leave few train pairs unseen
    assert set(test) == {pair for pair in everything if pair_side(operation, *pair) == "test"}


@pytest.mark.parametrize("operation", ["+", "-"])
@pytest.mark.parametrize("level", [3, 4])
def test_large_levels_never_repeat_a_test_question(operation: str, level: int) -> None:
    problems = Arithmetic(operation=operation, level=4).problems("test", level)
    seen = [p.question for p in islice(problems, 0, 6_000)]
    assert len(set(seen)) == len(seen)
    assert all(pair_side(operation, p.facts["a"], p.facts["b"]) == "test" for p in problems[:200])


def test_about_one_pair_in_five_is_test() -> None:
    share = sum(pair_side("+", a, b) == "test" for a in range(100, 200) for b in range(200, 300)) / 10_000
    assert 0.18 < share < 0.22


def test_seed_changes_the_draw_but_never_the_side() -> None:
    first, second = Arithmetic(seed=1, level=2), Arithmetic(seed=2, level=2)
    assert [p.question for p in first.problems("train")[:20]] != [p.question for p in second.problems("train")[:20]]
    assert {p.question for p in first.problems("test")} == {p.question for p in second.problems("test")}
    assert [p.question for p in first.problems("test")] != [p.question for p in second.problems("test")]


def test_same_problems_in_another_process_and_under_another_hash_seed() -> None:
    program = (
        "import json; from posttrain.tasks.arithmetic import Arithmetic; t = Arithmetic(level=5, seed=3);"
        "print(json.dumps([t.problems(s, l)[i].question for s in ('train', 'test') for l in t.levels for i in (0, 7)]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    outputs = [
        json.loads(
            subprocess.check_output([sys.executable, "-c", program], env={**environment, "PYTHONHASHSEED": seed}, text=True)
        )
        for seed in ("1", "2")
    ]
    task = Arithmetic(level=5, seed=3)
    here = [task.problems(s, level)[i].question for s in ("train", "test") for level in task.levels for i in (0, 7)]
    assert outputs == [here, here]


def test_problems_are_pinned() -> None:
    """The drawing of problems must not change silently: scores of old runs are about these."""
    task = Arithmetic(level=4)
    assert [p.question for p in task.problems("train")[:2]] == ["6255+7044=", "9359+9219="]
    assert [p.question for p in task.problems("test")[:2]] == ["5123+9659=", "1686+5653="]


def test_a_lazy_sequence_behaves_as_one() -> None:
    problems = Arithmetic().problems("train")
    assert len(problems) == 1_000_000
    assert problems[-1] == problems[999_999]
    assert list(problems[10:16:2]) == [problems[10], problems[12], problems[14]]
    assert len({p.id for p in problems[:500]}) == 500
    assert pickle.loads(pickle.dumps(problems))[5] == problems[5]  # noqa: S301
    with pytest.raises(IndexError):
        problems[1_000_000]


@pytest.mark.parametrize(
    ("response", "value", "formed", "outcome"),
    [
        ("75012,48113#132", 1, 1, "correct"),
        ("75012,48113#132\n", 1, 1, "correct"),
        ("99999,00000#132", 1, 0, "correct"),  # a carry of 9 is no carry
        ("00000,00000#132", 1, 1, "correct"),  # the steps are wrong but well formed
        ("#132", 1, 0, "correct"),
        ("75012#132", 1, 0, "correct"),
        ("75012,48113,00000#132", 1, 0, "correct"),
        ("#131#132", 1, 0, "correct"),
        ("75012,48113#131", 0, 1, "wrong"),
        ("#132#131", 0, 0, "wrong"),
        ("75012,48113#-132", 0, 1, "wrong"),
        ("75012,48113#0132", 0, 0, "unparseable"),
        ("75012,48113#+132", 0, 0, "unparseable"),
        ("75012,48113#132.", 0, 0, "unparseable"),
        ("75012,48113#132.0", 0, 0, "unparseable"),
        ("75012,48113#132 132", 0, 0, "unparseable"),
        ("75012,48113#１３２", 0, 0, "unparseable"),
        ("75012,48113#", 0, 0, "unparseable"),
        ("132", 0, 0, "unparseable"),
        ("", 0, 0, "unparseable"),
        ("#" + "9" * 1_000_000, 0, 0, "unparseable"),
    ],
)
def test_scores_by_hand(response: str, value: int, formed: int, outcome: str) -> None:
    score = Arithmetic(level=2).score(question(47, 85, 2), response)
    assert (score.value, score.outcome) == (value, outcome)
    assert (score.parts["answer"], score.parts["format"]) == (value, formed)
    mixed = Arithmetic(level=2, format_weight=0.25).score(question(47, 85, 2), response)
    assert mixed.value == 0.75 * value + 0.25 * formed


@pytest.mark.parametrize(
    ("response", "share"),
    [
        ("75012,48113#132", 1.0),
        ("75012,48012#122", 0.5),
        ("75012#132", 0.5),
        ("48113,75012#132", 0.0),
        ("#132", 0.0),
        ("", 0.0),
    ],
)
def test_steps_count_in_their_place(response: str, share: float) -> None:
    """47+85: the first step is 7+5+0=12, the second 4+8+1=13."""
    score = Arithmetic(level=2, steps_weight=0.4).score(question(47, 85, 2), response)
    assert score.parts["steps"] == share
    assert score.value == pytest.approx(0.4 * share + 0.6 * score.parts["answer"])
    assert score.solved == (score.parts["answer"] == 1.0)


def test_carry_restricts_training_problems_alone() -> None:
    for kind, handed_on in (("none", False), ("some", True)):
        task = Arithmetic(level=3, carry=kind)
        problems = [task.problems("train", 3)[i] for i in range(200)]
        assert {carries("+", p.facts["a"], p.facts["b"]) for p in problems} == {handed_on}
        assert all(pair_side("+", p.facts["a"], p.facts["b"]) == "train" for p in problems)
        assert [p.question for p in task.problems("test")[:50]] == [
            p.question for p in Arithmetic(level=3).problems("test")[:50]
        ]
    overflow = [p for p in Arithmetic(level=3, carry="none").problems("train", 3)[:200] if int(p.answer) > 999]
    assert overflow, "an overflow of the first digit is not a carry into the next"


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 18), st.data())
def test_steps_are_true_and_any_other_answer_is_wrong(level: int, data: st.DataObject) -> None:
    low = 10 ** (level - 1) if level > 1 else 0
    a, b = (data.draw(st.integers(low, 10**level - 1)) for _ in range(2))
    task, problem = Arithmetic(level=level), question(a, b, level)
    work, _, answer = task.demonstration(problem).partition("#")
    digits = ""
    carry = 0
    for step, x, y in zip(work.split(","), reversed(str(a)), reversed(str(b)), strict=True):
        assert step[:3] == f"{x}{y}{carry}"
        assert int(step[3:]) == int(x) + int(y) + carry
        carry, digits = int(step[3]), step[4] + digits
    assert int(f"{carry}{digits}") == int(answer) == a + b
    other = data.draw(st.integers(-(10**20), 10**20).filter(lambda n: n != a + b))
    assert task.score(problem, f"{work}#{other}").value == 0.0


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789+-=,# \n１x", max_size=40))
def test_any_text_gets_a_finite_score(response: str) -> None:
    score = Arithmetic(level=2).score(question(47, 85, 2), response)
    assert score.valid
    assert score.value in (0.0, 1.0)
    assert (
        (score.value == 1.0)
        == (score.outcome == "correct")
        == (response.rpartition("#")[2].strip() == "132" and "#" in response)
    )


@pytest.mark.parametrize(
    "bad",
    [
        {"operation": "*"},
        {"level": 0},
        {"min_level": 5},
        {"level": 19},
        {"steps": "long"},
        {"carry": "all"},
        {"steps_weight": 0.7, "format_weight": 0.4},
        {"format_weight": 1.5},
    ],
)
def test_bad_settings_are_refused_in_one_line(bad: dict[str, object]) -> None:
    with pytest.raises(UserError) as caught:
        Arithmetic(**bad)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_unknown_split_and_level_are_refused() -> None:
    with pytest.raises(UserError, match="'dev'"):
        Arithmetic().problems("dev")
    with pytest.raises(UserError, match="levels 1 to 4"):
        Arithmetic().problems("train", 5)
