"""The base class of pipeline stages, and the functions that run them. A stage is a frozen dataclass. It writes its results to the
run directory, where later stages find them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import string
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin

from posttrain import catalogue
from posttrain.algorithms.base import Algorithm
from posttrain.cluster.ray_cluster import Cluster
from posttrain.engine.engine import Engine
from posttrain.engine.fp8 import AS_TRAINED, Precision
from posttrain.errors import UserError, field_types, prefixed, refuse_unknown, require
from posttrain.events import Events, Level
from posttrain.loop import Interrupt, Loop, OnStep
from posttrain.models import given
from posttrain.models.load import Reader, as_dtype, load, stop_ids
from posttrain.models.lora import Lora, merge_adapters, peft_files
from posttrain.models.policy import Policy, wrap_model
from posttrain.models.save import save
from posttrain.models.scorer import Scorer, load_scorer
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.runs.console import print_message
from posttrain.runs.layout import plain_name, rollout_file
from posttrain.runs.trackers import Trackers
from posttrain.runs.write import RunWriter
from posttrain.stages import _lineage
from posttrain.stages._naming import Naming
from posttrain.stages._plan import DryRun
from posttrain.system.files import atomic_write, read_json
from posttrain.system.workers import WorkerPool
from posttrain.system.world import ALONE, current, using
from posttrain.tasks.base import Task
from posttrain.train.parts import gathering, plain_network
from posttrain.train.saving import Saving, Store
from posttrain.train.torch_settings import use_threads
from posttrain.trust import PREFIX
from posttrain.types import JSON, Problem, Sampler

PRINTABLE = string.printable[:95] + "\n"


@dataclass(eq=False)
class Context:
    """State shared by all stages of a run: the run writer, the seed, the device, and the earlier stages."""

    writer: RunWriter
    seed: int
    device: str = "cpu"
    interrupt: Interrupt = field(default_factory=Interrupt)
    trackers: Trackers | None = None
    threads: int = 0  # 0: chosen by the model's size, on the CPU
    say: bool = True  # print messages
    saving: Saving = field(default_factory=Saving)  # how checkpoints are written
    on_step: OnStep | None = None  # called after each training step
    workers: WorkerPool | None = None  # score responses of isolated tasks; see `worker_pool`
    # the run directory, if another process writes it and `writer` belongs to this process alone
    place: Path | None = None
    cluster: Cluster | None = None  # where samplers run, if not on this machine
    loop: Callable[..., Loop] = Loop  # the training loop; a replay replaces it

    def __post_init__(self) -> None:
        self.events.show = print_message if self.say else lambda event: None

    @property
    def events(self) -> Events:
        """The message channel of the run."""
        return self.writer.events

    @property
    def directory(self) -> Path:
        return self.place or self.writer.directory

    @property
    def writes(self) -> bool:
        """Whether this process writes the run directory."""
        return self.place is None

    def folder(self, stage: str) -> Path:
        return self.directory / "stages" / stage

    def earlier(self, name: str) -> Path | None:
        """The folder of the earlier stage called `name`; None if `name` is a path or another model."""
        inside = "/" not in name and not name.startswith(".") and self.folder(name).is_dir()
        return self.folder(name) if inside else None

    def checkpoints(self, stage: str) -> Store:
        return Store(self.directory / "checkpoints" / stage, self.saving, self.events)

    def announce(self, stage: str, lines: Sequence[str], level: Level = "info") -> None:
        """Emit messages of a stage."""
        for line in lines:
            self.events.emit("message", line, level, stage=stage)

    def sampler(self, policy: Policy, **how: Any) -> Sampler:
        """`make_sampler` with the threads and the cluster of the run."""
        return make_sampler(policy, processes=self.threads, cluster=self.cluster, **how)

    def save_model(
        self, stage: str, network: Policy | Scorer, lora: Lora | None = None, name: str = "model"
    ) -> None:
        """Save a stage's model as a plain HF checkpoint for later stages. With `lora`, its adapters are merged, and also saved in
        peft's format."""
        network, adapter = plain_network(network), None
        if self.writes and lora is not None:
            dtype, adapter = str(network.dtype).removeprefix("torch."), peft_files(network, lora)
            kept = merge_adapters(network.model)
            if kept < 1:
                line = f"the adapters are merged in float32; rounded to {dtype}, as a GPU loads it"
                line += f", {kept:.0%} of the changed weights differ from the base"
                peft = f"{name}/adapter has the adapters themselves, for peft"
                self.announce(stage, [f"{line}; {peft}"])
        if self.writes:
            folder = self.folder(stage) / name
            save(network.model, network.tokenizer, folder, replace=True, adapter=adapter)
        current().same(None)  # wait until it exists for all processes

    def write_lines(self, stage: str, lines: Iterable[JSON], name: str = "problems.jsonl") -> None:
        """Write per-problem results, or generated data, next to the stage's result: text as it is, others as JSON."""
        if not self.writes:
            return
        written = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        text = "".join(line + "\n" for line in written)
        atomic_write(self.folder(stage) / name, text, durable=False, folder=True)

    def result(self, stage: str) -> dict[str, JSON] | None:
        """The result of a finished stage, or None."""
        path = self.folder(stage) / _lineage.RESULT
        if not path.is_file():
            return None
        try:
            return read_json(path)
        except UserError as error:
            again = f"remove {path.parent} to run the stage {stage!r} again"
            raise UserError(f"{error}; {again}") from None

    def finish(self, stage: str, result: Mapping[str, JSON]) -> None:
        """Mark a stage as done. The result is written last and atomically: if it exists, everything else does."""
        self.write(stage, _lineage.RESULT, result)

    def set_aside(self, stage: str) -> Path:
        """Move what a stage has made to a folder of its own, so that it can run again. The folder gets its name last: if the process
        dies before, the next one puts everything back (`RunWriter`)."""
        places = (self.directory / "replaced" / f"{stage}-{n}" for n in count(1))
        place = next(path for path in places if not path.exists())
        begun = place.with_name(f".{place.name}")
        saved = sorted((self.directory / "checkpoints").glob("*"))
        members = [p for p in saved if re.fullmatch(rf"{re.escape(stage)}-\d+", p.name)]
        made = [p for p in saved if p.name == stage]
        # a folder rl-2 may also be of a stage of that name
        made += [p for p in members if not self.folder(p.name).exists()]
        sampled = rollout_file(self.directory, stage, 0).parent
        for folder in [*made, *([sampled] if sampled.is_dir() else []), self.folder(stage)]:
            aside = begun / folder.relative_to(self.directory)
            aside.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(folder, aside)
        return begun.rename(place)

    def write(self, stage: str, name: str, tree: Mapping[str, JSON]) -> None:
        """Write a JSON file of a stage."""
        text = json.dumps(tree, allow_nan=False, indent=2)
        atomic_write(self.folder(stage) / name, text, folder=True)


@contextmanager
def temporary_context(
    seed: int, device: str, threads: int = 0, workers: WorkerPool | None = None
) -> Iterator[Context]:
    """A context that prints nothing, with a temporary run directory."""
    with (
        tempfile.TemporaryDirectory() as folder,
        RunWriter(Path(folder) / "run", config={}) as writer,
    ):
        yield Context(writer, seed, device, threads=threads, say=False, workers=workers)


@dataclass(frozen=True, kw_only=True)
class Stage(Naming, ABC):
    """One stage of a pipeline. Its name is unique in the run."""

    # what later stages can use under its name: a model or data; "": neither; None: unknown
    leaves: ClassVar[str | None] = None
    # whether several processes run it together; otherwise the first process runs it alone
    together: ClassVar[bool] = False
    shares: ClassVar[str] = ""  # the key with the size of a step, which the processes share
    # whether its plan reads its data as `check_data` does; its run does so first
    reads_first: ClassVar[bool] = False

    name: str

    def __post_init__(self) -> None:
        for name, hint in field_types(type(self)):
            value, default = getattr(self, name), self.__dataclass_fields__[name].default_factory
            if isinstance(value, Mapping) and is_dataclass(hint) and callable(default):
                usual = default()  # the stage's own defaults, not those of the group
                value = replace(usual, **value) if type(usual) is hint else value
            object.__setattr__(self, name, in_full(value, hint))
        super().__post_init__()

    @property
    def where(self) -> str:
        return f"{self.name}: "

    @abstractmethod
    def run(self, context: Context) -> dict[str, JSON]:
        """Run the stage. The returned figures become its result."""

    def check_ready(self, device: str, names: Collection[str]) -> None:
        """Raise an error if something that the stage needs is missing (a package, a compiler, a file) or impossible, before the first
        stage runs. `names` are the stages of the run; the data of those may not exist yet."""
        task = getattr(self, "task", None)
        if isinstance(task, Task):
            task.ready()

    def splits(self) -> Sequence[tuple[str, int | None]]:
        """The (split, level) pairs of its task that it uses. Each must have a problem."""
        return ()

    def asks(self, split: str, problems: Sequence[Problem]) -> Sequence[Problem]:
        """The problems of a split that it may use."""
        return problems

    def check_data(self, reader: Reader, context: Context, before: Collection[str]) -> None:
        """Read the data that exists already, and raise the errors that the run would raise. The data of the stages `before` does
        not exist yet."""

    def warnings(self) -> list[str]:
        """Warnings about settings that are probably mistakes. They are not errors: a recipe is often tried with fewer steps than
        its warm-up."""
        return []

    def tasks(self) -> Sequence[Task | None]:
        """The tasks whose texts its model reads; None means any text."""
        return [getattr(self, "task", None)]

    def alphabet(self) -> str:
        """The characters that a tokenizer made from scratch for this stage must know: those that its tasks declare, or all
        printable ASCII if a task declares none."""
        declared = [getattr(task, "alphabet", None) for task in self.tasks()]
        if not declared or any(a is None for a in declared):
            return PRINTABLE
        return "".join(sorted(set("".join(a for a in declared if a))))

    def load(self, context: Context, name: str = "") -> Policy:
        """Load the model called `name`, by default the stage's starting model."""
        return load_policy(name or self.starts_from(), context, self.alphabet())

    def starts_from(self) -> str:
        """The name of the starting model, whose size is that of the model it trains; "" if it has none."""
        return str(getattr(self, "model", ""))

    def makes(self) -> int:
        """How many models of that size it produces."""
        return 1

    def reads_ids(self) -> tuple[str, ...]:
        """The models that receive token ids of the first one, and so must have the same vocabulary."""
        return ()

    def plan(self, policy: Policy, context: Context, before: Mapping[str, Stage]) -> Sequence[str]:
        """Lines about what the stage will do and need, without running it. `policy` is its starting model, `before` are the stages
        before it."""
        return ()

    def dry_run(self) -> DryRun:
        """A shortened stage, to estimate how long the whole one takes."""
        return DryRun(self)


def in_full(value: Any, hint: Any) -> Any:
    """Expand the short forms of a field's value: the name of an algorithm or a task, one value for a list of one, a file for its
    settings, or settings for the file."""
    if hasattr(hint, "__metadata__"):  # Annotated
        hint = hint.__origin__
    inner = get_args(hint)
    if get_origin(hint) is tuple and inner[1:] == (...,):
        several = value if isinstance(value, tuple | list) else [value]
        return tuple(in_full(one, inner[0]) for one in several)
    if hint is str and isinstance(value, Mapping) and [*value] == ["file"]:
        return value["file"]
    if isinstance(value, str) and hint in (Algorithm, Task):
        return catalogue.make("task" if hint is Task else "algorithm", value, hint)
    if isinstance(value, str) and hasattr(hint, "shorthand"):
        return hint(**{hint.shorthand: value})
    grouped = isinstance(value, Mapping) and isinstance(hint, type) and is_dataclass(hint)
    return hint(**value) if grouped else value


def run_stages(
    stages: Sequence[Stage], context: Context, only: Collection[str] = (), again: bool = False
) -> None:
    """Run the stages in order, and skip those that are done. A stage whose settings or inputs have changed runs again, and so do
    the stages that depend on it. `only` runs just the named stages, on the results that exist. `again` also restarts unfinished
    stages whose settings have changed.
    """
    if context.workers is None:
        with worker_pool(stages) as workers:
            run_stages(stages, replace(context, workers=workers), only, again)
        return
    if not context.writes:
        follow_stages(stages, context)
        return
    names = check_names(stages, only)
    for stage in unfinished(stages, context, only, again):
        context.announce(stage.name, stage.warnings(), "warning")
    for place, stage in enumerate(stages):
        folders = {name: context.folder(name) for name in names[:place]}
        lineage = _due(stage, folders, context, only, again)
        if lineage is not None:
            _run_stage(stage, lineage, context)
            now = _lineage.trace(stage, context.seed, folders).inputs
            # code is read once; of data, each evaluation may read a part
            data = [name for name in lineage.inputs if not name.endswith("(code)")]
            moved = ", ".join(name for name in data if now.get(name) != lineage.inputs[name])
            line = f"{moved} changed while the stage ran: it may have read both versions"
            context.announce(stage.name, [line] if moved else [], "warning")
    current().begin("", together=True)


def _due(
    stage: Stage, folders: Mapping[str, Path], context: Context, only: Collection[str], again: bool
) -> _lineage.Lineage | None:
    """The lineage of a stage that must run now, or None if its result is up to date. Results of other settings or inputs are set
    aside."""
    now = _lineage.trace(stage, context.seed, folders)
    before = _lineage.read(context.folder(stage.name))
    done = context.result(stage.name) is not None
    changes = [] if before is None else now.changes(before, config=done or again)
    if done and not changes:
        if context.writer.attempt > 1:
            context.events.emit("kept", stage=stage.name)
        return None
    why = _several(changes)
    if only and stage.name not in only:
        if done:
            context.announce(stage.name, [f"is out of date and used as it is: {why}"])
        return None
    named = _lineage.references(stage, folders)
    missing = ", ".join(name for name in named if context.result(name) is None)
    absent = f"{stage.name} needs {missing}, which has not been run in {context.directory}"
    require(not missing, absent)
    if changes:
        require(done or again, _other_inputs(stage, why, context))
        place = context.set_aside(stage.name)
        line = f"runs again: {why}; what it had made is now in {place}"
        context.announce(stage.name, [line], "info" if done else "warning")
    return now


def check_inputs(stages: Sequence[Stage], context: Context) -> None:
    """Raise an error, before a run is resumed, if a file or code that one of its stages was begun with has changed. What a finished
    stage has made would otherwise be set aside, and that of a stage which is to train longer."""
    for place, stage in enumerate(stages):
        before = _lineage.read(context.folder(stage.name))
        if before is not None:
            # what earlier stages have made is compared when it is their turn
            earlier = {other.name: Path(os.devnull) for other in stages[:place]}
            given = {name: was for name, was in before.inputs.items() if name not in earlier}
            now = _lineage.trace(stage, context.seed, earlier)
            changes = now.changes(_lineage.Lineage({}, given))
            require(not changes, _other_inputs(stage, _several(changes), context))


def _several(changes: Sequence[str]) -> str:
    more = f"; and {len(changes) - 3} more" if len(changes) > 3 else ""
    return "; ".join(changes[:3]) + more


def _other_inputs(stage: Stage, why: str, context: Context) -> str:
    how = f"'posttrain run ... out={shlex.quote(str(context.directory))} again=true'"
    return f"{stage.name} was begun with other inputs: {why}; put them back, or begin it anew with {how}"


def _run_stage(stage: Stage, lineage: _lineage.Lineage, context: Context) -> None:
    """Run a stage, and save its result and its lineage."""
    world = current()
    context.write(stage.name, _lineage.RECORD, asdict(lineage))
    context.events.emit("stage", stage=stage.name)
    began = time.perf_counter()
    world.begin(stage.name, stage.together)
    together = using(world if stage.together else ALONE)
    with context.events.at(stage.name), prefixed(stage.name), together:
        result = stage.run(context)
    content = _lineage.content(context.folder(stage.name), result)
    made = {**lineage.hashes(), "made_sha256": content}
    context.finish(stage.name, {"seconds": time.perf_counter() - began, **result, "lineage": made})
    world.end()


def follow_stages(stages: Sequence[Stage], context: Context) -> None:
    """Take part in the stages that the first process runs. Their results are in the run directory when all processes have ended."""
    world, named = current(), {stage.name: stage for stage in stages}
    while name := world.begin("", together=True):
        if name in named:
            with context.events.at(name), prefixed(name):
                named[name].run(context)
        world.end()


def unfinished(
    stages: Sequence[Stage], context: Context, only: Collection[str], again: bool = False
) -> list[Stage]:
    """The stages without a result or, with `again`, with one of other settings or inputs; with `only`, among these."""

    def due(place: int, stage: Stage) -> bool:
        before = _lineage.read(context.folder(stage.name))
        if not again or before is None or context.result(stage.name) is None:
            return context.result(stage.name) is None
        folders = {one.name: context.folder(one.name) for one in stages[:place]}
        return bool(_lineage.trace(stage, context.seed, folders).changes(before))

    wanted = [(n, stage) for n, stage in enumerate(stages) if not only or stage.name in only]
    return [stage for n, stage in wanted if due(n, stage)]


def worker_pool(stages: Iterable[Stage]) -> WorkerPool:
    """Worker processes for the tasks of a run. Create them before anything uses CUDA or starts a thread."""
    tasks = []
    for stage in stages:
        task = getattr(stage, "task", None)
        if isinstance(task, Task) and task.isolated:
            with prefixed(stage.name):
                task.ready()
            tasks.append(task)
    return WorkerPool(tasks)


def check_name(kind: str, name: str) -> None:
    text = f"{kind} name {name!r} is not a plain name: use letters, digits, '-', '_' and '.', not first"
    require(plain_name(name), text)


def check_names(stages: Sequence[Stage], only: Collection[str] = ()) -> list[str]:
    """Check that the names of the stages differ, and that `only` names some of them. Returns the names."""
    require(stages, "a recipe needs at least one stage")
    names = [stage.name for stage in stages]
    require(len(set(names)) == len(names), f"stage names must differ: {', '.join(names)}")
    for name in names:  # a name becomes a folder, and may come from a file
        check_name("stage", name)
    refuse_unknown("stage in only:", only, names)
    return names


def load_policy(name: str, context: Context, alphabet: str = PRINTABLE, place: str = "") -> Policy:
    """Load the model called `name`: the model of an earlier stage, `tiny:SIZE` made from scratch, a directory, a GGUF file, a hub
    name, or a copy of a module in this process (models/given.py). `place` is the device to put it on, if not the run's: a plan
    loads it on the CPU, with the precision of the run's device."""
    if name.startswith("tiny:"):
        tokenizer = character_tokenizer(alphabet)
        model = tiny_model(tokenizer, name.removeprefix("tiny:"), context.seed)
        use_threads(model.num_parameters(), context.threads)
        model = model.to(place or context.device, as_dtype(_dtype(context)))
        policy = wrap_model(model, tokenizer, stop_ids(model, tokenizer, name), name)
    else:
        found, device = model_places(name, context)[0], place or context.device
        read = given.copied if name.startswith(PREFIX) else load
        loaded = read(found, dtype=_dtype(context), device=device)
        use_threads(loaded.model.num_parameters(), context.threads)
        policy = wrap_model(loaded.model, loaded.tokenizer, loaded.stop_ids, loaded.source)
    policy.events = context.events
    return policy


def make_sampler(
    policy: Policy,
    rows: int = 0,
    processes: int = 0,
    kind: str = "engine",
    count: int = 1,
    cluster: Cluster | None = None,
    precision: Precision = AS_TRAINED,
    keep_caches: bool = False,
) -> Sampler:
    """Make the engine in this process, or a sampler in `count` other processes, here or on a cluster. It decodes up to `rows` responses
    at once (0: a number that suits the device). `kind` and `count` are the keys sampler and sampler_processes of the rl stage;
    `precision` selects what is computed in fp8. `keep_caches` is the engine's. If the weights are sharded, it samples with a gathered
    copy."""
    rows = rows or (1024 if policy.device.type == "cuda" else 256)
    on_cluster = cluster is not None and kind != "engine"
    text = f"sampler={kind} is not on a cluster yet; use sampler=process"
    require(kind == "process" or not on_cluster, text)

    def make(whole: Policy) -> Sampler:
        if kind == "engine":
            return Engine(whole, rows, processes, 0, precision, keep_caches)
        if cluster is not None:
            from posttrain.cluster.ray_sampler import RaySampler

            return RaySampler(whole, rows, processes, count, cluster, precision)
        from posttrain.cluster.remote import remote_sampler

        return remote_sampler(whole, rows, processes, kind, count, precision)

    return gathering(policy, make)


def load_reward_model(place: str, context: Context) -> Scorer:
    """Load the reward model in a directory or under a hub name; `model_places` finds those of a stage."""
    scorer = load_scorer(place, _dtype(context), context.device)
    scorer.events = context.events
    return scorer


def load_reward_models(name: str, context: Context) -> list[Scorer]:
    """Load the reward models called `name`: all members of a stage's ensemble, or the one in a directory or under a hub name."""
    return [load_reward_model(place, context) for place in model_places(name, context)]


def model_places(name: str, context: Context) -> list[str]:
    """The directories of the models called `name`: those of an earlier stage (an ensemble has several: model, model-1, ...), or
    else the name itself, as a directory or a hub name."""
    folder = context.earlier(name)
    if folder is None:
        return [name]
    first = folder / "model"
    require(first.is_dir(), f"stage {name!r} of this run has made no model")
    count = len(list(first.parent.glob("model-*")))
    return [str(first), *(str(first.with_name(f"model-{n + 1}")) for n in range(count))]


def exported(directory: Path, stages: Iterable[str]) -> Path | None:
    """The folder of the stage whose model the run exports: the last stage that made one. Models of control stages are not exported."""
    folders = [directory / "stages" / name for name in stages if "control" not in name]
    return next((folder for folder in reversed(folders) if (folder / "model").is_dir()), None)


def data_place(name: str, context: Context) -> str:
    """The file that `name` refers to: the data of an earlier stage, or the path itself."""
    folder = context.earlier(name)
    if folder is None:
        return name
    file = folder / "data.jsonl"
    require(file.is_file(), f"stage {name!r} of this run has written no data")
    return str(file)


def _dtype(context: Context) -> str:
    return "bfloat16" if context.device.startswith("cuda") else "float32"
