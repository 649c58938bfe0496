"""Sources of the reward in an rl stage: the task's own score, a function, reward models, a judge, or a weighted mix of these.

In a recipe: `reward: {name: models, models: [reward]}`; on the command line `rl.reward=models rl.reward.models=[reward]`. A class of
your own is named as `file.py:MyReward`. Whatever the source, the task's own score is also reported, as `reward/task`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from threading import Timer
from typing import Annotated, ClassVar, Literal

from torch import nn

from posttrain.data.steps import compile_separator
from posttrain.errors import NotNegative, Positive, Range, many, require
from posttrain.events import Events
from posttrain.models.load import same_vocabulary
from posttrain.models.policy import Policy
from posttrain.models.scorer import OffloadedRating
from posttrain.rewards._functions import Mix, finished
from posttrain.rewards._loop import no_running_loop
from posttrain.rewards.base import check, check_function, own_function
from posttrain.rewards.compose import combined
from posttrain.stages._judged import JudgeModel
from posttrain.stages._naming import ModelName, Naming, ScorerName
from posttrain.stages.base import Context, load_policy, load_reward_models
from posttrain.tasks.base import Task
from posttrain.tasks.mixed import Mixed
from posttrain.train.judging import JudgeRating
from posttrain.train.rating import ImplicitRating, ModelRating, ProcessRating
from posttrain.trust import PREFIX, code_place
from posttrain.types import JSON, Rating, Rollout, Score

Device = Literal["same", "cpu"]
SLOW = 30.0  # seconds of one call of a function before a warning


@dataclass(frozen=True, kw_only=True)
class RewardSource(Naming, ABC):
    """A source of rewards. Its fields are its settings; recipes refer to it by `name`."""

    name: ClassVar[str] = ""
    apart: ClassVar[bool] = True  # its keys are set by their full path only: rl.reward.k
    gives_steps: ClassVar[bool] = False  # whether its scores have values of steps

    # with a mixed task: rate answers to this source only; the others keep their task's own score
    rated: str = ""

    def loads(self) -> tuple[str, ...]:
        """The models that it uses: stages, directories or hub names."""
        return tuple(n for kind in ("model", "reward model") for _, n in self.named(kind))

    def reads_ids(self) -> tuple[str, ...]:
        """Those of its models that read the policy's token ids, and so must have its vocabulary."""
        return self.loads()

    def on_device(self) -> tuple[str, ...]:
        """Those of its models that stay on the policy's device between calls and take memory there."""
        return self.loads()

    def offloaded(self) -> RewardSource | None:
        """The source with its models on the CPU between calls (`device=cpu`); None if it has no such setting."""
        return None

    def check(self, where: str, task: Task, group: int, alone: bool) -> None:
        """Raise an error if the source does not fit the stage. `group` is the number of responses to a problem; `alone` says that
        single responses are rated, too."""
        known = [source.name for source in task.sources] if isinstance(task, Mixed) else []
        other = f"{where}: reward.rated is a source of a mixed task that models score, not {self.rated!r}"
        scored = not isinstance(self, TaskReward) and self.rated in known
        require(not self.rated or scored, f"{other}; the task has {', '.join(known) or 'none'}")

    def ready(self, task: Task) -> None:
        """Check its files and functions before the first stage runs."""

    def make(self, context: Context, policy: Policy, where: str, budget: int) -> Rating | None:
        """Load its models and return a rating of rollouts; None if the task's own score is the reward. `where` is the name of the
        stage."""
        rating = self.rating(context, policy, where, budget)
        return SourceRating(self.rated, rating) if rating is not None and self.rated else rating

    @abstractmethod
    def rating(self, context: Context, policy: Policy, where: str, budget: int) -> Rating | None:
        """`make` without the restriction to one task of a mix."""


@dataclass(frozen=True, kw_only=True)
class TaskReward(RewardSource):
    """The task's own score."""

    name: ClassVar[str] = "task"
    gives_steps: ClassVar[bool] = True  # if the task has them

    def check(self, where: str, task: Task, group: int, alone: bool) -> None:
        super().check(where, task, group, alone)
        text = f"{where}: the task scores nothing by itself; give it a reward"
        places = "task.reward, in Python reward=FUNCTION"
        require(task.scores, f"{text} ({places}), or name reward models as reward")

    def rating(self, context: Context, policy: Policy, where: str, budget: int) -> Rating | None:
        return None


@dataclass(frozen=True, kw_only=True)
class FunctionReward(RewardSource):
    """Your own function in place of the task's score: `reward` is FILE.py:NAME. It runs in this process; if it takes lists, it gets
    all responses of a step at once."""

    name: ClassVar[str] = "function"
    gives_steps: ClassVar[bool] = True  # if its scores have them

    reward: str
    options: Mapping[str, JSON] = field(default_factory=dict)

    def check(self, where: str, task: Task, group: int, alone: bool) -> None:
        super().check(where, task, group, alone)
        check(self.reward, self.options)
        found = code_place(self.reward) is not None or self.reward.startswith(PREFIX)
        require(found, f"{where}: reward.reward is FILE.py:NAME, not {self.reward!r}")

    def ready(self, task: Task) -> None:
        if problems := task.problems("train"):
            check_function(self.reward, self.options, problems)

    def rating(self, context: Context, policy: Policy, where: str, budget: int) -> Rating:
        found = own_function(self.reward, self.options)
        assert found is not None
        return FunctionRating(found, context.events)


@dataclass(frozen=True)
class FunctionRating:
    """The rating by a function. A call in this process cannot be ended, so a warning names one that takes long."""

    function: Mix
    events: Events
    models: tuple[nn.Module, ...] = ()

    def rate(self, rollouts: Sequence[Rollout]) -> list[Score]:
        labels = ", ".join(function.label for function in self.function.functions)
        text = f"the reward {labels} has not returned for {many(len(rollouts), 'response')} after {SLOW:g} s; nothing ends it here"
        timer = Timer(SLOW, self.events.emit, ("slow_reward", text, "warning"))
        timer.daemon = True
        timer.start()
        try:
            with no_running_loop():
                problems, responses = [r.problem for r in rollouts], [r.judged for r in rollouts]
                found: list[Score] = finished(self.function.scores(problems, responses))
        finally:
            timer.cancel()
        return found


@dataclass(frozen=True, kw_only=True)
class RewardModels(RewardSource):
    """Outcome reward models: one score for a whole response. Each is a stage (which may have trained several) or a directory. They are
    combined as in rewards/_models.py: mean, worst, or the mean minus `k` standard deviations. `weights`, one for each of `models`,
    weight mean and deviation; models of one stage share its weight. `device=cpu` keeps them on the CPU between calls."""

    name: ClassVar[str] = "models"
    makes: ClassVar[type[ModelRating]] = ModelRating

    models: tuple[ScorerName, ...]
    weights: tuple[Positive, ...] = ()  # one for each of models; (): all equal
    combine: Literal["mean", "worst", "mean_minus"] = "mean"
    k: NotNegative = 1.0
    device: Device = "same"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.models, "models: name at least one reward model")
        given, count = len(self.weights), len(self.models)
        require(given in (0, count), f"weights: {given} for {count} models; give one for each")
        none = "weights: the worst of several has no weights; use combine=mean or mean_minus"
        require(not given or self.combine != "worst", none)

    def on_device(self) -> tuple[str, ...]:
        return self.models if self.device == "same" else ()

    def offloaded(self) -> RewardSource:
        return replace(self, device="cpu")

    def rating(self, context: Context, policy: Policy, where: str, budget: int) -> Rating:
        ensembles = [load_reward_models(name, context) for name in self.models]
        shared = zip(self.weights, ensembles, strict=False)
        weights = tuple(weight / len(members) for weight, members in shared for _ in members)
        scorers = [*chain(*ensembles)]
        for scorer in scorers:
            same_vocabulary(where, policy, scorer)
            scorer.model.requires_grad_(False)
        how = (self.combine, self.k, budget, policy.tokenizer, *self.split())
        rating = self.makes(scorers, *how, weights=weights)
        return placed(rating, self.device, policy)

    def split(self) -> tuple[str, ...]:
        """How responses are split into steps, for a source that scores steps."""
        return ()


@dataclass(frozen=True, kw_only=True)
class ProcessRewardModels(RewardModels):
    r"""Process reward models, combined like outcome reward models: a value for every step; the value of a response is that of its
    worst step. `steps` says what ends a step: a text, pattern:REGEX (as in 'pattern:\n(?=Step [0-9]+)'), or token:TEXT, one token."""

    name: ClassVar[str] = "process"
    gives_steps: ClassVar[bool] = True
    makes = ProcessRating

    steps: str = "\n"  # what ends a step: a text, pattern:REGEX, or token:TEXT

    def __post_init__(self) -> None:
        super().__post_init__()
        compile_separator(self.steps)

    def split(self) -> tuple[str, ...]:
        return (self.steps,)


@dataclass(frozen=True, kw_only=True)
class ImplicitReward(RewardSource):
    """The implicit reward of a model trained by DPO: beta (log pi(y | x) - log pi_ref(y | x)). `reference` is the model that it was
    trained from, and `beta` that of its training."""

    name: ClassVar[str] = "implicit"

    model: ModelName
    reference: ModelName
    beta: Positive = 0.1

    def rating(self, context: Context, policy: Policy, where: str, budget: int) -> Rating:
        tuned, origin = (load_policy(name, context) for name in (self.model, self.reference))
        for one in (tuned, origin):
            same_vocabulary(where, policy, one)
            one.model.requires_grad_(False)
        return ImplicitRating(tuned, origin, self.beta, budget)


@dataclass(frozen=True, kw_only=True)
class JudgeReward(JudgeModel, RewardSource):
    """A language model as a judge (rewards/judge.py), in this process or, with a `url`, behind an OpenAI-compatible address. It reads
    text, so it may have another vocabulary. `mode`: points for each response, points for a group at once, or a tournament. `rubric`
    is a file that describes a good response."""

    name: ClassVar[str] = "judge"

    mode: Literal["points", "group", "tournament"] = "points"
    device: Device = "same"  # cpu: on the policy's device only while it judges

    def reads_ids(self) -> tuple[str, ...]:
        return ()

    def on_device(self) -> tuple[str, ...]:
        return self.loads() if self.device == "same" else ()

    def offloaded(self) -> RewardSource | None:
        return None if self.url else replace(self, device="cpu")

    def check(self, where: str, task: Task, group: int, alone: bool) -> None:
        super().check(where, task, group, alone)
        text = f"{where}: reward.mode=tournament compares the responses to one problem, and there is one alone in a group of 1"
        text += " and for each of measure_problems; use reward.mode=points"
        require(self.mode != "tournament" or (group > 1 and not alone), text)
        self.check_model()

    def rating(self, context: Context, policy: Policy, where: str, budget: int) -> Rating:
        rating = JudgeRating(self.open_model(context, budget), self.mode, self.rubric)
        return placed(rating, self.device, policy)


@dataclass(frozen=True, kw_only=True)
class Weighted(Naming):
    """A source in a mix, with the weight of its value. Its value is reported as `reward/LABEL`; by default the label is the
    source's name."""

    reward: RewardSource  # task, models, process, judge, implicit or function
    weight: Annotated[float, Range()] = 1.0
    label: str = ""

    @property
    def key(self) -> str:
        return self.label or self.reward.name


@dataclass(frozen=True, kw_only=True)
class MixedReward(RewardSource):
    """A weighted sum of sources: r = sum_i weight_i r_i. If one of them cannot score a response, it has no score."""

    name: ClassVar[str] = "mix"

    parts: tuple[Weighted, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.parts, "parts: give at least one, such as {reward: {name: task}}")
        labels = [part.key for part in self.parts]
        alike = f"parts: {', '.join(labels)} must differ; give each a label of its own"
        require(len(set(labels)) == len(labels), alike)
        nested = ", ".join(part.key for part in self.parts if part.reward.rated)
        require(not nested, f"parts: {nested}: set rated of the mix, not of a part of it")

    def reads_ids(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.reward.reads_ids())

    def on_device(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.reward.on_device())

    def check(self, where: str, task: Task, group: int, alone: bool) -> None:
        super().check(where, task, group, alone)
        for part in self.parts:
            part.reward.check(where, task, group, alone)

    def ready(self, task: Task) -> None:
        for part in self.parts:
            part.reward.ready(task)

    def rating(self, context: Context, policy: Policy, where: str, budget: int) -> Rating:
        made = [part.reward.make(context, policy, where, budget) for part in self.parts]
        return MixedRating(self.parts, tuple(made))


@dataclass(frozen=True)
class SourceRating:
    """A rating of one task in a mix of tasks. Responses of the other tasks keep their own score."""

    source: str
    rating: Rating

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The networks; a checkpoint records a checksum of their weights."""
        return tuple(self.rating.models)

    def rate(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        own = [rollout.problem.id.partition("/")[0] == self.source for rollout in rollouts]
        rated = iter(self.rating.rate([r for r, mine in zip(rollouts, own, strict=True) if mine]))
        return [next(rated) if mine else r.score for r, mine in zip(rollouts, own, strict=True)]


@dataclass(frozen=True)
class MixedRating:
    """The weighted sum of several ratings. None stands for the score that a rollout already has, its task's own."""

    parts: Sequence[Weighted]
    ratings: Sequence[Rating | None]

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The networks; a checkpoint records a checksum of their weights."""
        return tuple(m for one in self.ratings if one is not None for m in one.models)

    def rate(self, rollouts: Sequence[Rollout]) -> list[Score]:
        by_part = [
            [r.score for r in rollouts] if rating is None else rating.rate(rollouts)
            for rating in self.ratings
        ]
        return [self.score(scores) for scores in zip(*by_part, strict=True)]

    def score(self, scores: Sequence[Score]) -> Score:
        named = {part.key: score for part, score in zip(self.parts, scores, strict=True)}
        value = sum(part.weight * (named[part.key].value or 0.0) for part in self.parts)
        inner = {name: value for score in scores for name, value in score.parts.items()}
        found = combined(named, value)
        return replace(found, parts={**inner, **found.parts}) if found.valid else found


def placed(rating: Rating, device: Device, policy: Policy) -> Rating:
    """The rating, with its models on `device` between calls."""
    if device == "same" or not rating.models:
        return rating
    return OffloadedRating(rating, [model.to("cpu") for model in rating.models], policy.device)
