"""Shaping and composed rewards: numbers by hand, and how each could be fooled."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.errors import UserError
from posttrain.rewards.answer import answer
from posttrain.rewards.compose import Gate, Part, Product, Weighted, as_score
from posttrain.rewards.format import format
from posttrain.rewards.language import language, share
from posttrain.rewards.length import cosine, length, near, overlong
from posttrain.rewards.repetition import repeated, repetition
from posttrain.rewards.steps import marked, steps
from posttrain.types import Score


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        ("We compute the sum.", "en", 1.0),
        ("We compute 总和 now", "en", 3 / 5),  # an ideograph is a word
        ("我们计算 sum", "zh", 4 / 5),
        ("これは計算です sum", "ja", 7 / 8),
        ("Мы считаем", "ru", 1.0),
        ("Мы считаем", "en", 0.0),
        ("раypal", "en", 0.0),  # a Cyrillic р and а in a Latin word count for neither
        (r"So $\frac{сумма}{2}$ and `код` is fine", "en", 1.0),  # formulas and code are nobody's language
        ("12 + 30 = 42", "en", 1.0),
        ("", "zh", 1.0),
    ],
)
def test_language_by_hand(text: str, target: str, expected: float) -> None:
    assert share(text, target) == pytest.approx(expected)
    assert language("", text, "", target).parts["language"] == pytest.approx(expected)


def test_an_unknown_language_is_named() -> None:
    with pytest.raises(UserError, match="ru"):
        share("x", "ruu")


@given(st.text(max_size=300), st.sampled_from(["en", "zh", "ru"]))
def test_a_share_is_a_share(text: str, target: str) -> None:
    assert 0.0 <= share(text, target) <= 1.0


@given(st.integers(0, 5000))
def test_lengths_stay_in_their_ranges(characters: int) -> None:
    assert 0 <= near(characters, 300, 200) <= 1
    assert -1 <= overlong(characters, 1000, 200) <= 0
    assert 0.5 <= cosine(characters, 1000, True) <= 1 and -1 <= cosine(characters, 1000, False) <= -0.5
    assert cosine(characters, 1000, True) >= cosine(characters + 1, 1000, True)  # shorter is better when right
    assert cosine(characters, 1000, False) <= cosine(characters + 1, 1000, False)


def test_length_by_hand() -> None:
    assert length("", "x" * 300, "", target=400, tolerance=200).value == 0.5
    assert [overlong(n, 100, 50) for n in (50, 75, 100)] == [0.0, -0.5, -1.0]
    with pytest.raises(UserError):
        overlong(1, 10, 11)


def test_repetition_by_hand() -> None:
    assert repeated("the cat sat on the mat", 2) == 0.0
    assert repeated("no no no no no", 1) == pytest.approx(0.8)
    assert repetition("", "go " * 100, "").value == pytest.approx(-(1 - 1 / 97 - 0.1) / 0.9)
    assert repetition("", "every word here is its own, and none comes twice", "").value == 0.0
    with pytest.raises(UserError, match="free is a share"):
        repetition("", "go go", "", free=1.0)


def test_steps_count_once_and_cap() -> None:
    assert marked("1. add\n2. carry\n3. write") == 3
    assert marked("1. add\n" * 50) == 1
    assert steps("", "Step 1: a\nStep 2: b\nStep 3: c\nStep 4: d", "").value == 1.0
    assert steps("", "just the answer", "").value == 0.0


@pytest.mark.parametrize(
    "text", ["a" * 300_000, "- " * 150_000, "$" * 200_000, "`" * 200_000, "\n1. x" * 60_000, "Я" * 250_000]
)
def test_hostile_lengths_take_bounded_time(text: str) -> None:
    began = time.perf_counter()
    for reward in (language, repetition, steps, length):
        assert reward("", text, "").valid
    assert time.perf_counter() - began < 5.0


PARTS = (Part("format", format, 0.25), Part("correctness", answer, 0.75))
GOOD = "<think>2+2</think><answer>#4</answer>"


def test_weighted_product_and_gate_by_hand() -> None:
    both = Weighted(PARTS)("", "#4", "4")
    assert (both.value, both.outcome, dict(both.parts)) == (0.75, "correct", {"format": 0.0, "correctness": 1.0})
    assert Product(PARTS)("", "#4", "4").value == 0.0
    gated = Gate(PARTS[0], PARTS[1])("", "#4", "4")
    assert (gated.value, gated.outcome, dict(gated.parts)) == (0.0, "wrong", {"format": 0.0})
    open_gate = Gate(PARTS[1], PARTS[0])("", "#4", "4")
    assert open_gate.value == 0.0 and open_gate.parts["correctness"] == 1.0


def test_a_failed_part_fails_the_whole() -> None:
    """An infrastructure failure behind a weight of 0.75 must not become a reward of 0.25."""
    broken = Part("correctness", lambda p, r, a: Score.failed("timeout"), 0.75)
    for mix in (Weighted((PARTS[0], broken)), Product((PARTS[0], broken)), Gate(PARTS[0], broken), Gate(broken, PARTS[0])):
        score = mix("", GOOD, "4")
        assert score.value is None and score.failure == "correctness: timeout"


def test_plain_numbers_are_rewards_and_nan_is_not() -> None:
    assert as_score(0.5).value == 0.5 and as_score(True).value == 1.0
    for bad in (float("nan"), float("inf")):
        assert as_score(bad).failure == f"the reward returned {bad}"
    assert Weighted((Part("n", lambda p, r, a: float("nan")),))("", "", "").failure == "n: the reward returned nan"


def test_the_textbook_mix() -> None:
    mix = Weighted((Part("correctness", answer, 0.8), Part("format", format, 0.1), Part("reasoning", steps, 0.1)))
    assert mix("", "Step 1: add\nStep 2: write\nso it is\n#4", "4").value == pytest.approx(0.8 + 0.1)
    assert mix("", "#5", "4").value == 0.0


def test_bad_compositions_are_refused() -> None:
    with pytest.raises(UserError, match="different names"):
        Weighted((PARTS[0], PARTS[0]))
    with pytest.raises(UserError, match="at least one"):
        Product(())
    with pytest.raises(UserError, match="finite"):
        Part("x", answer, float("nan"))
