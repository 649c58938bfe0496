"""Settings for what decides which of two answers is better: a judge, in this process or behind a URL, or a reward model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from posttrain.errors import NotNegative, require
from posttrain.rewards._asking import Endpoint, EndpointSettings, Usage, endpoint
from posttrain.rewards.judge import Judge, read_rubric
from posttrain.stages._naming import ModelName, Naming, ScorerName
from posttrain.stages.base import Context, Stage, load_policy
from posttrain.tasks._rules import RuleJudge
from posttrain.tasks.base import Task
from posttrain.train.judging import JudgeRating, LocalModel


@dataclass(frozen=True, kw_only=True)
class JudgeModel(EndpointSettings, Naming):
    """A language model as a judge: one that runs in this process, or the name of a model behind `url`."""

    model: ModelName
    rubric: str = ""  # a file; "": the default

    def named(self, kind: str) -> list[tuple[str, str]]:
        return [] if self.url else super().named(kind)

    def check_model(self) -> None:
        """Check the settings before the first request."""
        if self.url:
            endpoint(self)
        read_rubric(self.rubric)

    def open_model(self, context: Context, budget: int) -> Endpoint | LocalModel:
        """The model, frozen if it runs in this process, where it reads `budget` tokens at once."""
        if self.url:
            return endpoint(self)
        policy = load_policy(self.model, context)
        policy.model.requires_grad_(False)
        return LocalModel(policy, budget, self.cache)


@dataclass(frozen=True, kw_only=True)
class JudgeSettings(JudgeModel):
    """A judge: a stage, directory or hub name that runs in this process, or the name of a model behind `url`. All other settings
    except `cache` apply to `url` only. `rules` is a judge without a model: the score of a task, with known errors."""

    shorthand: ClassVar[str] = "model"  # judge: NAME is judge: {model: NAME}

    model: ModelName = ""  # "": judge by `rules`
    rules: Task | None = None  # a task whose score judges, instead of a model
    noise: NotNegative = 0.0  # of `rules`: Gumbel noise of each text, the same in both orders
    # of `rules`: added to the score of the answer that is shown first
    position_bias: NotNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        one = "name a model that judges, or the rules of a task, not both"
        require(bool(self.model) != (self.rules is not None), one)
        inexact = self.rules is not None or self.noise == self.position_bias == 0
        require(inexact, "noise and position_bias are of rules, not of a model")

    def __str__(self) -> str:
        return self.model or f"the judge of {type(self.rules).__name__.lower()}"

    def open(self, context: Context) -> tuple[Judge, Usage]:
        """Open the judge, and return it with its usage counters. A model must first pass the canaries."""
        if self.rules is not None:
            rules = RuleJudge(self.rules, self.noise, self.position_bias)
            return Judge(rules, read_rubric(self.rubric)), rules.usage
        model = self.open_model(context, LocalModel.token_budget)
        return JudgeRating(model, rubric=self.rubric).judge, model.usage


@dataclass(frozen=True, kw_only=True)
class JudgedStage(Stage):
    """A stage in which a `judge` or a reward model decides which of two answers is better."""

    reward_model: ScorerName = ""
    judge: JudgeSettings | None = None

    def check_ready(self, device: str, names: Collection[str]) -> None:
        super().check_ready(device, names)
        if self.judge is not None:
            self.judge.check_model()
