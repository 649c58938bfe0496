"""Templates: what matches, what does not, and that no response makes matching slow."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.errors import UserError
from posttrain.rewards.format import THINK_ANSWER, announced, format, match


@pytest.mark.parametrize(
    ("response", "formed"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", True),
        ("  <think>a</think><answer>4</answer>\n", True),
        ("<think></think><answer>4</answer>", False),
        ("<think>a</think><answer> \n</answer>", False),
        ("<think>a < b</think><answer>4</answer>", True),
        ("<think>a</think>so<answer>4</answer>", False),
        ("a<think>a</think><answer>4</answer>", False),
        ("<think>a</think><answer>4</answer>b", False),
        ("<think>a<answer>3</answer></think><answer>4</answer>", False),
        ("<think><think>a</think><answer>4</answer>", False),
        ("<answer>4</answer>", False),
        ("", False),
    ],
)
def test_thinking_then_answering(response: str, formed: bool) -> None:
    score = format("q", response, "4")
    assert (score.value, score.parts, score.outcome) == (formed, {"format": formed}, "formed" if formed else "malformed")


def test_text_at_an_end_of_the_template_may_be_blank() -> None:
    assert format("q", "#### 4", "4", template="{text}#### {integer}{text}").value == 1.0


@pytest.mark.parametrize(
    ("response", "value"),
    [
        (r"\boxed{\frac{2}{\sqrt{7}}}", 1.0),
        (r"\boxed{\sqrt{\frac{\sqrt{2}}{7}}}", 1.0),
        (r"\boxed{7} after <think>", 1.0),
        (r"\boxed{}", 0.3),
        (r"\boxed{ }", 0.3),
        ("Final answer: 7", 0.7),
        ("Final answer:  ", 0.3),
    ],
)
def test_a_marked_answer_is_not_empty(response: str, value: float) -> None:
    assert announced(response) == value


def test_fields() -> None:
    assert match("{integer} + {digits}", "-7 + 007") == ("-7", "007")
    assert match("{integer}", "007") is None
    assert match("{line}!", "a\nb!") is None
    assert match("{text}!", "a\nb!") == ("a\nb",)
    assert match("{text}", "anything (.*) at [all") == ("anything (.*) at [all",)
    assert match("a.c", "abc") is None  # literals are literal
    assert match("{digits}", "１２") is None


@given(st.text(alphabet="ab<>/", max_size=20), st.text(alphabet="ab<>/ \n", max_size=20))
def test_a_text_without_the_literals_is_found_whole(thought: str, said: str) -> None:
    found = match("<x>{text}</x><y>{text}</y>", f"<x>{thought}</x><y>{said}</y>")
    assert found == (thought, said)


@pytest.mark.parametrize(
    "hostile",
    ["<think>" * 25_000, "<think>" + "a" * 190_000, "<think>" + "<" * 190_000, "<think></think>" + " " * 190_000 + "x"],
)
def test_matching_takes_linear_time(hostile: str) -> None:
    started = time.perf_counter()
    assert match(THINK_ANSWER, hostile) is None
    assert match("{space}{digits}{space}{text}", hostile) is None
    assert time.perf_counter() - started < 1.0


def test_what_is_very_long_is_malformed() -> None:
    assert match("{text}", "a" * 200_000) is not None
    assert match("{text}", "a" * 200_001) is None


@pytest.mark.parametrize(
    ("template", "said"), [("{words}", "unknown field"), ("{text}{line}", "needs literal text"), ("{}", "unknown")]
)
def test_bad_templates_are_refused(template: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        match(template, "")
