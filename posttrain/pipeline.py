"""A whole run: create the directory, run the stages, write the summary. The command line calls `start` and `resume`."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from posttrain import config, config_tree
from posttrain.cluster.placement import Placement, Resources
from posttrain.cluster.placement import versions as installed
from posttrain.cluster.ray_cluster import Cluster
from posttrain.config import Settings
from posttrain.errors import Interrupted, UserError, require
from posttrain.events import printable
from posttrain.loop import Interrupt, OnStep
from posttrain.models.load import check_device
from posttrain.monitor.monitor import alarm_lines
from posttrain.runs import console
from posttrain.runs.layout import CONFIG, EVENTS, FORMAT, LOCK, SUMMARY, dump_line
from posttrain.runs.plot import draw
from posttrain.runs.prometheus import Endpoint
from posttrain.runs.read import Run
from posttrain.runs.resume_policy import Changes
from posttrain.runs.resume_policy import compare as compare_settings
from posttrain.runs.trackers import Trackers
from posttrain.runs.write import RunWriter
from posttrain.stages import base
from posttrain.stages._check import check_stages
from posttrain.stages._conclusion import compare_before_after, pass_at_k, score_of
from posttrain.stages._lineage import RECORD, RESULT, digest, references, reopen
from posttrain.stages._side_by_side import answering_models, stage_answers
from posttrain.stages.base import Context, check_names, exported, run_stages, worker_pool
from posttrain.system import machine
from posttrain.system.files import atomic_folder, begun, explained, how_to_continue
from posttrain.system.processes import HANGUP, STARTED, Terminal, stop_signals
from posttrain.system.workers import WorkerPool
from posttrain.system.world import World, current
from posttrain.train import checkpoint, processes
from posttrain.train.saving import Saving
from posttrain.train.torch_settings import use_deterministic_kernels
from posttrain.trust import trusting
from posttrain.types import JSON

Write = Callable[[bool], Callable[[], None]]


def start(settings: Settings, on_step: OnStep | None = None, write: Write | None = None) -> Path:
    """Start a new run, run it to its end, and return its directory. `on_step` is called after each training step; see loop.py. With
    `again` or `only` the directory may hold a run already: finished stages that have not changed are kept, and a call that is refused
    before its first stage changes nothing. `write` adds files to a directory that was not refused, is told whether the run is new,
    and returns a function that puts back what was there."""
    if follows(settings):
        return follow(settings, write)
    directory = place(settings)
    check_only(settings, directory)
    tree = config.to_config(settings)
    continued = bool(settings.again or settings.only) and (directory / CONFIG).is_file()
    if continued:
        check_format(Run(directory))
    # os.path.isdir says no also where the name is too long
    there = frozenset(directory.iterdir()) if os.path.isdir(directory) else None
    above = [path for path in directory.absolute().parents if not os.path.exists(path)]
    made = started = False
    undo: list[Callable[[], None]] = []
    try:
        opened = RunWriter.resume(directory) if continued else RunWriter.create(directory, tree)
        with opened as writer, explained(directory), interrupts(directory) as interrupt:
            made = not continued
            if write is not None:
                undo.append(write(made))

            def begin() -> None:
                nonlocal started
                started = True
                if continued:
                    # the summary of an earlier attempt: a killed attempt must not look complete
                    (directory / SUMMARY).unlink(missing_ok=True)
                    writer.configure(tree)
                writer.event("config", {"config": tree})

            _run(settings, writer, interrupt, on_step, begin)
    except Exception as error:
        # a user's code may raise other errors before the first stage
        if not isinstance(error, UserError) and (started or isinstance(error, Interrupted)):
            raise
        for put_back in undo if continued and not started else ():
            put_back()
        found = {*directory.iterdir()} if os.path.isdir(directory) else set()
        if made or found - (there or set()) <= {directory / LOCK}:
            forget(directory, there)
        for path in above:  # made for it
            with contextlib.suppress(OSError):  # the directory is not empty
                path.rmdir()
        raise
    return directory


def forget(directory: Path, there: frozenset[Path] | None) -> None:
    """Delete a run that was refused before it trained or measured anything, so that the corrected command can use its directory.
    Files that were `there` before are kept (None: there was no directory)."""
    if begun(directory) or not os.path.isdir(directory):
        return
    for path in [directory] if there is None else {*directory.iterdir()} - there:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def resume(directory: Path, allow_code: bool = False, arguments: Sequence[str] = ()) -> Path:
    """Continue a run from its last intact checkpoint. `arguments` (key=value), and edits of its config.yaml, may change how the
    work is done, and stages that have not begun. `arguments` may also lengthen a stage, even of a finished run, or let one end at
    its last checkpoint. Changes that would make it another run are refused. A complete run is left as it is."""
    run = Run(directory)
    left = to_resume(run, allow_code, arguments)
    if left is None:
        if processes.rank() == 0:
            console.write_text(f"{completed(run)}\n", sys.stdout)
        return directory
    settings, pairs, found = left
    tree = config.to_config(settings)
    if follows(settings):
        return follow(settings)
    opened = RunWriter.resume(directory)
    with opened as writer, explained(directory), interrupts(directory) as interrupt:
        if not (settings.again or settings.only):
            with trusting(settings.trust):
                base.check_inputs(settings.recipe.stages, Context(writer, settings.seed))
        for text in found.named:
            console.write_text(f"changed since the last attempt: {text}\n", sys.stdout)
        if pairs:
            writer.configure(tree)
        if found.extended:
            (directory / SUMMARY).unlink(missing_ok=True)
        for name in found.extended:
            reopen(directory / "stages" / name)
        writer.event("config", {"config": tree, "changed": list(found.named)})
        _run(settings, writer, interrupt)
    return directory


def to_resume(
    run: Run, allow_code: bool, arguments: Sequence[str]
) -> tuple[Settings, dict[str, JSON], Changes] | None:
    """With which settings a run goes on, those that were given now, and what they change; None where it is complete."""
    check_format(run)
    # as it ended: then nothing that it names has to be there
    if not arguments and run.summary is not None and changed(run, run.config) == Changes((), ()):
        return None
    settings, pairs = settings_of(run, allow_code, arguments)
    found = changed(run, config.to_config(settings))
    # compared first: the process that writes removes the summary before it says what has changed
    return None if run.summary is not None and not found.extended else (settings, pairs, found)


def completed(run: Run) -> str:
    model = run.directory / "export"
    place = f"its model is in {model}" if model.is_dir() else f"see {run.directory / SUMMARY}"
    longer = "train a stage for longer, such as rl.steps=200, or start another with 'posttrain run'"
    return f"{run.directory} is complete: {place}; {longer}"


def settings_of(
    run: Run, allow_code: bool, arguments: Sequence[str]
) -> tuple[Settings, dict[str, JSON]]:
    """The settings of a run to continue, and those of them that were given now."""
    check_format(run)
    pairs = dict(map(config_tree.pair, arguments))
    moved = "out: a run goes on in its own directory; leave it out, or copy the directory first"
    require("out" not in pairs, moved)
    return config.from_config(run.config, str(run.directory / CONFIG), pairs, allow_code), pairs


def follows(settings: Settings) -> bool:
    """Whether this process is one of several, and not the one that writes the run directory. An error if the processes were not
    started, or cannot share a step."""
    count = settings.processes
    check_processes(settings, max(count, processes.size()))
    started = processes.size() if processes.size() > 1 or count == 1 else 0
    how = "start it with the command 'posttrain', or with torchrun"
    require(started > 0, f"processes={count}: a program cannot start itself again; {how}")
    same = count in (1, processes.size())
    require(same, f"processes={count}, and torchrun has started {processes.size()}; leave it out")
    return processes.rank() > 0


def check_processes(settings: Settings, count: int) -> None:
    """Raise an error for more processes than GPUs, or than a step of a stage can be shared between."""
    if count > 1:
        machine.require_posix(f"processes={count}", "leave it out")
    if count > 1 and not settings.cluster and machine.device(settings.device).startswith("cuda"):
        processes.check_devices(min(count, settings.processes) if settings.processes > 1 else 1)
    tensor = settings.tensor_parallel
    few = f"tensor_parallel={tensor}: {count} process(es) are not a multiple of it"
    require(count % tensor == 0, f"{few}; use processes={max(1, round(count / tensor)) * tensor}")
    for stage in (stage for stage in settings.recipe.stages if stage.shares):
        there = getattr(stage, stage.shares)
        key = f"{stage.name}.{stage.shares}"
        few = f"{key}={there}: {count} processes cannot share a step of {there}"
        require(there >= count, f"{few}; use processes={there} or fewer, or raise {key}")


def placement(settings: Settings) -> Placement:
    """The resources that the run needs of its cluster."""
    gpu = 1.0 if settings.device.startswith("cuda") else 0.0
    shared = settings.worker_gpus
    samplers = [
        int(getattr(stage, "sampler_processes", 1))
        for stage in settings.recipe.stages
        if getattr(stage, "sampler", "engine") != "engine"
    ]
    # a single process may be left of several
    text = f"cluster={settings.cluster}: nothing of this run is on it; add processes=N, or sampler=process to an rl stage"
    require(samplers or settings.processes > 1 or STARTED in os.environ, text)
    return Placement(
        address=settings.cluster,
        ranks=settings.processes,
        samplers=max(samplers, default=0) * settings.processes,
        rank=Resources(gpus=gpu),
        sampler=Resources(settings.worker_cpus, gpu if shared is None else shared),
        spread=settings.cluster_spread,
        on_failed_node=settings.on_failed_node,
    )


def check_format(run: Run) -> None:
    """Refuse to continue a run of another format, because its checkpoints and settings have another meaning. It can still be read."""
    found = run.config.get("format", 1)
    other = f"{run.directory} was written by another version of posttrain (format {found}; this one continues {FORMAT})"
    advice = "finish it with that version, or start a new run; its model, metrics and rollouts can be read"
    require(found == FORMAT, f"{other}: {advice}")


def check_only(settings: Settings, directory: Path) -> None:
    """Check, before anything is written, that the stages in `only` exist and have their inputs."""
    names = check_names(settings.recipe.stages, settings.only)
    for place, stage in enumerate(settings.recipe.stages if settings.only else ()):
        if stage.name in settings.only:
            needed = [n for n in references(stage, names[:place]) if n not in settings.only]
            missing = [n for n in needed if not (directory / "stages" / n / RESULT).is_file()]
            needs = f"only: {stage.name} needs {', '.join(missing)}, which has not been run in {directory}"
            advice = "name it too, or give the directory of a run that has it as out="
            require(not missing, f"{needs}; {advice}")


def changed(run: Run, tree: Mapping[str, JSON]) -> Changes:
    """The differences between the settings and those of the last attempt, if they are harmless; an error if they are not."""
    events = run.events()
    earlier = [e.details for e in events if e.kind == "config" and "config" in e.details]
    # none: an attempt that was killed at once, or events.jsonl was lost
    if not earlier or not isinstance(earlier[-1]["config"], dict):
        lost = f"{run.directory} has begun, and its {EVENTS} is lost or damaged: whether the settings are those that it began with"
        traces = bool(run.metrics()) or any(run.directory.glob(f"stages/*/{RECORD}"))
        require(not traces, f"{lost} cannot be known; put {EVENTS} back, or start a new run")
        return Changes((), ())
    named = {str(event.details.get("stage")) for event in events if event.kind == "stage"}
    # of these, the ones that made something; a stage may save several models as NAME-1, NAME-2
    paths = (*run.directory.glob("stages/*/*"), *run.directory.glob("checkpoints/*/*"))
    made = {path.parent.name for path in paths if path.name != RECORD}
    made |= {row.stage for row in run.metrics()}
    begun = {stage for stage in named if any(f"{name}-".startswith(f"{stage}-") for name in made)}
    reached = {stage: step for stage in begun if (step := _reached(run.directory, stage))}
    found = compare_settings(earlier[-1]["config"], json.loads(dump_line(tree)), begun, reached)
    more = f" (and {len(found.refused) - 3} more)" if len(found.refused) > 3 else ""
    other = f"{run.directory}: the settings are not those that the run began with: {'; '.join(found.refused[:3])}{more}"
    advice = "undo the change, or start a new run"
    for stage, step in [*reached.items()][:1]:
        place = shlex.quote(str(run.directory))
        end = f"let {stage} end where it is (posttrain resume {place} {stage}.steps={step})"
        advice += f"; to go on from its model with other settings, {end} and give the new run {stage}.model={place}"
    require(not found.refused, f"{other}; {advice}")
    return found


def _reached(directory: Path, stage: str) -> int:
    """The step of the newest checkpoint of a stage that has not ended; 0 if there is none, or if it trains several models."""
    saved = checkpoint.steps(directory / "checkpoints" / stage)
    several = [*(directory / "checkpoints").glob(f"{stage}-*")]
    ended = (directory / "stages" / stage / RESULT).exists()
    return 0 if ended or several or not saved else int(saved[0].name.removeprefix("step-"))


def place(settings: Settings) -> Path:
    """The directory of a new run: as set, or the first directory under runs/ that does not exist."""
    return Path(settings.out).expanduser() if settings.out else fresh(Path("runs"), settings.name)


def fresh(root: Path, name: str) -> Path:
    """The first directory root/name-N that does not exist."""
    numbered = (root / f"{name}-{number}" for number in count(1))
    return next(path for path in numbered if not path.exists())


def _run(
    settings: Settings,
    writer: RunWriter,
    interrupt: Interrupt,
    on_step: OnStep | None = None,
    begin: Callable[[], None] | None = None,
) -> None:
    began = time.perf_counter()
    # worker processes are forked before anything uses CUDA or starts a thread
    with trusting(settings.trust), worker_pool(settings.recipe.stages) as workers, joined(settings):
        current().same(str(writer.directory))
        context = _run_stages(settings, writer, workers, interrupt, on_step, begin=begin)
    left = [stage.name for stage in settings.recipe.stages if context.result(stage.name) is None]
    if left:
        go_on = f"go on with: {how_to_continue(writer.directory)}"
        console.write_text(f"not run yet: {', '.join(left)}; {go_on}\n", sys.stdout)
        return
    _export(context, settings)
    with trusting(settings.trust):
        answers = stage_answers(context, settings.recipe.stages)
    if answers:
        writer.answers(answers)
    # before the summary, which says that all is there
    drawn = _draw(settings, context)
    writer.summary(_summary(context, settings, time.perf_counter() - began))
    conclude(settings, context, *drawn)


def follow(settings: Settings, write: Write | None = None) -> Path:
    """Take part in a run whose first process writes the run directory; returns that directory. Messages of this process go to a
    temporary directory. `write` is that of `start`: on another machine the directory may be another one."""
    with (
        trusting(settings.trust),
        worker_pool(settings.recipe.stages) as workers,
        tempfile.TemporaryDirectory() as folder,
        RunWriter(Path(folder)) as writer,
        contextlib.redirect_stdout(io.StringIO()),
        joined(settings),
    ):
        place = Path(str(current().same(None)))
        if write is not None:
            write(False)
        with interrupts(place) as interrupt:
            _run_stages(settings, writer, workers, interrupt, None, place)
    return place


def joined(settings: Settings) -> contextlib.AbstractContextManager[World]:
    """Join the processes that were started together. They must have the same versions and settings."""
    tree = {**config.to_config(settings), "out": "", "processes": 0}
    sharding = {"auto": "auto", "ddp": "never", "fsdp": "always"}[settings.parallel]
    identity = {**versions(), "settings": digest(tree)[:12]}
    device = machine.device(settings.device)
    return processes.joined(device, sharding, identity, settings.tensor_parallel)


def versions() -> dict[str, str]:
    import transformers

    return installed() | {"transformers": transformers.__version__}


def device_of(settings: Settings) -> str:
    """The device of this process; an error if it is not available."""
    device = machine.device(settings.device)
    missing = device.startswith("cuda") and not torch.cuda.is_available()
    require(not missing, f"device={device}: torch sees no CUDA device here; use device=cpu")
    device = processes.local_device(device)
    check_device(device)
    return device


def set_up_torch(settings: Settings, device: str) -> int:
    """Set kernels, seed and threads of a run. Returns the number of threads, 0 if the size of a model decides."""
    if settings.deterministic:
        use_deterministic_kernels(device)
    torch.manual_seed(settings.seed)
    threads, world = settings.threads, current()
    if world.size > 1 and not threads:
        threads = max(1, machine.cores() // world.size)
    if threads:
        torch.set_num_threads(threads)
    return threads


def _run_stages(
    settings: Settings,
    writer: RunWriter,
    workers: WorkerPool,
    interrupt: Interrupt,
    on_step: OnStep | None,
    place: Path | None = None,
    begin: Callable[[], None] | None = None,
) -> Context:
    """Run the stages. `place` is the run directory if another process writes it. `begin` is called when nothing was refused."""
    device, stages = device_of(settings), settings.recipe.stages
    shared = writer, settings.seed, device
    again = settings.again or bool(settings.only)
    due = base.unfinished(stages, Context(*shared, place=place), settings.only, again)
    # the first stage reads its data at once and need not read it twice, unless what it made before is set aside for it
    reading = [stage.name for n, stage in enumerate(due) if n > 0 or again or not stage.reads_first]
    warnings = check_stages(stages, settings.seed, device, [stage.name for stage in due], reading)
    threads = set_up_torch(settings, device)
    keep, hook = settings.checkpoint_keep, settings.checkpoint_hook
    saving = Saving(keep=keep, synchronous=settings.checkpoint_sync, hook=hook)
    with contextlib.ExitStack() as stack:
        trackers = None
        if (settings.trackers or settings.prometheus) and place is None:
            trackers = Trackers.open(settings.trackers, writer, config.to_config(settings))
            stack.enter_context(contextlib.closing(trackers))
            if settings.prometheus:
                trackers.active["prometheus"] = Endpoint(settings.prometheus)
        rest = interrupt, trackers, threads
        cluster = None
        if settings.cluster:
            cluster = stack.enter_context(Cluster(placement(settings)))
            if cluster.settings.samplers:
                cluster.connect()  # or raise an error, before the first stage
        if begin is not None:
            begin()
        console.write_text(f"run directory: {writer.directory}\n", sys.stdout)
        context = Context(
            *shared,
            *rest,
            saving=saving,
            on_step=on_step,
            workers=workers,
            say=place is None,
            place=place,
            cluster=cluster,
        )
        for name, lines in warnings.items():
            context.announce(name, lines, "warning")
        run_stages(stages, context, settings.only, settings.again)
    return context


@contextlib.contextmanager
def interrupts(directory: Path) -> Iterator[Interrupt]:
    """Let the first Ctrl-C, SIGTERM or SIGHUP stop the loop after its step, and a second one, or one outside of a loop, stop at once,
    as an output that was closed does. After a SIGHUP further ones are ignored. The error names the directory to resume."""
    interrupt, terminal = Interrupt(), Terminal()

    def handler(number: int, frame: FrameType | None) -> None:
        if number == HANGUP:
            signal.signal(number, signal.SIG_IGN)  # the kernel and the shell may both send it
            interrupt.hung_up = True
            terminal.hang_up()
        if not interrupt.looping or (interrupt.requested and number != HANGUP):
            raise KeyboardInterrupt
        interrupt.requested = True
        if current().first:
            console.write_text("\nstopping after this step (again: at once)\n", sys.stderr)

    previous = {}
    # not in the main thread: the program that embeds us handles signals
    with contextlib.suppress(ValueError):
        for number in stop_signals():
            previous[number] = signal.signal(number, handler)

    def stopped(error: Any) -> Any:
        error.directory = directory
        error.add_note(f"continue with: {how_to_continue(directory)}")
        if interrupt.hung_up:
            error.code = 129
        return error

    try:
        yield interrupt
    except OSError as error:
        # `posttrain run ... | head` closes its output
        lost = error.errno == errno.EIO and terminal.lost()
        if not (lost or isinstance(error, BrokenPipeError)):
            raise
        text = "stopped because its output, or a pipe to another process, was closed"
        raise stopped(Interrupted(text)) from error
    except (Interrupted, KeyboardInterrupt) as error:
        if interrupt.hung_up and isinstance(error, KeyboardInterrupt):
            raise stopped(Interrupted("stopped because its terminal was closed")) from error
        stopped(error)
        raise
    finally:
        for number, old in previous.items():
            if not (number == HANGUP and interrupt.hung_up):
                signal.signal(number, old)


def _export(context: Context, settings: Settings) -> None:
    """Write the last trained model to export/ as a plain HF checkpoint."""
    last = exported(context.directory, [stage.name for stage in settings.recipe.stages])
    if last is None:
        return
    target = context.directory / "export"
    for kind in ("tmp", "old"):  # leftovers of a process that was killed here
        shutil.rmtree(target.with_name(f".export.{kind}"), ignore_errors=True)
    with atomic_folder(target) as folder:
        shutil.copytree(last / "model", folder, dirs_exist_ok=True)


def _summary(context: Context, settings: Settings, seconds: float) -> dict[str, JSON]:
    results = {stage.name: context.result(stage.name) or {} for stage in settings.recipe.stages}
    return {
        "name": settings.name,
        "seed": settings.seed,
        "before": score_of(results.get(settings.recipe.before) or {}),
        "after": score_of(results.get(settings.recipe.after) or {}),
        "stages": results,
        "lineage": {name: result.pop("lineage", None) for name, result in results.items()},
        "alarms": alarm_lines(Run(context.directory).events()),
        "seconds": round(seconds, 1),
        "attempts": context.writer.attempt,
        "config_sha256": digest(config.to_config(settings)),
        "versions": versions(),
    }


def _draw(settings: Settings, context: Context) -> tuple[bool, bool]:
    """Draw the curves and pass@k. Returns whether there were any."""
    run = Run(context.directory)
    drawn = bool(run.metrics())  # a pipeline of evaluations alone has no curves
    if drawn:
        draw(run, context.directory / "plot.png")
    return drawn, pass_at_k(context, settings.recipe.stages)


def conclude(settings: Settings, context: Context, drawn: bool, curves: bool) -> None:
    """Print the end of a run: tables, answers of the stages, the path of the plot, and what to try next."""
    run, recipe, folder = Run(context.directory), settings.recipe, context.directory
    if recipe.before and recipe.after:
        compare_before_after(context, recipe.before, recipe.after)
    if rows := run.answers():
        console.show(console.answers_table(rows))
    results = {stage.name: context.result(stage.name) or {} for stage in recipe.stages}
    bests = {name: result.get("best_score") for name, result in results.items()}
    lines = [
        f"best:     {name}: {best['figure']} {best['score']:.4g} at step {best['step']}"
        for name, best in bests.items()
        if best is not None
    ]
    lines += [f"alarm:    {printable(line)}" for line in alarm_lines(run.events())]
    quoted = shlex.quote(str(folder))
    answering = bool(answering_models(folder, results))
    exported, written = (folder / "export").is_dir(), any((folder / "rollouts").glob("*/*"))
    places = {
        f"plot:     {folder / 'plot.png'}": drawn,
        f"pass@k:   {folder / 'pass_at_k.png'}": curves,
        f"model:    {folder / 'export'} (a plain transformers checkpoint)": exported,
        f"rollouts: posttrain show {quoted}": written,
        f"answers:  posttrain sample {quoted} PROMPT --stages": exported and answering,
        f"took {console.duration(float((run.summary or {}).get('seconds', 0)))}": True,
        f"try next: {printable(recipe.next_command)}": bool(recipe.next_command),
    }
    lines += [line for line, there in places.items() if there]
    console.write_text("".join(f"{line}\n" for line in lines), sys.stdout)
