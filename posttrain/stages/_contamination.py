"""Detects training on evaluation problems: a training stage writes hashes of its questions, and an evaluation compares its problems
with them.

A stage refuses to train on a task whose own train and held-out problems share a question. Data of other stages and files may still
contain problems that a later stage evaluates on. The model is trained by then, so this is not refused: the evaluation reports it,
counts these problems, and also gives the accuracy on the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from posttrain.data.records import read_rows
from posttrain.evals.contamination import content_hash, require_clean, sample, text
from posttrain.runs.layout import CONFIG
from posttrain.runs.read import Run
from posttrain.stages._material import Data
from posttrain.stages.base import Context, exported
from posttrain.system.files import model_folder, read_text
from posttrain.tasks.base import Task
from posttrain.types import JSON

FILE = "trained_on.txt"


def guard_training(
    context: Context,
    stage: str,
    model: str,
    tasks: Sequence[Task],
    data: Sequence[Data] = (),
    measures: bool = True,
) -> None:
    """Check the tasks that a stage trains on, and write the hashes of all its questions, with those of the model that it starts from.
    If the stage evaluates nothing on held-out problems (`measures` is False), an overlap is a message, not an error."""
    hashes = set(trained_on(context, model))
    for task in [*tasks, *(source.task for source in data if source.task is not None)]:
        report = require_clean(task, stage, measures)
        context.announce(stage, [f"data: {line}" for line in report.lines()])
        hashes |= {content_hash(text(problem)) for problem in sample(task, "train")}
    for source in data:
        if source.task is None:
            hashes |= {content_hash(question) for question in file_questions(source)}
    context.write_lines(stage, sorted(hashes), FILE)


def file_questions(source: Data) -> Iterable[str]:
    """The questions in a file of examples: prompts, each user turn and all turns before the answer, or the whole of a plain text."""
    for _, record in read_rows(source.file, source.columns):
        prompt: JSON = record.get("prompt", record.get("messages", record.get("text", "")))
        if not isinstance(prompt, list):
            yield str(prompt)
            continue
        turns = [turn for turn in prompt if isinstance(turn, dict) and "content" in turn]
        yield from (str(turn["content"]) for turn in turns if turn.get("role") == "user")
        # the question is everything before the answer
        while turns and turns[-1].get("role") == "assistant":
            turns.pop()
        yield "\n".join(str(turn["content"]) for turn in turns)


def trained_on(context: Context, model: str) -> frozenset[str]:
    """Hashes of what a model of this run or of another run was trained on. If its stage wrote none, those of all stages in its run.
    Empty for other models, because nothing is known about them."""
    return noted(context.earlier(model) or made_by(model))


def made_by(place: str) -> Path | None:
    """The folder of the stage that made the model at `place`: a run, its export, or a stage's model. None for other models."""
    path = model_folder(Path(place).expanduser()).resolve()
    if path.is_dir() and path.parent.parent.name == "stages":
        return path.parent
    for run in (path, path.parent):
        if (run / "export").is_dir() and (run / CONFIG).is_file():
            return exported(run, Run(run).configured) if path in (run, run / "export") else None
    return None


def noted(stage: Path | None) -> frozenset[str]:
    """The hashes that a stage wrote."""
    if stage is None:
        return frozenset()
    own = stage / FILE
    files = [own] if own.is_file() else stage.parent.glob(f"*/{FILE}")
    return frozenset(line for file in files for line in read_text(file).split())
