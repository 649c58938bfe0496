"""Steps of arithmetic: verdicts by hand, what a policy could try, the scratchpads, and GRPO's process supervision on them."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.errors import UserError
from posttrain.ops.advantages import process_advantages
from posttrain.rewards.arithmetic_steps import LIMIT, arithmetic_steps, statements
from posttrain.rewards.compose import Gate, Part
from posttrain.rewards.format import format
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.jsonl import Jsonl
from posttrain.train.pack import pack_groups
from posttrain.types import Group, Problem, Rollout, Score, Segment

PENS = "A shop has 3 boxes of 4 pens and sells 5 of the pens at $2 each. What is the rest worth?"  # 14


def verdicts(response: str, question: str = PENS, answer: str = "14") -> list[float]:
    """Of the steps; the answer's own comes last and is left off."""
    return [value for _, value in arithmetic_steps(question, response, answer).steps[:-1]]


CASES: list[tuple[str, list[float], float]] = [
    # response, verdicts of its steps, value
    ("3*4 = 12\n12-5 = 7\n7*2 = 14\n\\boxed{14}", [1, 1, 1], 1.0),
    ("Step 1: 3 × 4 = 12 pens.\n2. 12 − 5 = 7\n- so $7 \\times 2 = $14.\n\\boxed{14}", [1, 1, 1], 1.0),
    ("3 x 4 = 12, 12 - 5 = 7\n(12-5)*2 = 14\n\\boxed{14}", [1, 1], 1.0),  # 7 is not needed, 12 is: one line, one step
    ("(3*4 - 5)*2 = 14\n\\boxed{14}", [1], 1.0),
    ("<<3*4=12>>12 pens\nthe rest = 12-5 = 7\n\\(7*2 = 14\\)\n\\boxed{14}", [1, 1, 1], 1.0),
    ("(3*4 - 5)*2 = 7*2 = 14\n\\boxed{14}", [1], 1.0),
    ("14 = (3*4 - 5)*2\n\\boxed{14}", [1], 1.0),
    ("3*4 = 13\n12-5 = 7\n7*2 = 14\n\\boxed{14}", [0, 1, 1], 2 / 3),  # 12-5 works with the question's 5
    ("3*4 = 12\n12-5 = 8\n8*2 = 16\n\\boxed{16}", [0, 1], 0.0),
    ("3*4 = 12 - 5 = 7\n7*2 = 14\n\\boxed{14}", [0, 1], 0.5),  # a run-on: 3*4 is not 7
    ("\\boxed{14}", [], 0.0),  # a bare answer is no work
    ("3*4 = 12\n12-5 = 7\n7*2 = 14\n", [], 0.0),  # work that leads to no answer
]


@pytest.mark.parametrize(("response", "expected", "value"), CASES)
def test_by_hand(response: str, expected: list[float], value: float) -> None:
    assert verdicts(response) == expected
    assert arithmetic_steps(PENS, response, "14").value == pytest.approx(value)


FORMS = [
    "Total: {}",
    "Total:\t{}",
    "**Total:** {}",
    "- Total: {}",
    "**Total: {}**",
    "**{}**",
    "Day 2: {}",
    "({})",
    "Total: ({}).",
    "= ({})",
]


@pytest.mark.parametrize("form", FORMS)
def test_labels_bold_type_and_parentheses_around_a_statement(form: str) -> None:
    def value(statement: str, more: str = "") -> float | None:
        return arithmetic_steps(
            "One costs 10, the other 20. Both?", f"{form.format(statement)}\n{more}\n\\boxed{{30}}", "30"
        ).value

    assert value("10+20 = 30") == value("(10 + 20)*1 = 30") == 1.0
    assert value("10+20 = 31", "10+20 = 30") == 0.5, "a false one is punished there too"


HONEST = "3*4 = 12\n12-5 = 7\n7*2 = 14\n\\boxed{14}"
PADDING = [
    "7 = 7\n" * 50,
    "1+1 = 2\n2+2 = 4\n100-1 = 99\n",  # true, and about nothing
    "3*4 = 12\n" * 20,  # said again
    "12*1 = 12\n7+0 = 7\n",  # nothing new
    "3+1 = 4\n4-1 = 3\n",  # in circles
    "3+100 = 103\n103+5 = 108\n",  # from the question, and nowhere to
    "1/3 + 1/6 = 1/2\n5-3 = 2\n",
    "two and two = four\n= 7\n7 =\n= =\n((( = )))\n2**3 = 8\n7//2 = 3\n",  # cannot be read
    # parts of something else:
    "12:30 = 4\nx^2 = 4\n5! = 120\n2x = 6\nx2 = 4\n3 apples + 4 = 7\n3 and 4 = 7\n12*3 = 3 dozen\n= 7\\%\nx_1 = 5\n2 = 2x\n",
    "12 : 4 = 3\n2 ^ 3 = 8\nx ^ 2 = 4\n2 ** 3 = 8\nx**2 + 1 = 5\nf(3 = 4)\n(3+4 = 8)*2\n",
    "because of this, we go on\n",
]


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("where", ["before", "after"])
def test_padding_is_neither_paid_nor_punished(padding: str, where: str) -> None:
    padded = padding + HONEST if where == "before" else HONEST.replace("\\boxed", f"{padding}\\boxed")
    found, plain = arithmetic_steps(PENS, padded, "14"), arithmetic_steps(PENS, HONEST, "14")
    assert found.value == plain.value == 1.0
    assert sum(v for _, v in found.steps) == sum(v for _, v in plain.steps) == 4.0
    assert all(v == 1.0 for _, v in found.steps)


FALSE = [
    "3*4 = 13",
    "7 = 8",
    "1/0 = 5",
    "0.1+0.2 = 0.3000001",
    "10/3 = 3.33",
    "3*4 = 12 = 13",
    "9999999999*9999999999 = 1",
    "-5 = 5",
]


@pytest.mark.parametrize("line", FALSE)
def test_a_false_statement_costs_wherever_it_stands(line: str) -> None:
    for response in (f"{line}\n{HONEST}", HONEST.replace("\\boxed", f"{line}\n\\boxed")):
        assert 0.0 in verdicts(response)
        assert arithmetic_steps(PENS, response, "14").value == pytest.approx(3 / 4)


def test_steps_that_do_not_lead_to_the_answer_are_not_paid() -> None:
    """All true, all from the question; the answer was guessed, or is another's."""
    assert verdicts("3*4 = 12\n12+5 = 17\n\\boxed{14}") == []
    assert arithmetic_steps(PENS, "3*4 = 12\n12+5 = 17\n\\boxed{14}", "14").value == 0.0
    wrong = arithmetic_steps(PENS, "3*4 = 12\n12+5 = 17\n\\boxed{17}", "14")
    assert (wrong.value, wrong.steps[-1][1], wrong.outcome) == (0.0, 0.0, "wrong")


def test_the_long_way_is_paid_for_so_many_steps_and_no_more() -> None:
    walk = "".join(f"{n}+1 = {n + 1}\n" for n in range(100, 160))
    score = arithmetic_steps("What is 100 and 60?", walk + "\\boxed{160}", "160")
    assert sum(v for _, v in score.steps) == 20 + 1 and score.parts["idle"] == 40


def test_an_error_is_not_built_upon() -> None:
    """8 comes from an error, so what follows from it alone is not right, though true."""
    assert verdicts("12+4 = 18\n18+18 = 36\n\\boxed{36}", "What is 12 and 4, twice?", "36") == [0]


def test_a_gold_answer_that_cannot_be_read_is_a_failure() -> None:
    assert arithmetic_steps(PENS, HONEST, "").value is None
    for settings, complaint in (
        ({"form": "x"}, "form is one of"),
        ({"separator": ""}, "separator"),
        ({"max_steps": 0}, "at least 1"),
        ({"form": "columns"}, "questions such as 47"),
    ):
        with pytest.raises(UserError, match=complaint):
            arithmetic_steps(PENS, HONEST, "14", **settings)  # type: ignore[arg-type]


NUMBERS = st.fractions(min_value=-999, max_value=999, max_denominator=9)


@given(NUMBERS, NUMBERS, st.sampled_from("+-*"), st.integers(-3, 3))
def test_a_statement_is_true_exactly_where_the_numbers_are(a, b, sign: str, off: int) -> None:
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    (found,) = statements(f"so ({a}){sign}({b}) = {value + off}", "\n")
    assert (found.result is not None) == (off == 0)


@given(st.text(alphabet="0123456789+-*/=(). ,\n%$x", max_size=300))
def test_any_text_has_a_score(text: str) -> None:
    score = arithmetic_steps(PENS, text + "\\boxed{14}", "14")
    assert score.valid and 0.0 <= (score.value or 0.0) <= 1.0
    assert [p for p, _ in score.steps] == sorted({p for p, _ in score.steps}), "positions in order, none twice"


def test_hostile_texts_take_no_time() -> None:
    texts = [
        "=" * LIMIT,
        "1=" * LIMIT,
        "1+" * LIMIT + "=1",
        "(" * LIMIT,
        "9" * LIMIT + "=9",
        "1/0=1\n" * LIMIT,
        "x " * LIMIT,
        ",1=1" * LIMIT,
    ]
    texts += [f"{'9' * 90}*{'9' * 90} = 1\n" * 500, "((((((((1))))))))=1\n" * 9000]
    began = time.process_time()
    for text in texts:
        assert arithmetic_steps(PENS, text, "14").valid
    assert time.process_time() - began < 5


@pytest.mark.parametrize("steps", ["short", "spelled"])
@pytest.mark.parametrize("operation", ["+", "-"])
def test_scratchpads_of_the_arithmetic_task(operation: str, steps: str) -> None:
    task = Arithmetic(operation=operation, level=4, steps=steps)
    for level in task.levels:
        for problem in task.problems("test", level)[:20]:
            text = task.demonstration(problem)
            score = arithmetic_steps(problem.question, text, problem.answer, "columns", ",", "#")
            assert score.value == 1.0 and len(score.steps) == level + 1
            assert [p for p, _ in score.steps] == [*(i for i, c in enumerate(text) if c in ",#"), len(text)]


COLUMNS = [
    # 958 + 467 = 1425: 8+7=15, 5+6+1=12, 9+4+1=14
    ("87015,56112,94114#1425", [1, 1, 1, 1]),
    ("87014,56112,94114#1424", [0, 1, 1, 0]),  # a slip in the digit
    ("87005,56011,94114#1415", [0, None, 1, 0]),  # a lost carry: the next step goes on from it
    ("87015,56011,94114#1415", [1, 0, 1, 0]),  # a carry that was written and not taken
    ("87015,87015,87015#1425", [1, 0, 0, 1]),  # the same step again: other digits were due
    ("87015,56112,94114,00101#1425", [1, 1, 1, None, 1]),  # nothing is left to add
    ("87015,,94114#1425", [1, 0, 1, 1]),
    ("8+7-0=15,56112,94114#1425", [0, 1, 1, 1]),
    ("87015,56112,94114", [1, 1, 1, 0]),
    ("#1425", [0, 1]),
]


@pytest.mark.parametrize(("text", "expected"), COLUMNS)
def test_columns_by_hand(text: str, expected: list[float | None]) -> None:
    score = arithmetic_steps("958+467=", text, "1425", "columns", ",", "#")
    ends = [i for i, c in enumerate(text) if c in ",#"] + [len(text)]
    if "#" not in text:  # the last column ends where the response does, and the worst counts
        ends, expected = ends[:-1] + ends[-1:], [*expected[:2], 0.0]
    assert list(score.steps) == [(end, v) for end, v in zip(ends, expected, strict=True) if v is not None]


def test_columns_with_a_borrow() -> None:
    assert arithmetic_steps("52-17=", "27015,51103#35", "35", "columns", ",", "#").value == 1.0
    assert [v for _, v in arithmetic_steps("52-17=", "27005,51103#35", "35", "columns", ",", "#").steps] == [0.0, 1.0, 1.0]


def rollout(sample: int, text: str, score: Score) -> Rollout:
    """A character a token, after a prompt of one token."""
    prompt = Segment(np.array([1]), "?", False, offsets=np.array([1]))
    said = Segment(np.arange(2, 2 + len(text)), text, True, np.zeros(len(text), np.float32), np.arange(1, len(text) + 1))
    return Rollout(Problem("1", "958+467="), sample, (prompt, said), score)


def test_process_supervision_learns_from_the_steps() -> None:
    """Two responses of a group, by hand: step rewards 1, 1, 1, 1 and 1, 0, 1, 0, mean 3/4. The first token of the wrong column of the
    second is worth less than any of the first."""
    texts = ["87015,56112,94114#1425", "87015,56011,94114#1415"]
    group = Group(Problem("1", "958+467="), tuple(
        rollout(n, text, arithmetic_steps("958+467=", text, "1425", "columns", ",", "#")) for n, text in enumerate(texts)
    ))  # fmt: skip
    batch = pack_groups([group], 1.0)
    assert batch.step_T is not None
    found_T = process_advantages(batch.step_T, batch.mask_T, batch.sequence_T, batch.group_N, ddof=0, epsilon=0.0).numpy()
    rewards = np.array([1, 1, 1, 1, 1, 0, 1, 0.0])
    normal = (rewards - rewards.mean()) / rewards.std()
    to_go = [
        normal[0:4].sum(),
        normal[1:4].sum(),
        normal[2:4].sum(),
        normal[3],
        normal[4:8].sum(),
        normal[5:8].sum(),
        normal[6:8].sum(),
    ]
    first = torch.arange(len(found_T))[batch.mask_T][[0, 6, 12, 18]].numpy()
    assert found_T[first] == pytest.approx(to_go[:4], abs=1e-5)
    second = first + len(texts[0]) + 1
    assert found_T[second[:3]] == pytest.approx(to_go[4:], abs=1e-5)
    assert found_T[second[1]] < 0 < found_T[first].min()


def test_as_a_tasks_reward_and_in_a_mix(tmp_path) -> None:
    file = tmp_path / "pens.jsonl"
    file.write_text("".join(f'{{"question": "{n} and 1", "answer": "{n + 1}"}}\n' for n in range(40)))
    task = Jsonl(str(file), reward="arithmetic_steps", options={"marker": "#"})
    problem = task.problems("train")[0]
    n = int(problem.answer) - 1
    assert task.score(problem, f"{n}+1 = {n + 1}\n#{n + 1}").steps[0][1] == 1.0
    mix = Gate(Part("format", lambda p, r, a: format(p, r, a, "{text}\\boxed{digits}")), Part("work", arithmetic_steps))
    assert mix(PENS, HONEST.replace("{14}", "14"), "14").parts["format"] == 1.0
