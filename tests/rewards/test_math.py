r"""The math reward, case by case: what is right however it is written, and what some grader has been paid for."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.errors import UserError
from posttrain.rewards.math import MathReward, final_answer, grade, math
from posttrain.tasks.base import Task, validate
from posttrain.types import Problem, Score


def box(text: str) -> str:
    return rf"\boxed{{{text}}}"


RIGHT = [
    # gold, answer
    ("5", "5"), ("5", "5.0"), ("5", "5."), ("5", "+5"), ("-5", "−5"), ("5", r"\text{5}"), ("5", "five"), ("5", r"\left(5\right)"),
    ("5", "x = 5"), ("5", "5 = x"), ("7", "f(2) = 7"), ("12", r"AB = 12"), ("x=8", "8"), ("k=3", "k = 3.0"), ("5", r"\boxed{5}"),
    # numbers in their spellings
    ("1000", "1,000"), ("1000", "1{,}000"), ("1000", r"1\,000"), ("12,345", "12345"), ("2500", "2.5e3"),
    ("2500", r"2.5 \times 10^3"),
    (r"\$1{,}250.00", "1250"), ("1250", r"\$1,250"), (r"0.\overline{3}", "1/3"), ("1/3", r"0.\dot{3}"),
    (r"\frac{7}{30}", r"0.2\overline{3}"),
    (r"\frac12", "0.5"), ("0.5", r"\frac{2}{4}"), ("-\\frac{1}{2}", r"\frac{-1}{2}"), ("-\\frac{1}{2}", r"\frac{1}{-2}"),
    (r"\frac92", r"\tfrac{9}{2}"),
    (r"2\frac12", "2.5"), ("2.5", "2 1/2"), (r"1\frac{4}{5}", r"\frac95"), ("3:4", "3/4"), ("9:16", r"\frac{9}{16}"),
    ("1:2:3", "2:4:6"),
    # radicals, pi, complex numbers
    (r"2\sqrt{3}", r"\sqrt{12}"), (r"\frac{3}{\sqrt{10}}", r"\frac{3\sqrt{10}}{10}"), (r"\sqrt[7]{12}", "12^{1/7}"),
    (r"\frac{\pi}{2}", r"0.5\pi"),
    (r"5+4\sqrt3", r"4\sqrt{3}+5"), (r"\frac{1+\sqrt5}{2}", r"\frac12+\frac{\sqrt5}{2}"), ("i", r"\sqrt{-1}"),
    ("-1", r"e^{i\pi}"), ("3+4i", "4i+3"),
    (r"\sqrt[3]{-8}", "-2"), (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"), ("2^{4950}", "4^{2475}"), (r"\frac{1}{2^{98}}", "2^{-98}"),
    # expressions and equations
    ("x^2+2x+1", "(x+1)^2"), (r"\tan x", r"\frac{\sin x}{\cos x}"), ("2^{n-1}", r"\frac{2^n}{2}"), ("f(x)=x^2", "x^2"),
    ("xy", "yx"), ("abc", "bca"),
    ("x^2-1", "f(x) = (x-1)(x+1)"), ("y=-3x+30", "3x+y-30=0"), ("y=-3x+30", "-3x+30"), ("x+y=3", "2x+2y=6"),
    ("2x+y<3", "y<3-2x"), ("x_1+x_2", "x_{2}+x_{1}"),
    # collections, intervals, matrices
    (r"\{1,2,3\}", "3,2,1"), (r"\pm2", "2,-2"), (r"1\pm\sqrt5", r"1-\sqrt5, 1+\sqrt5"), (r"2, 3, \text{ and } 4", "4, 3, 2"),
    ("x=1,x=2", r"x=2 \text{ or } x=1"),
    ("1,2", "x=1, x=2"), ("x=5,y=6", "y=6, x=5"), (r"\{100,200\}", "100,200"), ("(100,200)", "(100, 200)"),
    (r"\emptyset", r"\{\}"), (r"60^\circ,120^\circ", "120, 60"),
    ("1<x<2", "(1,2)"), (r"[5,\infty)", r"x \ge 5"), (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>3"),
    (r"\mathbb{R}", r"(-\infty,\infty)"),
    (r"x \in [1,2]", "[1,2]"),
    (r"\begin{pmatrix} 1/3 \\ 2 \end{pmatrix}", r"\left[\begin{array}{c} \frac13 \\ 2 \end{array}\right]"),
    # units, percent, degrees, time, bases
    ("10", r"10\text{ cm}"), (r"21\text{ dogs}", "21"), (r"10\text{ m}", r"1000\text{ cm}"),
    (r"864 \mbox{ inches}^2", r"864\text{ sq in}"), (r"\$5", r"500\text{ cents}"),
    ("5000000", r"5\text{ million}"), (r"90^\circ", "90"), (r"-90^\circ", r"-90\text{ degrees}"), (r"50\%", r"50\%"),
    (r"50\%", r"\frac12"), (r"32\%", r"32\text{ percent}"),
    ("8:34 pm", "8:34"), (r"4\!:\!51 \text{ p.m.}", r"4:51\text{ PM}"), ("1011_2", r"1011_{2}"),
    ("-37_8", "-37_8"),
    (r"10\text{ m}", "10m"), ("24_{10}", "24"), ("9:16", "9/16"), (r"5\text{ km/h}", r"5\ \mathrm{km}/\mathrm{h}"),
    ("10", r"10\,\mathrm{m}"), ("0.5", r"{1 \over 2}"), (r"\pi", "π"), ("(1,2,3)", r"\langle 1, 2, 3 \rangle"),
    (r"\infty", r"\text{infinity}"), (r"\binom{n}{2}", r"{n \choose 2}"),
    # choices and words
    (r"\text{(A)}", "A"), (r"\text{(A)}", "a"), ("A", "(A)"), ("A", r"\textbf{(A)}"), (r"\text{(C)}", r"\textbf{(C)}\ 12"),
    (r"\text{A,C}", "C, A"), ("D, E", r"\text{D, E}"),
    (r"\text{Monday}", "monday"), ("ellipse", r"\text{an ellipse}"), (r"\text{October 30}", "October 30"),
    (r"\text{été}", r"\text{Été}"), (r"\mbox{four}", "4"),
]  # fmt: skip

WRONG = [
    # a second answer, a chain, a claim that names nothing
    ("5", "4, 5, 6"), ("5", r"5 \text{ or } 6"), ("5", r"\{5\}"), ("5", "[5]"), ("5", r"5 \cup 6"), ("5", "5, 5"),
    ("1,2", "1,2,2"), ("1,2", "1"), ("A", "A, B, C, D"),
    ("5", "x = 6 = 5"), ("5", "7 = 5"), ("5", "5 = 7"), ("5", "5 = 5"), ("5", "x = y = 5"), ("5", "2x = 5"), ("5", "x^2 = 5"),
    ("5", "x + y = 5"), ("x+y=3", "0 = 0"),
    ("5", r"6 \neq 5"), ("5", r"x \ge 5"), ("5", "x < 5"), ("x=5", "y=5"), ("x=5,y=6", "x=6,y=5"), ("x=5,y=6", "5,6"),
    ("x=5,y=6", "(5,6)"), ("A", r"\text{A or B}"),
    # a question restated
    ("144", "12^2"), ("4", "2+2"), ("3", r"\log_2 8"), ("1", r"\sin^2x+\cos^2x"), ("2", r"\lim_{x\to0}\frac{\sin2x}{x}"),
    ("12", r"\sqrt{144}"), ("6", "3!"), ("5", r"5 \cdot 1"),
    ("10", r"\binom{5}{2}"), ("5", r"\frac{\sqrt{50}}{\sqrt2}"), ("2", r"\frac{2\pi}{\pi}"), ("-1", "i^2"),
    ("-1", r"i \cdot i"), ("5", "|-5|"), ("8x", "4x+4x"), ("x^2", r"x \cdot x"),
    ("6", r"\frac{3}{\frac12}"), ("1", r"\sin 90^\circ"), ("1", r"\sum_{k=1}^{1} k"), ("4", "8^{2/3}"), ("1", "0^0"),
    ("x", "x+y-y"), ("5", r"\lfloor 5.5 \rfloor"),
    # numbers that are near
    (r"\frac13", "0.333333"), (r"\frac13", "0.33"), (r"\frac13", "0." + "3" * 60), (r"\pi", "3.14159265"),
    (r"\sqrt2", "1.41421356237309504880168872420969807856967187537694"),
    ("0", "0.0000001"), ("0", "10^{-7}"), ("10^{-10}", r"2 \cdot 10^{-10}"), (r"\pi \cdot 10^{-40}", r"2\pi \cdot 10^{-40}"),
    ("x^2", "x^2+0.0000000001"),
    ("12345678901234567890", "12345678901234567891"), ("12345678901234567890.5", "12345678901234567891.5"), (r"2\frac12", "1"),
    ("1.5", "1,5"), ("12:30", "0.4"), ("3:4", "4:3"),
    ("5", r"\frac{0}{0}"), ("0", r"\frac{0}{0}"), (r"\infty", r"-\infty"), (r"\infty", "9999999999"), ("1+10^{40}i", "2+10^{40}i"),
    # structure
    ("[1,2]", "(1,2)"), ("(1,2,3)", "(3,2,1)"), ("(5,6)", "5,6"), ("5,6", "(5,6)"), (r"\pm2", "2"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    ("2x+y<3", "2x+y>3"), ("2x+y<3", r"2x+y\le3"), ("1<x<2", "1<t<2"), (r"\{5\}", "5"), ("x", "X"), ("x+y=3", "x+y=4"),
    # units, percent, bases, time
    (r"10\text{ m}", r"10\text{ cm}"), (r"10\text{ m}", r"10\text{ m}^2"), (r"21\text{ dogs}", r"21\text{ cats}"),
    ("5", r"5\text{ million}"), ("5", r"5\text{ hundredths}"),
    ("5", r"5\text{ is wrong}"), ("5", r"5\text{ thirty}"), ("5", r"5\text{ pi}"), ("5", r"5\text{ x}"), ("5", "5x"),
    (r"50\%", "50"), ("50", r"50\%"), ("9", "1001_2"), ("1011_2", "11"), ("1011_2", "1011"),
    ("12:30", "12:31"), ("12:30", "2:5"), ("8:34 pm", "8:34 am"),
    ("7:20", "0.35"), ("0.35", "7:20"), ("5", r"5\text{ halves}"), ("5", r"5\text{ hundred-thousandths}"), (r"10\text{ m}", "10g"),
    # words
    (r"\text{Monday}", "yadnoM"), (r"\text{no}", "on"), ("no", "on"), ("ABC", "CBA"), (r"\text{是}", r"\text{否}"), ("A", "B"),
    ("A", "AB"), (r"\text{(A)}", r"\text{(A) or (B)}"),
    ("5", "None"), ("5", "nan"), ("5", "inf"), ("5", r"\emptyset"), (r"\text{even}", r"\text{even or odd}"),
]  # fmt: skip

BOMBS = [
    "9**9**9**9", r"\dfrac{5^{(5^{(5^{(5^5)})} - 4)} - 5}{16}", "10^{10^{10}}", "2^{30^{5}}", "((9^9)^{9999})^{9999}",
    "1000000!", "(((10!)!)!)!",
    r"\binom{10^9}{5\cdot10^8}", r"\int_0^1 \frac{\sin(x^{x^x})}{\log(1+x^x)}dx", "1e1000000000", "1e-1000000000", "9" * 5000,
    "1+" * 20000 + "1", r"\sqrt[10^{9}]{10^{9^{9}}}",
    r"e^{e^{e^{e^{e}}}}", r"\tan(10^{10^{5}})",
]  # fmt: skip

UNREADABLE = [
    "(" * 5000 + "5" + ")" * 5000, "(" * 500 + "5" + ")" * 500, "", " ", r"\text{}", "$$", "5 6", "5|6", r"\frac{1}{", "5 +",
    ")5(", "5{", "\\", "\0", "5\x00",
    "__import__('os').system('touch pwned')", r"\pi*__import__('os').getpid()", "[[__import__('os').getpid()]]",
    "{" * 60 + "5" + "}" * 60, "0.333...",
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_right_however_it_is_written(gold: str, answer: str) -> None:
    assert grade(box(answer), gold) == Score(1.0, outcome="correct")


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_wrong_however_near(gold: str, answer: str) -> None:
    assert grade(box(answer), gold) == Score(0.0, outcome="wrong")


def table() -> dict[str, list[tuple[str, str, str]]]:
    """(gold, answer, outcome) by class, from math_answers.txt."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    gold, pairs = "", list[tuple[str, str, str]]()
    for line in (Path(__file__).parent / "math_answers.txt").read_text().splitlines()[1:]:
        if line.startswith("# "):
            pairs = found.setdefault(line[2:], [])
        elif line.startswith(("= ", "! ")):
            pairs.append((gold, line[2:], "paid" if line[0] == "=" else "not paid"))
        elif line:
            gold = line
    return found


@pytest.mark.parametrize(("kind", "pairs"), table().items(), ids=table())
def test_answers_of_each_class(kind: str, pairs: list[tuple[str, str, str]]) -> None:
    verdicts = {1.0: "paid", 0.0: "not paid", None: "gold unreadable"}
    given = [(gold, answer, verdicts[grade(box(answer), gold).value]) for gold, answer, _ in pairs]
    assert [one for one, right in zip(given, pairs, strict=True) if one != right] == []


@pytest.mark.parametrize("gold", ["5", r"2^{10}", "10!", r"\binom{10}{3}", r"x^{x}", r"e^2"])
@pytest.mark.parametrize("answer", BOMBS)
def test_numbers_beyond_all_bounds_are_wrong(gold: str, answer: str) -> None:
    assert grade(box(answer), gold) == Score(0.0, outcome="wrong")


@pytest.mark.parametrize("answer", UNREADABLE)
def test_what_cannot_be_read(answer: str) -> None:
    score = grade(box(answer), "5")
    assert score.outcome == "unparseable"
    assert score.value == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "5",
        "I think 1 2 3 4 5",
        r"\boxed{5",
        "\\boxed{" * 50_000,
        "$" * 50_000,
        r"\boxed 5x",
        r"\boxed 5 million",
        r"\boxed 5.5x",
        r"boxed{5}",
    ],
)
def test_no_complete_box(response: str) -> None:
    assert grade(response, "5") == Score(0.0, outcome="unparseable")


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{5} wait no, \boxed{6}", "6"),
        (r"\boxed{5} then \boxed{6", "5"),
        (r"\boxed{5} or \boxed{6} or \boxed{7}", "5, 6, 7"),
        (r"\boxed{5}, $\boxed{6}$", "5, 6"),
        (r"$\boxed{5}$, that is $\boxed{5}$", "5"),
        (r"$\boxed{5}$, $\boxed{5}$", "5"),
        (r"\boxed{5}. \boxed{6}", "6"),
        (r"\boxed{5} \text{ and } \boxed{6}", "5, 6"),
        (r"{ open \boxed{\frac{1}{2}} } }", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed {5}", "5"),
        (r"$\boxed 5$.", "5"),
        (r"\boxed 3.5.", "3.5"),
        (r"$\boxed\frac12$", r"\frac12"),
        (r"\boxed 5 or \boxed 6", "5, 6"),
        (r"\boxed{5}, \boxed 6", "5, 6"),
        (r"the choice is \boxed B", "B"),
        (r"\fbox{5}", "5"),
        (r"\framebox{5}", "5"),
        (r"<think>\boxed{7}</think> I cannot solve it.", None),
        (r"<think>maybe \boxed{6}</think> so \boxed{7}", "7"),
        (r"<think>a</think>\boxed{1}<think>\boxed{2}</think>", None),
        (r"<think>\boxed{7} and on it goes", None),
        (r"so \boxed{5} " + "and that is all " * 500, "5"),
    ],
)
def test_where_the_answer_is_found(response: str, answer: str | None) -> None:
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    ("response", "gold", "outcome"),
    [
        (r"$\boxed{3\frac14}$, or $\boxed{\frac{13}{4}}$", r"\frac{13}{4}", "correct"),
        (r"\boxed{6}, \boxed{6.0}, \boxed{\text{six}}", "6", "correct"),
        (r"\boxed{3\frac14} or \boxed{\frac{15}{4}}", r"\frac{13}{4}", "wrong"),
        (r"\boxed{6} or \boxed{6.0} or \boxed{7}", "6", "wrong"),
        (r"\boxed{6.0} or \boxed{2, 7}", "2, 7", "wrong"),
    ],
)
def test_boxes_with_one_value_in_several_spellings(response: str, gold: str, outcome: str) -> None:
    assert grade(response, gold).outcome == outcome


def test_thinking_only_ends_where_the_format_says() -> None:
    response = r"<think>\boxed{7}</think>"
    assert grade(response, "7").outcome == "unparseable"
    assert grade(response, "7", MathReward(reasoning_end="")).outcome == "correct"
    assert grade(r"\boxed{6} [/R] \boxed{7}", "7", MathReward(reasoning_end="[/R]")).outcome == "correct"


@pytest.mark.parametrize(
    "gold", ["", "  ", "$$", r"\frac{1}{", r"\frac10", "(", r"\int_0^1 x", r"\unknown{3}", "9^{9^{9^9}}", "5 6", None]
)
@pytest.mark.parametrize("response", [box("5"), "", box("")])
def test_a_gold_answer_that_cannot_be_read_is_our_failure(gold: str | None, response: str) -> None:
    score = grade(response, gold)
    assert score.value is None
    assert score.outcome == "error"
    assert score.failure is not None and score.failure.startswith("gold answer cannot be read")


@pytest.mark.parametrize(
    ("reward", "gold", "answer"),
    [
        (MathReward(percent="bare"), r"50\%", "50"),
        (MathReward(percent="bare"), "50", r"50\%"),
        (MathReward(decimal_comma=True), "1.5", "1,5"),
        (MathReward(bases=True), "9", "1001_2"),
        (MathReward(bases=True), "11_8", "1001_2"),
        (MathReward(rounding=2), r"\frac13", "0.33"),
        (MathReward(rounding=2), r"\sqrt2", "1.4142"),
        (MathReward(variables=("x", "y")), "x=5,y=6", "(5,6)"),
        (MathReward(variables=("x", "y", "z")), "(1,2,3)", "z=3, x=1, y=2"),
    ],
)
def test_what_a_data_set_declares(reward: MathReward, gold: str, answer: str) -> None:
    assert grade(box(answer), gold, reward).outcome == "correct"
    assert grade(box(answer), gold).outcome == "wrong"


@pytest.mark.parametrize(
    ("reward", "gold", "answer"),
    [
        (MathReward(percent="bare"), "50", r"60\%"),
        (MathReward(rounding=2), r"\frac13", "0.3"),
        (MathReward(rounding=2), r"\frac13", "0.34"),
        (MathReward(rounding=2), r"\sqrt2", "1.4143"),
        (MathReward(require_units=True), r"10\text{ m}", "10"),
        (MathReward(variables=("x", "y")), "x=5,y=6", "(6,5)"),
        (MathReward(bases=True), "9", "1000_2"),
        (MathReward(bases=True), "9", "1009_2"),
    ],
)
def test_what_a_declaration_does_not_allow(reward: MathReward, gold: str, answer: str) -> None:
    assert grade(box(answer), gold, reward).outcome == "wrong"


def test_settings_are_checked() -> None:
    with pytest.raises(UserError, match="percent must be exact or bare"):
        MathReward(percent="maybe")
    with pytest.raises(UserError, match="rounding must be a number of decimal places"):
        MathReward(rounding=-1)


def test_a_question_is_not_its_own_answer() -> None:
    question = "Factor $x^2 + 5x + 6$ completely."
    assert math(question, box("x^2+5x+6"), "(x+2)(x+3)").outcome == "wrong"
    assert math(question, box("(x+3)(x+2)"), "(x+2)(x+3)").outcome == "correct"
    # without the question the two are the same expression
    assert grade(box("x^2+5x+6"), "(x+2)(x+3)").outcome == "correct"
    assert math("Is it $x^2 + 1$ or $x^2$?", box("x^2+1"), "1+x^2").outcome == "correct"  # the same terms
    # a gold answer that stands in the question may be given in its words
    assert math("Which is larger, $x^2+1$ or $x^2$?", box("x^2 + 1"), "x^2+1").outcome == "correct"


def test_after_a_marker() -> None:
    reward = MathReward(marker="####")
    assert grade("48/2 = 24\n#### 72", "72", reward).outcome == "correct"
    assert grade("#### 71\n#### 1,072", "1072", reward).outcome == "correct"
    assert grade(r"\boxed{72}", "72", reward).outcome == "unparseable"


class Roots(Task):
    """A task with a mathematical answer, as a user would write it."""

    reward = MathReward()

    def problems(self, split: str, level: int | None = None) -> list[Problem]:
        return [Problem(f"{split}/{n}", rf"Simplify $\sqrt{{{n * n * 2}}}$.", rf"{n}\sqrt{{2}}") for n in range(2, 9)]

    def score(self, problem: Problem, response: str) -> Score:
        return self.reward(problem.question, response, problem.answer)

    def demonstration(self, problem: Problem) -> str:
        return rf"It is \boxed{{{problem.answer}}}."


def test_a_task_uses_it_in_one_line() -> None:
    validate(Roots())
    problem = Roots().problems("test")[0]
    assert Roots().score(problem, box(r"3\sqrt2")).outcome == "wrong"


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        ("So 3 + 4.\nFinal answer: 7", "correct"),
        ("**Final Answer:** 7.", "correct"),
        ("final answer: 6\nNo. FINAL ANSWER: $7$\nDone.", "correct"),
        (r"Final answer: 6, that is \boxed{7}", "correct"),  # a box counts first
        (r"\boxed{6} so, final answer: 7", "wrong"),
        ("Final answer: 6", "wrong"),
        ("Final answer:", "unparseable"),
        ("<think>final answer: 7", "unparseable"),
        ("7", "unparseable"),
    ],
)
def test_a_phrase_may_announce_the_answer_instead_of_a_box(response: str, outcome: str) -> None:
    assert grade(response, "7", MathReward(phrase="final answer:")).outcome == outcome


def test_an_answer_within_a_second_block_of_reasoning_that_never_ends_is_none() -> None:
    assert grade(r"<think>a</think> so <think> \boxed{7}", "7").outcome == "unparseable"
