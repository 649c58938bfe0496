"""Where the steps of a response end: in its text and in its tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from posttrain.data.steps import Step, steps_of
from posttrain.data.text import Decoder
from posttrain.errors import UserError
from posttrain.models.tiny import character_tokenizer
from posttrain.train.pack import step_rewards
from posttrain.types import Problem, Rollout, Score, Segment

TOKENIZER = character_tokenizer("abcx\n ")
DECODER = Decoder(TOKENIZER)
PROMPT = Segment(np.array([3, 6, 6]), "aa", False)


def answered(text: str, finish: str = "stop", score: Score | None = None) -> Rollout:
    ids = np.array([*TOKENIZER(text)["input_ids"], *([TOKENIZER.eos_token_id] if finish == "stop" else [])])
    decoded, offsets = DECODER.decode(ids)
    assert decoded == text
    return Rollout(Problem("p", ""), 0, (PROMPT, Segment(ids, text, True, None, offsets, 0, finish)), score or Score(0.0))


def test_by_hand() -> None:
    """The prompt has tokens 0 to 2. A label stands where the text of its step ends; a completion goes on after the separator, from
    the last step on after everything."""
    assert steps_of(answered("ab\nb\nac")) == [Step(2, 4, 5), Step(4, 6, 7), Step(7, 9, 10)]
    assert steps_of(answered("ab\n\n b")) == [Step(2, 4, 5), Step(6, 8, 9)], "two separators in a row make no step"
    assert steps_of(answered("ab\n")) == [Step(2, 4, 6)], "the last separator and the stop token end no other step"
    assert steps_of(answered("ab\nb", "length")) == [Step(2, 4, 5), Step(4, 6, 6)]
    assert steps_of(answered("abxb", "length"), "x") == [Step(2, 4, 5), Step(4, 6, 6)]
    assert steps_of(answered("abxxb"), "xx") == [Step(2, 4, 6), Step(5, 7, 8)]
    assert steps_of(answered("\n \n")) == []


def test_a_token_that_holds_the_end_of_two_steps_counts_once() -> None:
    """As where one token is a whole line or more: offsets tell how far each token reaches."""
    response = Segment(np.array([7, 8]), "a\nb\nc", True, None, np.array([4, 5]), 0, "length")
    assert steps_of(Rollout(Problem("p", ""), 0, (PROMPT, response), Score(0.0))) == [Step(3, 3, 3), Step(5, 4, 4)]


def test_positions_lead_to_the_same_tokens_when_packed() -> None:
    """A score's steps are given by character; packing puts them where the steps end."""
    rollout = answered("ab\nb\nac")
    steps = steps_of(rollout)
    placed = step_rewards(answered("ab\nb\nac", score=Score(0.0, steps=tuple((s.position, 1.0) for s in steps))))
    assert placed is not None and np.flatnonzero(~np.isnan(placed)).tolist() == [s.end for s in steps]


def test_a_pattern_separates_at_every_match() -> None:
    """Also one of no width, after which the next step's own text begins."""
    text = "ab\n\nx c\nb"
    assert [text[: s.position] for s in steps_of(answered(text), "pattern:\\n+")] == ["ab", "ab\n\nx c", text]
    assert steps_of(answered("abxxb"), "pattern:x{2}") == steps_of(answered("abxxb"), "xx")
    assert steps_of(answered(text), "pattern:\\n(?=x)") == [Step(3, 5, 6), Step(len(text), 11, 12)]
    assert steps_of(answered("abxb", "length"), "pattern:(?=x)") == [Step(2, 4, 4), Step(4, 6, 6)]
    assert steps_of(answered("abcb"), "a.") == steps_of(answered("abcb")), "plain text is no pattern"


def test_a_pattern_that_backtracks_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.data.steps.SECONDS", 0.05)
    with pytest.raises(TimeoutError, match="took over 0.05 s in 61 characters; it backtracks"):
        steps_of(answered("a" * 60 + "b"), "pattern:(?:a|a)+c")


@pytest.mark.parametrize(
    ("separator", "said"),
    [
        ("", "separator that is not empty"),
        ("pattern:", "matches empty"),
        ("pattern:x*", "matches empty"),
        ("pattern:(", "no regular"),
    ],
)
def test_separators_that_cannot_be_used_are_refused(separator: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        steps_of(answered("b"), separator)


def test_refusals() -> None:
    bare = replace(answered("b").segments[1], offsets=None)
    with pytest.raises(UserError, match="turns with offsets, unlike that of problem p$"):
        steps_of(Rollout(Problem("p", ""), 0, (PROMPT, bare), Score(1.0)))


def test_steps_of_several_turns_lie_in_their_own_turns() -> None:
    """Positions count the characters that the policy wrote; ends and the last ids count all tokens."""
    first, second = answered("ab\nc").segments[1], answered("c\n").segments[1]
    rollout = Rollout(Problem("p", ""), 0, (PROMPT, first, PROMPT, second), Score(1.0))
    alone, given, length = steps_of(answered("ab\nc")), len(PROMPT.ids), len(first.ids)
    assert steps_of(rollout)[:2] == alone
    (last,) = steps_of(rollout)[2:]
    (own,) = steps_of(answered("c\n"))
    assert last == Step(own.position + 4, own.end + given + length, own.through + given + length)
    assert steps_of(Rollout(Problem("p", ""), 0, (PROMPT,), Score.failed("no turn"))) == []
