"""Thinking tokens and scores of rollouts, and rollouts as JSON.

The JSON, with arrays, is for another process that works on the same run (system/world.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from posttrain.types import JSON, THINK, THINK_END, TURNS, Group, Problem, Rollout, Score, Segment

# the fields of a rollout that need no conversion
PLAIN = [f.name for f in fields(Rollout) if f.name not in ("problem", "segments", "score")]


def thinking_tokens(given: Segment, reply: Segment) -> int:
    """Count the tokens of a turn in reasoning blocks. The chat template may have opened the first block."""
    text, offsets, count = reply.text, reply.offsets, 0
    assert offsets is not None
    place = -len(THINK) if given.text.rstrip().endswith(THINK) else text.find(THINK)
    while place != -1:
        begin, end = place + len(THINK), text.find(THINK_END, max(0, place))
        inside = (begin, end if end >= 0 else len(text))
        first, last = np.searchsorted(offsets, inside, side="right")
        count += int(last - first)
        place = text.find(THINK, end) if end >= 0 else -1
    return count


def with_score(rollout: Rollout, score: Score) -> Rollout:
    """Return the rollout with its score: its value includes the rewards of turns, its outcome is the one that the episode
    named, and its steps end at characters of the response."""
    named, paid = rollout.score.outcome, rollout.paid
    if score.steps and rollout.answer is not None:
        place = rollout.response.rfind(rollout.answer)
        ends = [p + place if place >= 0 else len(rollout.response) for p, _ in score.steps]
        score = replace(score, steps=tuple(zip(ends, (v for _, v in score.steps), strict=True)))
    elif score.steps and (openings := rollout.openings):
        starts = [place + n * len(THINK) for n, place in enumerate(openings)]
        moved = [(p - len(THINK) * sum(s < p for s in starts), v) for p, v in score.steps]
        score = replace(score, steps=tuple((max(0, p), v) for p, v in moved))
    if paid and score.value is not None:
        score = replace(score, value=score.value + paid, parts={**score.parts, TURNS: paid})
    score = replace(score, outcome=named) if named else score
    return replace(rollout, score=score)


def as_rollouts(made: object) -> list[Rollout]:
    several = isinstance(made, list | tuple) and bool(made)
    rollouts = list(made) if isinstance(made, list | tuple) and several else [made]
    found = [rollout for rollout in rollouts if isinstance(rollout, Rollout)]
    if len(found) < len(rollouts):
        kind = type(made).__name__
        raise TypeError(f"run must return rollouts, as generate.rollout() makes them, not {kind}")
    return found


def rollout_row(rollout: Rollout) -> JSON:
    """Return a rollout in the form that another process gets."""
    segments = [[getattr(s, f.name) for f in fields(s)] for s in rollout.segments]
    return [segments, score_row(rollout.score), {name: getattr(rollout, name) for name in PLAIN}]


def group_of_rows(problem: Problem, role: str, rows: Sequence[JSON]) -> Group:
    rollouts = []
    for segments, score, plain in rows:
        parts = tuple(Segment(*segment) for segment in segments)
        rollouts.append(Rollout(problem, segments=parts, score=Score(*score), **plain))
    return Group(problem, tuple(rollouts), role)


def score_row(score: Score) -> JSON:
    """Return the arguments of a score, as JSON."""
    return [getattr(score, f.name) for f in fields(score)]
