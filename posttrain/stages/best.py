"""Chooses the best of several models, at the end of rounds, by a figure that other stages measured."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from posttrain.errors import require
from posttrain.models.policy import Policy
from posttrain.stages._naming import ModelName, StageName
from posttrain.stages.base import Context, Stage, model_places
from posttrain.types import JSON


@dataclass(frozen=True, kw_only=True)
class BestStage(Stage):
    """Keep the model with the best `figure`; stage `measured[n]` measured `models[n]`. A figure may be a path, such as parts.format.
    An interval counts by its estimate. Of equal models the first is kept, because it has changed least."""

    leaves = "model"

    models: tuple[ModelName, ...]
    measured: tuple[StageName, ...]
    figure: str = "accuracy"  # a figure in the results of `measured`, or its path
    higher: bool = True  # whether a higher figure is better

    def mistakes(self) -> Iterator[str]:
        if not len(self.models) == len(self.measured) > 0:
            yield "give as many stages that measured as models"

    def starts_from(self) -> str:
        return self.models[0]

    def plan(self, policy: Policy, context: Context, before: Mapping[str, Stage]) -> list[str]:
        return [f"keeps one of {', '.join(self.models)}, by {self.figure}"]

    def run(self, context: Context) -> dict[str, JSON]:
        pairs = zip(self.models, self.measured, strict=True)
        values = {model: self.value(context, stage) for model, stage in pairs}
        best = (max if self.higher else min)(values, key=lambda model: values[model])
        target = context.folder(self.name) / "model"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(model_places(best, context)[0], target)
        shown = ", ".join(f"{model} {value:.3f}" for model, value in values.items())
        context.announce(self.name, [f"keeps {best} by {self.figure} ({shown})"])
        return {"best": best, "figure": self.figure, "values": values}

    def value(self, context: Context, stage: str) -> float:
        found: JSON = context.result(stage)
        require(found is not None, f"{self.name}: stage {stage!r} of this run has measured nothing")
        for key in self.figure.split("."):
            parts = found if isinstance(found, dict) else {}
            has = ", ".join(sorted(parts)) or "no parts"
            none = f"{self.name}: the result of {stage!r} has no figure {self.figure!r}"
            figure = "reward" if "reward" in parts else "FIGURE"
            other = f"posttrain resume {shlex.quote(str(context.directory))} {self.name}.figure={figure}"
            require(key in parts, f"{none}; it has {has}; everything else is kept by: {other}")
            found = parts[key]
        number = found[0] if isinstance(found, list) and found else found
        numeric = isinstance(number, int | float) and math.isfinite(number)
        require(numeric, f"{self.name}: {self.figure!r} of {stage!r} is {number!r}, not a number")
        return float(number)
