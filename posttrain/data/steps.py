"""The steps of a response, and the tokens in which they end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posttrain.errors import require
from posttrain.types import Rollout, Segment


@dataclass(frozen=True, slots=True)
class Step:
    """Where a step ends: in the response's text, in the rollout's ids (the token that completes its text), and the last of the ids
    that a completion of it goes on from."""

    position: int
    end: int
    through: int


def steps_of(rollout: Rollout, separator: str = "\n") -> list[Step]:
    """The steps of a rollout's one response. A step's label or reward stands at the token in which its own text ends, as in a file of
    step labels; completions go on after the separator, so that the step is over. Of several steps that end in one token the last
    counts, and two separators in a row make no step."""
    require(bool(separator), "steps need a separator that is not empty")
    response = response_of(rollout)
    before, text, offsets = len(rollout.ids) - len(response.ids), response.text, response.offsets
    assert offsets is not None
    found: dict[int, Step] = {}
    start = 0
    while start <= len(text):
        stop = text.find(separator, start)
        stop = stop if stop >= 0 else len(text)
        if text[start:stop].strip():
            # the first to reach this far
            end, through = np.searchsorted(offsets, [stop, min(stop + len(separator), len(text))])
            found[int(end)] = Step(stop, before + int(end), before + int(through))
        start = stop + len(separator)
    steps = list(found.values())
    if steps:
        steps[-1] = Step(steps[-1].position, steps[-1].end, len(rollout.ids) - 1)
    return steps


def response_of(rollout: Rollout) -> Segment:
    """The one segment that was sampled, with which the rollout ends."""
    sampled = [s for s in rollout.segments if s.sampled]
    require(
        len(sampled) == 1
        and sampled[0] is rollout.segments[-1]
        and sampled[0].offsets is not None
        and len(sampled[0].ids) > 0,
        f"steps are found in rollouts of one response with offsets, unlike that of problem {rollout.problem.id}",
    )
    return sampled[0]
