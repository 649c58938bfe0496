"""The benchmark of three ways to take a step: each learns, and TRPO keeps to its KL."""

from __future__ import annotations

import pytest
from scripts_for_tests import load_script


@pytest.mark.parametrize(("arm", "value"), [("REINFORCE", 0.1), ("PPO", 0.01), ("TRPO", 0.1)])
def test_an_arm_learns_and_says_how_far_it_moved(arm: str, value: float) -> None:
    """The share of right letters starts at 1/8."""
    found = load_script("benchmarks/trpo.py").run(arm, value, 0, 8)
    assert found.shape == (8, 2) and found[-1, 0] > found[0, 0] + 0.03 and (found[:, 1] > 0).all()
    assert arm != "TRPO" or found[:, 1].max() <= value
