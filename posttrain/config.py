"""From words to settings: YAML files and key=value arguments become stages, checked by pydantic here and nowhere else."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import shlex
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml

from posttrain import catalogue
from posttrain.algorithms.base import Algorithm
from posttrain.cluster.placement import LOCAL, check_address
from posttrain.data.safe_readers import read_values, read_yaml
from posttrain.errors import (
    LARGEST,
    Checked,
    NotNegative,
    Positive,
    Range,
    Seed,
    Several,
    UserError,
    called_here,
    require,
    unknown,
)
from posttrain.recipes.base import Recipe, as_recipe, repeat
from posttrain.runs.layout import FORMAT
from posttrain.stages._lineage import MODELS, PLACES, inside, place
from posttrain.stages.base import Stage, check_name, check_names
from posttrain.stages.reward_sources import RewardSource
from posttrain.stages.train import STAGES
from posttrain.system.machine import check_threads, requested_threads
from posttrain.tasks.base import Task
from posttrain.tasks.tools.base import Tool
from posttrain.trust import EVERYTHING, TRUST_IT, Trust, active, trusting
from posttrain.types import JSON

# polymorphic: a dict with its catalogue name
NAMED: dict[type, str] = {
    Algorithm: "algorithm",
    Task: "task",
    Tool: "tool",
    Stage: "stage",
    RewardSource: "reward_source",
}


@dataclasses.dataclass(frozen=True)
class Settings(Checked):
    """A whole run: its recipe and the keys that belong to no stage."""

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
    # that work together on this machine, each on a GPU of its own or a share of the cores
    processes: Several = 1
    # of several processes: whole weights in each (ddp), or a part in each (fsdp); auto: by their size
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    # neighbours of the processes that divide each layer of a model, which is to learn, where it is too large for parallel=fsdp alone
    tensor_parallel: Several = 1
    # ray: one of this machine, which ends with the run; or HOST:PORT of one that runs. It has places for what `processes` and
    # rl.sampler start
    cluster: str = ""
    cluster_spread: bool = False  # over the nodes, rather than on as few as have room
    worker_cpus: Positive = 1.0  # of a cluster, for each sampler
    # of a cluster, for each sampler; below 1, it shares a GPU. none: one where device=cuda
    worker_gpus: NotNegative | None = None
    # stop: the run ends and can be resumed; shrink: the group of processes goes on with fewer, from the last checkpoint
    on_failed_node: Literal["stop", "shrink"] = "stop"
    # stages to run alone, on what is in the directory; never part of a run's configuration
    only: tuple[str, ...] = ()
    again: bool = False  # let the directory hold a run, and do again what has changed
    # the source of all names; no key
    trust: Trust = dataclasses.field(default=EVERYTHING, compare=False)

    def __post_init__(self) -> None:
        """Refused before there is a directory."""
        check_machine(self.seed, self.device)
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
    """Check what every command that runs a model takes."""
    require(0 <= seed < 2**63, f"seed is a whole number, 0 or more and below 2**63, not {seed}")
    known = re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device) is not None
    require(known, f"device must be auto, cpu, mps, cuda or cuda:0, not {device!r}")
    check_threads(requested_threads(), "OMP_NUM_THREADS")


class Text(str):
    """A value as it was typed. What it means depends on its field: `no` is a truth, or the name of a directory."""

    value: JSON

    def __new__(cls, text: str, value: JSON) -> Text:
        made = super().__new__(cls, text)
        made.value = value
        return made


def meant(value: JSON, kind: Any = Any) -> JSON:
    """A value for a field of this type."""
    if not isinstance(value, Text):
        return value
    accepted = (kind, *typing.get_args(kind))
    said = kind is str or (str in accepted and type(value.value) not in accepted)
    return str(value) if said else value.value


THOUSANDS = r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?"
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+"
TOP = [f.name for f in dataclasses.fields(Settings)][2:-1]  # the keys that belong to no stage
TEXTS = ("before", "after", "next_command")  # of a recipe
# of those, what is about a cluster
CLUSTER = ("cluster_spread", "worker_cpus", "worker_gpus", "on_failed_node")
PASSING = ("out", "only", "again")  # of those, what is no part of a run's configuration


def parse(
    recipe: str, arguments: Sequence[str], allow_code: bool = False, source: str = ""
) -> Settings:
    """A recipe's name, YAML file or Python file, and key=value arguments in the words of the README. Nobody typed them where they come
    from a file, the `source`."""
    pairs = dict(pair(argument) for argument in arguments)
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
    given = {k: _check(k, hints.get(k, Any), v) for k, v in top.items() if k in own}
    missing = [k for k, p in own.items() if p.default is p.empty and k not in given]
    require(not missing, f"{name}: give {', '.join(f'{key}=...' for key in missing)}")
    return _settings(name, as_recipe(function(**given), name), pairs)


def _settings(name: str, recipe: Recipe, pairs: Mapping[str, JSON]) -> Settings:
    """A run of the recipe, with the keys of its stages applied to them."""
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
            found[key] = _check(key, hints[key], value)
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
    """A program and its arguments, from one line or a list of words. Nothing in it is expanded: there is no shell."""
    if not isinstance(command, str):
        return tuple(_check("checkpoint_hook", tuple[str, ...], command))
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise UserError(f"checkpoint_hook: {command!r} is not a command line ({error})") from None


def check_named(stages: Sequence[Stage]) -> None:
    """Refuse what the resolved stages name and the file they come from may not; see trust.py. Whatever a name went through on its way
    here (rounds, overrides, a recipe's parameters), this is what the stages will use."""
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
    """The file or folder that a setting names: in a field for places whatever there is, "." too, even where a stage is called so."""
    try:
        path = Path(value).expanduser()
        return path if field in PLACES and path.exists() else place(value, field)
    except (OSError, ValueError, RuntimeError):  # no path: too long, a null, an unknown user
        return None


def pair(argument: str) -> tuple[str, JSON]:
    """The key and the value of key=value: text, a list or a mapping; other values as they were typed, until their field is known."""
    key, equals, text = argument.partition("=")
    require(bool(equals) and bool(key), f"{argument!r} is not key=value")
    try:
        if text.lstrip().startswith("#"):  # a comment to YAML; here a marker such as ####
            return key, text
        value = read_values(text, key) if text else ""
    except (yaml.YAMLError, ValueError):
        return key, text
    # YAML 1.1 reads 1e-4 as a string; people mean a number
    if isinstance(value, str) and re.fullmatch(NUMBER, value):
        value = float(value)
    return key, value if isinstance(value, str | list | dict) else Text(text, value)


def refuse_unknown(
    what: str, keys: Iterable[str], known: Sequence[str], owners: Sequence[str] = ()
) -> None:
    for key in keys:
        if key not in known:
            raise unknown(what, str(key), known, owners)


def refuse_bare(keys: Iterable[str], known: Sequence[str], owners: Sequence[str] = ()) -> None:
    """Refuse keys that neither the run nor its recipe has."""
    try:
        refuse_unknown("key", keys, known, owners)
    except UserError as error:
        raise UserError(f"{error} (one of a stage is STAGE.KEY, such as rl.steps=10)") from None


def override(stages: Sequence[Stage], pairs: Mapping[str, JSON]) -> tuple[Stage, ...]:
    """Apply `stage.key=value`, where key may be a path, or the one nested key of that name."""
    check_names(stages)  # two of one name would be one
    kinds = {stage.name: type(stage) for stage in stages}
    trees = {stage.name: to_tree(stage) for stage in stages}
    for dotted, value in pairs.items():
        name, *path = dotted.split(".")
        # of a stage in rounds: all of them, unless one is named
        rounds = [n for n in trees if re.fullmatch(rf"{re.escape(name)}_\d+", n)]
        meant = [name] if name in trees else rounds
        if not meant:
            raise unknown("stage", name, trees)
        for one in meant:
            _assign(trees[one], kinds[one], path, value, dotted)
            either = getattr(kinds[one], "either", ())
            # what a recipe says gives way to the other way to say it, unless both are given
            for other in either if path[0] in either else ():
                if f"{name}.{other}" not in pairs:
                    trees[one][other] = None
    return tuple(from_tree(tree, Stage, name) for name, tree in trees.items())


def _assign(tree: dict[str, JSON], kind: Any, path: list[str], value: JSON, dotted: str) -> None:
    """Put `value` into the tree of a `kind` at `path`."""
    key, hints = path[0], _hints(kind)
    names = _keys(kind)
    groups = {f: group for f in names if (group := _group(hints[f], tree.get(f))) is not None}
    if key not in names:
        require(not (called := called_here(key)), f"{dotted}: {called}")
        # groups that stand apart are meant by their path alone
        nested = {
            f: _keys(group)
            for f, group in groups.items()
            if isinstance(tree.get(f), dict) and not getattr(group, "apart", False)
        }
        inside = [f for f, keys in nested.items() if key in keys]
        which = f"{dotted}: {key} is a key of {' and of '.join(inside)}; say which"
        require(len(inside) < 2, which)
        if not inside:
            owners = map(catalogue.name_of, (kind, *(groups[f] for f in nested)))
            raise unknown(f"key {dotted!r}: no", key, sum(nested.values(), names), owners)
        path = [inside[0], *path]
        key = path[0]
    if len(path) == 1:
        tree[key] = _named(value, hints[key])  # another algorithm or task, with its own defaults
        return
    require(key in groups, f"{dotted}: {key} has no keys of its own")
    if not isinstance(tree.get(key), dict):
        tree[key] = {}  # an optional group of settings: its defaults, with this one changed
    _assign(tree[key], groups[key], path[1:], value, dotted)


def _group(hint: Any, tree: JSON) -> Any:
    """The dataclass that a field holds, where it holds one. Which one a polymorphic field holds, its tree says."""
    choices = (hint, *typing.get_args(hint)) if typing.get_origin(hint) is not tuple else ()
    base = next((c for c in choices if c in NAMED), None)
    if base is not None:
        named = isinstance(tree, dict) and "name" in tree
        return catalogue.load(NAMED[base], str(tree["name"]), base) if named else None
    return next((c for c in choices if dataclasses.is_dataclass(c)), None)


def _keys(kind: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(kind) if f.init]


def to_tree(value: Any) -> JSON:
    """Settings as plain data, for config.yaml. Polymorphic ones carry their catalogue name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        tree = {key: to_tree(getattr(value, key)) for key in _keys(value)}
        if not isinstance(value, tuple(NAMED)):
            return tree
        tag = "stage" if isinstance(value, Stage) else "name"
        return {tag: catalogue.name_of(value), **tree}
    if isinstance(value, Mapping):
        return {k: to_tree(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [to_tree(v) for v in value]
    return value


def from_tree(tree: JSON, kind: Any, where: str) -> Any:
    """The inverse of `to_tree`, with every key and type checked; errors name the key and what it accepts. The name of an algorithm, a
    task or a reward stands for its settings, and one value for a list of one."""
    tree = meant(_named(tree, kind), kind)
    if kind in NAMED:
        require(isinstance(tree, dict), f"{where}: give a mapping")
        tag = "stage" if kind is Stage else "name"
        rest = {k: v for k, v in tree.items() if k != tag}
        require(tag in tree, f"{where}: no {tag!r} says which {NAMED[kind]} it is")
        if kind is not Stage:
            return from_tree(rest, catalogue.load(NAMED[kind], str(tree[tag]), kind), where)
        made = _stage(str(tree[tag]))
        named = {"name": catalogue.name_of(made), **rest}
        return from_tree(_grouped(named, made, where), made, where)
    if dataclasses.is_dataclass(kind):
        if not isinstance(tree, dict | list | bool | None) and hasattr(kind, "shorthand"):
            tree = {kind.shorthand: tree}
        require(isinstance(tree, dict), f"{where} takes keys, not {tree!r}")
        hints = _hints(kind)
        refuse_unknown(f"key in {where}:", tree, _keys(kind), [catalogue.name_of(kind)])
        values = {k: from_tree(v, hints[k], f"{where}.{k}") for k, v in tree.items()}
        return _construct(kind, values, where)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and inner[1:] == (...,) and tree is not None:
        items = enumerate(_listed(tree, inner[0]))
        return tuple(from_tree(item, inner[0], f"{where}[{n}]") for n, item in items)
    optional = [i for i in inner if i in NAMED or dataclasses.is_dataclass(i)]
    if optional and type(None) in inner:
        return None if tree is None else from_tree(tree, optional[0], where)
    return _check(where, kind, tree)


def _stage(name: str) -> Any:
    """The class of a stage; for the name of an algorithm, advice which stage takes it."""
    if name in catalogue.names("algorithm") and name not in catalogue.names("stage"):
        algorithm = catalogue.load("algorithm", name, Algorithm)
        stage = STAGES[algorithm.learns_from].split()[1]
        instead = f"write stage: {stage} with algorithm: {name}"
        raise UserError(f"stage: {name} is an algorithm; {instead}")
    return catalogue.load("stage", name, Stage)


def _named(tree: JSON, kind: Any) -> JSON:
    """Settings by the name of an algorithm, a task or a reward alone, or with a value after it: reasoning_gym:leg_counting."""
    base = next((c for c in (kind, *typing.get_args(kind)) if c in NAMED and c is not Stage), None)
    if base is None or typing.get_origin(kind) is tuple:
        return tree
    if isinstance(tree, str) and tree:
        return catalogue.short_form(NAMED[base], tree, base)
    if isinstance(tree, dict) and "name" in tree:
        return {**tree, **catalogue.short_form(NAMED[base], str(tree["name"]), base)}
    return tree


def _listed(tree: JSON, kind: Any) -> list[JSON]:
    """The items of a list: one value is a list of one, and text with commas one of several, unless a file is called so."""
    if isinstance(tree, list | tuple):
        items = list(tree)
    elif isinstance(tree, str) and "," in tree and not os.path.exists(tree):
        items = [part.strip() for part in tree.split(",")]
    else:
        items = [tree] if tree != "" else []
    if kind is not str:
        return items
    return [one["file"] if isinstance(one, dict) and [*one] == ["file"] else one for one in items]


def _grouped(tree: dict[str, JSON], kind: Any, where: str) -> dict[str, JSON]:
    """The settings of a stage with keys of its groups that stand in the stage itself (`lr`) put where they belong (optimizer.lr), as
    the command line does."""
    loose = [key for key in tree if key not in _keys(kind) and not called_here(key)]
    if not loose:
        return tree
    own = {key: value for key, value in tree.items() if key not in loose}
    hints = _hints(kind)
    whole = {
        f.name: to_tree(f.default_factory())
        for f in dataclasses.fields(kind)
        if f.default_factory is not dataclasses.MISSING and f.name not in own
    }
    whole |= {key: _named(value, hints.get(key)) for key, value in own.items()}
    for key in loose:
        _assign(whole, kind, [str(key)], tree[key], f"{where}.{key}")
    return {key: value for key, value in whole.items() if key in own or isinstance(value, dict)}


def _construct(kind: Any, values: dict[str, Any], where: str) -> Any:
    keys = inspect.signature(kind).parameters.items()
    missing = [name for name, key in keys if key.default is key.empty and name not in values]
    require(not missing, f"{where}: missing {', '.join(missing)}")
    try:
        return kind(**values)
    except UserError as error:
        # a stage gives its name itself; what it holds does not know whose it is
        raise error if issubclass(kind, Stage) else UserError(f"{where}: {error}") from None


# the types of a dataclass's fields, by their names
_hints: Callable[[Any], dict[str, Any]] = cache(typing.get_type_hints)


@cache
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


def _check(where: str, kind: Any, value: JSON) -> Any:
    """One plain value against its type. 1,000 is a number, and a number where text is wanted is text."""
    kinds = {kind, *typing.get_args(kind)}
    value, number = meant(value, kind), {int, float} & kinds
    truth = isinstance(value, bool) and bool(number) and bool not in kinds
    require(not truth, f"{where}: input should be a number, not {value!r}")
    if number and isinstance(value, str) and re.fullmatch(THOUSANDS, value):
        value = value.replace(",", "")
    if kind is str and isinstance(value, bool | int | float):
        value = str(value).lower() if isinstance(value, bool) else str(value)
    try:
        found = _adapter(kind).validate_python(value)
        # of a recipe's parameters; fields are checked where they are set, by their own types
        large = kind is int and abs(found) > LARGEST and not where.endswith(("seed", "rounds"))
        require(not large, f"{where} must be at most {LARGEST:,}, not {value}")
        return found
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        inside = "".join(f"[{part!r}]" for part in first["loc"])
        reason = f"{first['msg'][0].lower()}{first['msg'][1:]}"
        several = bool(number) and isinstance(value, str) and "," in value
        more = f"; for a run with each of them: --sweep {where}={value}" if several else ""
        raise UserError(f"{where}{inside}: {reason}, not {first['input']!r}{more}") from None


def _from_yaml(path: Path, pairs: Mapping[str, JSON]) -> Settings:
    require(path.is_file(), f"recipe file {path} does not exist")
    try:
        tree = read_yaml(path.read_text(), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    require(isinstance(tree, dict), f"{path} must hold keys")
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
    """The configuration that a run directory keeps, the file `where`, with the user's own `pairs`."""
    pairs = dict(pairs or {})
    if not {**tree, **pairs}.get("cluster"):  # a run that goes on without its cluster
        tree = {key: value for key, value in tree.items() if key not in CLUSTER}
    with trusting(EVERYTHING if allow_code else Trust(where, pairs, strict=False)):
        return _resolved(tree, where, pairs)


def _resolved(tree: Mapping[str, JSON], where: str, pairs: Mapping[str, JSON]) -> Settings:
    """A configuration that says everything in full."""
    known = ("format", "name", "stages", *TEXTS, "versions", *TOP)
    refuse_unknown(f"key in {where}:", tree, known)
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
    """One stage, or those of some rounds: {rounds: 3, first: {...}, advance: {...}, stages: [...]}; see recipes/base.py."""
    if not isinstance(tree, dict) or "rounds" not in tree:
        return [from_tree(tree, Stage, where)]
    refuse_unknown(f"key in {where}:", tree, ("rounds", "first", "advance", "stages"))
    require(isinstance(tree.get("stages"), list), f"{where}: rounds need a list of stages")
    stages = [from_tree(t, Stage, f"{where}.stages[{n}]") for n, t in enumerate(tree["stages"])]
    first = _check(f"{where}.first", dict[str, str], tree.get("first") or {})
    advance = _check(f"{where}.advance", dict[str, int | float], tree.get("advance") or {})
    return repeat(stages, _check(f"{where}.rounds", int, tree["rounds"]), first, advance)


def to_config(settings: Settings) -> dict[str, JSON]:
    """Everything that decides a run, as plain data."""
    return {
        "format": FORMAT,
        "name": settings.name,
        **{key: to_tree(getattr(settings, key)) for key in TOP if key not in PASSING},
        **{key: getattr(settings.recipe, key) for key in TEXTS},
        "stages": [to_tree(stage) for stage in settings.recipe.stages],
    }
