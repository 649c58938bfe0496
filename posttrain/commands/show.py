"""Shows the rollouts of a step, or one of them as a decision process."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from posttrain.errors import UserError, many, refuse_unknown, require
from posttrain.events import printable
from posttrain.runs.layout import EpisodeRow, RolloutRow, TokenArrays, sampled_tokens
from posttrain.runs.read import Run
from posttrain.runs.tokens import spell


def show(directory: Path, rollout: str = "") -> list[str]:
    """Return the rollouts of a step as lines, or one of them token by token."""
    run = Run(directory)
    stages = [s for s in run.stages() if run.rollout_steps(s)]
    require(stages, f"{directory} holds no rollouts yet")
    stage, step, number = _parse(rollout, run, stages)
    rows = run.rollouts(stage, step)
    kept = ", ".join(map(str, run.rollout_steps(stage)))
    require(rows, f"no rollouts of {stage} step {step}; there are those of {kept}")
    if number is None:
        return _overview(directory, stage, step, rows)
    there = f"{stage} step {step} has rollouts 0 to {len(rows) - 1}"
    require(0 <= number < len(rows), f"{there}, not {number}")
    return episode(rows[number], run.arrays(stage, step), number, partial(spell, directory, stage))


def _parse(rollout: str, run: Run, stages: list[str]) -> tuple[str, int, int | None]:
    parts = [part for part in rollout.split("/") if part]
    stage = parts[0] if parts else stages[-1]
    refuse_unknown("stage with rollouts", [stage], stages)
    try:
        step = int(parts[1]) if len(parts) > 1 else run.rollout_steps(stage)[-1]
        return stage, step, int(parts[2]) if len(parts) > 2 else None
    except (ValueError, IndexError):
        raise UserError(f"{rollout!r} is not STAGE/STEP/NUMBER, such as rl/120/0") from None


def _overview(directory: Path, stage: str, step: int, rows: Sequence[RolloutRow]) -> list[str]:
    lines = [f"{stage} step {step}: {many(len(rows), 'rollout')}"]
    for number, row in enumerate(rows[:32]):
        advantage = "" if row.advantage is None else f" advantage {row.advantage:+.2f}"
        text = f"{printable(row.question)} -> {printable(_said(row))[:70]}"
        lines.append(f"  {number:>3}  reward {_reward(row)}{advantage}  {text}")
    lines += [f"  ... and {len(rows) - 32} more"] if len(rows) > 32 else []
    place = shlex.quote(str(directory))
    return [*lines, f"one of them, token by token: posttrain show {place} {stage}/{step}/0"]


def _said(row: RolloutRow) -> str:
    """Return the response; with several turns, also the given text in between, after a `>`."""
    turns = row.conversation[1:] if isinstance(row, EpisodeRow) else ()
    parts = (text if kind == "sampled" else f"> {text}" for kind, text in turns)
    return " | ".join(parts) or row.response


def _reward(row: RolloutRow) -> str:
    return "failed" if row.reward is None else f"{row.reward:.2f}"


def episode(
    row: RolloutRow,
    arrays: TokenArrays | None,
    number: int,
    spelled: Callable[[Sequence[int]], list[str]],
) -> list[str]:
    """Return a rollout as a Markov decision process: at each time the state, the action, its log-prob, KL, reward and
    advantage."""
    question, answer = printable(row.question), printable(row.answer)
    lines = [f"problem {row.problem} (level {row.level}): {question}   gold answer: {answer}"]
    token = None if arrays is None else arrays.sequence(number)
    several = row if isinstance(row, EpisodeRow) else None
    if several is not None and several.counts:
        lines.append(", ".join(f"{name} {count:g}" for name, count in several.counts.items()))
    if token is None or not len(token["ids"]):
        turns = several.conversation if several is not None else ()
        lines += [f"{kind}: {printable(said)}" for kind, said in turns]
        lines += [] if turns else [f"response: {printable(row.response)}"]
        lines += [f"reward: {row.reward}"]
        absent = "the per-token figures of this step were not kept; the last steps have them"
        untrained = "it was not trained on, so there are no figures by token"
        return [*lines, absent if token is None else untrained]
    sampled = sampled_tokens(token, row.length)
    first = int(sampled.argmax())
    text = [*map(printable, spelled(token["ids"].tolist()))]
    lines.append(f"s_0 = {''.join(text[:first])}   (the prompt: {first} tokens, given, not chosen)")
    heading = f"{'t':>3}  {'state s_t ends with':<24} {'action a_t':<12} {'log pi':>8} "
    lines.append(heading + f"{'KL' if 'kl' in token else '':>8} {'reward':>7} {'advantage':>9}")
    actions = np.flatnonzero(sampled).tolist()
    rewards = _turn_rewards(row, actions)
    for t, at in enumerate(actions):
        if t and at > actions[t - 1] + 1:
            lines.append(f"     given: {''.join(text[actions[t - 1] + 1 : at])}")
        reward = rewards.get(at, "0")
        state = "".join(text[max(0, at - 12) : at])[-24:]
        kl = f"{token['kl'][at]:8.4f}" if "kl" in token else " " * 8
        figures = f"{token['logprob'][at]:8.4f} {kl} {reward:>7} {token['advantage'][at]:9.3f}"
        lines.append(f"{t:>3}  {state:<24} {text[at]:<12} {figures}")
    total = f"log pi(response | prompt) = {float(np.sum(token['logprob'][first:])):.3f}"
    outcome = row.outcome or row.failure
    return [*lines, f"end: {row.finish}; {total}; outcome {outcome}; {row.parts}"]


def _turn_rewards(row: RolloutRow, actions: Sequence[int]) -> dict[int, str]:
    """Return the reward at the last token of each turn: the turn's own reward, and in the last one the rest of the return."""
    ends = [a for a, b in pairwise([*actions, -1]) if b != a + 1]
    paid = [*row.paid] if isinstance(row, EpisodeRow) and row.paid else [0.0] * len(ends)
    if row.reward is None or len(paid) != len(ends):
        return {actions[-1]: _reward(row)}
    paid[-1] += row.reward - sum(paid)
    return {at: f"{value:.2f}" for at, value in zip(ends, paid, strict=True)}
