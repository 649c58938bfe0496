"""The KL of best-of-n: the formula against its integral, and as a bound against an enumerated distribution."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain.ops.kl import best_of_n_kl


def best_of_n_distribution(p: np.ndarray, reward: np.ndarray, n: int) -> np.ndarray:
    """Exactly: with F the mass of strictly worse outcomes, the best of n has a level's reward with chance (F + level)^n - F^n,
    shared within the level by p."""
    best = np.zeros_like(p)
    for value in np.unique(reward):
        level, worse = p[reward == value].sum(), p[reward < value].sum()
        best[reward == value] = p[reward == value] / level * ((worse + level) ** n - worse**n)
    return best


def test_by_hand() -> None:
    assert best_of_n_kl(1) == 0.0
    assert best_of_n_kl(2) == pytest.approx(0.6931471805599453 - 0.5)
    with pytest.raises(ValueError):
        best_of_n_kl(0)


@pytest.mark.parametrize("n", [2, 5, 64])
def test_it_is_the_integral(n: int) -> None:
    """E[log(n u^(n-1))] under the density n u^(n-1), by the midpoint rule."""
    u = (np.arange(200_000) + 0.5) / 200_000
    log_density = np.log(n) + (n - 1) * np.log(u)
    assert best_of_n_kl(n) == pytest.approx(float((np.exp(log_density) * log_density).mean()), abs=1e-3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n", [2, 4, 16])
def test_it_bounds_a_discrete_case_and_is_met_by_many_unlikely_outcomes(seed: int, n: int) -> None:
    generator = np.random.default_rng(seed)
    p = generator.dirichlet(np.ones(6))
    reward = generator.integers(0, 4, 6).astype(float)  # with ties
    best = best_of_n_distribution(p, reward, n)
    assert best.sum() == pytest.approx(1.0)
    kl = float((best * np.log(best / p)).sum())
    assert -1e-12 <= kl < best_of_n_kl(n)
    fine = np.full(1000, 1 / 1000)
    best = best_of_n_distribution(fine, np.arange(1000.0), n)
    assert float((best * np.log(best / fine)).sum()) == pytest.approx(best_of_n_kl(n), abs=1e-2)


def test_the_exact_distribution_is_what_sampling_gives() -> None:
    """The reference of these tests against 200,000 draws: within four deviations in every outcome."""
    p, reward, n, draws = np.array([0.5, 0.2, 0.2, 0.1]), np.array([0.0, 1.0, 1.0, 2.0]), 3, 200_000
    generator = np.random.default_rng(0)
    samples = generator.choice(4, size=(draws, n), p=p)
    tie_break = reward[samples] + 0.5 * generator.random((draws, n))
    chosen = samples[np.arange(draws), tie_break.argmax(1)]
    expected = best_of_n_distribution(p, reward, n)
    found = np.bincount(chosen, minlength=4) / draws
    assert (np.abs(found - expected) < 4 * np.sqrt(expected * (1 - expected) / draws)).all()
