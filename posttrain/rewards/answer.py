"""Exact answer after a marker: a strict integer (or a strict string) at the very end of the response."""

from __future__ import annotations

import re

from posttrain.rewards.compose import CORRECT, UNPARSEABLE, WRONG
from posttrain.types import Score

MARKER = "#"
# ASCII digits only (Python's \d and int() accept other scripts), no plus sign, no leading zeros, no -0, and a bounded length.
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,99}")


def after_marker(response: str, marker: str = MARKER) -> str | None:
    """Return the text after the last marker, without surrounding whitespace; None without a marker or without text after it.

    >>> after_marker("2+2 is #4 "), after_marker("4"), after_marker("#")
    ('4', None, None)
    """
    _, found, tail = response.rpartition(marker)
    return tail.strip() or None if found else None


def strict_integer(text: str | None) -> int | None:
    """Return the integer that `text` spells in canonical form, or None.

    >>> strict_integer("-12"), strict_integer("012"), strict_integer("12."), strict_integer("１２"), strict_integer("")
    (-12, None, None, None, None)
    """
    return int(text) if text is not None and INTEGER.fullmatch(text) else None


def integer_answer(response: str, gold: int, marker: str = MARKER) -> Score:
    """1 if the response ends in the marker and exactly `gold`; 0 and `unparseable` if no strict integer follows the marker.

    >>> [integer_answer(r, 132).outcome for r in ("so #132", "so #131", "so 132", "#132 or so")]
    ['correct', 'wrong', 'unparseable', 'unparseable']
    """
    given = strict_integer(after_marker(response, marker))
    if given is None:
        return UNPARSEABLE
    return CORRECT if given == gold else WRONG


def answer(prompt: str, response: str, answer: str, marker: str = MARKER) -> Score:
    """The reward: the text after the last marker must equal the gold answer, as integers if the gold answer is one.

    No response can match an empty gold answer; that is a failure of the data and not a score of 0.
    """
    gold = answer.strip()
    if not gold:
        return Score.failed("empty gold answer")
    number = strict_integer(gold)
    if number is not None:
        return integer_answer(response, number, marker)
    given = after_marker(response, marker)
    if given is None:
        return UNPARSEABLE
    return CORRECT if given == gold else WRONG
