"""Streams: every index once an epoch, whatever the sizes of the bites and wherever a run stopped."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.stream import Mixture, Stream, permutation
from posttrain.errors import UserError

BITES = st.lists(st.integers(0, 17), max_size=12)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 5), BITES)
def test_every_index_once_an_epoch_whatever_the_bites(count: int, seed: int, bites: list[int]) -> None:
    stream = Stream(count, seed)
    taken = [i for bite in bites for i in stream.take(bite)]
    assert taken == Stream(count, seed).take(sum(bites))
    for start in range(0, len(taken) - count + 1, count):
        assert sorted(taken[start : start + count]) == list(range(count))
    assert stream.epoch * count + stream.position == len(taken)


@settings(deadline=None)
@given(st.integers(1, 12), BITES, BITES)
def test_a_resumed_stream_goes_on_where_it_stopped(count: int, before: list[int], after: list[int]) -> None:
    whole = Stream(count, 3)
    for bite in before:
        whole.take(bite)
    resumed = Stream(count, 3)
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert [resumed.take(bite) for bite in after] == [whole.take(bite) for bite in after]


def test_a_state_taken_at_the_end_of_an_epoch_starts_the_next() -> None:
    stream = Stream(5, 0)
    first = stream.take(5)
    assert stream.state() == {"count": 5, "seed": 0, "epoch": 1, "position": 0}
    resumed = Stream(5, 0)
    resumed.restore(stream.state())
    second = resumed.take(5)
    assert sorted(second) == sorted(first) == list(range(5))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    stream = Stream(100, 0)
    first, second = stream.take(100), stream.take(100)
    assert first != second
    assert first != Stream(100, 1).take(100)
    assert first != list(range(100))


def test_orders_are_pinned() -> None:
    """A resumed run must see the order it began with, also after an upgrade."""
    assert permutation(8, "stream", 0, 0).tolist() == [6, 3, 2, 7, 5, 4, 1, 0]
    assert Mixture([1, 1], [Stream(1, 0), Stream(1, 0)])._sources(8) == [1, 0, 1, 1, 0, 0, 0, 1]


def test_a_permutation_is_uniform() -> None:
    counts = np.zeros((4, 4))
    for key in range(2_000):
        counts[np.arange(4), permutation(4, "test", key)] += 1
    assert np.abs(counts - 500).max() < 100  # five standard deviations


def test_the_global_generator_is_left_alone() -> None:
    np.random.seed(0)
    expected = np.random.rand()
    np.random.seed(0)
    Mixture([1, 2], [Stream(9, 0), Stream(9, 1)]).take(50)
    assert np.random.rand() == expected


@pytest.mark.parametrize("change", [{"count": 6}, {"seed": 1}, {"position": 5}, {"position": -1}, {"epoch": -1}])
def test_a_state_of_other_data_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(UserError, match="cannot resume the data stream"):
        Stream(5, 0).restore({**Stream(5, 0).state(), **change})


def mixture() -> Mixture:
    return Mixture([3.0, 1.0, 0.0], [Stream(7, 0), Stream(5, 1), Stream(2, 2)], seed=4)


@settings(deadline=None)
@given(BITES, BITES)
def test_a_mixture_is_the_same_whatever_the_bites_and_resumes(before: list[int], after: list[int]) -> None:
    bitten = mixture()
    taken = [pair for bite in before for pair in bitten.take(bite)]
    resumed = mixture()
    resumed.restore(json.loads(json.dumps(bitten.state())))
    taken += [pair for bite in after for pair in resumed.take(bite)]
    assert taken == mixture().take(sum(before) + sum(after))


def test_a_mixture_follows_its_weights_and_each_source_its_own_epochs() -> None:
    taken = mixture().take(4_000)
    sources = [source for source, _ in taken]
    assert abs(sources.count(0) - 3_000) < 150  # over five standard deviations
    assert sources.count(2) == 0
    for source, count in ((0, 7), (1, 5)):
        indices = [index for s, index in taken if s == source]
        assert sorted(indices[:count]) == list(range(count))


@pytest.mark.parametrize("weights", [[], [1.0], [0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_bad_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(UserError):
        Mixture(weights, [Stream(1, 0), Stream(1, 0)])


def test_a_mixture_of_other_sources_is_refused() -> None:
    state = mixture().state()
    with pytest.raises(UserError, match="3 sources and now has 1"):
        Mixture([1.0], [Stream(7, 0)], seed=4).restore(state)
    with pytest.raises(UserError, match="seed"):
        Mixture([1, 1, 1], [Stream(7, 0), Stream(5, 1), Stream(2, 2)], seed=5).restore(state)
    with pytest.raises(UserError, match="at least one example"):
        Stream(0, 0)
