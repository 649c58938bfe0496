"""Exact answer after a marker: a strict integer (or a strict string) that must be the last thing the response says."""

from __future__ import annotations

import re

from posttrain.rewards.compose import CORRECT, UNPARSEABLE, WRONG
from posttrain.types import Score

MARKER = "#"
# ASCII digits only (Python's \d and int() take other scripts), no plus sign, no leading zeros, no -0; the length is bounded.
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,99}")


def after_marker(response: str, marker: str = MARKER) -> str | None:
    """What follows the last marker, without surrounding whitespace; None without a marker or with nothing after it.

    >>> after_marker("2+2 is #4 "), after_marker("4"), after_marker("#")
    ('4', None, None)
    """
    _, found, tail = response.rpartition(marker)
    return tail.strip() or None if found else None


def strict_integer(text: str | None) -> int | None:
    """The integer that `text` spells in the one canonical way, or None.

    >>> strict_integer("-12"), strict_integer("012"), strict_integer("12."), strict_integer("１２"), strict_integer("")
    (-12, None, None, None, None)
    """
    return int(text) if text is not None and INTEGER.fullmatch(text) else None


def integer_answer(response: str, gold: int, marker: str = MARKER) -> Score:
    """1 where the response ends in the marker and exactly `gold`; 0 and `unparseable` where no strict integer is there.

    >>> [integer_answer(r, 132).outcome for r in ("so #132", "so #131", "so 132", "#132 or so")]
    ['correct', 'wrong', 'unparseable', 'unparseable']
    """
    given = strict_integer(after_marker(response, marker))
    if given is None:
        return UNPARSEABLE
    return CORRECT if given == gold else WRONG


def answer(prompt: str, response: str, answer: str, marker: str = MARKER) -> Score:
    """The plain reward: what follows the last marker must equal the gold answer, as integers where the gold is one.

    A gold answer that is empty cannot be met; that is a failure of the data and not a score of 0.
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
