"""The implicit reward: its formula, and that differences within a prompt are what DPO's margin is."""

from __future__ import annotations

import pytest

from posttrain.rewards.implicit import implicit_reward


@pytest.mark.parametrize(("logprob", "reference", "beta", "reward"), [(-3, -5, 0.5, 1.0), (-5, -3, 0.1, -0.2), (-4, -4, 2, 0)])
def test_by_hand(logprob: float, reference: float, beta: float, reward: float) -> None:
    assert implicit_reward(logprob, reference, beta) == pytest.approx(reward)


def test_it_is_antisymmetric_in_its_models() -> None:
    assert implicit_reward(-1.5, -7.0, 0.3) == -implicit_reward(-7.0, -1.5, 0.3)
