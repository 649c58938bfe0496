"""Run directories for tests of what reads them: two stages, an alarm, rollouts in groups with their tokens; no model is trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from posttrain.runs.layout import TokenArrays
from posttrain.runs.write import RunWriter
from posttrain.types import JSON, Problem, Rollout, Score, Segment

STAGES = [
    {"stage": "sft", "name": "sft", "model": "tiny:nano", "algorithm": {"name": "sft"}, "steps": 20},
    {"stage": "evaluate", "name": "before", "model": "sft"},
    {"stage": "rl", "name": "rl", "model": "sft", "algorithm": {"name": "grpo"}, "steps": 40},
    {"stage": "evaluate", "name": "after", "model": "rl"},
]
GROUP = 4


def rollout(problem: int, sample: int, text: str, reward: float | None = 1.0, question: str = "") -> Rollout:
    ids = np.arange(len(text.split()) or 1)
    segment = Segment(
        ids, text, True, np.full(len(ids), -0.5, np.float32), versions=np.zeros(len(ids), np.int32), finish="stop"
    )
    score = (
        Score(reward, parts={"answer": reward, "format": 1.0}, outcome="correct" if reward else "wrong")
        if reward is not None
        else Score.failed("timeout: 5 s")
    )
    return Rollout(
        Problem(f"train/{problem}", question or f"what is {problem}+{problem}?", str(2 * problem)), sample, (segment,), score
    )


def arrays(rollouts: Sequence[Rollout]) -> TokenArrays:
    """Two given tokens, then those of the answer."""
    lengths = [2 + one.length for one in rollouts]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    count = int(starts[-1])
    sampled = np.concatenate([np.arange(n) >= 2 for n in lengths])
    figures = {"logprob": np.linspace(-2, 0, count, dtype=np.float32), "advantage": np.linspace(-1, 1, count, dtype=np.float32)}
    return TokenArrays(starts, {"ids": np.arange(count), "sampled": sampled, **figures})


def step_rollouts(step: int, texts: Sequence[str] = ()) -> list[Rollout]:
    """Two problems, GROUP answers each, right more often as steps go by."""
    said = texts or [f"thinking about it {step} {n}" for n in range(2 * GROUP)]
    return [rollout(n // GROUP + 1, n % GROUP, text, float((n * 7 + step) % 40 < step)) for n, text in enumerate(said)]


def make_run(directory: Path, steps: int = 40, finish: bool = True, name: str = "quickstart") -> Path:
    """A run that learns: held-out accuracy from 0.5 to 0.9."""
    with RunWriter.create(directory, {"format": 2, "name": name, "seed": 0, "stages": STAGES}) as writer:
        writer.event("stage", {"stage": "sft"})
        for step in range(1, 21):
            writer.metrics("sft", step, {"loss": 2.0 / step, "nll": 2.0 / step, "grad_norm": 1.0})
        evaluation(directory, "before", 0.0)
        writer.event("stage", {"stage": "rl"})
        for step in range(1, steps + 1):
            add_step(writer, step)
        if finish:
            writer.event(
                "alarm", {"stage": "rl", "step": 30, "rule": "length", "text": "length: 11 -> 15 tokens", "level": "warning"}
            )
            evaluation(directory, "after", 1.0)
            writer.summary({"before": [0.5, 0.4, 0.6], "after": [0.9, 0.85, 0.95], "seconds": 12.0})
    return directory


def add_step(writer: RunWriter, step: int) -> None:
    """One step of rl as training writes it."""
    figures = {
        "reward": 0.4 + step / 100 + 0.01 * (step % 3),
        "kl": step / 100,
        "length": 10.0 + step,
        "entropy": 1 / step,
        "loss": 0.0,
    }
    if step % 10 == 0 or step == 1:
        accuracy = 0.5 + step / 100
        figures |= {"accuracy/test": accuracy, "accuracy/test_low": accuracy - 0.05, "accuracy/test_high": accuracy + 0.05}
    writer.metrics("rl", step, figures)
    if step % 10 == 0:
        rollouts = step_rollouts(step)
        writer.rollouts("rl", step, rollouts, [0.5] * len(rollouts), arrays(rollouts))


def evaluation(directory: Path, stage: str, value: float) -> None:
    """What an evaluate stage leaves."""
    folder = directory / "stages" / stage
    folder.mkdir(parents=True, exist_ok=True)
    row: dict[str, JSON] = {
        "problem": "test/1",
        "question": "what is 1+1?",
        "answer": "2",
        "responses": ["2" if value else "3"],
    }
    row |= {"values": [value], "outcomes": ["correct" if value else "wrong"], "solved": [bool(value)], "parts": [{}]}
    (folder / "problems.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "result.json").write_text(json.dumps({"accuracy": [value, 0.0, 1.0], "seconds": 1.0}))


def hostile_run(directory: Path, mine: Sequence[str]) -> None:
    """Texts as question, answer, response, tool output, name of a part, of a figure, of an outcome, and text of an alarm."""
    with RunWriter.create(directory, {"format": 2, "name": mine[0], "stages": STAGES, mine[1]: mine[2]}) as writer:
        writer.event("stage", {"stage": "rl"})
        for n, text in enumerate(mine):
            writer.event("alarm", {"stage": "rl", "step": n, "rule": text, "text": text, "level": "warning"})
        for step in (39, 40):
            writer.metrics("rl", step, {"reward": 0.5, **{f"x{text}": 1.0 for text in mine}})
            rows = [rollout(n // GROUP, n % GROUP, text, 1.0, text) for n, text in enumerate(mine)]
            writer.rollouts("rl", step, rows, None, arrays(rows))
    folder = directory / "stages" / "before"
    folder.mkdir(parents=True)
    saved = [
        {"question": text, "answer": text, "responses": [text], "values": [1.0], "outcomes": [text], "solved": [True]}
        for text in mine
    ]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in saved))
    file = directory / "rollouts" / "rl" / "step-000040.jsonl"
    said = [json.loads(line) for line in file.read_text().splitlines()]
    for row, text in zip(said, mine, strict=True):
        row |= {
            "parts": {text.replace('"', "'"): 1.0},
            "outcome": text,
            "role": text,
            "conversation": [["given", text], ["sampled", text]],
        }
    file.write_text("".join(json.dumps(row) + "\n" for row in said))
