"""Labels for a process reward model without people: how often a solution can still be finished from each of its steps.

    label of step k = share of n completions of (prompt, steps 1..k) that end solved        (Math-Shepherd, arXiv:2312.08935)

`hard` makes it 1 where any completion is solved: the step has not ruined the solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.collect import Prompt, generate_groups
from posttrain.data.steps import Step, steps_of
from posttrain.data.stream import philox
from posttrain.data.text import Decoder
from posttrain.errors import require
from posttrain.tasks.base import Task
from posttrain.types import Example, Rollout, Sampler, Sampling, Score


@dataclass(frozen=True, slots=True, eq=False)
class StepLabels:
    """One example for each rollout with a labelled step, and what happened on the way."""

    examples: list[Example]
    steps: int  # labelled
    completions: int  # sampled
    failed: int  # completions without a score: they have no vote
    unlabelled: int  # steps of which no completion could be scored


def label_steps(
    task: Task,
    sampler: Sampler,
    decoder: Decoder,
    rollouts: Sequence[Rollout],
    n: int,
    sampling: Sampling,
    seed: int,
    separator: str = "\n",
    hard: bool = False,
) -> StepLabels:
    """Complete every step prefix of each rollout `n` times and label it by how they end. Prefixes go in as the ids they are.

    The last step of a response that ended by itself is labelled by the rollout's own score. Randomness belongs to
    (seed, rollout, step). Completions that cannot be scored do not vote, and a step without a vote has no label.
    """
    require(n >= 1, f"step labels need at least one completion a step, not {n}")
    steps = [steps_of(rollout, separator) for rollout in rollouts]
    wanted = [
        (r, step)
        for r, rollout in enumerate(rollouts)
        for step in steps[r]
        if not _finished(rollout, step)
    ]
    prompts = [
        Prompt(
            tuple(rollouts[r].ids[: step.through + 1].tolist()),
            n,
            int(philox("steps", seed, r, step.end).random_raw()) >> 1,
            sampling,
        )
        for r, step in wanted
    ]
    labels = [np.full(len(rollout.ids), np.nan, np.float32) for rollout in rollouts]
    failed = unlabelled = 0
    for (r, step), completions in zip(wanted, generate_groups(sampler, prompts), strict=True):
        written = rollouts[r].ids[_before(rollouts[r]) : step.through + 1]
        scores = [
            _score(task, rollouts[r], decoder.decode(np.concatenate([written, c.ids]))[0])
            for c in completions
        ]
        votes = [score.solved for score in scores if score.valid]
        failed += len(scores) - len(votes)
        unlabelled += not votes
        if votes:
            labels[r][step.end] = float(any(votes)) if hard else sum(votes) / len(votes)
    for rollout, own, label_T in zip(rollouts, steps, labels, strict=True):
        if own and _finished(rollout, own[-1]):
            unlabelled += not rollout.score.valid
            label_T[own[-1].end] = float(rollout.score.solved) if rollout.score.valid else np.nan
    kept = [
        _example(r, label)
        for r, label in zip(rollouts, labels, strict=True)
        if not np.isnan(label).all()
    ]
    labelled = sum(int((~np.isnan(label)).sum()) for label in labels)
    return StepLabels(kept, labelled, n * len(prompts), failed, unlabelled)


def _example(rollout: Rollout, label_T: np.ndarray) -> Example:
    mask = np.concatenate([np.full(len(s.ids), s.sampled) for s in rollout.segments])
    reward = float("nan") if rollout.score.value is None else rollout.score.value
    return Example(rollout.ids, mask, reward=reward, steps=label_T)


def _before(rollout: Rollout) -> int:
    """Tokens before the response."""
    return len(rollout.ids) - len(rollout.segments[-1].ids)


def _finished(rollout: Rollout, step: Step) -> bool:
    return step.through == len(rollout.ids) - 1 and rollout.finish == "stop"


def _score(task: Task, rollout: Rollout, text: str) -> Score:
    try:
        return task.score(rollout.problem, text)
    except Exception as error:  # reward code is not ours
        return Score.failed(f"{type(error).__name__}: {error}")
