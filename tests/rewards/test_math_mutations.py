r"""Each known hole of a math grader, opened again: a case that is right today must go wrong. So the cases can fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from math import isqrt
from typing import Any

import pytest

from posttrain.rewards import math as math_reward
from posttrain.rewards.math import MathReward, grade
from posttrain.rewards.mathematics import compare, form, latex, naming, numbers, tree, words
from posttrain.rewards.mathematics.compare import Comparison
from posttrain.rewards.mathematics.tree import Node

ROOT_OF_A_SEVENTH = f"{isqrt(10**180 // 7):090d}"  # its first ninety decimals
Patch = Callable[[pytest.MonkeyPatch], None]


def replaced(target: Any, name: str, value: Any) -> Patch:
    return lambda patch: patch.setattr(target, name, value)


def last_side(self: Comparison, gold: Node, given: Node) -> bool:
    return self.same(
        gold.nodes[-1] if gold.kind == "relation" else gold, given.nodes[-1] if given.kind == "relation" else given
    )


def last_number(response: str, reward: MathReward) -> list[str]:
    return re.findall(r"-?[0-9]+", response)[-1:]


def near(left: Any, right: Any) -> bool:
    return (
        isinstance(left, Fraction)
        and isinstance(right, Fraction)
        and abs(float(left) - float(right)) <= 1e-6 * max(1.0, abs(float(left)))
    )


def unpacked(original: Callable[..., bool]) -> Callable[..., bool]:
    def same(self: Comparison, gold: Node, given: Node) -> bool:
        return original(self, gold, given.nodes[0] if given.kind == "set" and len(given.nodes) == 1 else given)

    return same


def any_brackets(self: Comparison, gold: Node, given: Node) -> bool:
    return len(gold.nodes) == len(given.nodes) and all(self.same(a, b) for a, b in zip(gold.nodes, given.nodes, strict=True))


def no_units(value: Node) -> tuple[Node, str]:
    return (value.nodes[0] if value.kind in ("quantity", "percent", "degrees") else value), ""


def letters_as_symbols(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(words, "is_word", lambda word: False)


def any_name(collection: Node) -> set[str]:
    return {"x"} if any(member.kind == "relation" for member in collection.nodes) else set()


def any_member(original: Callable[..., bool]) -> Callable[..., bool]:
    def same(self: Comparison, gold: Node, given: Node) -> bool:
        members = given.nodes if given.kind in ("list", "set") else ()
        return original(self, gold, given) or any(original(self, gold, member) for member in members)

    return same


def no_bound_on_size(patch: pytest.MonkeyPatch) -> None:
    for name in ("MAGNITUDE", "EXACT_BITS", "WORK"):
        patch.setattr(numbers, name, 10**9)
    patch.setattr(numbers.Meter, "charge", lambda self, work: None)


QUESTIONS = {"the question restated": "Factor $x^2+5x+6$."}
HOLES: list[tuple[str, Patch, str, str]] = [
    # hole, how it is opened, gold, response
    ("the last side of a chain", replaced(Comparison, "same_relation", last_side), "5", r"\boxed{x = 6 = 5}"),
    ("any left side is a name", replaced(naming, "is_name", lambda value: True), "5", r"\boxed{7 = 5}"),
    ("unevaluated powers", replaced(math_reward, "undone", lambda value: frozenset()), "144", r"\boxed{12^2}"),
    ("unevaluated sums", replaced(math_reward, "undone", lambda value: frozenset()), "4", r"\boxed{2+2}"),
    ("radicals that cancel", replaced(compare, "hidden", lambda *a: False), "5", r"\boxed{\frac{\sqrt{50}}{\sqrt2}}"),
    ("a long decimal", replaced(compare, "truncated", lambda *a: False), r"\frac{1}{\sqrt{7}}", rf"\boxed{{0.{ROOT_OF_A_SEVENTH}}}"),
    ("floating point", replaced(numbers, "equal", near), r"\frac13", r"\boxed{0.333333}"),
    ("floating point, large", replaced(numbers, "equal", near), "12345678901234567890", r"\boxed{12345678901234567891\text{ m}}"),
    ("a set of one unpacked", lambda patch: patch.setattr(Comparison, "same", unpacked(Comparison.same)), "5", r"\boxed{\{5\}}"),
    ("units dropped", replaced(compare, "measured", no_units), r"10\text{ m}", r"\boxed{10\text{ cm}}"),
    ("percent dropped", replaced(compare, "measured", no_units), "50", r"\boxed{50\%}"),
    ("scales dropped", replaced(words, "SCALES", {"million": Fraction(1)}), "5", r"\boxed{5\text{ million dollars}}"),
    ("sentences as units", replaced(words, "NO_UNITS", frozenset()), "5", r"\boxed{5\text{ wrong answers}}"),
    ("any word as a unit", replaced(words, "is_plural", lambda word: True), "5", r"\boxed{5\text{ negated}}"),
    ("a name under a bar", replaced(tree, "labelled", lambda macro, value: value), "3+4i", r"\boxed{\overline{3+4i}}"),
    ("a base left out", replaced(Comparison, "same_based", lambda *a: True), "101_2", r"\boxed{101}"),
    ("half a day", replaced(compare, "_HALF", {"am": "am", "pm": "am"}), "3:30 am", r"\boxed{3:30\text{ pm}}"),
    ("a time as a ratio", replaced(compare, "is_clock", lambda value: False), "12:30", r"\boxed{0.4}"),
    ("letters as a product", letters_as_symbols, "Monday", r"\boxed{yadnoM}"),
    ("brackets ignored", replaced(Comparison, "same_sequence", any_brackets), "[1,2]", r"\boxed{(1,2)}"),
    ("one sign of two", replaced(form, "SIGNS", ()), r"\pm2", r"\boxed{2}"),
    ("the sign of infinity", replaced(compare, "infinity", lambda v: int("inf" in repr(v))), r"\infty", r"\boxed{-\infty}"),
    ("names left out", replaced(naming, "names_of", any_name), "x=5,y=6", r"\boxed{5,6}"),
    ("the last number of the text", replaced(math_reward, "_answers", last_number), "5", "I think 1 2 3 4 5"),
    ("reasoning searched", replaced(math_reward, "STRICT", None), "7", r"<think>\boxed{7}</think> I cannot solve it."),
    ("several boxes, the last one paid", replaced(math_reward, "MAX_BOXES", 1), "7", r"\boxed{5} or \boxed{6} or \boxed{7}"),
    ("symbols that cancel", replaced(compare, "symbols", lambda value: frozenset("xyz")), "x+y", r"\boxed{x+y+\frac{z}{z}-1}"),
    ("an empty gold answer", replaced(math_reward, "_read_gold", lambda gold, reward: Node("set")), "", r"\boxed{\emptyset}"),
    ("the question restated", replaced(math_reward, "_restates", lambda *a: False), "(x+2)(x+3)", r"\boxed{x^2+5x+6}"),
    ("any of several values", lambda patch: patch.setattr(Comparison, "same", any_member(Comparison.same)), "5", r"\boxed{4, 5, 6}"),
    ("all choices", lambda patch: patch.setattr(Comparison, "same", any_member(Comparison.same)), "A", r"\boxed{A, B, C, D}"),
    ("no bound on size", no_bound_on_size, r"2^{300000}", r"\boxed{2^{300000}}"),
    ("no bound on brackets", replaced(latex, "NESTING", 10**9), "5", r"\boxed{" + "(" * 900 + "5" + ")" * 900 + "}"),
]  # fmt: skip


def graded(gold: str, response: str, question: str = "") -> tuple[float | None, str]:
    for cached in (math_reward._read_gold, words.unit_of):
        getattr(cached, "cache_clear", lambda: None)()
    reward = math_reward.STRICT or MathReward(reasoning_end="")
    score = grade(response, gold, reward, question)
    return score.value, score.outcome


@pytest.mark.parametrize(("hole", "opened", "gold", "response"), HOLES, ids=[hole[0] for hole in HOLES])
def test_an_opened_hole_is_seen(hole: str, opened: Patch, gold: str, response: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = graded(gold, response, QUESTIONS.get(hole, ""))
    assert before[0] != 1.0
    opened(monkeypatch)
    assert graded(gold, response, QUESTIONS.get(hole, "")) != before
