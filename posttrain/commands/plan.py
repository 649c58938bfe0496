"""Describes a run before it starts: batch arithmetic in words, memory, and the data report.

A dry run measures how long it will take on this machine. It runs every stage in a temporary folder, cut down to a few steps
(the first one warms up) or a few problems. An rl stage runs twice: with every response at its limit, which is the worst case
for time and memory, and with responses of the expected length: that of the examples on which its model is trained before, or
else what the model writes now.

    seconds = load + first + steps * median(step) + evaluations * evaluation
"""

from __future__ import annotations

import io
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from posttrain import pipeline
from posttrain.errors import prefixed, require
from posttrain.models.load import check_device
from posttrain.models.policy import Policy
from posttrain.runs.console import duration
from posttrain.runs.layout import Row
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.stages._check import check_stages
from posttrain.stages._plan import DryRun, size_text
from posttrain.stages.base import Context, Stage, load_policy, temporary_context, worker_pool
from posttrain.stages.train import TrainStage
from posttrain.system import machine
from posttrain.train.memory import learning_bytes, weight_bytes
from posttrain.trust import trusting

if TYPE_CHECKING:
    from posttrain.config import Settings


class Elsewhere(Policy):
    """A model whose memory is estimated for a CUDA device while its weights are in host memory."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


def describe(settings: Settings, dry: bool = False) -> list[str]:
    """Return the whole plan as lines. Loads the first model (to estimate its memory and to count tokens), trains nothing,
    writes nothing. `dry` runs a few steps of every stage in a temporary folder, to estimate the duration of the run."""
    device, stages = machine.device(settings.device), settings.recipe.stages
    away = device.startswith("cuda") and not torch.cuda.is_available()
    absent = f"device={device}: a dry run needs the device, and torch sees no CUDA device here"
    require(not (dry and away), f"{absent}; leave --dry out")
    if not away:
        check_device(device)
    pipeline.check_only(settings, pipeline.place(settings))
    if not (settings.again or settings.only):
        RunWriter.check_place(Path(settings.out or "runs/new").expanduser())
    every = [stage.name for stage in stages]
    due = settings.only or every
    names = " -> ".join(name for name in every if name in due)
    kept = " (again: finished ones that have not changed are kept)" if settings.again else ""
    lines = [f"recipe {settings.name}, seed {settings.seed}: {names}{kept}"]
    lines += [f"priced for {device}, which this machine does not have"] if away else []
    with trusting(settings.trust), temporary_context(settings.seed, device) as context:
        others = [stage.name for stage in stages if not stage.reads_first]
        found = check_stages(stages, settings.seed, device, due, others)
        seen = estimate(stages, settings.seed, device, settings.threads) if dry else {}
        policies: dict[str, Policy] = {}
        before: dict[str, Stage] = {}
        for stage in stages:
            with prefixed(stage.name):
                inner = stage_lines(stage, context, policies, before if stage.name in due else None)
            inner += shared_lines(stage, policies.get(stage.name), settings)
            inner += [dry_run_line(seen[stage.name])] if dry else []
            if stage.name in due:
                warned = [f"warning: {text}" for text in stage.warnings() + found[stage.name]]
                lines += ["", f"{stage.name} ({type(stage).__name__})"]
                lines += [f"  {line}" for line in (*warned, *inner)]
            before[stage.name] = stage
    if dry:
        parts = [seen[name] for name in due]
        total, longest = (sum(getattr(e, f) for e in parts) for f in ("seconds", "longest"))
        whole = f"the whole run: about {time_text(total)}{upper_bound(longest, total)}"
        lines += ["", f"{whole}, by a dry run on this machine"]
    return lines


def shared_lines(stage: Stage, policy: Policy | None, settings: Settings) -> list[str]:
    """Describe how several processes share a stage's memory; the other lines are for one process."""
    count = settings.processes
    if count == 1 or policy is None or not isinstance(stage, TrainStage):
        return []
    adapters = 0 if stage.lora is None else stage.lora.parameters(policy.body)
    learning = learning_bytes(policy, adapters or policy.trainable, stage.optimizer.moment_bytes)
    whole = weight_bytes(policy) + sum(learning.values())
    copied = f" and {size_text(weight_bytes(policy))} of the copy for generation"
    copied = copied if stage.shares == "prompts" else ""
    kept = f"{size_text(whole)} of weights, gradients and moments"
    divided = f"parallel=fsdp has {size_text(whole / count)} of it{copied}"
    said = f"{count} processes share a step (parallel={settings.parallel})"
    return [f"{said}: with ddp each has {kept}; {divided}"]


def time_text(seconds: float) -> str:
    """
    >>> time_text(1.739), time_text(75)
    ('1.74s', '1m15s')
    """
    return f"{seconds:.3g}s" if seconds < 60 else duration(seconds)


def dry_run_line(seen: Estimate) -> str:
    """Return the dry run's line about a stage."""
    each = f"a step takes {seen.step:.3g} s, " if seen.step else ""
    measured = f"an evaluation {seen.evaluation:.3g} s, " if seen.evaluation else ""
    length = f" with responses of {seen.length:.0f} tokens, as in its examples"
    whole = f"{time_text(seen.seconds)}{length if seen.length else ''}"
    bound = upper_bound(seen.longest, seen.seconds)
    return f"dry run: about {whole}{bound}; {each}{measured}memory {size_text(seen.memory)} at its peak"


def upper_bound(longest: float, usual: float) -> str:
    said = f", at most {time_text(longest)} where every response reaches its limit"
    return said if longest > 1.05 * usual else ""


def stage_lines(
    stage: Stage, context: Context, policies: dict[str, Policy], before: Mapping[str, Stage] | None
) -> list[str]:
    """Return a stage's own description; nothing where `before` is None, so that its data need not be there. `policies` are the
    models so far, by the name of a stage or their own; a stage's model has the size of the one it starts from."""
    model = stage.starts_from()
    if not model:
        return ["no estimate for this kind of stage"]
    if model not in policies:
        policies[model] = load_priced(stage, context)
    policy = policies[stage.name] = policies[model]
    described = [] if before is None else stage.plan(policy, context, before)
    return [model_line(model, policy), *described]


def model_line(name: str, policy: Policy) -> str:
    count, active = policy.parameters, policy.active_parameters
    used = f" of which a token uses {active:,}" if active < count else ""
    dtype = str(policy.dtype).removeprefix("torch.")
    return f"model {name}: {count:,} parameters{used}, {dtype}"


def load_priced(stage: Stage, context: Context) -> Policy:
    """Load the model as a run would have it on the device; in host memory if the device is not here, or could not hold it."""
    lora = stage.lora if isinstance(stage, TrainStage) else None
    whole = lora is None or not lora.load_in_4bit
    given = (stage.starts_from(), context, stage.alphabet())
    if not context.device.startswith("cuda") or (whole and torch.cuda.is_available()):
        return load_policy(*given)
    policy = load_policy(*given, place="cpu")
    return Elsewhere(policy.model, policy.tokenizer, policy.stop_ids, policy.source)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a stage, expected and with every response at its limit; of a step and of an evaluation; peak memory."""

    seconds: float
    longest: float
    step: float = 0.0
    evaluation: float = 0.0
    memory: float = 0.0  # peak bytes, beyond what the process had before
    length: float = 0.0  # tokens of a response that `seconds` assumes; 0: as the model writes now


def estimate(
    stages: Sequence[Stage], seed: int, device: str, threads: int = 0
) -> dict[str, Estimate]:
    """Run small versions of a recipe's stages, one after the other, each on the output of those before it. Returns estimates by
    name."""
    found: dict[str, Estimate] = {}
    lengths: dict[str, float] = {}  # lengths of responses in the examples that a stage trains on
    with (
        worker_pool(stages) as workers,
        temporary_context(seed, device, threads, workers) as context,
    ):
        for stage in stages:
            with redirect_stdout(io.StringIO()):  # hide the progress of the dry run
                made = measure_stage(stage, context, lengths)
            same = found.get(stage.dry_run().same_time_as, made)
            found[stage.name] = replace(made, seconds=same.seconds, longest=same.longest)
    return found


def measure_stage(stage: Stage, context: Context, lengths: dict[str, float]) -> Estimate:
    """Run a small version of a stage. A stage that samples during training runs twice: see the top of this file."""
    dry = stage.dry_run()
    if not dry.limit:
        made = measure(dry, dry.stage, context)
        if dry.batch:
            rows = Run(context.directory).metrics(stage.name)
            lengths[stage.name] = rows[-1].figures["trained"] / dry.batch
        return made
    worst = dry.at_length(dry.limit, f"{stage.name}-longest")
    longest = measure(replace(dry, loops=(worst.name,)), worst, context)
    length = min(dry.limit, round(lengths.get(stage.starts_from(), 0.0)))
    small = dry.at_length(length, stage.name) if length else dry.stage
    usual = measure(dry, small, context)
    lengths[stage.name] = length
    seconds, memory = max(usual.seconds, longest.seconds), max(usual.memory, longest.memory)
    return replace(usual, longest=seconds, memory=memory, length=float(length))


def measure(dry: DryRun, small: Stage, context: Context) -> Estimate:
    """Run the small stage and compute what the whole one takes."""
    peak = Peak(context.device)
    began = time.perf_counter()
    result = small.run(context)
    seconds, memory = time.perf_counter() - began, peak.bytes()
    context.finish(small.name, result)
    runs = [rows for loop in dry.loops if (rows := Run(context.directory).metrics(loop))]
    if not runs:
        return Estimate(dry.factor * seconds, dry.factor * seconds, memory=memory)
    steps = dry.steps if dry.counted is None else dry.counted(int(result["trained_on"]))
    parts = [loop_seconds(rows, steps, dry.evaluate_every) for rows in runs]
    step, evaluation = (statistics.mean(part[n] for part in parts) for n in (1, 2))
    outside = max(0.0, seconds - sum(part[3] for part in parts))  # loading, saving
    total = outside + sum(part[0] for part in parts)
    return Estimate(total, total, step, evaluation, memory)


def loop_seconds(rows: Sequence[Row], steps: int, every: int) -> tuple[float, float, float, float]:
    """Return, for one loop: seconds of the whole one, of a step, of an evaluation; and seconds that the small one took."""
    each = [row.figures["seconds/total"] for row in rows if row.step > 0]
    usual = statistics.median(each[1:] or each)
    evaluation = 0.0
    if every and rows[0].step == 0 and len(rows) > 1:
        evaluation = max(0.0, rows[-1].time - rows[-2].time - each[-1])
    evaluations = 1 + steps // every + bool(steps % every) if evaluation else 0
    whole = each[0] - usual + steps * usual + evaluations * evaluation
    return whole, usual, evaluation, sum(each) + 2 * evaluation


class Peak:
    """The peak memory since it was made, minus the memory at that time: of a CUDA device, or of this process."""

    def __init__(self, device: str):
        self.cuda = device.startswith("cuda")
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = float(torch.cuda.memory_allocated())
            return
        # if it cannot be reset, the peak is that of the process's whole life
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self.before = _status("VmRSS")

    def bytes(self) -> float:
        peak = float(torch.cuda.max_memory_allocated()) if self.cuda else _status("VmHWM")
        return max(0.0, peak - self.before)


def _status(name: str) -> float:
    """Return a line of /proc/self/status in bytes; 0 if there is none."""
    with suppress(OSError):
        found = re.search(rf"(?m)^{name}:\s*(\d+)", Path("/proc/self/status").read_text())
        return 1024.0 * float(found[1]) if found else 0.0
    return 0.0
