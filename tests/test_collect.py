"""What is said of a step's rollouts, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain.runs.metrics import group_metrics
from posttrain.types import Group, Problem, Rollout, Score, Segment

PROMPT = Segment(np.array([1]), "q", sampled=False)


def rollout(number: int, text: str, score: Score, logprobs: tuple[float, ...] = (-1.0,), finish: str = "stop") -> Rollout:
    ids = np.arange(len(logprobs))
    answer = Segment(ids, text, True, np.array(logprobs, np.float32), finish=finish)
    return Rollout(Problem("0", "q"), number, (PROMPT, answer), score)


def test_the_figures_of_three_rollouts() -> None:
    members = (
        rollout(0, "12. Wait, no: 13", Score(1.0, {"answer": 1.0}), (-1.0, -2.0, -3.0)),
        rollout(1, "a waiter checks", Score(0.5, {"answer": 0.0}), (-2.0,), finish="length"),
        rollout(2, "let me verify", Score(None, failure="timeout: 5 s")),
    )
    found = {m.name: m.value for m in group_metrics([Group(members[0].problem, members)])}
    assert found["reward"] == pytest.approx(1.5 / 2) and found["reward/answer"] == pytest.approx(0.5)
    assert found["length"] == pytest.approx(5 / 3) and found["entropy"] == pytest.approx(9 / 5)
    assert found["truncated"] == pytest.approx(1 / 3) and found["failed"] == pytest.approx(1 / 3)
    assert found["reflection"] == pytest.approx(2 / 3)  # "Wait" and "let me verify", not "waiter"
