"""GSM8K from files: gold answers, styles, what each style accepts as an answer, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from posttrain.errors import UserError
from posttrain.tasks.base import validate
from posttrain.tasks.gsm8k import Gsm8k

TRAIN = [
    {
        "question": f"Ann has {n} pears and buys {n} more. How many?",
        "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}",
    }
    for n in (700, 2, 3)
]
TEST = [{"question": "Bob sells 1200 eggs at $2. How many dollars?", "answer": "1200*2=<<1200*2=2400>>2,400\n#### 2,400"}]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "gsm8k-train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TRAIN))
    with gzip.open(tmp_path / "gsm8k-test.jsonl.gz", "wt") as out:
        out.write("".join(json.dumps(row) + "\n" for row in TEST))
    return str(tmp_path)


def test_gold_answers_and_worked_ones_without_the_calculators_notes(folder: str) -> None:
    task = Gsm8k(folder)
    assert [p.answer for p in task.problems("train")] == ["1400", "4", "6"]
    (held_out,) = task.problems("test")
    assert (held_out.answer, held_out.id) == ("2,400", "test/0")
    assert task.demonstration(held_out) == "1200*2=2,400\n\\boxed{2,400}"


def test_a_share_of_the_training_part_takes_the_tests_place(folder: str) -> None:
    task = Gsm8k(folder, held_out=0.5)
    sides = [{p.question for p in task.problems(split)} for split in ("train", "test")]
    assert all(sides) and not sides[0] & sides[1]
    assert sides[0] | sides[1] == {row["question"] for row in TRAIN}, "the test itself is in neither"
    with pytest.raises(UserError, match="held_out"):
        Gsm8k(folder, held_out=1.0)


@pytest.mark.parametrize("style", ["boxed", "thinking", "direct"])
def test_every_styles_own_demonstrations_score_one(folder: str, style: str) -> None:
    for split in ("train", "test"):
        validate(Gsm8k(folder, style=style), split)


def test_what_each_style_takes_as_the_answer(folder: str) -> None:
    said = ["\\boxed{2400}", "so it is $2,400 in all", "2400 dollars for 1200", "#### 2400", "\\boxed{2400} of 7", "none"]
    right = {"boxed": [1, 0, 0, 0, 1, 0], "thinking": [1, 1, 0, 1, 1, 0]}
    for style, expected in right.items():
        task = Gsm8k(folder, style=style)
        (problem,) = task.problems("test")
        assert [task.score(problem, response).value for response in said] == expected
    assert task.score(problem, "none").outcome == "unparseable"
    assert [task.final(response) for response in said] == ["2400", "2400", "1200", "2400", "2400", None]
    assert task.score(problem, "<think>it is 2400").outcome == "unparseable", "the reasoning never ended"


def test_the_form_earns_its_share_and_never_makes_a_wrong_answer_right(folder: str) -> None:
    task = Gsm8k(folder, format_weight=0.25)
    (problem,) = task.problems("test")
    scores = [task.score(problem, said) for said in ("\\boxed{2400}", "\\boxed{7}", "2400")]
    assert [s.value for s in scores] == [1.0, 0.25, 0.0]
    assert [(s.parts["answer"], s.parts["format"]) for s in scores] == [(1, 1), (0, 1), (0, 0)]
    assert [s.outcome for s in scores] == ["correct", "wrong", "unparseable"]
    with pytest.raises(UserError, match="format_weight"):
        Gsm8k(folder, format_weight=2)


def test_few_shot_and_direct(folder: str) -> None:
    task = Gsm8k(folder, style="direct", examples=2, system="Be brief.")
    messages = task.prompt(task.problems("train")[0])
    assert [m.role for m in messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [m.content for m in messages if m.role == "assistant"] == ["4", "6"], "a problem is not its own example"
    assert messages[-1].content == TRAIN[0]["question"]
    assert (
        Gsm8k(folder, style="thinking")
        .prompt(task.problems("test")[0])[0]
        .content.endswith("Think step by step before you answer.")
    )


def test_files_and_leaks(folder: str, tmp_path: Path) -> None:
    train = str(tmp_path / "gsm8k-train.jsonl")
    with pytest.raises(UserError, match="give test_data"):
        Gsm8k(train).problems("train")
    leaked = tmp_path / "leaked.jsonl"
    leaked.write_text(json.dumps(TRAIN[1] | {"question": TRAIN[1]["question"].upper() + " "}) + "\n")
    with pytest.raises(UserError, match="1 questions are also in the training part, such as that of test/0"):
        Gsm8k(train, str(leaked)).problems("test")
    with pytest.raises(UserError, match="holds none of gsm8k-train.jsonl"):
        Gsm8k(str(tmp_path.parent)).problems("train")
    with pytest.raises(UserError, match="there is no folder or file .*nowhere"):
        Gsm8k(str(tmp_path / "nowhere")).problems("test")
    with pytest.raises(UserError, match="style is one of"):
        Gsm8k(style="rhyme")
