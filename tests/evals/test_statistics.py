"""Statistics against numbers worked by hand, against enumeration, and intervals against simulations of what they promise."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from math import inf, isclose, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.errors import UserError
from posttrain.evals.statistics import (
    Interval,
    clustered,
    compare,
    majority_at_k,
    mean_interval,
    paired_interval,
    pass_at_k,
    share_interval,
    sign_test,
    student,
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
    interval = mean_interval([0, 0, 1, 1])  # s^2 = 1/3, s/sqrt(4) = 0.288675; t of 3 degrees of freedom is 3.18245
    assert interval.value == 0.5
    assert isclose(interval.high - 0.5, 3.18245 * sqrt(1 / 12), rel_tol=1e-5)
    assert (mean_interval([3.0]).low, mean_interval([3.0]).high) == (-inf, inf)
    for bad in ([], [float("nan")]):
        with pytest.raises(ValueError):
            mean_interval(bad)


def test_shares_stay_within_0_and_1() -> None:
    none, low, high = share_interval([0.0] * 10), share_interval([0.0, 0.0, 0.1]), share_interval([1.0, 1.0, 0.9])
    assert none == wilson(0, 10) and none.high > 0.2
    assert 0.0 <= low.low < low.value == pytest.approx(0.1 / 3) and high.value < high.high <= 1.0
    assert low == wilson(0.1, 3) and high == wilson(2.9, 3), "one value between 0 and 1 does not narrow it"


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
    result = compare(first, second)
    assert (result.wins, result.losses, result.ties) == (5, 1, 2)
    assert result.p_value == 2 * (1 + 6) / 64
    assert result.difference.value == 0.5
    # with half a problem more in each of four cells: (5 - 1) / 10, and sqrt(7 - 16 / 10) / 10
    assert isclose(result.difference.low, 0.4 - 1.96 * sqrt(5.4) / 10)
    assert isclose(result.difference.high, 0.4 + 1.96 * sqrt(5.4) / 10)


def test_shares_of_several_samples_have_their_own_squares_within_bounds() -> None:
    # differences 0.5, 0, 1: sum 1.5, squares 1.25, and one problem more that differs by 1 and by -1
    found = compare([0.5, 0.5, 0.0], [1.0, 0.5, 1.0]).difference
    half = 1.96 * sqrt(1.25 + 1 - 1.5**2 / 5) / 5
    assert isclose(found.low, 0.3 - half) and isclose(found.high, 0.3 + half) and found.value == 0.5
    assert compare([0.0] * 5, [1.0] * 4 + [0.9]).difference.high == 1.0, "not beyond what shares can differ by"
    rewards = compare([5.0, 1.0, 3.0], [9.0, 1.0, 4.0]).difference  # no shares: differences 4, 0, 1, variance 13 / 3
    assert isclose(rewards.high, 5 / 3 + 4.30265 * sqrt(13 / 9), rel_tol=1e-5)


def test_equal_results_say_how_little_they_know() -> None:
    few, many = (compare([1.0] * n, [1.0] * n).difference for n in (5, 500))
    assert few.value == many.value == 0.0 and few.high > 0.25 and 0 < many.high < 0.01 and few.low == -few.high


def test_equal_shares_have_a_width_too() -> None:
    moved, same = compare([0.25] * 30, [0.5] * 30).difference, share_interval([2 / 3] * 30)
    assert moved.value == 0.25 and 0.1 < moved.low < 0.2 < 0.29 < moved.high < 0.4
    assert same == wilson(20, 30) and 0.48 < same.low < same.high < 0.81


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


def test_student_by_the_table() -> None:
    table = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445, 5: 2.570582, 9: 2.262157, 10: 2.228139, 29: 2.045230,
             30: 2.042272, 100: 1.983972, 101: 1.983731, 1000: 1.962339, 1_000_000: 1.960}  # fmt: skip
    assert {v: round(student(v), 6) for v in table} == pytest.approx(table, rel=2e-4)
    assert all(isclose(student(v), t, abs_tol=1e-6) for v, t in table.items() if v < 10_000)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(1, 4))
def test_intervals_of_shares_hold_their_mean_and_stay_within_bounds(values: list[float], size: int) -> None:
    n = len(values)
    keys = [place // size for place in range(n)]
    for found in (share_interval(values), share_interval(values, keys), share_interval(values, means=True)):
        assert (
            0 <= found.low <= found.value + 1e-12 and found.value - 1e-12 <= found.high <= 1 and found.high - found.low > 1e-3
        )
        assert isclose(found.value, sum(values) / n, abs_tol=1e-12)
    plain, floor = share_interval(values), wilson(min(sum(values), n), n)
    assert plain.high - plain.low >= floor.high - floor.low - 1e-12, "never narrower than Wilson's of the mean"
    paired = paired_interval([2 * value - 1 for value in values], keys)
    assert -1 <= paired.low <= paired.value + 1e-12 and paired.value - 1e-12 <= paired.high <= 1


def test_clusters_keep_the_mean_and_have_the_robust_variance() -> None:
    values, keys = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0], ["a", "a", "a", "b", "c", "c"]
    found = clustered(values, keys)
    mean, residuals = 4 / 6, [2 - 3 * 4 / 6, 1 - 4 / 6, 1 - 2 * 4 / 6]
    assert isclose(sum(found) / 3, mean)
    # the textbook's: sum over clusters of (sum of residuals)^2 / N^2, times C / (C - 1)
    assert isclose(np.var(found, ddof=1) / 3, sum(r * r for r in residuals) / 36 * 3 / 2)
    assert clustered(values, range(6)) == values and clustered([0.0, 1.0], ["a", "a"]) == [0.5]
    assert share_interval([1.0] * 6, keys) == wilson(3, 3), "six right pairs of three rankings are three rankings"


def test_differences_of_a_cluster_that_add_up_to_nothing_are_a_tie() -> None:
    """0 + 0 + 1 and three thirds: the rounding of thirds is neither a win nor a loss."""
    found = compare([0.0, 0.0, 1.0], [1 / 3, 1 / 3, 1 / 3], ["a"] * 3)
    assert (found.wins, found.losses, found.ties) == (0, 0, 1)
    found = compare([0.0, 0.0, 1.0], [1 / 3, 1 / 3, 1 / 3 + 1e-6], ["a"] * 3)
    assert (found.wins, found.losses, found.ties) == (1, 0, 0)


def test_one_share_between_does_not_make_it_sure() -> None:
    """All of 30 solved, then one of them three times in four: the interval must not collapse."""
    sure, nearly = share_interval([1.0] * 30, means=True), share_interval([1.0] * 29 + [0.75], means=True)
    assert sure == wilson(30, 30) and nearly.low < sure.low < 0.9
    same, moved = paired_interval([0.0] * 30), paired_interval([0.0] * 29 + [0.01])
    assert moved.high - moved.low >= same.high - same.low > 0.1


def test_the_same_prompt_many_times_is_one_observation() -> None:
    """29 prompts, 17 times each with the same answer, are 29 and not 493."""
    first, second = [float(n % 2) for n in range(29)], [float(n % 3 > 0) for n in range(29)]
    keys = [n for n in range(29) for _ in range(17)]
    many = [[value for value in side for _ in range(17)] for side in (first, second)]
    once, repeated = compare(first, second), compare(*many, keys)
    assert (repeated.wins, repeated.losses, repeated.p_value) == (once.wins, once.losses, once.p_value)
    assert repeated.difference.low == pytest.approx(once.difference.low)
    assert share_interval(many[0], keys) == share_interval(first)
    assert mean_interval(many[0], keys).low == pytest.approx(mean_interval(first).low)


RUNS = 1000
Draw = Callable[[np.random.Generator], tuple[Interval, float]]


def normal(n: int) -> Draw:
    return lambda g: (mean_interval(g.normal(3.0, 2.0, n).tolist()), 3.0)


def bernoulli(n: int, p: float) -> Draw:
    return lambda g: (share_interval((g.random(n) < p).astype(float).tolist()), p)


def one_between(n: int, p: float) -> Draw:
    """Outcomes of 0 and 1 and a single partial credit among them."""
    return lambda g: (share_interval([*(g.random(n) < p).astype(float).tolist(), float(g.beta(2 * p, 2 - 2 * p))]), p)


def rankings(count: int, k: int, noise: float) -> Draw:
    """Pairs of rankings of K responses, the truth and a score that is the truth with noise; the pairs share responses."""
    first, second = np.triu_indices(k, 1)
    truth = np.random.default_rng(1).normal(size=(20_000, 2, k)) * [[1.0], [noise]]
    seen = truth.sum(1)
    right = (truth[:, 0, first] > truth[:, 0, second]) == (seen[:, first] > seen[:, second])
    keys, expected = np.repeat(np.arange(count), len(first)).tolist(), float(right.mean())

    def draw(g: np.random.Generator) -> tuple[Interval, float]:
        return share_interval(right[g.integers(0, len(right), count)].astype(float).ravel().tolist(), keys), expected

    return draw


def samples(problems: int, k: int, spread: float) -> Draw:
    """k samples of each problem, whose chances differ: beta distributed with mean 0.6."""
    a, b = 0.6 * spread, 0.4 * spread
    return lambda g: (share_interval((g.binomial(k, g.beta(a, b, problems)) / k).tolist(), means=True), 0.6)


def hidden_half(problems: int) -> Draw:
    """Most problems are never solved and now and then once in 16 samples; one in twenty always is."""

    def draw(g: np.random.Generator) -> tuple[Interval, float]:
        chance = np.where(g.random(problems) < 0.05, 1.0, 0.004)
        return share_interval((g.binomial(16, chance) / 16).tolist(), means=True), 0.05 + 0.95 * 0.004

    return draw


def pairs(n: int, k: int) -> Draw:
    """k samples of both models on the same problems; the second solves each 0.1 more often."""

    def draw(g: np.random.Generator) -> tuple[Interval, float]:
        chance = g.uniform(0.0, 0.9, n)
        first, second = (g.binomial(k, c) / k for c in (chance, chance + 0.1))
        return compare(first.tolist(), second.tolist()).difference, 0.1

    return draw


def repeated(prompts: int, times: int) -> Draw:
    """Answers to few prompts, each asked several times."""
    keys = np.repeat(np.arange(prompts), times).tolist()

    def draw(g: np.random.Generator) -> tuple[Interval, float]:
        chance = np.repeat(g.beta(1.2, 0.8, prompts), times)
        return share_interval((g.random(prompts * times) < chance).astype(float).tolist(), keys), 0.6

    return draw


COVERAGE = {  # what is drawn: the least and the most of 95% that is accepted
    "mean of 2": (normal(2), 0.93, 0.97),
    "mean of 5": (normal(5), 0.93, 0.97),
    "mean of 20": (normal(20), 0.93, 0.97),
    "5 outcomes": (bernoulli(5, 0.7), 0.93, 1.0),
    "20 outcomes": (bernoulli(20, 0.5), 0.93, 0.98),
    "20 outcomes near 1": (bernoulli(20, 0.93), 0.92, 0.99),
    "200 outcomes": (bernoulli(200, 0.3), 0.93, 0.97),
    "a partial credit among 10": (one_between(9, 0.9), 0.93, 1.0),
    "a partial credit among 40": (one_between(39, 0.5), 0.93, 0.98),
    "30 rankings of 4": (rankings(30, 4, 1.0), 0.93, 0.98),
    "30 rankings of 9": (rankings(30, 9, 1.0), 0.93, 0.995),
    "100 rankings of 9": (rankings(100, 9, 0.5), 0.93, 0.98),
    "30 problems, 8 samples": (samples(30, 8, 2.0), 0.93, 0.98),
    "100 problems, 16 samples": (samples(100, 16, 4.0), 0.93, 0.98),
    "30 problems, few of them always solved": (hidden_half(30), 0.93, 1.0),
    "40 pairs": (pairs(40, 1), 0.93, 0.98),
    "10 pairs": (pairs(10, 1), 0.93, 1.0),
    "40 pairs of 8 samples": (pairs(40, 8), 0.93, 0.99),
    "29 prompts, 17 times each": (repeated(29, 17), 0.93, 0.99),
}


@pytest.mark.parametrize("name", COVERAGE)
def test_intervals_cover_what_they_promise(name: str) -> None:
    """Of RUNS seeded draws, the share of 95% intervals that hold the truth lies within a stated band around 95%."""
    draw, least, most = COVERAGE[name]
    generator, inside = np.random.default_rng(len(name)), 0
    for _ in range(RUNS):
        found, truth = draw(generator)
        inside += found.low <= truth <= found.high
    assert least <= inside / RUNS <= most, inside / RUNS
