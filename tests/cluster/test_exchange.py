"""What processes tell each other arrives as it was: every field of a rollout, arrays to the bit, half a surrogate pair."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import ranks_for_tests as ranks

from posttrain.system.world import ALONE, World
from posttrain.tasks._rollouts import group_of_rows, rollout_row
from posttrain.train.processes import decode, encode
from posttrain.types import Problem, Rollout, Score, Segment

EVERY = Rollout(
    Problem("p", "q"),
    sample=3,
    segments=(
        Segment(np.array([1, 2]), "ab", False, offsets=np.array([1, 2])),
        Segment(
            ids=np.array([5]),
            text="\udc80",
            sampled=True,
            logprobs=np.array([-0.1], np.float32),
            offsets=np.array([1]),
            versions=np.array([4], np.int32),
            finish="stop",
            reward=0.25,
        ),
    ),
    score=Score(0.5, parts={"a": 0.1}, steps=((1, 0.3),), outcome="correct"),
    role="solver",
    answer="7",
    counts={"tool/calls": 2.0},
    routes=np.array([[0, 3], [-1, -1]], np.int16),
)


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    return [plain(one) for one in value] if isinstance(value, tuple) else value


def test_every_field_of_a_rollout_arrives() -> None:
    """A field that is added to the type and has no value here fails: it would be forgotten between processes."""
    for one in (EVERY, EVERY.segments[1]):
        for field in fields(one):
            value = getattr(one, field.name)
            assert isinstance(value, np.ndarray) or value not in (None, "", 0.0, {}), f"give {field.name} a value above"
    for rollout in (EVERY, Rollout(Problem("p", "q"), 0, EVERY.segments[:1], Score.failed("timeout"))):
        found = group_of_rows(rollout.problem, rollout.role, [decode(encode(rollout_row(rollout)))])
        assert plain(found.rollouts[0]) == plain(rollout)


def test_what_is_not_data_is_refused() -> None:
    with pytest.raises(TypeError, match="Problem cannot be exchanged"):
        encode({"x": Problem("p", "q")})


def exchanged(world: World) -> list[Any]:
    same = world.same({"from": world.rank})
    every = world.gather([world.rank, np.full(world.rank, 0.5)])
    return [same, [[rank, array.tolist()] for rank, array in every], world.any(world.rank == 1), list(world.share(5))]


def test_all_processes_have_the_same() -> None:
    found = ranks.run(2, exchanged)
    assert found[0][:3] == found[1][:3] == [{"from": 0}, [[0, []], [1, [0.5]]], True]
    assert [one[3] for one in found] == [[0, 1], [2, 3, 4]]


def test_one_process_alone_exchanges_nothing() -> None:
    value = object()
    assert ALONE.same(value) is value and ALONE.gather(value) == [value] and list(ALONE.share(3)) == [0, 1, 2]
