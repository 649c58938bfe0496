"""The expected best of n from N samples: against every subset, without bias, and the reward-KL curve of groups."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from material_for_tests import segment

from posttrain.evals.best_of_n import chances, expected_best, frontier
from posttrain.ops.kl import best_of_n_kl
from posttrain.types import Group, Problem, Rollout, Score


def by_enumeration(proxy: list[float], value: list[float], n: int) -> float:
    """The mean over all subsets of size n of the value of the best; of several bests, the mean of theirs."""
    means = []
    for subset in combinations(range(len(proxy)), n):
        top = max(proxy[i] for i in subset)
        means.append(np.mean([value[i] for i in subset if proxy[i] == top]))
    return float(np.mean(means))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_against_all_subsets(seed: int, ties: bool) -> None:
    generator = np.random.default_rng(seed)
    proxy = (generator.integers(0, 3, 7).astype(float) if ties else generator.normal(size=7)).tolist()
    gold = generator.normal(size=7).tolist()
    for value in (proxy, gold):
        found = expected_best(proxy, value)
        assert found.tolist() == pytest.approx([by_enumeration(proxy, value, n) for n in range(1, 8)], abs=1e-12)


def test_by_hand() -> None:
    """Of 0, 0, 1 (the last one right): one sample is right 1/3 of the time, two 2/3, three always: pass@k."""
    assert expected_best([0.0, 0.0, 1.0], [0.0, 0.0, 1.0]).tolist() == pytest.approx([1 / 3, 2 / 3, 1.0])
    # a proxy that is the gold upside down: the best by proxy is the worst by gold
    assert expected_best([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]).tolist() == pytest.approx([2.0, 4 / 3, 1.0])


def test_chances_add_up_at_any_size() -> None:
    for samples, n in ((1, 1), (5, 5), (7, 3), (2000, 1000), (4096, 64)):
        found = chances(samples, n)
        assert found.sum() == pytest.approx(1.0, rel=1e-9) and (found[: n - 1] == 0).all() and found[-1] == n / samples


def test_it_is_unbiased() -> None:
    """Samples from the uniform distribution: the expected best of n is n / (n + 1), for every n of one batch of 8."""
    generator = np.random.default_rng(0)
    draws = generator.random((20_000, 8))
    mean = np.mean([expected_best(row, row) for row in draws[:4000].tolist()], axis=0)
    exact = np.arange(1, 9) / np.arange(2, 10)
    assert (np.abs(mean - exact) < 0.02).all()


def group(name: str, scores: list[Score]) -> Group:
    problem = Problem(name, "")
    return Group(problem, tuple(Rollout(problem, n, (segment([3], True),), s) for n, s in enumerate(scores)))


def test_the_curve_of_groups() -> None:
    """Two problems; in one a sample failed and another lacks its gold, so n stops at 2."""
    first = group("a", [Score(1.0, {"task": 0.0}), Score(3.0, {"task": 1.0})])
    second = group("b", [Score(0.0, {"task": 1.0}), Score.failed("timeout"), Score(2.0, {"task": 0.0}), Score(9.0)])
    points = frontier([first, second])
    assert [p.n for p in points] == [1, 2]
    assert [p.kl for p in points] == [best_of_n_kl(1), best_of_n_kl(2)]
    assert [p.proxy.value for p in points] == pytest.approx([(2 + 1) / 2, (3 + 2) / 2])
    assert [p.gold.value for p in points] == pytest.approx([(0.5 + 0.5) / 2, (1 + 0) / 2])
    assert [p.n for p in frontier([first], ns=[2])] == [2]


def test_without_a_gold_part_the_value_is_both() -> None:
    (one, two) = frontier([group("a", [Score(0.0), Score(1.0)])])
    assert (one.gold.value, two.gold.value) == (one.proxy.value, two.proxy.value) == (0.5, 1.0)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no sample has a score"):
        frontier([group("a", [Score.failed("x")])])
    with pytest.raises(ValueError, match="the best of 3 cannot be estimated from 1 samples"):
        frontier([group("a", [Score(1.0)])], ns=[3])
    with pytest.raises(ValueError, match="finite"):
        expected_best([1.0, float("nan")], [1.0, 2.0])
    with pytest.raises(ValueError, match="proxy rewards for"):
        expected_best([1.0], [1.0, 2.0])
