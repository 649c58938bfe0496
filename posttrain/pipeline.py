"""A whole run: make the directory, run the stages, sum up. `start` and `resume` are what the command line calls."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from posttrain import config
from posttrain.config import Settings
from posttrain.errors import UserError, require
from posttrain.evals.statistics import Interval, compare
from posttrain.loop import Interrupt
from posttrain.runs.console import duration, show, write_text
from posttrain.runs.plot import draw
from posttrain.runs.read import Run
from posttrain.runs.report import Answers, BeforeAfter, final_table, side_by_side
from posttrain.runs.trackers import Trackers
from posttrain.runs.write import RunWriter
from posttrain.stages.base import Context, run_stages
from posttrain.types import JSON
from posttrain.version import VERSION


def start(settings: Settings) -> Path:
    """Start a new run and go on to its end; returns its directory."""
    directory = Path(settings.out) if settings.out else fresh(Path("runs"), settings.name)
    with RunWriter.create(directory, config.to_config(settings)) as writer:
        _run(settings, writer)
    return directory


def resume(directory: Path, allow_code: bool = False) -> Path:
    """Continue a run where its last good checkpoint was."""
    run = Run(directory)
    settings = config.from_config(run.config, str(directory / "config.yaml"), allow_code=allow_code)
    if run.summary is not None:
        raise UserError(f"{directory} is complete; see {directory / 'summary.json'}, or start another with 'posttrain run'")
    with RunWriter.resume(directory) as writer:
        _run(settings, writer)
    return directory


def fresh(root: Path, name: str) -> Path:
    """The first directory root/name-N that does not exist."""
    number = 1
    while (root / f"{name}-{number}").exists():
        number += 1
    return root / f"{name}-{number}"


def _run(settings: Settings, writer: RunWriter) -> None:
    import torch

    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    require(not device.startswith("cuda") or torch.cuda.is_available(), f"device={device}: torch sees no CUDA device here")
    torch.manual_seed(settings.seed)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    trackers = Trackers.open(settings.trackers, writer, config.to_config(settings)) if settings.trackers else None
    began = time.time()
    write_text(f"run directory: {writer.directory}\n", sys.stdout)
    with interrupts() as interrupt:
        context = Context(writer, settings.seed, device, interrupt, trackers, threads=settings.threads)
        run_stages(settings.recipe.stages, context)
    if trackers is not None:
        trackers.close()
    _export(context, settings)
    writer.summary(_summary(context, settings, time.time() - began))
    conclude(settings, context)


@contextmanager
def interrupts() -> Iterator[Interrupt]:
    """The first Ctrl-C or SIGTERM asks the loop to stop after its step; a second one stops at once."""
    interrupt = Interrupt()

    def handler(number: int, frame: FrameType | None) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True
        write_text("\nstopping after this step (again: at once)\n", sys.stderr)

    previous = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, handler)
    except ValueError:  # not in the main thread: whoever embeds us handles signals
        pass
    try:
        yield interrupt
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _export(context: Context, settings: Settings) -> None:
    """Publish the last trained model as export/: a plain HF checkpoint."""
    made = [s.name for s in settings.recipe.stages if (context.folder(s.name) / "model").is_dir() and "control" not in s.name]
    if not made:
        return
    target, temporary = context.directory / "export", context.directory / ".export.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(context.folder(made[-1]) / "model", temporary)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)


def _summary(context: Context, settings: Settings, seconds: float) -> dict[str, JSON]:
    import torch
    import transformers

    tree = config.to_config(settings)
    results = {stage.name: context.result(stage.name) for stage in settings.recipe.stages}
    return {
        "name": settings.name,
        "seed": settings.seed,
        "before": (results.get(settings.recipe.before) or {}).get("accuracy"),
        "after": (results.get(settings.recipe.after) or {}).get("accuracy"),
        "stages": results,
        "seconds": round(seconds, 1),
        "attempts": context.writer.attempt,
        "config_sha256": hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest(),
        "versions": {
            "posttrain": VERSION,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def conclude(settings: Settings, context: Context) -> None:
    """What a person sees at the end: the table, three problems with both answers, where the plot is, what to try next."""
    run, recipe = Run(context.directory), settings.recipe
    draw(run, context.directory / "plot.png")
    if recipe.before and recipe.after:
        before, after = context.result(recipe.before), context.result(recipe.after)
        assert before is not None and after is not None
        first, second = problems(context, recipe.before), problems(context, recipe.after)
        solved = [[float(o == "correct") for row in rows for o in row["outcomes"][:1]] for rows in (first, second)]
        rows = [BeforeAfter("answer right", Interval(*before["accuracy"]), Interval(*after["accuracy"]),
                            compare(*solved).difference, int(before["problems"]))]  # fmt: skip
        rows += [
            BeforeAfter(f"{name} right", Interval(*value), Interval(*after["parts"][name]))
            for name, value in before["parts"].items()
            if name != "answer" and name in after["parts"]
        ]
        show(final_table(rows, f"Held-out problems, {recipe.before} and {recipe.after} training"))
        show(side_by_side(chosen(first, second)))
    write_text(f"plot:     {context.directory / 'plot.png'}\n", sys.stdout)
    write_text(f"model:    {context.directory / 'export'} (a plain transformers checkpoint)\n", sys.stdout)
    write_text(f"rollouts: posttrain show {context.directory}\n", sys.stdout)
    summary = run.summary or {}
    write_text(f"took {duration(float(summary.get('seconds', 0)))}\n", sys.stdout)
    if recipe.next_command:
        write_text(f"try next: {recipe.next_command}\n", sys.stdout)


def problems(context: Context, stage: str) -> list[dict[str, JSON]]:
    """Per-problem results of an evaluate stage."""
    return [json.loads(line) for line in (context.folder(stage) / "problems.jsonl").read_text().splitlines()]


def chosen(first: list[dict[str, JSON]], second: list[dict[str, JSON]], count: int = 3) -> list[Answers]:
    """Problems to show: the first ones that training changed, then others."""
    pairs = sorted(zip(first, second, strict=True), key=lambda pair: pair[0]["outcomes"] == pair[1]["outcomes"])
    return [
        Answers(
            a["question"], a["answer"], a["responses"][0], b["responses"][0],
            a["outcomes"][0] == "correct", b["outcomes"][0] == "correct",
        )
        for a, b in pairs[:count]
    ]  # fmt: skip
