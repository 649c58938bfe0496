"""Splits a response into steps, and finds the tokens where they end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import regex

from posttrain.errors import UserError, require
from posttrain.types import Rollout

PATTERN = "pattern:"
SECONDS = 1.0  # how long a pattern may search in one turn


@dataclass(frozen=True, slots=True)
class Step:
    """The end of a step: in the text that the policy wrote, in the rollout's ids (the token that completes its text), and the last
    id after which a completion continues."""

    position: int
    end: int
    through: int


def steps_of(rollout: Rollout, separator: str = "\n") -> list[Step]:
    """The steps of the policy's text, turn by turn. The label or reward of a step belongs to the token that completes its text, as
    in a file of step labels. Completions continue after the separator. If several steps end in one token, the last counts; two
    separators in a row make no step; the end of a turn ends a step.

    `pattern:REGEX` separates at every match of a regular expression. It is searched for `SECONDS` at most, as it may backtrack without
    end on what a policy writes; then TimeoutError says so."""
    return [step for turn in turns_of(rollout) for step in _steps_of_turn(turn, separator)]


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A turn that the policy wrote, and its position in the rollout."""

    ids: np.ndarray
    text: str
    offsets: np.ndarray
    written: int  # characters of earlier turns
    tokens: int  # before it, given ones included

    @property
    def last(self) -> int:
        """The place of its last token in the rollout's ids."""
        return self.tokens + len(self.ids) - 1


def turns_of(rollout: Rollout) -> list[Turn]:
    turns, written, tokens = [], 0, 0
    for segment in rollout.segments:
        if segment.sampled:
            offsets, needed = segment.offsets, "steps are found in turns with offsets"
            if offsets is None or len(segment.ids) == 0:
                raise UserError(f"{needed}, unlike that of problem {rollout.problem.id}")
            turns.append(Turn(segment.ids, segment.text, offsets, written, tokens))
            written += len(segment.text)
        tokens += len(segment.ids)
    return turns


@lru_cache(maxsize=256)
def compile_separator(separator: str) -> Any:
    """The pattern of a separator: plain text, or the regular expression after `pattern:`.

    >>> compile_separator("pattern:\\n+").split("one\\n\\ntwo"), compile_separator("a+").split("aaa+b")
    (['one', 'two'], ['aa', 'b'])
    """
    require(separator, "steps need a separator that is not empty")
    if not separator.startswith(PATTERN):
        return regex.compile(regex.escape(separator))
    text = separator.removeprefix(PATTERN)
    try:
        found = regex.compile(text)
    except regex.error as error:
        raise UserError(f"steps: {text!r} is no regular expression: {error}") from None
    empty = f"steps: the pattern {text!r} matches empty text: every character would be a step"
    require(found.search("") is None, f"{empty}; ask for one character at least, as + for *")
    return found


def check_separator(separator: str) -> None:
    """Raise an error unless `steps_of` can split by it: by a text or a regular expression."""
    other = f"steps: {separator!r}: token:TEXT is for reward=process; give a text or pattern:REGEX"
    require(not separator.startswith("token:"), other)
    compile_separator(separator)


def separators_in(text: str, separator: str) -> Iterator[tuple[int, int]]:
    """Start and end of each separator, with the end of the text as the last."""
    try:
        for match in compile_separator(separator).finditer(text, timeout=SECONDS):
            yield match.span()
    except TimeoutError:
        slow = f"took over {SECONDS:g} s in {len(text)} characters"
        raise TimeoutError(f"steps: {separator!r} {slow}; it backtracks, simplify it") from None
    yield len(text), len(text)


def _steps_of_turn(turn: Turn, separator: str) -> list[Step]:
    text, written, tokens = turn.text, turn.written, turn.tokens
    found: dict[int, Step] = {}
    start = 0
    for stop, after in separators_in(text, separator):
        if text[start:stop].strip():
            # the first tokens that end so far
            end, through = np.searchsorted(turn.offsets, [stop, after])
            found[int(end)] = Step(written + stop, tokens + int(end), tokens + int(through))
        start = after
    steps = list(found.values())
    if steps:
        steps[-1] = replace(steps[-1], through=turn.last)
    return steps
