"""From words to settings: YAML files and key=value arguments become stages, checked by pydantic here and nowhere else."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from posttrain import catalogue
from posttrain.algorithms.base import Algorithm
from posttrain.errors import UserError, require, unknown
from posttrain.machine import check_threads, told_threads
from posttrain.recipes.base import Recipe, repeat
from posttrain.stages.base import Stage
from posttrain.tasks.base import Task
from posttrain.types import JSON, Code
from posttrain.untrusted import read_yaml

NAMED: dict[type, str] = {Algorithm: "algorithm", Task: "task", Stage: "stage"}  # polymorphic: a dict with its catalogue name
KEY_VARIABLE = "OPENAI_API_KEY"  # the secret that a judge's server is sent where nothing else is said


@dataclasses.dataclass(frozen=True)
class Settings:
    """A whole run: its recipe and the keys that belong to no stage."""

    recipe: Recipe
    name: str
    seed: int = 0
    device: str = "auto"
    threads: int = 0  # 0: chosen by the model's size
    out: str = ""  # the run directory; "" makes a new one under runs/
    trackers: tuple[str, ...] = ()
    checkpoint_hook: tuple[str, ...] = ()  # a program and its arguments; it gets the directory of each finished checkpoint
    checkpoint_sync: bool = False  # wait for the disk at every checkpoint, instead of writing in the background
    checkpoint_keep: int = 2
    deterministic: bool = False  # on a GPU: the same bits every time, for some speed; on a CPU that is always so
    only: tuple[str, ...] = ()  # stages to run alone, on what is in the directory; never part of a run's configuration
    again: bool = False  # let the directory hold a run, and do again what has changed

    def __post_init__(self) -> None:
        """Refused before there is a directory."""
        check_machine(self.seed, self.device)
        require(self.threads >= 0, f"threads is a number of threads, 0 for as many as pay, not {self.threads}")
        check_threads(self.threads, "threads")
        require(self.checkpoint_keep >= 1, f"checkpoint_keep must be 1 or more, not {self.checkpoint_keep}")


def check_machine(seed: int, device: str) -> None:
    """What every command that runs a model is told."""
    require(0 <= seed < 2**63, f"seed is a whole number, 0 or more and below 2**63, not {seed}")
    known = re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device) is not None
    require(known, f"device must be auto, cpu, mps, cuda or cuda:0, not {device!r}")
    check_threads(told_threads(), "OMP_NUM_THREADS")


TOP = [f.name for f in dataclasses.fields(Settings)][2:]  # the keys that belong to no stage
PASSING = ("out", "only", "again")  # of those, what is no part of a run's configuration


def parse(recipe: str, arguments: Sequence[str], allow_code: bool = False) -> Settings:
    """A recipe's name, YAML file or Python file, and key=value arguments in the words of the README."""
    pairs = dict(pair(argument) for argument in arguments)
    if recipe.endswith((".yaml", ".yml")):
        return _from_yaml(Path(recipe), pairs, allow_code)
    function = catalogue.load("recipe", recipe, allow_code=True)
    name = recipe.rsplit(":", 1)[-1]
    return build(name, function, pairs)


def build(name: str, function: Any, pairs: Mapping[str, JSON]) -> Settings:
    """Call the recipe with its own keys, then apply the keys of its stages."""
    own = inspect.signature(function).parameters
    top = {key: value for key, value in pairs.items() if "." not in key}
    for key in top:
        if key not in own and key not in TOP:
            raise unknown("key", key, [*own, *TOP])
    hints = typing.get_type_hints(function)
    made = function(**{key: _check(key, hints[key], value) for key, value in top.items() if key in own})
    dotted = {key: value for key, value in pairs.items() if "." in key}
    stages = override(made.stages, dotted)
    return _settings(name, dataclasses.replace(made, stages=stages), top)


def _settings(name: str, recipe: Recipe, top: Mapping[str, JSON]) -> Settings:
    hints = typing.get_type_hints(Settings)
    found: dict[str, Any] = {}
    for key, value in ((key, top[key]) for key in TOP if key in top):
        if key == "checkpoint_hook":
            found[key] = _words(value or "")
        elif key in ("trackers", "only"):
            listed = value if isinstance(value, list) else str(value or "").split(",")
            found[key] = tuple(word.strip() for word in map(str, listed) if word.strip())
        else:
            found[key] = str(value) if hints[key] is str else _check(key, hints[key], value)
    return Settings(recipe, name, **found)


def _words(command: JSON) -> tuple[str, ...]:
    """A program and its arguments, from one line or a list of words. Nothing in it is expanded: there is no shell."""
    try:
        return tuple(shlex.split(command)) if isinstance(command, str) else _check("checkpoint_hook", tuple[str, ...], command)
    except ValueError as error:
        raise UserError(f"checkpoint_hook: {command!r} is not a command line ({error})") from None


def _refuse_programs(tree: Mapping[str, JSON], where: str, allow_code: bool) -> None:
    """Unless it is trusted, a file may not name programs to run, as it may not name code, nor take the walls around a model's
    programs away, nor choose which of the user's secrets a judge's server is sent."""
    allowed = allow_code or not tree.get("checkpoint_hook")
    require(allowed, f"{where}: checkpoint_hook would run a program; pass --allow-code if you trust it")
    left: list[JSON] = [] if allow_code else [{k: v for k, v in tree.items() if k != "recipe"}]
    while left:  # options of rewards, and of rewards inside them, may be at any depth
        value = left.pop()
        # keys of a recipe are applied together with those of the command line, which may name code; of stages `from_tree` asks
        code = "recipe" in tree and isinstance(value, str) and ".py:" in value
        require(not code, f"{where}: {value!r} would run code from a file; pass --allow-code if you trust it")
        inside = list(value.items()) if isinstance(value, Mapping) else []
        left += [v for _, v in inside] + (value if isinstance(value, list) else [])
        for key, setting in ((str(k).rpartition(".")[2], v) for k, v in inside):
            open_sandbox = key == "sandbox" and setting == "unsafe"
            require(
                not open_sandbox, f"{where}: sandbox: unsafe runs a model's programs as you; pass --allow-code if you trust it"
            )
            other = key == "key_variable" and setting != KEY_VARIABLE
            require(not other, f"{where}: key_variable: {setting} would send that variable to an address; pass --allow-code if you "
                    "trust it")  # fmt: skip


def pair(argument: str) -> tuple[str, JSON]:
    key, equals, text = argument.partition("=")
    require(bool(equals) and bool(key), f"{argument!r} is not key=value")
    try:
        return key, number(yaml.safe_load(text)) if text else ""
    except yaml.YAMLError:
        return key, text


def number(value: JSON) -> JSON:
    """YAML 1.1 reads 1e-4 as a string; people mean a number."""
    if isinstance(value, str):
        try:
            return float(value) if "e" in value.lower() and value.lower().strip("+-.0123456789e") == "" else value
        except ValueError:
            return value
    return value


def override(stages: Sequence[Stage], pairs: Mapping[str, JSON]) -> tuple[Stage, ...]:
    """Apply `stage.key=value`, where key may be a path, or the one nested key of that name."""
    trees = {stage.name: to_tree(stage) for stage in stages}
    for dotted, value in pairs.items():
        name, *path = dotted.split(".")
        meant = (
            [name] if name in trees else [n for n in trees if n.rpartition("_")[0] == name and n.rpartition("_")[2].isdigit()]
        )
        if not meant:
            raise unknown("stage", name, trees)
        for one in meant:  # of a stage in rounds: all of them, unless one is named
            _assign(trees[one], type(next(s for s in stages if s.name == one)), path, value, dotted)
    return tuple(from_tree(tree, Stage, name) for name, tree in trees.items())


def _assign(tree: dict[str, JSON], kind: Any, path: list[str], value: JSON, dotted: str) -> None:
    """Put `value` into the tree of a `kind` at `path`."""
    key, hints = path[0], typing.get_type_hints(kind)
    names = _keys(kind)
    groups = {f: group for f in names if (group := _group(hints[f], tree.get(f))) is not None}
    if key not in names:
        # groups that stand apart are meant by their path alone
        groups = {f: group for f, group in groups.items() if not getattr(group, "apart", False)}
        inside = [f for f in groups if isinstance(tree.get(f), dict) and key in _keys(groups[f])]
        require(len(inside) < 2, f"{dotted}: {key} is a key of {' and of '.join(inside)}; say which")
        if inside:
            _assign(tree[inside[0]], groups[inside[0]], path, value, dotted)
            return
        nested = [k for f, group in groups.items() if isinstance(tree.get(f), dict) for k in _keys(group)]
        raise unknown(f"key {dotted!r}: no", key, [*names, *nested])
    if len(path) == 1:
        if isinstance(value, str) and isinstance(tree.get(key), dict) and "name" in tree[key]:
            value = _shorthand({"name": value})  # another algorithm or task, with its own defaults
        tree[key] = value
        return
    require(key in groups, f"{dotted}: {key} has no keys of its own")
    if not isinstance(tree.get(key), dict):  # an optional group of settings: its defaults, with this one changed
        tree[key] = {}
    _assign(tree[key], groups[key], path[1:], value, dotted)


def _group(hint: Any, tree: JSON) -> Any:
    """The dataclass that a field holds, where it holds one. Which one a polymorphic field holds, its tree says."""
    choices = (hint, *typing.get_args(hint)) if typing.get_origin(hint) is not tuple else ()
    base = next((c for c in choices if c in NAMED), None)
    if base is not None:
        named = isinstance(tree, dict) and "name" in tree
        return catalogue.load(NAMED[base], str(tree["name"]), base, True) if named else None
    return next((c for c in choices if dataclasses.is_dataclass(c)), None)


def _keys(kind: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(kind) if f.init]


def to_tree(value: Any) -> JSON:
    """Settings as plain data, for config.yaml. Polymorphic ones carry their catalogue name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        tree = {f.name: to_tree(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        kind = next((base for base in NAMED if isinstance(value, base)), None)
        if kind is Stage:
            return {"stage": catalogue.name_of(value), **tree}
        return {"name": catalogue.name_of(value), **tree} if kind is not None else tree
    if isinstance(value, Mapping):
        return {k: to_tree(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [to_tree(v) for v in value]
    return value


def from_tree(tree: JSON, kind: Any, where: str, allow_code: bool = True) -> Any:
    """The inverse of `to_tree`, with every key and type checked; errors name the key and what it accepts."""
    base = next((b for b in NAMED if kind is b), None)
    if base is not None:
        require(isinstance(tree, dict), f"{where}: give a mapping")
        tag = "stage" if base is Stage else "name"
        tree = _shorthand(tree) if base is Task else tree
        rest = {k: v for k, v in tree.items() if k != tag}
        require(tag in tree, f"{where}: no {tag!r} says which {NAMED[base]} it is")
        return from_tree(rest, catalogue.load(NAMED[base], str(tree[tag]), base, allow_code), where, allow_code)
    if dataclasses.is_dataclass(kind):
        require(isinstance(tree, dict), f"{where} takes keys, not {tree!r}")
        hints = typing.get_type_hints(kind)
        names = _keys(kind)
        for key in tree:
            if key not in names:
                raise unknown(f"key in {where}:", str(key), names)
        for key, hint in typing.get_type_hints(kind, include_extras=True).items():
            code = hint == Code and ".py:" in str(tree.get(key, ""))
            require(allow_code or not code, f"{where}.{key} would run code from a file; pass --allow-code if you trust it")
        return _construct(kind, {k: from_tree(v, hints[k], f"{where}.{k}", allow_code) for k, v in tree.items()}, where)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and inner and (dataclasses.is_dataclass(inner[0]) or inner[0] in NAMED):
        require(isinstance(tree, list), f"{where} takes a list")
        return tuple(from_tree(item, inner[0], f"{where}[{n}]", allow_code) for n, item in enumerate(tree))
    optional = [i for i in inner if i in NAMED or dataclasses.is_dataclass(i)]
    if optional and type(None) in inner:
        return None if tree is None else from_tree(tree, optional[0], where, allow_code)
    return _check(where, kind, tree)


def _shorthand(tree: Mapping[str, JSON]) -> dict[str, JSON]:
    """`NAME:VALUE` for a task that says which of its settings the value is: reasoning_gym:leg_counting."""
    name, colon, value = str(tree.get("name", "")).partition(":")
    if not colon or name.endswith(".py") or name not in catalogue.names("task"):
        return dict(tree)
    key = getattr(catalogue.load("task", name, Task), "shorthand", "")
    require(bool(key), f"{name}:{value}: the task {name} takes no value after its name")
    return {**tree, "name": name, key: value}


def _construct(kind: type, values: dict[str, Any], where: str) -> Any:
    missing = [
        f.name
        for f in dataclasses.fields(kind)
        if f.init and f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    require(not missing, f"{where}: missing {', '.join(missing)}")
    try:
        return kind(**values)
    except UserError as error:  # a stage gives its name itself; what it holds does not know whose it is
        raise error if issubclass(kind, Stage) else UserError(f"{where}: {error}") from None


def _check(where: str, kind: Any, value: JSON) -> Any:
    """One plain value against its type."""
    try:
        return pydantic.TypeAdapter(kind).validate_python(value)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        inside = "".join(f"[{part!r}]" for part in first["loc"])
        raise UserError(f"{where}{inside}: {first['msg'][0].lower()}{first['msg'][1:]}, not {first['input']!r}") from None


def _from_yaml(path: Path, pairs: Mapping[str, JSON], allow_code: bool) -> Settings:
    require(path.is_file(), f"recipe file {path} does not exist")
    try:
        tree = read_yaml(path.read_text(), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    require(isinstance(tree, dict), f"{path} must hold keys")
    _refuse_programs(tree, str(path), allow_code)
    if "recipe" in tree:
        rest = _flatten({k: v for k, v in tree.items() if k != "recipe"})
        name = str(tree["recipe"])
        return build(name, catalogue.load("recipe", name, allow_code=allow_code), {**rest, **pairs})
    return from_config(tree, str(path), pairs, allow_code)


def _flatten(tree: Mapping[str, JSON], prefix: str = "") -> dict[str, JSON]:
    flat: dict[str, JSON] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and "name" not in value and not any(isinstance(k, int) for k in value):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def from_config(
    tree: Mapping[str, JSON], where: str, pairs: Mapping[str, JSON] | None = None, allow_code: bool = False
) -> Settings:
    """A resolved configuration, as a run directory keeps it or a YAML file says it in full."""
    known = ("name", "stages", "before", "after", "next_command", "versions", *TOP)
    for key in tree:
        if key not in known:
            raise unknown(f"key in {where}:", str(key), known)
    _refuse_programs(tree, where, allow_code)
    require(isinstance(tree.get("stages"), list), f"{where}: 'stages' must be a list")
    stages = tuple(stage for n, t in enumerate(tree["stages"]) for stage in _expanded(t, f"stages[{n}]", allow_code))
    top = {**{k: v for k, v in tree.items() if k in TOP}, **{k: v for k, v in (pairs or {}).items() if "." not in k}}
    for key in top:
        if key not in TOP:
            raise unknown("key", key, TOP)
    stages = override(stages, {k: v for k, v in (pairs or {}).items() if "." in k})
    recipe = Recipe(stages, str(tree.get("before", "")), str(tree.get("after", "")), str(tree.get("next_command", "")))
    return _settings(str(tree.get("name", where)), recipe, top)


def _expanded(tree: JSON, where: str, allow_code: bool) -> list[Stage]:
    """One stage, or those of some rounds: {rounds: 3, first: {...}, advance: {...}, stages: [...]}; see recipes/base.py."""
    if not isinstance(tree, dict) or "rounds" not in tree:
        return [from_tree(tree, Stage, where, allow_code)]
    known = ("rounds", "first", "advance", "stages")
    for key in tree:
        if key not in known:
            raise unknown(f"key in {where}:", str(key), known)
    require(isinstance(tree.get("stages"), list), f"{where}: rounds need a list of stages")
    stages = [from_tree(t, Stage, f"{where}.stages[{n}]", allow_code) for n, t in enumerate(tree["stages"])]
    first = _check(f"{where}.first", dict[str, str], tree.get("first") or {})
    advance = _check(f"{where}.advance", dict[str, int | float], tree.get("advance") or {})
    return repeat(stages, _check(f"{where}.rounds", int, tree["rounds"]), first, advance)


def to_config(settings: Settings) -> dict[str, JSON]:
    """Everything that decides a run, as plain data."""
    recipe = settings.recipe
    return {
        "name": settings.name,
        **{key: to_tree(getattr(settings, key)) for key in TOP if key not in PASSING},
        "before": recipe.before,
        "after": recipe.after,
        "next_command": recipe.next_command,
        "stages": [to_tree(stage) for stage in recipe.stages],
    }
