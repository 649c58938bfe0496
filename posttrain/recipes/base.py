"""The interface of a recipe: a function named like its file that returns stages. Its parameters are the recipe's top-level settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

from posttrain.errors import refuse_unknown, require, unknown
from posttrain.stages.base import Stage
from posttrain.stages.best import BestStage
from posttrain.stages.evaluate import EvaluateStage
from posttrain.tasks.base import Task
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling

PREVIOUS = "previous "
MAX_ROUNDS = 1000  # a line of a file must not produce a billion stages


Given = TypeVar("Given")


def given(value: Given | None, default: Given) -> Given:
    """Return the user's value, even 0, which the stage may refuse; or the recipe's default."""
    return default if value is None else value


def with_given(settings: Given, **values: Any) -> Given:
    """Return a dataclass with the values that the user gave; None keeps the one that is there."""
    chosen = {name: value for name, value in values.items() if value is not None}
    return replace(settings, **chosen)  # type: ignore[type-var]


def falling(lr: float, warmup: int = 10, final: float = 0.1, **more: Any) -> Optimization:
    """A learning rate that falls in a line, to the share `final` of it at the last step."""
    return Optimization(lr=lr, warmup=warmup, schedule="linear", final=final, **more)


def evaluate(
    name: str, model: str, task: Task, problems: int, sampling: Sampling, samples: int = 1
) -> EvaluateStage:
    """Measure a model on held-out problems: with several samples of each, pass@1 to pass@`samples`."""
    return EvaluateStage(
        name=name, model=model, task=task, problems=problems, samples=samples, sampling=sampling
    )


@dataclass(frozen=True)
class Recipe:
    """Stages in order, and the two evaluations that the summary compares."""

    stages: tuple[Stage, ...]
    before: str = ""  # an evaluate stage
    after: str = ""
    next_command: str = ""  # a command to try afterwards

    def __post_init__(self) -> None:
        """Check that the evaluations that the summary compares exist among the stages."""
        known = [stage.name for stage in self.stages if isinstance(stage, EvaluateStage)]
        for key, name in (("before", self.before), ("after", self.after)):
            if name and name not in known:
                raise unknown(f"evaluate stage in {key}:", name, known)


def as_recipe(made: Any, name: str) -> Recipe:
    """Convert what a recipe's function returned: a Recipe, stages, or a single stage."""
    if isinstance(made, Recipe):
        return made
    stages = [made] if isinstance(made, Stage) else made
    several = isinstance(stages, Iterable) and not isinstance(stages, str)
    listed = list(stages) if several else [made]
    for stage in listed:
        what = f"{name}: a recipe returns a Recipe, a stage or a list of stages"
        require(isinstance(stage, Stage), f"{what}, not {type(stage).__name__} {str(stage)[:40]!r}")
    return Recipe(tuple(listed))


def repeat(
    stages: Sequence[Stage],
    count: int,
    first: Mapping[str, str] | None = None,
    advance: Mapping[str, float] | None = None,
) -> list[Stage]:
    """Repeat the stages `count` times, with the output of one round as input of the next. In round n

    - the stage x is called x_n, and a stage that names x (as model, data, reference, ...) means x_n, that of the same round;
    - "previous x" means x of the round before, x_(n-1); in round 1 it means the value of `first` for x ("" leaves it out);
    - every other name keeps its meaning: a stage before the rounds, a file, a model;
    - a number in `advance`, such as {"comparisons.skip": 1000}, is raised by that much in each round after the first.

    In a YAML file, this is an item of its stages: {rounds: 3, first: {...}, advance: {...}, stages: [...]}.
    """
    text = f"rounds: there must be at least 1 and at most {MAX_ROUNDS}, not {count}"
    require(1 <= count <= MAX_ROUNDS, text)
    first, own = dict(first or {}), [stage.name for stage in stages]
    named = (*first, *(key.split(".")[0] for key in advance or {}))
    refuse_unknown("stage in rounds:", named, own)
    made: list[Stage] = []
    for number in range(1, count + 1):
        for stage in stages:
            for path, step in (advance or {}).items():
                name, *keys = path.split(".")
                if name == stage.name:
                    stage = _raised(stage, keys, step * (number - 1), path)
            made.append(_renamed(stage, number, own, first))
    return made


def best_round(model: str, measured: str, count: int, figure: str) -> BestStage:
    """Keep the model of the round with the best value of a result in its `measured` stage."""
    every = range(1, count + 1)
    models, stages = (tuple(f"{name}_{n}" for n in every) for name in (model, measured))
    return BestStage(name="best", models=models, measured=stages, figure=figure)


def _raised(value: Any, keys: Sequence[str], by: float, path: str) -> Any:
    known = [f.name for f in fields(value)] if is_dataclass(value) else []
    if not keys or keys[0] not in known:
        raise unknown(f"key {path!r} in rounds: no", keys[0] if keys else "", known)
    inner = getattr(value, keys[0])
    if len(keys) > 1:
        return replace(value, **{keys[0]: _raised(inner, keys[1:], by, path)})
    numeric = isinstance(inner, int | float) and not isinstance(inner, bool)
    require(numeric, f"rounds: {path} is {inner!r}, not a number that could advance")
    return replace(value, **{keys[0]: type(inner)(inner + by)})


def _renamed(value: Any, number: int, own: Sequence[str], first: Mapping[str, str]) -> Any:
    """Return a value in which the names of a round's stages are resolved."""
    if isinstance(value, str):
        if value.startswith(PREVIOUS):
            name = value.removeprefix(PREVIOUS)
            refuse_unknown("stage in rounds:", [name], own)
            text = f"rounds: {value!r} means nothing in round 1; give first: {{{name}: ...}}"
            require(number > 1 or name in first, text)
            return f"{name}_{number - 1}" if number > 1 else first[name]
        return f"{value}_{number}" if value in own else value
    if isinstance(value, tuple):
        return tuple(_renamed(inner, number, own, first) for inner in value)
    if is_dataclass(value) and not isinstance(value, type):
        hints = get_type_hints(type(value))  # a word of a fixed list is not the name of a stage
        kinds = {f.name: get_origin(hints[f.name]) for f in fields(value) if f.init}
        names = [name for name, kind in kinds.items() if kind is not Literal]
        changed = {name: _renamed(getattr(value, name), number, own, first) for name in names}
        changed = {name: new for name, new in changed.items() if new != getattr(value, name)}
        return replace(value, **changed) if changed else value
    return value
