"""Answers of all stages of a run to the same held-out prompts, shown at the end of a run with several trained models."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.collect import Prompt, generate_groups
from posttrain.data.chat import render_prompt
from posttrain.data.preferences import prompt_length
from posttrain.data.text import Decoder
from posttrain.models.policy import Policy
from posttrain.runs.layout import AnswerRow
from posttrain.stages.base import Context, Stage, load_policy, temporary_context
from posttrain.stages.train import DataStage
from posttrain.system.files import is_reward_model
from posttrain.tasks.base import Task
from posttrain.types import Message, Sampling

PROMPTS = 2
TOKENS = 64  # limit of an answer
# largest total size in bytes of the models and files to read; larger ones would take longer than a second or two
MAX_MODELS = {"cpu": 1 << 30, "cuda": 1 << 34}
MAX_FILES = 1 << 22


@dataclass(frozen=True, slots=True)
class SharedPrompt:
    """A prompt, as turns of a task or as ids of a file, with its text and, if known, the answer."""

    text: str
    turns: tuple[Message, ...] = ()
    ids: tuple[int, ...] = ()
    answer: str = ""
    held_out: bool = True


def answering_models(
    directory: Path, stages: Iterable[str], answering: bool = True
) -> dict[str, Path]:
    """The policies of a run by stage, in the order of the stages; without `answering`, its reward models."""
    folders = {name: directory / "stages" / name / "model" for name in stages}
    made = {name: path for name, path in folders.items() if (path / "config.json").is_file()}
    return {name: path for name, path in made.items() if is_reward_model(path) != answering}


def stage_answers(context: Context, stages: Sequence[Stage]) -> list[AnswerRow]:
    """Short greedy answers of every trained stage to one or two held-out prompts. Empty if only one stage has made a model, or if
    loading the models or finding a prompt would take long."""
    models = answering_models(context.directory, (stage.name for stage in stages))
    size = sum(file.stat().st_size for folder in models.values() for file in folder.glob("*.safe*"))
    if len(models) < 2 or size > MAX_MODELS[context.device.partition(":")[0]]:
        return []
    rows: list[AnswerRow] = []
    asked: list[SharedPrompt] = []
    for name in models:
        policy = load_policy(name, context)
        asked = asked or find_prompts(context, stages, policy)
        rows += answers_of(context, name, policy, asked)
    return sorted(rows, key=lambda row: [one.text for one in asked].index(row.prompt))


def answers_of(
    context: Context, stage: str, policy: Policy, asked: Sequence[SharedPrompt]
) -> list[AnswerRow]:
    """The answers of one model to each prompt."""
    ids = [one.ids or tuple(render_prompt(policy.tokenizer, one.turns)) for one in asked]
    room = (policy.positions or sys.maxsize) - max(map(len, ids), default=0)
    if room < 1:
        return []
    sampling = Sampling(min(TOKENS, room), temperature=0.0)
    drawn = [Prompt(prompt, 1, context.seed, sampling) for prompt in ids]
    decoder, sampler = Decoder(policy.tokenizer), context.sampler(policy)
    rows = []
    for one, (said,) in zip(asked, generate_groups(sampler, drawn), strict=True):
        given, text = (one.text, one.answer, one.held_out), decoder.decode(said.ids)[0]
        rows.append(AnswerRow(*given, stage, text, said.finish))
    return rows


def find_prompts(context: Context, stages: Sequence[Stage], policy: Policy) -> list[SharedPrompt]:
    """Held-out problems of the last stage with a task; without one, held-out prompts of the last stage with data files. If nothing
    was held out, training prompts."""
    for stage in reversed(stages):
        task = getattr(stage, "task", None)
        if isinstance(task, Task):
            held_out = task.problems("test")
            problems = held_out if len(held_out) else task.problems("train")
            first = [problems[n] for n in range(min(PROMPTS, len(problems)))]
            known = len(held_out) > 0
            return [
                SharedPrompt(p.question, tuple(task.prompt(p)), (), p.answer, known) for p in first
            ]
    for stage in reversed(stages):
        files = [Path(file) for _, file in stage.named("data")]
        there = bool(files) and all(path.is_file() for path in files)
        small = there and sum(path.stat().st_size for path in files) < MAX_FILES
        if isinstance(stage, DataStage) and small:
            return from_files(context, stage, policy)
    return []


def from_files(context: Context, stage: DataStage, policy: Policy) -> list[SharedPrompt]:
    """Prompts from the data files of a stage, read again without messages."""
    with temporary_context(context.seed, context.device) as quiet:
        train, held_out = stage.examples(quiet, policy)
    decoder = Decoder(policy.tokenizer)
    prompts = [e.ids[: prompt_length(e)].tolist() for e in held_out or train]
    different = list(dict.fromkeys(tuple(ids) for ids in prompts if ids))[:PROMPTS]
    return [SharedPrompt(decoder.decode(ids)[0], (), ids, "", bool(held_out)) for ids in different]
