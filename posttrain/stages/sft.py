"""Supervised fine-tuning on demonstrations, with loss on the assistant's turns."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.sft import SFT
from posttrain.errors import Count, require
from posttrain.models.load import Reader
from posttrain.models.policy import Policy
from posttrain.runs.console import duration
from posttrain.runs.read import Run
from posttrain.stages._contamination import guard_training
from posttrain.stages._held_out import HeldOutEvaluation
from posttrain.stages._material import Data, Material, check_lengths, gather, measured_units, placed
from posttrain.stages._naming import StageName
from posttrain.stages._plan import DryRun, few_steps, sft_plan
from posttrain.stages.base import Context
from posttrain.stages.train import DataStage
from posttrain.tasks.base import Task
from posttrain.types import JSON, Example


@dataclass(frozen=True, kw_only=True)
class SFTStage(DataStage):
    """Train `model` on `data`, and measure the loss on held-out examples before, during and after. `as_long_as` names an earlier
    stage: train for as long as that stage took, regardless of `steps`."""

    reads = ("demonstrations",)
    all_tokens: ClassVar[bool] = False
    reads_first = True

    data: tuple[Data, ...] = ()
    max_length: int = 1024
    # how many held-out examples are evaluated; drawn by the seed if there are more
    evaluate_units: Count = 500
    algorithm: Algorithm = field(default_factory=SFT)
    as_long_as: StageName = ""

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if not self.data:
            yield "a supervised stage needs data"

    def material(self, context: Context, reader: Policy | Reader) -> Material:
        data, seed = placed(self.data, context), context.seed
        made = gather(data, reader.tokenizer, seed, self.max_length, self.all_tokens, self.held_out)
        check_lengths(reader, [*made.sets, *made.held_out], f"{self.name}.max_length")
        return made

    def examples(self, context: Context, policy: Policy) -> tuple[list[Example], list[Example]]:
        made = self.material(context, policy)
        return [e for one in made.sets for e in one], [unit[0] for unit in made.held_out]

    def check_data(self, reader: Reader, context: Context, before: Collection[str]) -> None:
        there = tuple(source.few() for source in self.data if source.file not in before)
        if there and reader.tokenizer is not None:
            replace(self, data=there).material(context, reader)

    def tasks(self) -> list[Task | None]:
        return [d.task for d in self.data]

    plan = sft_plan

    def dry_run(self) -> DryRun:
        made = few_steps(self, self.evaluate_every if self.held_out else 0, as_long_as="")
        return replace(made, batch=self.batch, same_time_as=self.as_long_as)

    def run(self, context: Context) -> dict[str, JSON]:
        guard_training(context, self.name, self.model, (), placed(self.data, context))
        policy = self.load(context)
        material = self.material(context, policy)
        for report in material.reports:
            context.announce(self.name, report.lines())
        if self.held_out and not material.held_out:
            text = f"held_out={self.held_out:g}: no source has a second prompt; nothing is held out or measured"
            context.announce(self.name, [text], "warning")
        measured = measured_units(context, self.name, material.held_out, self.evaluate_units)
        sets, weights = material.sets, material.weights
        return self.learn(context, policy, sets, weights, measured, self.seconds(context))

    def held_out_result(self, context: Context, evaluation: HeldOutEvaluation) -> dict[str, JSON]:
        """The held-out loss after training, with its interval, and before it if it was measured."""
        rows = [row for row in Run(context.directory).metrics(self.name) if not row.step]
        before = rows[0].figures.get("loss/held_out") if rows else None
        after = evaluation.loss()
        was = "" if before is None else f", {before:.4f} before training"
        context.announce(self.name, [f"held-out loss {after}{was}"])
        return {"held_out": len(evaluation.units), "loss": {"before": before, "after": after.row()}}

    def seconds(self, context: Context) -> float:
        if not self.as_long_as:
            return 0.0
        seconds: JSON = (context.result(self.as_long_as) or {}).get("train_seconds")
        untrained = f"{self.name}: as_long_as names {self.as_long_as!r}, which has not trained"
        require(seconds is not None, untrained)
        context.announce(self.name, [f"for {duration(seconds)}, as long as {self.as_long_as}"])
        return float(seconds)
