"""Dry steps: how long a run will take, measured on this machine before it is begun.

Every stage is run in a folder that is thrown away, cut down to a few steps (the first one warms up) or a few problems. An rl stage runs
twice: with every response at its limit, which is the worst case for time and memory, and with responses as long as they will likely be:
those of the examples that its model learns from before, or else what the model writes now.

    seconds = load + first + steps * median(step) + evaluations * evaluation
"""

from __future__ import annotations

import io
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from posttrain.monitor.rules import ALWAYS, RULES, MonitorSettings
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.stages.base import Context, Stage, worker_pool
from posttrain.stages.rl import RLStage
from posttrain.stages.sft import SFTStage

STEPS = 3  # the first one warms up
FEW = 32  # problems or prompts of a stage without steps
NEVER = 10**9


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a stage: as it will likely go, and where every response reaches its limit; a step, an evaluation; peak memory."""

    stage: str
    seconds: float
    most: float
    step: float = 0.0
    evaluation: float = 0.0
    memory: float = 0.0  # bytes at the most, beyond what the process had before
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
            with redirect_stdout(io.StringIO()):  # the progress of what is thrown away
                made = _one(stage, context, lengths)
            same = getattr(stage, "as_long_as", "")
            found[stage.name] = (
                replace(made, seconds=found[same].seconds, most=found[same].most)
                if same in found
                else made
            )
    return found


def _one(stage: Stage, context: Context, lengths: dict[str, float]) -> Estimate:
    small, times = shortened(stage)
    if not (isinstance(stage, RLStage) and isinstance(small, RLStage)):
        made = measure(stage, small, times, context)
        if isinstance(stage, SFTStage):
            rows = Run(context.directory).metrics(stage.name)
            lengths[stage.name] = rows[-1].figures["trained"] / stage.batch
        return made
    limit = stage.sampling.max_new_tokens
    worst = replace(
        small, name=f"{stage.name}-longest", sampling=replace(stage.sampling, min_new_tokens=limit)
    )
    most = measure(stage, worst, times, context)
    length = min(limit, round(lengths.get(stage.model, 0.0)))
    if length:
        small = replace(
            small, sampling=replace(stage.sampling, max_new_tokens=length, min_new_tokens=length)
        )
    usual = measure(stage, small, times, context)
    lengths[stage.name] = length
    return replace(
        usual,
        most=max(usual.seconds, most.seconds),
        memory=max(usual.memory, most.memory),
        length=float(length),
    )


def shortened(stage: Stage) -> tuple[Stage, float]:
    """The stage cut down, and how many times as much the whole one does where it has no steps."""
    names = {f.name for f in fields(stage)}
    changes: dict[str, Any] = {}
    times = 1.0
    if "steps" in names:
        changes["steps"] = min(STEPS, getattr(stage, "steps", STEPS))
        for name, value in (
            ("checkpoint_every", NEVER),
            ("min_accuracy", 0.0),
            ("as_long_as", ""),
        ):
            if name in names:
                changes[name] = value
        if getattr(stage, "evaluate_every", 0):
            changes["evaluate_every"] = NEVER  # then before the first step and after the last
    else:
        for name in ("problems", "prompts", "pairs"):
            count = getattr(stage, name, None)
            if isinstance(count, int) and count > FEW:
                changes[name], times = FEW, count / FEW
    # a model of a few steps would pass no gate, and need not: what it makes is thrown away
    for name in ("min_score", "min_agreement"):
        if name in names:
            changes[name] = 0.0
    if "monitor" in names:
        changes["monitor"] = MonitorSettings(off=tuple(set(RULES) - set(ALWAYS)))
    return replace(stage, **changes), times


def measure(stage: Stage, small: Stage, times: float, context: Context) -> Estimate:
    """Run the small one and work out what the whole one takes."""
    peak = Peak(context.device)
    began, now = time.perf_counter(), time.time()
    result = small.run(context)
    seconds, memory = time.perf_counter() - began, peak.bytes()
    context.finish(small.name, result)
    members = [small.name, *(f"{small.name}-{n}" for n in range(1, getattr(stage, "members", 1)))]
    runs = [rows for name in members if (rows := Run(context.directory).metrics(name))]
    if not runs:
        return Estimate(stage.name, times * seconds, times * seconds, memory=memory)
    parts = [_loop(rows, stage, now) for rows in runs]
    step, evaluation = (statistics.mean(part[n] for part in parts) for n in (1, 2))
    outside = max(0.0, seconds - sum(part[3] for part in parts))  # loading, saving
    total = outside + sum(part[0] for part in parts)
    return Estimate(stage.name, total, total, step, evaluation, memory)


def _loop(rows: Sequence[Any], stage: Stage, began: float) -> tuple[float, float, float, float]:
    """Of one loop: seconds of the whole one, of a step, of an evaluation; and seconds that the small one took."""
    steps = [row for row in rows if row.step > 0]
    each = [row.figures["seconds/total"] for row in steps]
    usual = statistics.median(each[1:] or each)
    every, count = getattr(stage, "evaluate_every", 0), getattr(stage, "steps", 0)
    evaluation = 0.0
    if every and rows[0].step == 0 and len(rows) > 1:
        evaluation = max(0.0, rows[-1].time - rows[-2].time - each[-1])
    evaluations = 1 + count // every + bool(count % every) if evaluation else 0
    small = sum(each) + (2 * evaluation if evaluation else 0.0)
    return each[0] - usual + count * usual + evaluations * evaluation, usual, evaluation, small


class Peak:
    """The most memory since it was made, less what there was then: of a CUDA device, or of this process."""

    def __init__(self, device: str):
        self.cuda = device.startswith("cuda")
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = float(torch.cuda.memory_allocated())
            return
        with suppress(
            OSError
        ):  # the highest mark is that of the process's life where it cannot be taken down
            Path("/proc/self/clear_refs").write_text("5")
        self.before = _status("VmRSS")

    def bytes(self) -> float:
        peak = float(torch.cuda.max_memory_allocated()) if self.cuda else _status("VmHWM")
        return max(0.0, peak - self.before)


def _status(name: str) -> float:
    """A line of /proc/self/status in bytes; 0 where there is none."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return 1024.0 * float(line.split()[1])
    return 0.0
