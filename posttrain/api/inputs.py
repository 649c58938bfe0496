"""Converts the arguments of the Python interface (rows, data sets, modules, functions, runs) into the names and files that stages
use."""

from __future__ import annotations

import json
import os
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from posttrain import config_tree
from posttrain.api.run import Model, Run
from posttrain.catalogue import UNDECORATED
from posttrain.data.records import check_whole, load_hub
from posttrain.errors import UserError, called_here, many, refuse_unknown, require, unknown
from posttrain.rewards._functions import Function, Mix, give
from posttrain.rewards.base import check, resolve
from posttrain.runs.layout import CONFIG
from posttrain.stages import reward_sources
from posttrain.stages._judged import JudgeSettings
from posttrain.stages.reward_sources import RewardModels, RewardSource, Weighted
from posttrain.system.files import atomic_write, explained, read_bytes
from posttrain.tasks.base import Task
from posttrain.tasks.prompts import Prompts
from posttrain.tasks.tool_use import ToolUse
from posttrain.tasks.tools.base import Tool
from posttrain.tasks.tools.function import give as give_tool

HUB = re.compile(r"[\w.-]+/[\w.-]+")


class Files:
    """The data files of a run that is about to begin. Rows given in memory are written to `DIRECTORY/data/`, so that the run keeps
    them."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name
        self.place = directory.absolute()
        self.lines: dict[Path, list[str]] = {}
        self.made: list[Path] = []  # those that were written and not there before

    def path(self, data: Any, what: str) -> str:
        """The file of `data`: an existing one if it is a path or a run that wrote data, else one that will be written."""
        if isinstance(data, Run):
            return str(data.data)
        if isinstance(data, str | Path) and not (found := _hub_name(data)):
            path = Path(data).expanduser()
            none = f"{what}: there is no file {str(data)[:200]}; give a file, or a list of rows"
            require(os.path.isfile(path), none)  # False for any text, however long
            return str(data)
        rows = load_hub(found, "", "train", "", what) if isinstance(data, str | Path) else data
        lines = [_line(row, number, what) for number, row in enumerate(_rows(rows, what), start=1)]
        require(lines, f"{what}: there are no rows")
        path = self.directory / "data" / f"{what}.jsonl"
        number = 1
        while path in self.lines:
            number += 1
            path = path.with_name(f"{what}-{number}.jsonl")
        self.lines[path] = lines
        return str(path)

    def paths(self, data: Any, what: str) -> tuple[str, ...]:
        """The files of one source, or of a list of paths."""
        several = isinstance(data, list | tuple) and bool(data)
        if several and all(isinstance(item, Mapping) and [*item] == ["file"] for item in data):
            data = [item["file"] for item in data]
        if several and all(isinstance(item, str | Path) for item in data):
            texts = [
                t for t in data if not _hub_name(t) and not os.path.exists(Path(t).expanduser())
            ]
            rows = "give rows, as 'posttrain list formats' shows them"
            advice = 'of texts make rows: {"text": ...}' if self.name == "sft" else rows
            files = f"{what}: a list of texts is one of files, and there is no file {data[0]!r}"
            require(len(texts) < len(data), f"{files}; {advice}")
            return tuple(self.path(item, what) for item in data)
        return (self.path(data, what),)

    def write(self, new: bool = True) -> Callable[[], None]:
        """Write the rows. In a `new` run they replace no file; else none that has them, as another process may have written it. Returns
        a function that puts back what was there."""
        with explained(self.directory):
            before = {path: read_bytes(path) for path in self.lines if path.exists()}
            taken = ", ".join(f"data/{path.name}" for path in before)
            other = f"{self.directory} is no run and holds {taken}; choose another directory"
            require(not (new and before), other)
            self.made = [path.absolute() for path in self.lines if path not in before]
            for path, lines in self.lines.items():
                text = "".join(line + "\n" for line in lines).encode()
                path.parent.mkdir(parents=True, exist_ok=True)
                if before.get(path) != text:
                    atomic_write(path, text, durable=False)

        def put_back() -> None:
            for path in self.made:
                path.unlink(missing_ok=True)
            for path, content in before.items():
                atomic_write(path, content, durable=False)

        return put_back

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name rows in an error by their argument: the caller has not seen the files. Those of a run that was refused are removed."""
        try:
            yield
        except UserError as error:
            text = str(error)
            for path in self.lines:
                text = text.replace(f"{path} line ", f"{path.stem} row ")
                text = text.replace(f"{path}", path.stem)
            error.args = (text,)
            for path in () if os.path.exists(self.place / CONFIG) else self.made:
                path.unlink(missing_ok=True)
            raise


def _hub_name(data: str | Path) -> str:
    named = isinstance(data, str) and HUB.fullmatch(data) is not None
    return str(data) if named and not os.path.exists(Path(data).expanduser()) else ""


def _rows(data: Any, what: str) -> Iterable[Any]:
    """The rows of a list, a data set of `datasets`, a pandas table, or any iterable."""
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        return data.astype(object).where(data.notna(), None).to_dict("records")  # type: ignore[no-any-return]
    if hasattr(data, "tolist"):  # a column of pandas, an array of texts
        return data.tolist()  # type: ignore[no-any-return]
    if hasattr(data, "keys") and hasattr(data, "items"):
        held = ", ".join(map(str, data))
        wrong = f"{what}: expected a list of rows, not a mapping of {held}"
        require("train" in data, f"{wrong}; of several splits give one")
        return data["train"]  # type: ignore[no-any-return]
    several, kind = isinstance(data, Iterable), type(data).__name__
    require(several, f"{what}: expected rows, a file or a data set, not {kind}")
    return data  # type: ignore[no-any-return]


def _line(row: Any, number: int, what: str) -> str:
    if isinstance(row, str | list) and what in ("prompts", "held_out_data"):
        row = {"prompt": row}
    fine = isinstance(row, Mapping)
    found = f"{type(row).__name__} {str(row)[:40]!r}"
    require(fine, f"{what} row {number}: expected a dict of columns, not {found}")
    for name, value in row.items():
        try:
            json.dumps({name: value}, default=as_plain)
        except (TypeError, ValueError):
            where = f"{what} row {number}: the column {name} is a {type(value).__name__}"
            raise UserError(f"{where}; use text, numbers, lists, dicts") from None
    line = json.dumps(dict(row), default=as_plain, ensure_ascii=False)
    check_whole(line, f"{what} row {number}")
    return line


def as_plain(value: Any) -> Any:
    """Convert NumPy numbers and arrays to plain Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError


def as_model(model: Any, tokenizer: Any = None) -> str:
    """The name of a model for a stage's settings: a path, a hub name, a run's export, or a key for a module in this process."""
    if isinstance(model, tuple) and len(model) == 2:
        model, tokenizer = model
    if isinstance(model, Run):
        return str(model.export)
    if isinstance(model, Model):
        return model.source
    if isinstance(model, str | Path):
        require(tokenizer is None, "tokenizer is given with a module; a path or a name has its own")
        return str(model)
    from posttrain.models.given import give

    return give(model, tokenizer)


def as_task(task: Any) -> Task:
    """A task from its name (arithmetic, prompts:FILE), its settings, or a Task."""
    if isinstance(task, Task):
        require(is_dataclass(task), f"task {type(task).__name__}: {UNDECORATED}")
        return task
    fine = isinstance(task, str | Mapping)
    kind = f"the class {task.__name__}" if isinstance(task, type) else type(task).__name__
    require(fine, f"task: a name, settings or a Task, such as Mine(), not {kind}")
    tree = {"name": task} if isinstance(task, str) else dict(task)
    made: Task = config_tree.from_tree(tree, Task, "task")
    return made


def with_tools(task: Task, tools: Any, settings: dict[str, Any]) -> Task:
    """The task with tools that the policy may call. Settings of the task itself are removed from `settings`."""
    several = tools if isinstance(tools, list | tuple) else [tools]
    made = tuple(
        give_tool(one)
        if callable(one) or isinstance(one, Tool)
        else config_tree.from_tree(one, Tool, "tools")
        for one in several
    )
    names: list[str] = [f.name for f in fields(task) if f.init] if is_dataclass(task) else []
    own = {name: settings.pop(name) for name in names if name in settings}
    values = {name: getattr(task, name) for name in names}
    inner = built(type(task), values, own, "task") if own else task
    return ToolUse(task=inner, tools=made)


def as_rewards(
    reward: Any, weights: Any, models: Any, task: Task | None, file: str
) -> tuple[Task, RewardSource]:
    """The task and its reward source. Without a `task`, the task is the prompts in `file`, with the given functions as its reward. With
    a task, the functions replace the task's own score."""
    if isinstance(reward, RewardSource):
        return task or Prompts(file), reward
    several = isinstance(models, list | tuple)
    ensemble = _ensemble(models if several else [models], None if reward is not None else weights)
    functions: dict[str, tuple[Any, float]] = {}
    learned, parts = list[Weighted](), list[Weighted]()
    for label, (one, weight) in _named(reward, weights if reward is not None else None).items():
        if isinstance(one, Run):
            one = RewardModels(models=_scorers(one))
        if isinstance(one, RewardSource):
            learned.append(Weighted(reward=one, weight=weight, label=label))
        else:
            functions[label] = one, weight
    own: RewardSource = reward_sources.TaskReward()
    if task is None:
        task = Prompts(file, reward=_function(functions) if functions else "")
    elif functions:
        own = reward_sources.FunctionReward(reward=_function(functions, always=True))
    if functions or not (learned or ensemble):
        parts.append(Weighted(reward=own, label="rules"))
    parts += learned
    if ensemble:
        parts.append(Weighted(reward=ensemble, label="models"))
    alone = len(parts) == 1 and parts[0].weight == 1
    return task, parts[0].reward if alone else reward_sources.MixedReward(parts=tuple(parts))


def _ensemble(models: Iterable[Any], weights: Any) -> RewardModels | None:
    """The weighted mean of reward models. The members of one run's ensemble share its weight."""
    places = [_scorers(model) for model in models]
    if not places:
        return None
    given = [] if weights is None else numbers(weights, len(places), "reward model")
    shared = tuple(w / len(own) for w, own in zip(given, places, strict=False) for _ in own)
    return RewardModels(models=tuple(place for own in places for place in own), weights=shared)


def as_probed(reward: Any, weights: Any) -> str | None:
    """The name under which a probe finds a reward, or a mix of several; for the run of a reward model, its directory."""
    if isinstance(reward, Run):
        return reward.scorers()[0]
    named = _named(reward, weights)
    return _function(named) if named else None


def _named(reward: Any, weights: Any) -> dict[str, tuple[Any, float]]:
    """Rewards by label, each with its weight."""
    given = [] if reward is None else [reward]
    if isinstance(reward, Mapping):
        labels, given = [str(label) for label in reward], list(reward.values())
    else:
        given = list(reward) if isinstance(reward, list | tuple) else given
        labels = [_label(one) for one in given]
        labels = [f"{x}_{n}" if labels.count(x) > 1 else x for n, x in enumerate(labels)]
    if isinstance(weights, Mapping):
        refuse_unknown("reward in weights:", weights, labels)
        weights = [weights.get(label, 1.0) for label in labels]
    factors = [1.0] * len(given) if weights is None else numbers(weights, len(given), "reward")
    return {label: (one, w) for label, one, w in zip(labels, given, factors, strict=True)}


def numbers(weights: Any, count: int, what: str) -> list[float]:
    """Weights as given, one for each reward or file."""
    fine = isinstance(weights, Iterable) and not isinstance(weights, str | bytes)
    require(fine, f"weights: a list of numbers, one for each {what}, not {weights!r}")
    found = [value_of(weight, float, "weights") for weight in weights]
    require(all(map(isfinite, found)), f"weights must be finite, not {found}")
    require(len(found) == count, f"weights: {len(found)} for {many(count, what)}")
    return found


def _label(reward: Any) -> str:
    if isinstance(reward, str):
        return reward.rpartition(":")[2]
    if isinstance(reward, RewardSource):
        return reward.name
    return "model" if isinstance(reward, Run) else Function.of(reward).label


def _function(named: Mapping[str, tuple[Any, float]], always: bool = False) -> str:
    """The name of the reward that mixes the given functions. A single reward with a name of its own keeps it, so that the run can be
    resumed from its directory."""
    for one, _ in named.values():
        if isinstance(one, str):
            check(one, {})
    ((first, weight), *others) = named.values()
    if isinstance(first, str) and not others and weight == 1 and (not always or ":" in first):
        return first
    resolved = {k: resolve(r, {}) if isinstance(r, str) else r for k, (r, _) in named.items()}
    made = [Function.of(call, label) for label, call in resolved.items()]
    return give(Mix(tuple(made), tuple(weight for _, weight in named.values())))


def _scorers(model: Any) -> tuple[str, ...]:
    """The paths of reward models: all members of a run's ensemble, or a path or hub name as given."""
    return tuple(model.scorers()) if isinstance(model, Run) else (as_model(model),)


def as_judge(judge: Any) -> JudgeSettings | None:
    """A judge from the path, hub name or run of a model, or from settings: {"model": ..., "url": ...}."""
    if judge is None or isinstance(judge, JudgeSettings):
        return judge
    given = dict(judge) if isinstance(judge, Mapping) else {"model": judge}
    if "model" in given:
        given["model"] = as_model(given["model"])
    made: JudgeSettings = config_tree.from_tree(given, JudgeSettings, "judge")
    return made


def built(kind: Any, given: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> Any:
    """Build a dataclass from `given` values and `settings`. A key of the settings is one of its fields, `group.key`, or a key that only
    one group has: `lr` is optimizer.lr, as on the command line."""
    hints, own = typing.get_type_hints(kind), [f for f in fields(kind) if f.init]
    made = {f.name: f.default_factory() for f in own if f.default_factory is not MISSING}
    values = {**made, **given}
    groups = {name: value for name, value in values.items() if is_dataclass(value)}
    known = {name: [f.name for f in fields(group) if f.init] for name, group in groups.items()}
    free = [name for name, group in groups.items() if not getattr(group, "apart", False)]
    inner: dict[str, dict[str, Any]] = {}
    called = [text for key in settings if key not in hints and (text := called_here(key))]
    require(not called, f"{where}: {'; '.join(called)}")
    for key, value in settings.items():
        head, dot, rest = key.partition(".")
        inside = [head] if dot and head in groups else [name for name in free if key in known[name]]
        if key in groups and hints[key] is type(groups[key]) and isinstance(value, Mapping):
            inner.setdefault(key, {}).update(value)
        elif key in hints:
            values[key] = value_of(value, hints[key], f"{where}: {key}")
        elif len(inside) == 1:
            inner.setdefault(inside[0], {})[rest if dot else key] = value
        else:
            which = " or ".join(f"{name}.{key}" for name in inside)
            require(not inside, f"{where}: {key} is a key of several; give {which} in **{{...}}")
            names = [*(f.name for f in own), *(k for name in free for k in known[name])]
            raise unknown("setting", key, names, [where])
    for name, changes in inner.items():
        group = groups[name]
        before = {f.name: getattr(group, f.name) for f in fields(group) if f.init}
        values[name] = built(type(group), before, changes, f"{where}: {name}")
    return kind(**values)


def value_of(value: Any, hint: Any, where: str) -> Any:
    """A value of the type `hint`; an error names `where`. NumPy's numbers become plain ones."""
    if is_dataclass(value) or isinstance(value, Task):
        kinds = tuple(kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type))
        keys = ", ".join(f.name for kind in kinds if is_dataclass(kind) for f in fields(kind))
        fine = not kinds or isinstance(value, kinds)
        require(fine, f"{where}: give its keys ({keys}), not {type(value).__name__}")
        return value
    value = value.item() if hasattr(value, "item") else value
    return config_tree.from_tree(list(value) if isinstance(value, tuple) else value, hint, where)
