"""Rewards that a server gives to answers: those of a run's reward models, and those of its rl stages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain import pipeline
from posttrain.commands.models import open_policy
from posttrain.errors import UserError
from posttrain.models.load import Reader, read_tokenizer
from posttrain.runs.layout import CONFIG
from posttrain.runs.read import Run
from posttrain.stages import reward_sources
from posttrain.stages._side_by_side import answering_models
from posttrain.stages.base import Context, Stage, temporary_context, worker_pool
from posttrain.stages.reward_model import RewardModelStage
from posttrain.stages.reward_sources import ProcessRewardModels, RewardModels, RewardSource
from posttrain.stages.rl import RLStage
from posttrain.system import machine
from posttrain.system.workers import WorkerPool
from posttrain.tasks.base import Task
from posttrain.trust import Trust, trusting
from posttrain.types import Problem, Rating, Rollout, Score

if TYPE_CHECKING:
    from posttrain.serve.scoring import Load

KNOWN_PROBLEMS = 20_000  # problems of each split that are searched for the right answer to a prompt
BUDGET = 8192  # tokens of a batch
NO_GOLD = "the right answer to this prompt is not known; give it"


@dataclass(eq=False)
class TaskScore:
    """A task's own score of answers to any prompt. A prompt of one of its problems has that problem's right answer, any other
    prompt the given one."""

    task: Task
    workers: WorkerPool

    @cached_property
    def known(self) -> dict[str, Problem]:
        listed = (self.task.problems(split)[:KNOWN_PROBLEMS] for split in ("train", "test"))
        return {problem.question.strip(): problem for problem in chain(*listed)}

    def score(self, problem: Problem, response: str) -> Score:
        found = self.known.get(problem.question.strip())
        if found is None:
            first = next(islice(self.known.values(), 1), problem)
            if not problem.answer and (first.answer or first.facts):
                return Score.failed(NO_GOLD)
            found = problem
        return asyncio.run(self.workers.score(self.task, found, response))


@dataclass(eq=False)
class LoadedReward:
    """Reward models, a task's own score, or both: then the models give the reward, and the task's score is its part `task`."""

    tokenizer: Any
    rating: Rating | None
    task: TaskScore | None = None

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        if self.task is None:
            return rollouts
        own = (self.task.score(one.problem, one.judged) for one in rollouts)
        return [replace(one, score=score) for one, score in zip(rollouts, own, strict=True)]

    def rate(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        own = [one.score for one in rollouts]
        if self.rating is None:
            return own
        return [
            replace(score, parts={**score.parts, "task": ruled.value})
            if score.valid and ruled.value is not None
            else score
            for score, ruled in zip(self.rating.rate(rollouts), own, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class RunRewards:
    """The rewards of a run; `note` says why those of stages are missing."""

    context: Context
    stages: Sequence[Stage]
    workers: WorkerPool
    note: str = ""

    def models(self) -> dict[str, Load]:
        """Return the reward models of the run, by stage."""
        names = Run(self.context.directory).configured
        steps = {
            stage.name
            for stage in self.stages
            if isinstance(stage, RewardModelStage) and stage.algorithm.learns_from == "step_labels"
        }
        return {
            name: partial(self._model, name, ProcessRewardModels if name in steps else RewardModels)
            for name in answering_models(self.context.directory, names, answering=False)
        }

    def of_stages(self) -> dict[str, Load]:
        """Return the reward of each rl stage, as STAGE/reward, if it needs only one answer and this machine can compute it."""
        found = [stage for stage in self.stages if isinstance(stage, RLStage) and _scores(stage)]
        return {f"{stage.name}/reward": partial(self._stage, stage) for stage in found}

    def _model(self, name: str, kind: type[RewardModels | ProcessRewardModels]) -> LoadedReward:
        policy: Any = Reader(read_tokenizer(self.context.folder(name) / "model"), name)
        rating = kind(models=(name,)).make(self.context, policy, name, BUDGET)
        return LoadedReward(policy.tokenizer, rating)

    def _stage(self, stage: RLStage) -> LoadedReward:
        own, before = (self.context.folder(name) / "model" for name in (stage.name, stage.model))
        place = str(next((folder for folder in (own, before) if folder.is_dir()), stage.model))
        # for its vocabulary, which is compared, and its device
        policy = open_policy(place, self.context.device)
        rating = stage.reward.make(self.context, policy, stage.name, BUDGET)
        return LoadedReward(policy.tokenizer, rating, TaskScore(stage.task, self.workers))


@contextmanager
def run_rewards(directory: Path, device: str) -> Iterator[RunRewards]:
    """Yield the rewards of a run, as far as its directory is trusted. Enter it before anything uses CUDA or starts a thread."""
    stages, trust, note = tuple[Stage, ...](), Trust(str(directory / CONFIG)), ""
    try:
        settings, _ = pipeline.settings_of(Run(directory), False, [])
        stages, trust = settings.recipe.stages, settings.trust
    except UserError as error:  # code that a run may not name, or a task whose package is missing
        note = f"the rewards of its rl stages cannot be computed: {error}"
    with (
        trusting(trust),
        worker_pool([stage for stage in stages if _scores(stage)]) as workers,
        temporary_context(0, machine.device(device)) as context,
    ):
        yield RunRewards(replace(context, place=directory), stages, workers, note)


def _scores(stage: Stage) -> bool:
    """Whether its reward needs only one answer, and neither another machine nor the user's own code."""
    if not isinstance(stage, RLStage):
        return False
    return type(stage.task).run is Task.run and _computed_here(stage.reward)


def _computed_here(source: RewardSource) -> bool:
    if isinstance(source, reward_sources.MixedReward):
        return all(_computed_here(part.reward) for part in source.parts)
    kinds = (reward_sources.TaskReward, RewardModels, reward_sources.ImplicitReward)
    return isinstance(source, kinds) and not source.rated
