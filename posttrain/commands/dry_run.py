"""Dry runs: how long a run will take, measured on this machine before it is begun.

Every stage is run in a temporary folder, cut down to a few steps (the first one warms up) or a few problems. An rl stage runs twice:
with every response at its limit, which is the worst case for time and memory, and with responses as long as they will likely be: those
of the examples that its model learns from before, or else what the model writes now.

    seconds = load + first + steps * median(step) + evaluations * evaluation
"""

from __future__ import annotations

import io
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from posttrain.runs.layout import Row
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.stages._plan import DryRun
from posttrain.stages.base import Context, Stage, worker_pool


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a stage: as it will likely go, and where every response reaches its limit; a step, an evaluation; peak memory."""

    stage: str
    seconds: float
    longest: float
    step: float = 0.0
    evaluation: float = 0.0
    memory: float = 0.0  # bytes at the peak, beyond what the process had before
    length: float = 0.0  # tokens of a response that `seconds` is for; 0: as the model writes now


def estimate(
    stages: Sequence[Stage], seed: int, device: str, threads: int = 0
) -> dict[str, Estimate]:
    """Run the stages of a recipe in small, one after the other, each on what those before it made; by name."""
    found: dict[str, Estimate] = {}
    lengths: dict[str, float] = {}  # of responses in the examples that a stage learns from
    with (
        worker_pool(stages) as workers,
        tempfile.TemporaryDirectory() as folder,
        RunWriter(Path(folder) / "run", config={}) as writer,
    ):
        context = Context(writer, seed, device, threads=threads, say=False, workers=workers)
        for stage in stages:
            with redirect_stdout(io.StringIO()):  # the progress of the dry run
                made = measure_stage(stage, context, lengths)
            same = found.get(stage.dry_run().same_time_as, made)
            found[stage.name] = replace(made, seconds=same.seconds, longest=same.longest)
    return found


def measure_stage(stage: Stage, context: Context, lengths: dict[str, float]) -> Estimate:
    """A stage, cut down and run. One that samples while it trains runs twice, as the head of this file says."""
    dry = stage.dry_run()
    if not dry.limit:
        made = measure(stage.name, dry, dry.stage, context)
        if dry.batch:
            rows = Run(context.directory).metrics(stage.name)
            lengths[stage.name] = rows[-1].figures["trained"] / dry.batch
        return made
    worst = dry.at_length(dry.limit, f"{stage.name}-longest")
    longest = measure(stage.name, replace(dry, loops=(worst.name,)), worst, context)
    length = min(dry.limit, round(lengths.get(stage.starts_from(), 0.0)))
    small = dry.at_length(length, stage.name) if length else dry.stage
    usual = measure(stage.name, dry, small, context)
    lengths[stage.name] = length
    seconds, memory = max(usual.seconds, longest.seconds), max(usual.memory, longest.memory)
    return replace(usual, longest=seconds, memory=memory, length=float(length))


def measure(name: str, dry: DryRun, small: Stage, context: Context) -> Estimate:
    """Run the small stage and work out what the whole one takes."""
    peak = Peak(context.device)
    began = time.perf_counter()
    result = small.run(context)
    seconds, memory = time.perf_counter() - began, peak.bytes()
    context.finish(small.name, result)
    runs = [rows for loop in dry.loops if (rows := Run(context.directory).metrics(loop))]
    if not runs:
        return Estimate(name, dry.factor * seconds, dry.factor * seconds, memory=memory)
    parts = [loop_seconds(rows, dry.steps, dry.evaluate_every) for rows in runs]
    step, evaluation = (statistics.mean(part[n] for part in parts) for n in (1, 2))
    outside = max(0.0, seconds - sum(part[3] for part in parts))  # loading, saving
    total = outside + sum(part[0] for part in parts)
    return Estimate(name, total, total, step, evaluation, memory)


def loop_seconds(rows: Sequence[Row], steps: int, every: int) -> tuple[float, float, float, float]:
    """Of one loop: seconds of the whole one, of a step, of an evaluation; and seconds that the small one took."""
    each = [row.figures["seconds/total"] for row in rows if row.step > 0]
    usual = statistics.median(each[1:] or each)
    evaluation = 0.0
    if every and rows[0].step == 0 and len(rows) > 1:
        evaluation = max(0.0, rows[-1].time - rows[-2].time - each[-1])
    evaluations = 1 + steps // every + bool(steps % every) if evaluation else 0
    whole = each[0] - usual + steps * usual + evaluations * evaluation
    return whole, usual, evaluation, sum(each) + 2 * evaluation


class Peak:
    """The most memory since it was made, less what there was then: of a CUDA device, or of this process."""

    def __init__(self, device: str):
        self.cuda = device.startswith("cuda")
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = float(torch.cuda.memory_allocated())
            return
        with suppress(OSError):  # where it cannot be reset, the peak is that of the process's life
            Path("/proc/self/clear_refs").write_text("5")
        self.before = _status("VmRSS")

    def bytes(self) -> float:
        peak = float(torch.cuda.max_memory_allocated()) if self.cuda else _status("VmHWM")
        return max(0.0, peak - self.before)


def _status(name: str) -> float:
    """A line of /proc/self/status in bytes; 0 where there is none."""
    with suppress(OSError):
        found = re.search(rf"(?m)^{name}:\s*(\d+)", Path("/proc/self/status").read_text())
        return 1024.0 * float(found[1]) if found else 0.0
    return 0.0
