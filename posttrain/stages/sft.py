"""Supervised fine-tuning on demonstrations, with loss on what the assistant says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.sft import SFT
from posttrain.collect import Examples
from posttrain.errors import Count, require
from posttrain.models.policy import Policy
from posttrain.runs.console import duration
from posttrain.stages._contamination import guard_training
from posttrain.stages._material import Data, Material, check_lengths, gather, placed
from posttrain.stages._plan import DryRun, few_steps, sft_plan
from posttrain.stages.base import Context, Stage
from posttrain.stages.train import TrainStage, trained
from posttrain.tasks.base import Task
from posttrain.types import JSON


@dataclass(frozen=True, kw_only=True)
class SFTStage(TrainStage):
    """Train `model` on `data`. `as_long_as` names an earlier stage: train for the time that one took, whatever `steps` says."""

    reads = ("demonstrations",)
    all_tokens: ClassVar[bool] = False

    data: tuple[Data, ...] = ()
    batch: Count = 32  # examples an optimizer step
    max_length: int = 1024
    algorithm: Algorithm = field(default_factory=SFT)
    as_long_as: str = ""

    def material(self, context: Context, tokenizer: object) -> Material:
        data = placed(self.data, context)
        return gather(data, tokenizer, context.seed, self.max_length, self.all_tokens)

    def tasks(self) -> list[Task | None]:
        return [d.task for d in self.data]

    def plan(self, policy: Policy, context: Context, before: Mapping[str, Stage]) -> list[str]:
        return sft_plan(self, policy, context, before)

    def dry_run(self) -> DryRun:
        made = few_steps(self, as_long_as="")
        return replace(made, batch=self.batch, same_time_as=self.as_long_as)

    def run(self, context: Context) -> dict[str, JSON]:
        guard_training(context, self.name, self.model, (), placed(self.data, context))
        policy = self.load(context)
        material = self.material(context, policy.tokenizer)
        for report in material.reports:
            context.announce(self.name, report.lines())
        check_lengths(policy, material.sets, "max_length")
        roles = self.make_roles(context, policy)
        loop = self.train(
            context,
            self.make_trainer(context, policy, roles),
            Examples(material.sets, material.weights, self.batch, context.seed, policy.device),
            self.schedule(seconds=self.seconds(context)),
        )
        context.save_model(self.name, policy, self.lora)
        return trained(loop)

    def seconds(self, context: Context) -> float:
        if not self.as_long_as:
            return 0.0
        seconds: JSON = (context.result(self.as_long_as) or {}).get("train_seconds")
        untrained = f"{self.name}: as_long_as names {self.as_long_as!r}, which has not trained"
        require(seconds is not None, untrained)
        context.announce(self.name, [f"for {duration(seconds)}, as long as {self.as_long_as}"])
        return float(seconds)
