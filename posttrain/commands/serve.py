"""Serves a model, or the models of a run's stages under their names, through an OpenAI-compatible endpoint, and the rewards that a
run gives to answers: those of its reward models, and those of its rl stages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain import config_tree, pipeline
from posttrain.commands.models import MachineOptions, open_policy, stage_models
from posttrain.errors import Count, UserError, require
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
from posttrain.system.files import model_folder
from posttrain.system.workers import WorkerPool
from posttrain.tasks.base import Task
from posttrain.trust import Trust, trusting
from posttrain.types import Problem, Rating, Rollout, Score

if TYPE_CHECKING:
    from posttrain.serve.scoring import Load
    from posttrain.serve.server import Address, Server

BASE = "base"  # the model with which the first stage of a run began
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


@dataclass(frozen=True, kw_only=True)
class ServeOptions(MachineOptions):
    """Options of `posttrain serve`."""

    token: str = ""  # "": none on this machine, else a new one, which is printed
    loaded: Count = 2  # models in memory
    rows: Count = 256  # samples decoded at once
    # requests that wait or are being answered; further ones are refused with 429
    requests: Count = 1024
    max_new_tokens: Count = 2048  # if a request does not set it
    body_bytes: Count = 4 << 20


def model_places(model: str) -> dict[str, str]:
    """Return the paths of the models by name, in the order in which a run made them; the last one is the default."""
    folder = Path(model).expanduser()
    if not (folder / CONFIG).is_file():
        return {folder.name if folder.exists() else model: model}
    stages = Run(folder).config.get("stages") or [{}]
    first = str(stages[0].get("model", ""))
    elsewhere = bool(first) and (Path(first).expanduser().is_dir() or "/" in first)
    base = {BASE: first} if elsewhere else {}
    return base | {name: str(place) for name, place in stage_models(folder).items()}


def context_length(place: str) -> int | None:
    """Return the context length in the configuration of a local model, before it is loaded."""
    with suppress(OSError, ValueError, AttributeError):
        tree = json.loads((model_folder(Path(place).expanduser()) / "config.json").read_text())
        return int(tree.get("max_position_embeddings")) or None
    return None


@contextmanager
def serving(
    model: str, settings: Sequence[str], **place: Any
) -> Iterator[tuple[Server, Sequence[str]]]:
    """Yield a server of a model or a run whose port is open and whose default model is loaded, and lines to show. `place` is its
    host, port and hosts, as of `Address`. The server of a run also provides the rewards of its reward models and rl stages."""
    needs = "serve needs its packages: pip install 'posttrain[serve]'"
    require(all(map(find_spec, ("starlette", "uvicorn"))), needs)
    from posttrain.serve.server import Address

    pairs = dict(map(config_tree.pair, settings))
    options: ServeOptions = config_tree.from_tree(pairs, ServeOptions, "serve")
    address = Address(token=options.token, **place).secured()
    folder = Path(model).expanduser()
    is_run = (folder / CONFIG).is_file()
    with run_rewards(folder, options.device) if is_run else nullcontext() as rewards:
        yield from _serving(model, options, address, rewards)


def _serving(
    model: str, options: ServeOptions, address: Address, rewards: RunRewards | None
) -> Iterator[tuple[Server, Sequence[str]]]:
    from posttrain.serve.app import Limits, application
    from posttrain.serve.models import Models
    from posttrain.serve.scoring import Scoring
    from posttrain.serve.server import make_server

    places = model_places(model)
    default = [*places][-1]
    first = {default: open_policy(places[default], options.device)}
    models = Models(
        {name: context_length(place) for name, place in places.items()},
        lambda name: first.pop(name, None) or open_policy(places[name], options.device),
        default,
        options.loaded,
        options.rows,
        options.max_new_tokens,
    )
    limits = Limits(options.body_bytes, options.requests)
    given = (rewards.models(), rewards.of_stages()) if rewards else ()
    scoring = Scoring(models, *given)
    lines = [rewards.note] if rewards and rewards.note else []
    try:
        server = make_server(application(lambda _: models, limits, scores=scoring), address, limits)
        lines.append(f"serving {', '.join(places)} at {server.url}/v1")
        made = address.token != options.token
        yield server, lines + ([f"token: {address.token}"] if made else [])
    finally:
        models.close()
