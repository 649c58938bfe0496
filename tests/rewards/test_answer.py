"""The exact-answer reward: one spelling is right, and a gold answer that is not there is a failure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.rewards.answer import after_marker, answer, integer_answer, strict_integer


@given(st.integers(-(10**30), 10**30))
def test_every_integer_has_one_spelling(n: int) -> None:
    assert strict_integer(str(n)) == n
    for other in (f"+{n}", f"0{n}", f"{n}.", f"{n}.0", f" {n}", f"{n}\n", f"{n:_}" if abs(n) > 999 else "", f"--{n}"):
        assert strict_integer(other) is None


@pytest.mark.parametrize("text", ["-0", "00", "٣", "１", "²", "0x1", "1e3", "None", "9" * 101, None])
def test_what_is_not_an_integer(text: str | None) -> None:
    assert strict_integer(text) is None


def test_the_last_marker_counts() -> None:
    assert after_marker("#1 no #2 ") == "2"
    assert after_marker("a boxed: 3", "boxed:") == "3"
    assert integer_answer("#1#2", 1).outcome == "wrong"


@pytest.mark.parametrize(
    ("response", "gold", "outcome"),
    [
        ("so #12", "12", "correct"),
        ("so #12", " 12 ", "correct"),
        ("so #012", "12", "unparseable"),
        ("so #Paris", "Paris", "correct"),
        ("so #paris", "Paris", "wrong"),
        ("Paris", "Paris", "unparseable"),
        ("#", "Paris", "unparseable"),
        ("#None", "12", "unparseable"),
    ],
)
def test_the_plain_reward(response: str, gold: str, outcome: str) -> None:
    score = answer("q", response, gold)
    assert score.outcome == outcome
    assert score.value == float(outcome == "correct")


@pytest.mark.parametrize("gold", ["", "  "])
def test_an_empty_gold_answer_is_a_failure_and_never_right(gold: str) -> None:
    for response in ("", "#", "# ", "#1"):
        score = answer("q", response, gold)
        assert score.failure
        assert score.value is None
