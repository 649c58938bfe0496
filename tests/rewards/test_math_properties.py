"""Laws of the math reward: an answer equals itself in every spelling, differs from all others, costs little, hangs on nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from posttrain.rewards import math as math_reward
from posttrain.rewards.math import grade
from posttrain.rewards.mathematics import compare, form, latex, naming, numbers, phrases, sets, tokens, tree, words
from posttrain.rewards.mathematics.latex import read
from posttrain.rewards.mathematics.numbers import Meter, evaluate

ROOT = Path(__file__).parent.parent.parent
FUZZER = ROOT / "tests" / "rewards" / "math_fuzzer.py"

rationals = st.builds(Fraction, st.integers(-(10**12), 10**12), st.integers(1, 10**6))
small = st.integers(-50, 50)
squarefree = st.sampled_from([2, 3, 5, 6, 7, 10, 11, 13])


def verdict(gold: str, answer: str) -> str:
    return grade(rf"\boxed{{{answer}}}", gold).outcome


def renderings(value: Fraction) -> list[str]:
    """A rational number as people write it."""
    sign, above, below = "-" if value < 0 else "", abs(value.numerator), value.denominator
    made = [
        rf"{sign}\frac{{{above}}}{{{below}}}",
        f"{value.numerator}/{below}",
        rf"\dfrac{{{value.numerator * 6}}}{{{below * 6}}}",
        f"x = {value}",
    ]
    made.append(rf"{sign}\left( \frac {{{above}}} {{{below}}} \right)")
    if below == 1:
        made += [str(value.numerator), f"{value.numerator:,}", f"{value.numerator}.0", rf"{value.numerator}\text{{ cm}}"]
    else:
        whole, rest = divmod(above, below)
        made += [rf"{sign}{whole}\frac{{{rest}}}{{{below}}}"] if whole else []
    scaled = abs(value) * 10**6
    if scaled.denominator == 1:
        made.append(f"{sign}{int(scaled) // 10**6}.{int(scaled) % 10**6:06d}")
    return made


@settings(deadline=None)
@given(rationals)
def test_a_rational_number_equals_itself_in_every_spelling(value: Fraction) -> None:
    spellings = renderings(value)
    for gold in spellings[:2]:
        assert [verdict(gold, answer) for answer in spellings] == ["correct"] * len(spellings)


@settings(deadline=None)
@given(rationals, rationals, st.integers(1, 10**9))
def test_a_rational_number_differs_from_every_other(value: Fraction, other: Fraction, nearness: int) -> None:
    assume(value != other)
    gold = renderings(value)[0]
    for wrong in (other, value + Fraction(1, nearness), -value if value else Fraction(1)):
        assert {verdict(gold, answer) for answer in renderings(wrong)} == {"wrong"}


@settings(deadline=None, max_examples=30)
@given(rationals, rationals, st.booleans())
def test_the_short_way_for_literals_agrees_with_the_grammar(value: Fraction, other: Fraction, same: bool) -> None:
    golds, answers = renderings(value), renderings(value if same else other)
    for gold in golds:
        for answer in answers:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(math_reward, "_literal", lambda text: None)
                by_grammar = verdict(gold, answer)
            assert verdict(gold, answer) == by_grammar


@settings(deadline=None)
@given(small, small, squarefree, squarefree)
def test_radicals(whole: int, factor: int, root: int, other: int) -> None:
    assume(whole and factor and root != other)
    gold = rf"{whole}+{factor}\sqrt{{{root}}}"
    for same in (
        rf"{factor}\sqrt{root:d}+{whole}".replace(rf"\sqrt{root:d}", rf"\sqrt{{{root}}}"),
        rf"{whole}-{-factor}\sqrt{{{root}}}",
    ):
        assert verdict(gold, same) == "correct"
    for wrong in (
        rf"{whole}+{factor}\sqrt{{{other}}}",
        rf"{whole}-{factor}\sqrt{{{root}}}",
        rf"{whole + 1}+{factor}\sqrt{{{root}}}",
    ):
        assert verdict(gold, wrong) == "wrong"
    decimal = whole + factor * root**0.5
    assert verdict(gold, f"{decimal:.15f}") == "wrong"


@settings(deadline=None)
@given(st.lists(small, min_size=2, max_size=8, unique=True), st.randoms(use_true_random=False))
def test_sets_and_lists_have_no_order_and_tuples_have(members: list[int], draw: random.Random) -> None:
    shuffled = draw.sample(members, len(members))
    first, second = ", ".join(map(str, members)), ", ".join(map(str, shuffled))
    assert verdict(rf"\{{{first}\}}", rf"\left\{{ {second} \right\}}") == "correct"
    assert verdict(rf"\{{{first}\}}", second) == verdict(first, second) == "correct"
    assert verdict(f"({first})", f"({second})") == ("correct" if members == shuffled else "wrong")
    assert verdict(first, f"{second}, 99") == verdict(f"{first}, 99", second) == "wrong"
    assert verdict(rf"\{{{first}\}}", f"({first})") == "wrong"


@settings(deadline=None)
@given(small, st.integers(1, 50), st.sampled_from("(["), st.sampled_from(")]"), st.sampled_from("(["), st.sampled_from(")]"))
def test_intervals_have_ends(low: int, width: int, left: str, right: str, other_left: str, other_right: str) -> None:
    ends = f"{low}, {low + width}"
    same = (left, right) == (other_left, other_right)
    assert verdict(f"{left}{ends}{right}", rf"\left{other_left}{ends}\right{other_right}") == ("correct" if same else "wrong")
    signs = {"(": "<", "[": r"\le", ")": "<", "]": r"\le"}
    inequality = f"{low} {signs[left]} x {signs[right]} {low + width}"
    assert verdict(f"{left}{ends}{right}", inequality) == verdict(inequality, f"{left}{ends}{right}") == "correct"
    assert verdict(f"{left}{ends}{right}", f"{left}{low}, {low + width + 1}{right}") == "wrong"


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_matrices_entry_by_entry(rows: int, columns: int, data: st.DataObject) -> None:
    entries = data.draw(st.lists(st.lists(small, min_size=columns, max_size=columns), min_size=rows, max_size=rows))
    where = data.draw(st.integers(0, rows * columns - 1))
    changed = [row[:] for row in entries]
    changed[where // columns][where % columns] += 1

    def matrix(values: list[list[int]], shape: str) -> str:
        return rf"\begin{{{shape}}}" + r" \\ ".join(" & ".join(map(str, row)) for row in values) + rf"\end{{{shape}}}"

    assert verdict(matrix(entries, "pmatrix"), matrix(entries, "bmatrix")) == "correct"
    assert verdict(matrix(entries, "pmatrix"), matrix(changed, "pmatrix")) == "wrong"
    if rows != columns:
        assert (
            verdict(matrix(entries, "pmatrix"), matrix([list(row) for row in zip(*entries, strict=True)], "pmatrix")) == "wrong"
        )


@settings(deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=2, max_size=5), st.integers(-9, 9), st.integers(0, 4))
def test_polynomials_by_their_values(coefficients: list[int], shift: int, where: int) -> None:
    assume(coefficients[-1] != 0 and len([c for c in coefficients if c]) > 1)
    gold = " + ".join(f"({c})x^{{{n}}}" for n, c in enumerate(coefficients) if c)
    horner = "0"
    for c in reversed(coefficients):
        horner = f"({horner})x + ({c})" if horner != "0" else f"({c})"
    assert verdict(gold, horner) == "correct"
    changed = list(coefficients)
    changed[where % len(changed)] += 1
    assume(any(changed))
    assert verdict(gold, " + ".join(f"({c})x^{{{n}}}" for n, c in enumerate(changed) if c) or "0") != "correct"


@settings(deadline=None, max_examples=300)
@given(st.text(max_size=300), st.sampled_from(["5", r"\frac12", "x+1", r"\text{east}", "(1,2)"]))
def test_no_text_is_a_fault(answer: str, gold: str) -> None:
    for response in (answer, rf"\boxed{{{answer}}}"):
        score = grade(response, gold)
        assert score.failure is None
        assert score.value in (0.0, 1.0)


HEAVY = [
    (r"\sin x", "+".join(rf"\sin(x+{n})" for n in range(150))), ("x^2+1", "+".join(f"x^{{{n}}}" for n in range(250))),
    ("x^2+x", "(x+1)^{1000}(x+2)^{1000}+x"),
    ("x+y", "+".join(rf"\frac{{x}}{{y+{n}}}" for n in range(140))), ("x^{y}+1", "x^{y^{x^{y^{x^{y}}}}}+1"),
    ("2^{10}+1", "+".join(["9^{2000}"] * 200)), ("10!", "1000!" * 300),
    (r"\binom{10}{3}", r"\binom{1000}{500}" * 100), ("1,2", ",".join(str(n) for n in range(500))),
    (r"\sqrt2,1", ",".join(rf"\sqrt{{{n}}}" for n in range(2, 180))),
    (r"\{x,y\}", r"\{" + ",".join(f"x+{n}" for n in range(300)) + r"\}"), ("x", "-" * 1900 + "y"), ("x^2", "x" + "!" * 1900),
    ("2^{3}", "2" + "^3" * 900), (r"|x|", "|" * 1900),
    ("x=1,y=2,z=3", ",".join(f"x={n}+y" for n in range(250))), ("x+y=1", "+".join(f"x^{{{n}}}y" for n in range(200)) + "=1"),
    ("A", ",".join("ABCDEFGH" * 100)),
    ("x", "\\left" * 400), ("x", "\\frac" * 400), ("x", "\\sqrt" * 400), ("5", "{}" * 900), (r"\pm1", r"\pm1" * 300),
    ("5", "9" * 8000), ("5", "1+" * 4000 + "1"), ("5", "twenty hundred and " * 100), ("5", "(A) " * 400), ("5", r"\text{ a }" * 190),
    (r"\mathbb{R}", r"\cup".join(f"({n},{n + 1})" for n in range(140))), ("x\\neq1", ",".join(f"x\\neq{n}" for n in range(200))),
    (r"\mathbb{R}", r"\{x\mid" * 38 + "x>1" + r"\}" * 38), (r"\mathbb{R}", r"\mathbb{R}" + r"\setminus\{1\}" * 120),
    (r"x\ne\sqrt2", ",".join(rf"x\ne\sqrt{{{n}}}" for n in range(2, 150))), ("5", "5" + r"\text{ million}" * 120),
    ("5", "all real numbers " * 110 + "except 0"), ("5", "the number of " + "a " * 900 + "is 5"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), HEAVY, ids=lambda text: text[:20])
def test_the_dearest_answers_known_cost_less_than_a_second(gold: str, answer: str) -> None:
    began = time.process_time()
    assert verdict(gold, answer) in ("wrong", "unparseable")
    assert time.process_time() - began < 1.0


def fuzz(seed: int, count: int, hash_seed: int) -> dict[str, object]:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, str(FUZZER), str(seed), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100, env=environment)
    return dict(json.loads(done.stdout))


def test_ten_thousand_hostile_strings() -> None:
    report = fuzz(0, 10_000, 0)
    assert report["faults"] == []
    assert report["slowest"] < 1.0, report["culprit"]  # type: ignore[operator]
    assert report["megabytes"] < 300  # type: ignore[operator]
    assert set(report["outcomes"]) <= {"wrong", "unparseable", "correct"}  # type: ignore[call-overload]
    assert min(report["outcomes"]["wrong"], report["outcomes"]["unparseable"]) > 2_000  # type: ignore[index]


def test_verdicts_are_the_same_in_other_processes_and_on_every_call() -> None:
    first, second = fuzz(7, 300, 1), fuzz(7, 300, 2)
    assert first["verdicts"] == second["verdicts"]
    cases = [("x^2+2x+1", "(x+1)^2"), (r"\frac13", "0.333333"), ("x+y=3", "2x+2y=6"), ("5", "9^{9^{9}}")]
    for gold, answer in cases:
        assert len({verdict(gold, answer) for _ in range(100)}) == 1


CASES = [
    ("x^2+2x+1", "(x+1)^2", "correct"),
    (r"\sqrt2", "1.4", "wrong"),
    ("5", "9^{9^{9^{9}}}", "wrong"),
    (r"\tan x", r"\frac{\sin x}{\cos x}", "correct"),
    ("5", "(((", "unparseable"),
]


def everything() -> bool:
    return all(verdict(gold, answer) == outcome for gold, answer, outcome in CASES * 5)


def test_in_threads() -> None:
    assert threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: everything(), range(32)))


def test_in_an_event_loop() -> None:
    async def one() -> bool:
        return everything()

    async def many() -> list[bool]:
        return await asyncio.gather(*(one() for _ in range(4)), *(asyncio.to_thread(everything) for _ in range(4)))

    assert all(asyncio.run(many()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_in_a_forked_process() -> None:
    program = (
        "import os, sys; sys.path[:0] = ['.', 'tests']; from posttrain.rewards.math import grade; r = chr(92) + 'boxed{2+2}'\n"
        "assert grade(r, '4').outcome == 'wrong'\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(0 if grade(r, '2+2').outcome == 'correct' and 'torch' not in sys.modules else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60).returncode == 0


def test_in_a_ray_actor() -> None:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        assert ray.get(ray.remote(grade).remote(r"\boxed{5}", "5")).outcome == "correct"
    finally:
        ray.shutdown()


@pytest.mark.parametrize(
    "module",
    [math_reward, compare, form, latex, naming, numbers, phrases, sets, tokens, tree, words],
    ids=lambda m: m.__name__,
)
def test_no_signals_no_clock_no_processes(module: object) -> None:
    source = Path(str(module.__file__)).read_text()  # type: ignore[attr-defined]
    for forbidden in (
        "import signal",
        "import time",
        "import random",
        "multiprocessing",
        "subprocess",
        "sympify",
        "eval(",
        "exec(",
    ):
        assert forbidden not in source.replace("evaluate(", "")


def test_exact_numbers_stay_small() -> None:
    """9^200000 has 634,000 bits: past the bound it becomes a number of 200 bits, and past the next one it is refused."""
    assert isinstance(evaluate(read("9^{2000}"), {}, Meter()), Fraction)
    assert not isinstance(evaluate(read("9^{20000}"), {}, Meter()), Fraction)
    for text in ("9^{200000}", "((9^9)^{9999})^{9999}", "1001!", r"\binom{1001}{2}", "e^{e^{12}}", "10^{-50000}"):
        with pytest.raises(numbers.Exhausted):
            evaluate(read(text), {}, Meter())
