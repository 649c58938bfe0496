"""Looking at models and runs from the command line: evaluate a model, sample from it, show a rollout as a decision process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from posttrain import config
from posttrain.errors import UserError, require, unknown
from posttrain.evals.evaluate import prompts
from posttrain.evals.statistics import compare
from posttrain.runs.console import printable, write_text
from posttrain.runs.console import show as show_table
from posttrain.runs.layout import RolloutRow, TokenArrays, encode
from posttrain.runs.read import Run
from posttrain.runs.report import figures_table
from posttrain.types import JSON, Message, Sampling


def open_policy(name: str, device: str = "auto") -> Any:
    """A model for inference: a run directory stands for its exported model."""
    import torch

    from posttrain.models.load import load
    from posttrain.models.policy import wrap_model

    if (Path(name) / "export").is_dir():
        name = str(Path(name) / "export")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load(name, dtype="bfloat16" if device.startswith("cuda") else "float32", device=device)
    return wrap_model(loaded.model, loaded.tokenizer, loaded.stop_ids, loaded.source)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What `posttrain eval` is told beside the settings of an evaluate stage."""

    seed: int = 0
    device: str = "auto"
    against: str = ""
    save: str = ""

    def __post_init__(self) -> None:
        config.check_machine(self.seed, self.device)
        place = Path(self.save)
        writable = (
            place.parent.is_dir()
            and os.access(place if place.exists() else place.parent, os.W_OK)
            and not place.is_dir()
        )
        require(not self.save or writable, f"save={self.save}: no file can be written there")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What `posttrain sample` is told beside how to sample."""

    seed: int = 0
    device: str = "auto"
    plain: bool = False
    group: int = 1

    def __post_init__(self) -> None:
        config.check_machine(self.seed, self.device)
        require(self.group >= 1, f"group must be at least 1, not {self.group}")


def take(pairs: dict[str, JSON], kind: Any, where: str) -> Any:
    """The settings of a kind, taken out of the others and checked. A name may be a number."""
    taken = {
        field.name: (field.type, pairs.pop(field.name))
        for field in fields(kind)
        if field.name in pairs
    }
    return config.from_tree(
        {name: str(v) if of == "str" else v for name, (of, v) in taken.items()}, kind, where
    )


def evaluate(model: str, task: str, settings: Sequence[str], as_json: bool = False) -> None:
    """Print a model's held-out figures on a task; with `against`, also those of another model on the same problems, compared in pairs.
    `save` names a file for the per-problem results."""
    from posttrain.stages._contamination import made_by, noted
    from posttrain.stages.evaluate import EvaluateStage, rows, seen

    pairs = dict(config.pair(argument) for argument in settings)
    asked = take(pairs, Asked, "eval")
    against = asked.against
    tree = {
        "stage": "evaluate",
        "name": "eval",
        "model": model,
        "task": {"name": task},
        "sampling": {"temperature": 0.0},
    }
    keys = {f"eval.{key}": value for key, value in pairs.items()}
    # a task may need its settings to be made at all, so they go into the tree before it is read
    tree["task"] |= {
        key.removeprefix("eval.task."): keys.pop(key)
        for key in list(keys)
        if key.count(".") == 2 and ".task." in key
    }
    stage = config.override([config.from_tree(tree, config.Stage, "eval")], keys)[0]
    require(isinstance(stage, EvaluateStage), "eval: model and task cannot be changed by settings")
    stage.task.ready()
    measured = []
    for name in [model, against] if against else [model]:
        policy = open_policy(name, asked.device)
        evaluation, figures = stage.measure(
            policy, lambda: open_policy(stage.reference, asked.device), asked.seed
        )
        counted, said = seen(evaluation, name, noted(made_by(name)))
        measured.append(
            (name, evaluation, {"model": name, "task": task, **figures, **counted}, said)
        )
    if asked.save:
        Path(asked.save).write_text(
            "".join(json.dumps(row) + "\n" for row in rows(measured[0][1])), "utf-8"
        )
    ours, theirs = measured[0][1], measured[-1][1]
    paired = compare(theirs.solved(), ours.solved(), prompts(ours.groups)) if against else None
    if as_json:
        written = measured[0][2] | (
            {"against": measured[1][2], "paired": asdict(paired)} if paired else {}
        )
        write_text(json.dumps(encode(written)) + "\n", sys.stdout)
        return
    for name, evaluation, figures, said in measured:
        many = f"{evaluation.problems} held-out problems of {task}, {stage.samples} sample(s) each"
        write_text(f"{name} on {many}\n", sys.stdout)
        show_table(figures_table(figures))
        write_text(
            f"  length {evaluation.length:.1f} tokens; {evaluation.failed} could not be scored\n",
            sys.stdout,
        )
        if said:
            write_text(f"  contamination: {printable(said)}\n", sys.stdout)
    if paired:
        write_text(f"  {model} less {against}: {paired}\n", sys.stdout)


def sample(model: str, prompt: str, settings: Sequence[str]) -> None:
    """Print a model's answers to a prompt: through its chat template, or as plain text where it has none (or `plain=true`)."""
    from posttrain.collect import Prompt, generate_groups
    from posttrain.data.chat import render_prompt
    from posttrain.data.text import Decoder
    from posttrain.stages.base import make_sampler

    pairs = dict(config.pair(argument) for argument in settings)
    asked = take(pairs, Drawn, "sample")
    sampling = config.from_tree(pairs, Sampling, "sample")
    policy = open_policy(model, asked.device)
    if asked.plain or not policy.tokenizer.chat_template:
        ids = tuple(policy.tokenizer(prompt)["input_ids"])
    else:
        ids = render_prompt(policy.tokenizer, (Message("user", prompt),))
    require(bool(ids), "the prompt has no tokens")
    decoder = Decoder(policy.tokenizer)
    for completions in generate_groups(
        make_sampler(policy), [Prompt(ids, asked.group, asked.seed, sampling)]
    ):
        for number, completion in enumerate(completions):
            text, _ = decoder.decode(completion.ids)
            note = f"{len(completion.ids)} tokens, {completion.finish}, mean log-prob {completion.logprobs.mean():.3f}"
            write_text(f"[{number}] {printable(text, lines=True)}\n    ({note})\n", sys.stdout)


def show(directory: Path, rollout: str = "") -> None:
    """Print the rollouts of a step, or one of them token by token."""
    run = Run(directory)
    stages = [s for s in run.stages() if run.rollout_steps(s)]
    require(bool(stages), f"{directory} holds no rollouts yet")
    stage, step, number = _parse(rollout, run, stages)
    rows = run.rollouts(stage, step)
    require(
        bool(rows),
        f"no rollouts of {stage} step {step}; there are those of {', '.join(map(str, run.rollout_steps(stage)))}",
    )
    if number is None:
        _list(directory, stage, step, rows)
        return
    require(
        0 <= number < len(rows),
        f"{stage} step {step} has rollouts 0 to {len(rows) - 1}, not {number}",
    )
    arrays = run.arrays(stage, step)
    for line in episode(rows[number], arrays, number, _tokenizer(directory, stage)):
        write_text(printable(line) + "\n", sys.stdout)


def _parse(rollout: str, run: Run, stages: list[str]) -> tuple[str, int, int | None]:
    parts = [part for part in rollout.split("/") if part]
    stage = parts[0] if parts else stages[-1]
    if stage not in stages:
        raise unknown("stage with rollouts", stage, stages)
    try:
        step = int(parts[1]) if len(parts) > 1 else run.rollout_steps(stage)[-1]
        return stage, step, int(parts[2]) if len(parts) > 2 else None
    except (ValueError, IndexError):
        raise UserError(f"{rollout!r} is not STAGE/STEP/NUMBER, such as rl/600/0") from None


def _list(directory: Path, stage: str, step: int, rows: Sequence[RolloutRow]) -> None:
    write_text(f"{stage} step {step}: {len(rows)} rollouts\n", sys.stdout)
    for number, row in enumerate(rows[:32]):
        reward = "failed" if row.reward is None else f"{row.reward:.2f}"
        advantage = "" if row.advantage is None else f" advantage {row.advantage:+.2f}"
        text = printable(row.response)[:70]
        write_text(
            f"  {number:>3}  reward {reward}{advantage}  {printable(row.question)} -> {text}\n",
            sys.stdout,
        )
    if len(rows) > 32:
        write_text(f"  ... and {len(rows) - 32} more\n", sys.stdout)
    write_text(
        f"one of them, token by token: posttrain show {directory} {stage}/{step}/0\n", sys.stdout
    )


def episode(row: RolloutRow, arrays: TokenArrays | None, number: int, tokenizer: Any) -> list[str]:
    """A rollout as a Markov decision process: at each time the state, the action, its log-prob, KL, reward and advantage."""
    lines = [
        f"problem {row.problem} (level {row.level}): {printable(row.question)}   gold answer: {printable(row.answer)}"
    ]
    token = None if arrays is None else arrays.sequence(number)
    if token is None or not len(token["ids"]):
        lines += [f"response: {printable(row.response)}", f"reward: {row.reward}"]
        return [
            *lines,
            "the per-token figures of this step were not kept; the last steps have them"
            if token is None
            else "it was not trained on, so there are no figures by token",
        ]
    first = len(token["ids"]) - row.length
    text = [printable(tokenizer.decode([i])) for i in token["ids"].tolist()]
    lines.append(f"s_0 = {''.join(text[:first])}   (the prompt: {first} tokens, given, not chosen)")
    heading = f"{'t':>3}  {'state s_t ends with':<24} {'action a_t':<12} {'log pi':>8} "
    lines.append(heading + f"{'KL' if 'kl' in token else '':>8} {'reward':>7} {'advantage':>9}")
    for t, at in enumerate(range(first, len(text))):
        last = at + 1 == len(text)
        reward = ("failed" if row.reward is None else f"{row.reward:.2f}") if last else "0"
        state = "".join(text[max(0, at - 12) : at])[-24:]
        kl = f"{token['kl'][at]:8.4f}" if "kl" in token else " " * 8
        lines.append(
            f"{t:>3}  {state:<24} {text[at]:<12} {token['logprob'][at]:8.4f} {kl} {reward:>7} {token['advantage'][at]:9.3f}"
        )
    total = float(np.sum(token["logprob"][first:]))
    lines.append(
        f"end: {row.finish}; log pi(response | prompt) = {total:.3f}; outcome {row.outcome or row.failure}; {row.parts}"
    )
    return lines


def _tokenizer(directory: Path, stage: str) -> Any:
    """The tokenizer of the stage's model, of the export, or of any stage that has one: a run uses one throughout."""
    from posttrain.models.load_directory import read_tokenizer

    candidates = [
        directory / "stages" / stage / "model",
        directory / "export",
        *sorted(directory.glob("stages/*/model")),
    ]
    found = [path for path in candidates if path.is_dir()]
    require(bool(found), f"{directory} holds no model yet, so its tokens cannot be spelled")
    return read_tokenizer(found[0])
