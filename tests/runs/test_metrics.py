"""Metrics merge as sums: numbers worked by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.runs.metrics import merge, merged
from posttrain.types import Metric


def test_totals_and_counts_are_summed_before_they_are_divided() -> None:
    figures = merge(
        [
            Metric("kl", 6.0, 3),  # mean 2 over 3 tokens
            Metric("clip", 1.0, 4),
            Metric("kl", 10.0, 1),  # mean 10 over 1 token
            Metric("tokens", 3.0, None),
            Metric("tokens", 1.0, None),
        ]
    )
    assert dict(figures) == {"kl": 4.0, "clip": 0.25, "tokens": 4.0}  # 16 / 4; a mean of means would say 6
    assert list(figures) == ["kl", "clip", "tokens"]


def test_nothing_measured_is_nan_and_does_not_dilute() -> None:
    assert math.isnan(merge([Metric("kl", 0.0, 0), Metric("kl", 0.0, 0)])["kl"])
    assert merge([Metric("kl", 0.0, 0), Metric("kl", 3.0, 2)])["kl"] == 1.5
    assert len(merge([])) == 0
    with pytest.raises(KeyError):
        merge([])["kl"]


def test_a_nan_is_seen_not_swallowed() -> None:
    assert math.isnan(merge([Metric("loss", float("nan"), 1), Metric("loss", 1.0, 1)])["loss"])


def test_a_name_is_a_sum_or_a_mean() -> None:
    for pair in ([Metric("a", 1.0, None), Metric("a", 1.0, 1)], [Metric("a", 1.0, 1), Metric("a", 1.0, None)]):
        with pytest.raises(ValueError, match="'a' is a sum in one place"):
            merge(pair)


def test_the_largest_of_all_merges_as_such() -> None:
    parts = [Metric("worst", value, None, largest=True) for value in (-3.0, -1.0, -2.0)]
    assert merge(parts)["worst"] == merge([*merged(parts[:2]).values(), parts[2]])["worst"] == -1.0
    for order in (1, -1):
        assert math.isnan(merge([Metric("worst", float("nan"), None, largest=True), parts[0]][::order])["worst"])
    with pytest.raises(ValueError, match="'worst' is a sum in one place"):
        merge([parts[0], Metric("worst", 1.0, None)])


def test_the_smallest_of_all_merges_as_such() -> None:
    parts = [Metric("least", value, None, smallest=True) for value in (3.0, 1.0, 2.0)]
    assert merge(parts)["least"] == 1.0
    assert math.isnan(merge([parts[0], Metric("least", float("nan"), None, smallest=True)])["least"])
    with pytest.raises(ValueError, match="least"):
        merge([parts[0], Metric("least", 1.0, None, largest=True)])


def test_tensors_are_taken_as_numbers() -> None:
    torch = pytest.importorskip("torch")
    assert merge([Metric("kl", torch.tensor(1.5), torch.tensor(2)), Metric("kl", 0.5, 2)])["kl"] == 0.5


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(-99, 99), st.integers(0, 9))), st.integers(0, 20))
def test_merging_parts_first_changes_nothing(raw: list[tuple[str, int, int]], cut: int) -> None:
    metrics = [Metric(*entry) for entry in raw]
    parts = [*merged(metrics[:cut]).values(), *merged(metrics[cut:]).values()]
    once, twice = ([(m.name, m.total, m.count) for m in merged(these).values()] for these in (metrics, parts))
    assert sorted(once) == sorted(twice)
