"""Collecting a step: what is made ahead of it, and what is said of its rollouts, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from material_for_tests import small_policy

from posttrain.algorithms.grpo import GRPO
from posttrain.collect import Rollouts
from posttrain.data.curriculum import Curriculum, CurriculumState
from posttrain.engine.engine import Engine
from posttrain.models.tiny import character_tokenizer
from posttrain.runs.metrics import group_metrics
from posttrain.stages.base import PRINTABLE
from posttrain.tasks.base import Task
from posttrain.types import Group, Message, Problem, Rollout, Sampling, Score, Segment

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
    found = {m.name: m.value for m in group_metrics([Group(members[0].problem, members)], greedy=[0])}
    assert found["reward"] == 0.5 and found["entropy"] == pytest.approx(3 / 2), (
        "a greedy answer has no entropy, and trains nothing"
    )


@dataclass(frozen=True)
class Counting(Task):
    """Says how often each of its prompts was asked for; one of them is broken."""

    asked: list[str] = field(default_factory=list)
    broken: str = ""

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return [Problem(str(n), f"{n}+{n}=") for n in range(8)]

    def prompt(self, problem: Problem) -> tuple[Message, ...]:
        self.asked.append(problem.id)
        if problem.id == self.broken:
            raise ValueError("no prompt")
        return super().prompt(problem)

    def score(self, problem: Problem, response: str) -> Score:
        return Score(float(len(response)))


def source(task: Task) -> Rollouts:
    tokenizer = character_tokenizer(PRINTABLE)
    policy = small_policy(vocab_size=len(tokenizer), dtype=torch.float32)
    state = CurriculumState([0], [8], Curriculum(), 0)
    return Rollouts(task, Engine(policy), tokenizer, state, 3, Sampling(6), 0, torch.device("cpu"))


def drawn(source: Rollouts, steps: int, ahead: bool) -> list[Any]:
    found: list[Any] = []
    for step in range(steps):
        groups = source.collect(step, GRPO(group=2), {}).groups
        found += [(g.problem.id, r.sample, r.ids.tolist(), r.score) for g in groups for r in g.rollouts]
        if ahead:
            before = source.state()
            source.look_ahead()
            assert source.state() == before
    return found


def test_prompts_that_are_rendered_ahead_change_nothing_and_are_rendered_once() -> None:
    """Over more than an epoch, so that a look goes beyond its end."""
    task, plain = Counting(), Counting()
    assert drawn(source(task), 4, True) == drawn(source(plain), 4, False)
    assert task.asked[:12] == plain.asked and len(task.asked) == 15


def test_a_prompt_that_cannot_be_rendered_ahead_fails_in_its_own_step() -> None:
    order = [one[0] for one in drawn(source(Counting()), 2, False)[::2]]
    later = source(Counting(broken=order[4]))
    drawn(later, 1, True)
    with pytest.raises(ValueError, match="no prompt"):
        later.collect(1, GRPO(group=2), {})


def test_a_curriculum_that_moves_after_the_look_decides() -> None:
    looked = source(Counting())
    looked.look_ahead()
    looked.curriculum_state.draw(3)
    moved = source(Counting())
    moved.curriculum_state.draw(3)
    assert drawn(looked, 1, False) == drawn(moved, 1, False)
