"""Settings for what decides which of two answers is better: a judge, in this process or behind a URL, or a reward model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from posttrain.errors import NotNegative, require
from posttrain.rewards._asking import (
    Endpoint,
    EndpointSettings,
    Form,
    Messages,
    Reply,
    Unanswered,
    Usage,
    endpoint,
)
from posttrain.rewards.judge import Judge, read_rubric
from posttrain.stages._naming import ModelName, Naming, ScorerName
from posttrain.stages.base import Context, Stage, load_policy
from posttrain.tasks._procedural import stable_hash
from posttrain.tasks.base import Task
from posttrain.train.judging import JudgeRating, LocalModel
from posttrain.types import Problem

# the form of a block in rewards/judge.py: a name, and a text between markers
BLOCK = re.compile(
    r"^([A-Z]+(?: \d+)?):\n<([0-9a-f]{16})>\n(.*?)\n</\2>$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class RuleJudge:
    """Gets the same requests as any judge, reads question and answers from them, and scores them by `rules`. The verdict on a
    pair follows from the difference of the two scores, plus Gumbel `noise` of each text, the same in both orders, plus
    `position_bias` in favour of the text that is shown first."""

    rules: Task
    noise: float = 0.0
    position_bias: float = 0.0
    usage: Usage = field(default_factory=Usage)

    def ask(self, conversations: Sequence[Messages], form: Form) -> list[Reply]:
        self.usage.requests += len(conversations)
        return [self.reply(str(messages[-1]["content"]), form) for messages in conversations]

    def reply(self, content: str, form: Form) -> Reply:
        shown = {name: text for name, _, text in BLOCK.findall(content)}
        question = shown.pop("QUESTION", "")
        values = [self.rules.score(Problem("", question), text).value for text in shown.values()]
        known = [value for value in values if value is not None]
        if len(known) < len(values) or not known:
            return Unanswered("the rules give no score")
        if form.field == "verdict":
            draws = (gumbel(stable_hash("judge", question, text)) for text in shown.values())
            first, second = (v + self.noise * g for v, g in zip(known, draws, strict=True))
            ahead = first - second + self.position_bias
            return json.dumps({"verdict": "tie" if ahead == 0 else "A" if ahead > 0 else "B"})
        low, high = min(form.options), max(form.options)
        points = [low + round((high - low) * min(1.0, max(0.0, value))) for value in known]
        return json.dumps({form.field: points if form.count else points[0]})


def gumbel(number: int) -> float:
    """Return a Gumbel variable drawn by the lowest 53 bits of a number."""
    return -math.log(-math.log((number % (1 << 53) + 0.5) / (1 << 53)))


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
