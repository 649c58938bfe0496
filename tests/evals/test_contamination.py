"""The guard against training on what is measured: hashes, n-grams counted by hand, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from posttrain.errors import UserError
from posttrain.evals.contamination import LAZY, content_hash, known, ngrams, overlap, require_clean, sample
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Task
from posttrain.types import Problem, Score


@dataclass(frozen=True)
class Given(Task):
    train: tuple[str, ...]
    test: tuple[str, ...]
    answer: str = "yes"

    def problems(self, split: str, level: int | None = None) -> list[Problem]:
        return [Problem(f"{split}/{n}", q, self.answer) for n, q in enumerate(self.train if split == "train" else self.test)]

    def score(self, problem: Problem, response: str) -> Score:
        return Score(1.0)


def test_hashes_see_through_case_spaces_and_unicode_forms_but_not_signs() -> None:
    same = ["Is ½ of 4 two?", "is  ½ of 4\ntwo?", "Is 1⁄2 of 4 two?"]
    assert len({content_hash(text) for text in same}) == 1
    assert len({content_hash(text) for text in ("12+3=", "12-3=", "123=", "1 2+3=")}) == 4
    assert len(content_hash("a")) == 16


def test_ngrams_by_hand() -> None:
    assert ngrams("a b c", 2) == {("a", "b"), ("b", "c")} and ngrams("a b", 3) == set()


def test_overlap_by_hand() -> None:
    train = ["the cat sat on the mat", "a dog ran"]
    held_out = ["The cat  sat on the mat", "the cat sat on a chair", "birds fly south now", "a dog"]
    found = overlap(train, held_out, n=3, near=0.5)
    assert (found.train, found.held_out, found.exact) == (2, 4, ((0, 0),))
    assert found.near == ((1, 0.5),)  # the cat sat, cat sat on of: the cat sat, cat sat on, sat on a, on a chair
    assert overlap(train, held_out, n=3, near=0.51).near == ()
    assert found.lines()[0] == "1 of 4 held-out questions are among the 2 trained on" and len(found.lines()) == 2
    assert overlap(train, ["birds fly south now"], n=3).lines() == []
    assert overlap([], []).exact == ()


def test_an_instruction_that_most_questions_share_does_not_make_them_near() -> None:
    said = "think first and then answer in the box"
    train = [f"{said} {n} apples and {n} pears" for n in (1, 2, 3, 4)]
    assert overlap(train, [f"{said} 7 plums cost 9 euros"], n=4).near == ()
    assert overlap(train, [f"{said} 3 apples and 3 nuts"], n=4).near == ((0, 4 / 5),)  # of 5 that begin in or after it


def test_the_first_of_equal_training_questions_is_named() -> None:
    assert overlap(["x y", "a b", "A b"], ["a  b"]).exact == ((0, 1),)


def test_a_task_that_shares_questions_is_refused() -> None:
    assert require_clean(Given(("a", "b"), ("c",)), "rl").exact == ()
    with pytest.raises(UserError, match="rl: 1 of 2 held-out questions are among the 2 trained on, such as 'B b'") as caught:
        require_clean(Given(("a", "b b"), ("c", "B  b")), "rl")
    assert "\n" not in str(caught.value)
    assert require_clean(Given(("write",), ("write",), answer=""), "rl").exact == ((0, 0),), "an open-ended prompt is only told"


def test_problems_made_on_demand_are_looked_at_in_part() -> None:
    task = Arithmetic(level=2)
    assert len(sample(task, "train")) == 2 * LAZY
    assert require_clean(task, "rl").exact == ()


def test_known_problems_and_conversations() -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "user", "content": "what?"}]
    problems = [Problem("1", "A  b"), Problem("2", "what?", facts={"messages": turns}), Problem("3", "c")]
    assert known(problems, frozenset({content_hash("a B"), content_hash("what?")})) == [True, False, False]
    assert known(problems, frozenset({content_hash("hi\nwhat?")})) == [False, True, False]
