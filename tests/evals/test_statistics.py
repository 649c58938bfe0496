"""Statistics against numbers worked by hand and against enumeration."""

from __future__ import annotations

from itertools import combinations, product
from math import inf, isclose, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.errors import UserError
from posttrain.evals.statistics import (
    compare,
    majority_at_k,
    mean_interval,
    pass_at_k,
    share_interval,
    sign_test,
    wilson,
)


def test_wilson_by_hand() -> None:
    # p = 0.5, n = 4, z = 2: shrink 2, centre (0.5 + 0.5)/2, half-width 2 sqrt(0.25/4 + 4/64)/2 = sqrt(0.125)
    interval = wilson(2, 4, z=2)
    assert interval.value == 0.5
    assert isclose(interval.low, 0.5 - sqrt(0.125))
    assert isclose(interval.high, 0.5 + sqrt(0.125))
    assert (wilson(0, 10).low, wilson(10, 10).high) == (0.0, 1.0)
    assert isclose(wilson(0, 10).high, 1.96**2 / (10 + 1.96**2))


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_contains_its_value_inside_the_unit_interval(case: tuple[int, int]) -> None:
    interval, mirror = wilson(*case), wilson(case[1] - case[0], case[1])
    assert 0 <= interval.low <= interval.value <= interval.high <= 1
    assert interval.low < interval.high
    assert isclose(interval.low, 1 - mirror.high, abs_tol=1e-12)


@pytest.mark.parametrize("case", [(1, 0), (0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_what_is_no_count(case: tuple[int, int]) -> None:
    with pytest.raises(ValueError):
        wilson(*case)


def test_mean_interval_by_hand() -> None:
    interval = mean_interval([0, 0, 1, 1], z=2)  # s^2 = 1/3, s/sqrt(4) = 0.288675
    assert interval.value == 0.5
    assert isclose(interval.high - 0.5, 2 * sqrt(1 / 12))
    assert (mean_interval([3.0]).low, mean_interval([3.0]).high) == (-inf, inf)
    for bad in ([], [float("nan")]):
        with pytest.raises(ValueError):
            mean_interval(bad)


def test_shares_stay_within_0_and_1() -> None:
    none, low, high = share_interval([0.0] * 10), share_interval([0.0, 0.0, 0.1]), share_interval([1.0, 1.0, 0.9])
    assert none == wilson(0, 10) and none.high > 0.2
    assert low.low == 0.0 < low.value == pytest.approx(0.1 / 3) and high.high == 1.0
    # s^2 = (2 (1/30)^2 + (2/30)^2) / 2 = 1/300
    assert isclose(low.high - low.value, 1.96 * sqrt(1 / 300 / 3))


def test_pass_at_k_where_resampling_goes_wrong() -> None:
    assert pass_at_k(8, 1, 8) == 1.0  # drawing with replacement would say 0.656
    assert pass_at_k(8, 0, 8) == 0.0
    assert pass_at_k(10, 3, 1) == 0.3
    assert pass_at_k(1000, 1, 500) == 0.5  # the binomials here overflow floats


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_mean_over_all_choices(case: tuple[int, int, int]) -> None:
    n, c, k = case
    choices = list(combinations([1] * c + [0] * (n - c), k))
    assert isclose(pass_at_k(n, c, k), sum(any(choice) for choice in choices) / len(choices))


@pytest.mark.parametrize("case", [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_pass_at_k_refuses_what_it_cannot_know(case: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError):
        pass_at_k(*case)


@pytest.mark.parametrize(
    ("answers", "k", "expected"),
    [
        (["7", "7", "8"], 3, 1.0),
        (["8", "8", "7"], 3, 0.0),
        (["7", "8"], 2, 0.5),
        (["7", "8", "9"], 3, 1 / 3),
        (["8", "7", "7"], 1, 0.0),
        ([None, None, "7"], 3, 1.0),
        ([None, None], 2, 0.0),
    ],
)
def test_majority_by_hand(answers: list[str | None], k: int, expected: float) -> None:
    assert majority_at_k(answers, [a == "7" for a in answers], k) == expected


def test_majority_refuses_contradictions() -> None:
    with pytest.raises(ValueError, match="both right and wrong"):
        majority_at_k(["7", "7"], [True, False], 2)
    with pytest.raises(ValueError):
        majority_at_k(["7"], [True], 2)


@given(st.integers(0, 9), st.integers(0, 9))
def test_sign_test_is_what_coins_say(wins: int, losses: int) -> None:
    n = wins + losses
    as_far = [sum(coins) for coins in product((0, 1), repeat=min(n, 10))] if n <= 10 else None
    assert sign_test(wins, losses) == sign_test(losses, wins)
    if as_far is not None:
        extreme = sum(abs(heads - n / 2) >= abs(wins - n / 2) for heads in as_far) / len(as_far)
        assert isclose(sign_test(wins, losses), extreme)


def test_comparison_by_hand() -> None:
    first, second = [1, 1, 0, 0, 0, 0, 0, 0], [1, 0, 1, 1, 1, 1, 1, 0]
    result = compare(first, second, z=1.0)
    assert (result.wins, result.losses, result.ties) == (5, 1, 2)
    assert result.p_value == 2 * (1 + 6) / 64
    assert result.difference.value == 0.5
    # with half a problem more in each of four cells: (5 - 1) / 10, and sqrt(7 - 16 / 10) / 10
    assert isclose(result.difference.low, 0.4 - sqrt(5.4) / 10) and isclose(result.difference.high, 0.4 + sqrt(5.4) / 10)


def test_shares_of_several_samples_have_the_normal_interval_within_bounds() -> None:
    # differences 0.5, 0, 1: mean 0.5, variance 0.25, over 3
    found = compare([0.5, 0.5, 0.0], [1.0, 0.5, 1.0], z=1.0).difference
    assert isclose(found.low, 0.5 - sqrt(0.25 / 3)) and isclose(found.high, 0.5 + sqrt(0.25 / 3))
    assert compare([0.5, 0.5, 0.0], [1.0, 0.5, 1.0]).difference.high == 1.0, "not beyond what shares can differ by"
    rewards = compare([5.0, 1.0, 3.0], [9.0, 1.0, 4.0], z=1.0).difference  # no shares: differences 4, 0, 1, variance 13 / 3
    assert isclose(rewards.high, 5 / 3 + sqrt(13 / 9))


def test_equal_results_say_how_little_they_know() -> None:
    few, many = (compare([1.0] * n, [1.0] * n).difference for n in (5, 500))
    assert few.value == many.value == 0.0 and few.high > 0.25 and 0 < many.high < 0.01 and few.low == -few.high


def test_equal_shares_have_a_width_too() -> None:
    moved, same = compare([0.25] * 30, [0.5] * 30).difference, share_interval([2 / 3] * 30)
    assert moved.value == 0.25 and 0.05 < moved.low < 0.15 < 0.35 < moved.high < 0.5
    assert same == wilson(20, 30) and 0.48 < same.low < same.high < 0.81


def test_the_paired_interval_holds_what_it_promises() -> None:
    """Simulated: of 2,000 comparisons of 40 problems, the true difference lies within about 95%."""
    generator, inside = np.random.default_rng(0), 0
    for _ in range(2000):
        cells = generator.choice(4, size=40, p=[0.5, 0.2, 0.05, 0.25])  # both, only the second, only the first, neither
        found = compare(np.isin(cells, (0, 2)).astype(float).tolist(), np.isin(cells, (0, 1)).astype(float).tolist()).difference
        inside += found.low <= 0.15 <= found.high
    assert 0.93 < inside / 2000 < 0.98


def test_what_could_not_be_scored_is_left_out_of_both_sides() -> None:
    nan = float("nan")
    found, plain = compare([1, nan, 0, 0], [1, 1, nan, 1]), compare([1, 0], [1, 1])
    assert (found.wins, found.losses, found.ties, found.left_out) == (1, 0, 1, 2) and found.difference == plain.difference
    assert "; 2 left out, which could not be scored" in str(found) and "left out" not in str(plain)


def test_a_long_comparison_does_not_overflow() -> None:
    assert 0 < sign_test(5_000, 6_000) < 1e-20
    assert isclose(sign_test(5_000, 5_000), 1.0)


@pytest.mark.parametrize(
    ("pair", "error"),
    [
        (([], []), UserError),
        (([float("nan")], [1.0]), UserError),
        (([1], [1, 0]), ValueError),
        (([float("inf")], [1.0]), ValueError),
    ],
)
def test_comparison_refuses_what_is_not_paired(pair: tuple[list[float], list[float]], error: type[Exception]) -> None:
    with pytest.raises(error):
        compare(*pair)
