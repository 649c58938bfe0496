"""The guard against training on what is measured: a stage that trains leaves hashes of its questions, and evaluation looks there.

A stage refuses to train on a task whose own train and held-out problems share a question. Data of other stages and files may still
hold what a later stage evaluates on; by then the model is trained, so that is not refused: it is said, counted, and the accuracy on the
other problems is reported too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from posttrain.data.records import read_jsonl
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
    """Check the tasks that a stage trains on, and leave the hashes of all it learns from, with those of the model it starts from.
    A stage that `measures` nothing on held-out problems gets a message about an overlap, not a refusal."""
    hashes = set(trained_on(context, model))
    for task in [*tasks, *(source.task for source in data if source.task is not None)]:
        report = require_clean(task, stage, measures)
        context.announce(stage, [f"data: {line}" for line in report.lines()])
        hashes |= {content_hash(text(problem)) for problem in sample(task, "train")}
    for source in data:
        if source.task is None:
            hashes |= {content_hash(question) for question in file_questions(source.file)}
    context.write_lines(stage, sorted(hashes), FILE)


def file_questions(file: str) -> Iterable[str]:
    """What is asked in a file of examples: prompts, every user's turn and all turns before the answer, or the whole of a plain text."""
    for _, record in read_jsonl(file):
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
    """Hashes of what a model of this run, or of another, has been trained on; of a stage that noted none, what any stage of its run
    has. Of models from elsewhere nothing is known."""
    return noted(context.earlier(model) or made_by(model))


def made_by(place: str) -> Path | None:
    """The folder of the stage that made the model at `place`: a run, its export, or a stage's model; None of a model from elsewhere."""
    path = model_folder(Path(place).expanduser()).resolve()
    if path.is_dir() and path.parent.parent.name == "stages":
        return path.parent
    for run in (path, path.parent):
        if (run / "export").is_dir() and (run / CONFIG).is_file():
            return exported(run, Run(run).configured) if path in (run, run / "export") else None
    return None


def noted(stage: Path | None) -> frozenset[str]:
    """The hashes that a stage left."""
    if stage is None:
        return frozenset()
    own = stage / FILE
    files = [own] if own.is_file() else stage.parent.glob(f"*/{FILE}")
    return frozenset(line for file in files for line in read_text(file).split())
