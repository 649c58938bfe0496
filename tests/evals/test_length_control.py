"""The win rate at equal length: what length explains is taken away, and what it does not explain stays."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain.evals.statistics import win_rate_at_equal_length as at_equal_length


def drawn(own: float, of_length: float, longer: float, count: int = 4000) -> tuple[list[float], list[tuple[int, int]]]:
    """Comparisons of a known logistic model, in which our answers are e^longer times as long."""
    source = np.random.default_rng(0)
    lengths = np.exp(source.normal(longer, 0.4, count)) * 99
    chance = 1 / (1 + np.exp(-(own + of_length * np.log((1 + lengths.astype(int)) / 100))))
    return (source.random(count) < chance).astype(float).tolist(), [(int(n), 99) for n in lengths]


@pytest.mark.parametrize(("own", "of_length"), [(0.0, 2.0), (1.0, 2.0), (1.0, 0.0)])
def test_the_coefficient_of_a_known_model_is_found_within_its_interval(own: float, of_length: float) -> None:
    won, lengths = drawn(own, of_length, longer=0.5)
    found, truth = at_equal_length(won, lengths, range(len(won))), 1 / (1 + np.exp(-own))
    assert found.low < truth < found.high and found.high - found.low < 0.08
    if own == 0:
        assert sum(won) / len(won) > 0.6, "a win rate by length alone"


def test_answers_of_one_length_have_the_plain_win_rate() -> None:
    found = at_equal_length([1.0] * 70 + [0.0] * 30, [(10, 10)] * 100, range(100))
    assert found.row() == pytest.approx([0.7, 0.6, 0.78], abs=0.015)


def test_prompts_that_come_again_are_one_observation() -> None:
    won, lengths = [1.0] * 7 + [0.0] * 3, [(10, 10), (11, 10)] * 5
    once, often = at_equal_length(won, lengths, range(10)), at_equal_length(won * 20, lengths * 20, [*range(10)] * 20)
    assert often.high - often.low == pytest.approx(once.high - once.low, rel=0.15)


def test_wins_that_always_come_with_length_say_nothing_of_equal_length() -> None:
    found = at_equal_length([1.0] * 40, [(20, 10)] * 40, range(40))
    assert 0.0 < found.low < 0.5 < found.value < found.high < 1.0
