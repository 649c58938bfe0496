"""Builds the settings of a run from a recipe (a name, a YAML file or a Python file) and key=value arguments."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import shlex
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from posttrain import catalogue, errors
from posttrain.cluster.placement import LOCAL, check_address
from posttrain.config_tree import check_value, from_tree, override, pair, to_tree
from posttrain.data.safe_readers import read_yaml
from posttrain.errors import Checked, NotNegative, Positive, Range, Seed, Several, require
from posttrain.recipes.base import Recipe, as_recipe, repeat
from posttrain.runs.layout import FORMAT
from posttrain.stages._lineage import MODELS, PLACES, inside, place
from posttrain.stages.base import Stage, check_name, check_names
from posttrain.system.machine import check_threads, requested_threads
from posttrain.trust import EVERYTHING, TRUST_IT, Trust, active, trusting
from posttrain.types import JSON


@dataclasses.dataclass(frozen=True)
class Settings(Checked):
    """The settings of a whole run: its recipe, and the keys that belong to no stage."""

    recipe: Recipe
    name: str
    seed: Seed = 0
    device: str = "auto"
    threads: Annotated[int, Range(ge=0, text="a number of threads, 0 for as many as pay")] = 0
    out: str = ""  # the run directory; "" makes a new one under runs/
    trackers: tuple[str, ...] = ()
    # a port of the loopback interface, where Prometheus finds the newest figures at /metrics; 0: none
    prometheus: Annotated[int, Range(ge=0, lt=2**16, text="a port, 0 for none")] = 0
    # a program and its arguments; it gets the directory of each finished checkpoint
    checkpoint_hook: tuple[str, ...] = ()
    checkpoint_sync: bool = False  # wait for the disk at every checkpoint
    checkpoint_keep: Several = 2
    deterministic: bool = False  # on a GPU: the same bits every time; on a CPU that is always so
    # processes that train together on this machine, each on its own GPU or with a share of the cores
    processes: Several = 1
    # with several processes: whole weights in each (ddp), or a shard in each (fsdp); auto: by their size
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    # neighbours of the processes that divide each layer of a model, which is to learn, where it is too large for parallel=fsdp alone
    tensor_parallel: Several = 1
    # ray: one of this machine, which ends with the run; or HOST:PORT of one that runs. It has places for what `processes` and
    # rl.sampler start
    cluster: str = ""
    cluster_spread: bool = False  # over the nodes, rather than on as few as have room
    worker_cpus: Positive = 1.0  # CPUs of each sampler on a cluster
    # GPUs of each sampler on a cluster; below 1, samplers share a GPU; none: one if device=cuda
    worker_gpus: NotNegative | None = None
    # stop: the run ends and can be resumed; shrink: the group of processes goes on with fewer, from the last checkpoint
    on_failed_node: Literal["stop", "shrink"] = "stop"
    # stages to run alone, on what is in the directory; never part of a run's configuration
    only: tuple[str, ...] = ()
    again: bool = False  # let the directory hold a run, and do again what has changed
    # the source of all names; no key
    trust: Trust = dataclasses.field(default=EVERYTHING, compare=False)

    def __post_init__(self) -> None:
        """Checked before the run directory exists."""
        check_machine(self.seed, self.device)
        # a tokenizer is not saved to a name that is not UTF-8; nor can a command to copy have a line's end
        text = f"out={self.out!r}: the name of a run directory is UTF-8 without control characters and begins with no dash"
        odd = re.search(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]|^(\./)*-", self.out)
        require(odd is None, f"{text}; choose another")
        path = os.path.abspath(self.out)
        unnamed = f"out={self.out!r} is {path!r}, which is not UTF-8; choose another, or rename the folder above it"
        require(re.search("[\ud800-\udfff]", path) is None, unnamed)
        nobody = f"out={self.out}: there is no such user; write ./{self.out} for a directory here"
        require(not os.path.expanduser(self.out).startswith("~"), nobody)
        super().__post_init__()
        check_threads(self.threads, "threads")
        if self.tensor_parallel > 1:
            whole = f"tensor_parallel={self.tensor_parallel} divides weights"
            text = f"{whole}, and parallel=ddp has all of them in each process; leave one out"
            require(self.parallel != "ddp", text)
            adapted = [stage.name for stage in self.recipe.stages if getattr(stage, "lora", None)]
            names = f"{whole}, and those with adapters ({', '.join(adapted)}) are not divided yet"
            require(not adapted, f"{names}; leave one out")
        if self.cluster:
            check_address(self.cluster)
        if self.cluster in ("", LOCAL):
            check_threads(self.processes, "processes")


def check_machine(seed: int, device: str) -> None:
    """Check the settings that every command with a model has."""
    require(0 <= seed < 2**63, f"seed is a whole number, 0 or more and below 2**63, not {seed}")
    known = re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device) is not None
    require(known, f"device must be auto, cpu, mps, cuda or cuda:0, not {device!r}")
    check_threads(requested_threads(), "OMP_NUM_THREADS")


TOP = [f.name for f in dataclasses.fields(Settings)][2:-1]  # the keys that belong to no stage
TEXTS = ("before", "after", "next_command")  # of a recipe
# those of them that are about a cluster
CLUSTER = ("cluster_spread", "worker_cpus", "worker_gpus", "on_failed_node")
PASSING = ("out", "only", "again")  # those of them that are not part of a run's configuration


def parse(
    recipe: str, arguments: Sequence[str], allow_code: bool = False, source: str = ""
) -> Settings:
    """Parse a recipe (name, YAML file or Python file) and key=value arguments. `source` is the file that they come from, if nobody
    typed them."""
    catalogue.check_recipe(recipe)
    pairs = dict(map(pair, arguments))
    written = recipe.endswith((".yaml", ".yml"))
    own = {key: pairs[key] for key in PASSING if key in pairs}  # not from the file: see sweep.py
    trust = Trust(source, own, strict=False) if source else Trust(recipe if written else "", pairs)
    with trusting(EVERYTHING if allow_code else trust):
        if written:
            return _from_yaml(Path(recipe), pairs)
        return build(recipe.rsplit(":", 1)[-1], catalogue.load("recipe", recipe), pairs)


def build(name: str, function: Any, pairs: Mapping[str, JSON]) -> Settings:
    """Call the recipe with its own keys, then apply the keys of its stages."""
    own = inspect.signature(function).parameters
    top = {key: value for key, value in pairs.items() if "." not in key}
    refuse_bare(top, [*own, *TOP], [name])
    active().require_program(top.get("checkpoint_hook"))
    hints = typing.get_type_hints(function)
    given = {k: check_value(k, hints.get(k, Any), v) for k, v in top.items() if k in own}
    missing = [k for k, p in own.items() if p.default is p.empty and k not in given]
    require(not missing, f"{name}: give {', '.join(f'{key}=...' for key in missing)}")
    return _settings(name, as_recipe(function(**given), name), pairs)


def _settings(name: str, recipe: Recipe, pairs: Mapping[str, JSON]) -> Settings:
    """The settings of a run of the recipe, with the stages' keys applied."""
    dotted = {key: value for key, value in pairs.items() if "." in key}
    recipe = dataclasses.replace(recipe, stages=override(recipe.stages, dotted))
    hints = typing.get_type_hints(Settings)
    found: dict[str, Any] = {}
    for key, value in ((key, pairs[key]) for key in TOP if key in pairs):
        if key == "checkpoint_hook":
            found[key] = _words(value or "")
        elif key in ("trackers", "only"):
            listed = value if isinstance(value, list) else str(value or "").split(",")
            found[key] = tuple(word.strip() for word in map(str, listed) if word.strip())
        else:
            found[key] = check_value(key, hints[key], value)
    check_names(recipe.stages)
    check_named(recipe.stages)
    for key in CLUSTER if not found.get("cluster") else ():
        usual = found.get(key, getattr(Settings, key)) == getattr(Settings, key)
        alone = f"{key} is for a cluster, and there is none"
        require(usual, f"{alone}; add cluster=ray, or leave it out")
    if found.get("cluster") and check_address(found["cluster"]) is not None:
        active().require_address(f"http://{found['cluster']}")
    active().require_trackers(found.get("trackers", ()))
    replacing = {key: found.get(key) for key in ("only", "again")}
    active().require_output(found.get("out", ""), replacing)
    return Settings(recipe, name, **found, trust=active())


def _words(command: JSON) -> tuple[str, ...]:
    """A program and its arguments, from one line or a list of words. There is no shell, so nothing is expanded."""
    if not isinstance(command, str):
        return tuple(check_value("checkpoint_hook", tuple[str, ...], command))
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        text = f"checkpoint_hook: {command!r} is not a command line ({error})"
        raise errors.UserError(text) from None


def check_named(stages: Sequence[Stage]) -> None:
    """Raise an error if the resolved stages name something that the file they come from may not name; see trust.py. This checks the
    final values, after rounds, overrides and recipe parameters."""
    trust = active()
    if trust.whole:
        return
    named = (pair for stage in stages for pair in inside(stage))
    found = [(field, value) for field, value in named if isinstance(value, str) and value]
    checks: dict[str, Callable[[str], None]] = {
        "reward": lambda name: trust.require_code("reward", name),
        "sandbox": trust.require_sandbox,
        "command": trust.require_command,
        "url": trust.require_address,
        "key_variable": trust.require_variable,
    }
    for field, value in found:
        if field in checks:
            checks[field](value)
    sends = any(field == "url" for field, _ in found)
    for field, value in found if sends or trust.strict else ():
        path = _path(field, value) if field not in MODELS and field not in checks else None
        if path is not None:
            # a data set in a folder may itself name files elsewhere
            fine = field != "dataset" or trust.said(value)
            folder = f"{trust.file} names the folder {value} as a dataset"
            require(fine, f"{folder}: give it on the command line, or {TRUST_IT}")
            trust.require_file(value, path)


def _path(field: str, value: str) -> Path | None:
    """The file or folder that a setting names. In a field for paths any existing path counts, even "." or one with the name of a
    stage."""
    try:
        path = Path(value).expanduser()
        return path if field in PLACES and path.exists() else place(value, field)
    except (OSError, ValueError, RuntimeError):  # no path: too long, a null, an unknown user
        return None


def refuse_bare(keys: Iterable[str], known: Sequence[str], owners: Sequence[str] = ()) -> None:
    """Raise an error for keys that neither the run nor its recipe has."""
    for key in keys:
        if key not in known:
            hint = "one of a stage is STAGE.KEY, such as rl.steps=10"
            raise errors.UserError(f"{errors.unknown('key', key, known, owners)} ({hint})")


def _from_yaml(path: Path, pairs: Mapping[str, JSON]) -> Settings:
    try:
        tree = read_yaml(path.read_text(), str(path))
    except UnicodeDecodeError as error:
        raise errors.UserError(f"{path} is not valid YAML: {error}") from None
    keys = f"{path} must hold keys; a list of stages stands below the key stages"
    require(isinstance(tree, dict), keys)
    if "recipe" in tree:
        name = str(tree.pop("recipe"))
        return build(name, catalogue.load("recipe", name), {**_flatten(tree), **pairs})
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem)[:60].strip(".-")
    tree = {"name": plain or "recipe", **tree}
    return _resolved(tree, str(path), pairs)


def _flatten(tree: Mapping[str, JSON], prefix: str = "") -> dict[str, JSON]:
    flat: dict[str, JSON] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and not any(k == "name" or isinstance(k, int) for k in value):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def from_config(
    tree: Mapping[str, JSON],
    where: str,
    pairs: Mapping[str, JSON] | None = None,
    allow_code: bool = False,
) -> Settings:
    """The settings saved in a run directory, in the file `where`, with the user's own `pairs`."""
    pairs = dict(pairs or {})
    if not {**tree, **pairs}.get("cluster"):  # a run that goes on without its cluster
        tree = {key: value for key, value in tree.items() if key not in CLUSTER}
    with trusting(EVERYTHING if allow_code else Trust(where, pairs, strict=False)):
        return _resolved(tree, where, pairs)


def _resolved(tree: Mapping[str, JSON], where: str, pairs: Mapping[str, JSON]) -> Settings:
    """The settings from a fully resolved configuration."""
    errors.refuse_unknown(
        f"key in {where}:", tree, ("format", "name", "stages", *TEXTS, "versions", *TOP)
    )
    active().require_program(pairs.get("checkpoint_hook", tree.get("checkpoint_hook")))
    require(isinstance(tree.get("stages"), list), f"{where}: 'stages' must be a list")
    made = [_expanded(t, f"stages[{n}]") for n, t in enumerate(tree["stages"])]
    refuse_bare((k for k in pairs if "." not in k), TOP)
    recipe = Recipe(tuple(chain(*made)), *(str(tree.get(key, "")) for key in TEXTS))
    top = {k: v for k, v in tree.items() if k in TOP}
    name = str(tree.get("name", "run"))
    check_name("recipe", name)  # it becomes a folder
    return _settings(name, recipe, {**top, **pairs})


def _expanded(tree: JSON, where: str) -> list[Stage]:
    """One stage, or the stages of several rounds: {rounds: 3, first: {...}, advance: {...}, stages: [...]}; see recipes/base.py."""
    if not isinstance(tree, dict) or "rounds" not in tree:
        return [from_tree(tree, Stage, where)]
    errors.refuse_unknown(f"key in {where}:", tree, ("rounds", "first", "advance", "stages"))
    require(isinstance(tree.get("stages"), list), f"{where}: rounds need a list of stages")
    stages = [from_tree(t, Stage, f"{where}.stages[{n}]") for n, t in enumerate(tree["stages"])]
    first = check_value(f"{where}.first", dict[str, str], tree.get("first") or {})
    advance = check_value(f"{where}.advance", dict[str, int | float], tree.get("advance") or {})
    return repeat(stages, check_value(f"{where}.rounds", int, tree["rounds"]), first, advance)


def to_config(settings: Settings) -> dict[str, JSON]:
    """All settings that determine a run, as plain data."""
    return {
        "format": FORMAT,
        "name": settings.name,
        **{key: to_tree(getattr(settings, key)) for key in TOP if key not in PASSING},
        **{key: getattr(settings.recipe, key) for key in TEXTS},
        "stages": [to_tree(stage) for stage in settings.recipe.stages],
    }
