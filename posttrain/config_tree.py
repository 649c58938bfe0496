"""Converts settings to and from nested plain data, as in YAML and on the command line. Every key and type is checked. Only this
module uses pydantic."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pydantic
import yaml

from posttrain import catalogue
from posttrain.algorithms.base import Algorithm
from posttrain.data.safe_readers import read_values
from posttrain.errors import LARGEST, UserError, called_here, refuse_unknown, require, unknown
from posttrain.stages.base import Stage, check_names
from posttrain.stages.reward_sources import RewardSource
from posttrain.stages.train import STAGES
from posttrain.tasks.base import Task
from posttrain.tasks.tools.base import Tool
from posttrain.types import JSON

# the classes whose settings carry the name of a subclass, with the part of the catalogue that finds it
NAMED: dict[type, str] = {
    Algorithm: "algorithm",
    Task: "task",
    Tool: "tool",
    Stage: "stage",
    RewardSource: "reward_source",
}
THOUSANDS = r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?"
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+"


class Text(str):
    """A value as it was typed. Its meaning depends on its field: `no` is false, or the name of a directory."""

    value: JSON

    def __new__(cls, text: str, value: JSON) -> Text:
        made = super().__new__(cls, text)
        made.value = value
        return made


def pair(argument: str) -> tuple[str, JSON]:
    """Split key=value. The value is text, a list or a mapping; other values stay as typed until their field is known."""
    key, equals, text = argument.partition("=")
    require(equals and key, f"{argument!r} is not key=value, such as steps=10")
    plain = text.lstrip()[:1] not in tuple("'\"[{|>")
    try:
        if plain and re.search(r"(?:^|\s)#", text):  # a comment to YAML; here a marker such as ####
            return key, text
        value = read_values(text, key) if text else ""
        if plain and isinstance(value, str) and "\n" in text:  # YAML joins the lines
            return key, text
    except (yaml.YAMLError, ValueError):
        return key, text
    # YAML 1.1 reads 1e-4 as a string; people mean a number
    if isinstance(value, str) and re.fullmatch(NUMBER, value):
        value = float(value)
    return key, value if isinstance(value, str | list | dict) else Text(text, value)


def meant(value: JSON, kind: Any = Any) -> JSON:
    """Convert a typed value to the type of its field."""
    if not isinstance(value, Text):
        return value
    accepted = (kind, *typing.get_args(kind))
    said = kind is str or (str in accepted and type(value.value) not in accepted)
    return str(value) if said else value.value


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
    """The inverse of `to_tree`, with every key and type checked. Errors name the key and the accepted values. The name of an
    algorithm, a task or a reward is short for its settings, and one value for a list of one."""
    tree = meant(_named(tree, kind), kind)
    if kind in NAMED:
        given = f"give a {NAMED[kind]} by its name or settings, not {type(tree).__name__}"
        require(isinstance(tree, dict), f"{where}: {given}")
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
    return check_value(where, kind, tree)


def override(stages: Sequence[Stage], pairs: Mapping[str, JSON]) -> tuple[Stage, ...]:
    """Apply `stage.key=value`. The key may be a path, or a nested key that is unique in the stage."""
    check_names(stages)  # two of one name would be one
    kinds = {stage.name: type(stage) for stage in stages}
    trees = {stage.name: to_tree(stage) for stage in stages}
    for dotted, value in pairs.items():
        name, *path = dotted.split(".")
        # for a stage in rounds, set the key in all rounds, unless one is named
        rounds = [n for n in trees if re.fullmatch(rf"{re.escape(name)}_\d+", n)]
        meant = [name] if name in trees else rounds
        if not meant:
            raise unknown("stage", name, trees)
        for one in meant:
            _assign(trees[one], kinds[one], path, value, dotted)
            either = getattr(kinds[one], "either", ())
            # the recipe's value of one of two exclusive keys gives way to the other key, unless both are given
            for other in either if path[0] in either else ():
                if f"{name}.{other}" not in pairs:
                    trees[one][other] = None
    return tuple(from_tree(tree, Stage, name) for name, tree in trees.items())


def _assign(tree: dict[str, JSON], kind: Any, path: list[str], value: JSON, dotted: str) -> None:
    """Set `value` at `path` in the tree of a `kind`."""
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
    """The dataclass that a field holds, if any. For a polymorphic field, the tree names it."""
    choices = (hint, *typing.get_args(hint)) if typing.get_origin(hint) is not tuple else ()
    base = next((c for c in choices if c in NAMED), None)
    if base is not None:
        named = isinstance(tree, dict) and "name" in tree
        return catalogue.load(NAMED[base], str(tree["name"]), base) if named else None
    return next((c for c in choices if dataclasses.is_dataclass(c)), None)


def _keys(kind: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(kind) if f.init]


def _stage(name: str) -> Any:
    """The class of a stage. For the name of an algorithm, the error says which stage takes it."""
    if name in catalogue.names("algorithm") and name not in catalogue.names("stage"):
        stage = STAGES[catalogue.load("algorithm", name, Algorithm).learns_from].split()[1]
        instead = f"write stage: {stage} with algorithm: {name}"
        raise UserError(f"stage: {name} is an algorithm; {instead}")
    return catalogue.load("stage", name, Stage)


def _named(tree: JSON, kind: Any) -> JSON:
    """Expand the name of an algorithm, a task or a reward, alone or with a value after it (reasoning_gym:leg_counting), to settings."""
    base = next((c for c in (kind, *typing.get_args(kind)) if c in NAMED and c is not Stage), None)
    if base is None or typing.get_origin(kind) is tuple:
        return tree
    if isinstance(tree, str) and tree:
        return catalogue.short_form(NAMED[base], tree, base)
    if isinstance(tree, dict) and "name" in tree:
        return {**tree, **catalogue.short_form(NAMED[base], str(tree["name"]), base)}
    return tree


def _listed(tree: JSON, kind: Any) -> list[JSON]:
    """The items of a list. One value is a list of one; text with commas is a list of several, unless a file has that name."""
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
    """Move the keys of a stage that belong to one of its groups (`lr`) into the group (optimizer.lr), as the command line does. The
    other keys of a group are the stage's own defaults, not those of the group."""
    loose = [key for key in tree if key not in _keys(kind) and not called_here(key)]
    own = {key: value for key, value in tree.items() if key not in loose}
    hints = _hints(kind)
    whole = {
        f.name: to_tree(f.default_factory())
        for f in dataclasses.fields(kind)
        if f.default_factory is not dataclasses.MISSING
    }
    for key, value in own.items():
        hint = hints.get(key)
        group = dataclasses.is_dataclass(hint) and hint not in NAMED and isinstance(value, dict)
        whole[key] = {**whole.get(key, {}), **value} if group else _named(value, hint)
    for key in loose:
        _assign(whole, kind, [str(key)], tree[key], f"{where}.{key}")
    groups = [key for key, value in whole.items() if loose and isinstance(value, dict)]
    return {key: value for key, value in whole.items() if key in own or key in groups}


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
_adapter: Callable[[Any], pydantic.TypeAdapter[Any]] = cache(pydantic.TypeAdapter)


def check_value(where: str, kind: Any, value: JSON) -> Any:
    """Check one plain value against its type. 1,000 is a number, and a number in a text field becomes text."""
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
