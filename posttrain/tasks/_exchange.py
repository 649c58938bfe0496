"""Rollouts and scores as JSON with arrays, for another process that works on the same run (system/world.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from posttrain.types import JSON, Group, Problem, Rollout, Score, Segment

# what a rollout is besides its parts, which are made anew
PLAIN = [f.name for f in fields(Rollout) if f.name not in ("problem", "segments", "score")]


def rollout_row(rollout: Rollout) -> JSON:
    """A rollout as another process gets it."""
    segments = [[getattr(s, f.name) for f in fields(s)] for s in rollout.segments]
    return [segments, score_row(rollout.score), {name: getattr(rollout, name) for name in PLAIN}]


def group_of_rows(problem: Problem, role: str, rows: Sequence[JSON]) -> Group:
    rollouts = [
        Rollout(
            problem, segments=tuple(Segment(*s) for s in segments), score=Score(*score), **plain
        )
        for segments, score, plain in rows
    ]
    return Group(problem, tuple(rollouts), role)


def score_row(score: Score) -> JSON:
    """The arguments of a score, as JSON."""
    return [getattr(score, f.name) for f in fields(score)]
