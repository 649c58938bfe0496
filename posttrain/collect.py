"""Where steps come from: examples drawn from a data set, or rollouts that the policy makes and a task scores."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from posttrain.algorithms.base import Algorithm, State
from posttrain.data.curriculum import CurriculumState
from posttrain.data.rendering import Renderer
from posttrain.data.stream import Mixture, Stream
from posttrain.data.text import Decoder
from posttrain.engine.random import derive
from posttrain.episodes import EPISODE_FAILED, rollout_groups
from posttrain.events import Events
from posttrain.runs.metrics import failure_kind
from posttrain.system.workers import WorkerPool
from posttrain.system.world import current
from posttrain.tasks._rollouts import score_row
from posttrain.tasks.base import Task
from posttrain.train.pack import pack_examples, pack_groups
from posttrain.turns import Seconds
from posttrain.types import (
    JSON,
    Batch,
    Completion,
    Example,
    Group,
    Metric,
    Problem,
    Rating,
    Request,
    Sampler,
    Sampling,
    Score,
)

Item = Example | tuple[Example, ...]
MAX_ROUNDS = 4  # how often a step may ask for more groups before it goes on with what it has
MAX_SECONDS = 1800.0  # a step that has sampled for so long does not ask again


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """The material of one step. `metrics` are those of collecting; the loop measures the groups while the device trains."""

    batch: Batch
    groups: tuple[Group, ...] = ()
    metrics: tuple[Metric, ...] = ()


class Source:
    """Where the batch of a step comes from. `models` are the frozen ones that score, for a checkpoint to name them by their weights."""

    order: Mixture | Stream  # what decides the order, which a checkpoint keeps

    @property
    def models(self) -> Sequence[torch.nn.Module]:
        return ()

    def collect(self, step: int, algorithm: Algorithm, state: State) -> Collected:
        raise NotImplementedError

    def observe(self, groups: Sequence[Group]) -> None:
        """See what became of a step."""

    def look_ahead(self) -> None:
        """Make what the next step is going to need, while the device is at work; nothing is decided by it."""

    def state(self) -> JSON:
        return self.order.state()

    def restore(self, state: JSON) -> None:
        self.order.restore(state)


@dataclass(eq=False)
class Examples(Source):
    """Steps of `batch` examples each, in an order that a seed decides. Several sets are mixed by weight. An item of a set may be
    a unit of several examples: a pair, a ranking."""

    sets: Sequence[Sequence[Item]]
    weights: Sequence[float]
    batch: int
    seed: int
    device: torch.device
    order: Mixture = field(init=False)

    def __post_init__(self) -> None:
        streams = [Stream(len(s), derive(self.seed, n) >> 1) for n, s in enumerate(self.sets)]
        self.order = Mixture(self.weights, streams, self.seed)

    def collect(self, step: int, algorithm: Algorithm, state: State) -> Collected:
        batch = self.draw(together=algorithm.unit != "sequence")
        return Collected(batch, metrics=(Metric("length", batch.tokens, batch.sequences),))

    def draw(self, together: bool) -> Batch:
        """The next batch; with `together` the examples of an item are not cut apart."""
        drawn = [self.sets[source][index] for source, index in self.order.take(self.batch)]
        units = [item if isinstance(item, tuple) else (item,) for item in drawn]
        examples = [replace(e, unit=n) for n, unit in enumerate(units) for e in unit]
        return pack_examples(examples, self.device, together)


@dataclass(eq=False)
class SavedGroups(Source):
    """Steps of `batch` groups that were sampled and scored before, in an order that a seed decides. `logprobs` fills in for a sampler
    whose log-probs are not known: those of the policy as the step begins."""

    groups: Sequence[Group]
    batch: int
    seed: int
    temperature: float
    device: torch.device
    logprobs: Callable[[Batch], torch.Tensor] | None
    order: Stream = field(init=False)

    def __post_init__(self) -> None:
        self.order = Stream(len(self.groups), derive(self.seed) >> 1)

    def collect(self, step: int, algorithm: Algorithm, state: State) -> Collected:
        """The next groups; there are no others for an algorithm that asks for more."""
        drawn = [self.groups[n] for n in self.order.take(self.batch)]
        selection = algorithm.select(drawn, state)
        together = algorithm.unit != "sequence"
        packed = (self.temperature, self.device, together, algorithm.learns_parts)
        batch = pack_groups(selection.groups, *packed)
        if self.logprobs is not None and batch.sequences:
            batch = batch.replace(behaviour_T=self.logprobs(batch).where(batch.mask_T, 0.0))
        rewards = [value for group in drawn for value in group.rewards]
        reward = Metric("reward", sum(rewards), len(rewards))
        # what another policy sampled is meant to differ from what the trainer computes
        batch = batch.replace(stale_T=batch.mask_T)
        return Collected(batch, metrics=(*selection.metrics, reward))


@dataclass(eq=False)
class Rollouts(Source):
    """Steps of `prompts` groups each: problems drawn by a curriculum, answered by a sampler, scored by the task."""

    task: Task
    sampler: Sampler
    tokenizer: object
    curriculum_state: CurriculumState
    prompts: int
    sampling: Sampling
    seed: int
    device: torch.device
    rating: Rating | None = None
    events: Events = field(default_factory=Events)
    workers: WorkerPool | None = None
    # by level; those of the task, unless others are given
    problems: Mapping[int, Sequence[Problem]] = field(default_factory=dict)
    # kinds of failures, each of which is a message once
    reported: set[str] = field(default_factory=set, init=False)
    # prompts that were rendered ahead, and of which levels and indices
    looked_ahead: tuple[list[tuple[int, int]], Renderer | None] = field(
        default=([], None), init=False
    )

    def __post_init__(self) -> None:
        task, self.decoder = self.task, Decoder(self.tokenizer)
        self.problems = self.problems or {n: task.problems("train", n) for n in task.levels}
        for text in task.ready():
            self.events.emit("message", text)

    @property
    def models(self) -> Sequence[torch.nn.Module]:
        return () if self.rating is None else self.rating.models

    def collect(self, step: int, algorithm: Algorithm, state: State) -> Collected:
        """Draw, sample, score; let the algorithm select, and ask again while it wants more."""
        seconds = Seconds()
        groups: list[Group] = []
        began = time.monotonic()
        wanted = self.prompts
        for attempt in range(MAX_ROUNDS):
            samples = algorithm.samples(self.sampling)
            fresh = self.fresh(step, attempt, wanted, samples, seconds)
            groups += fresh if self.rating is None else rate_groups(self.rating, fresh, seconds)
            self.mention_steps(algorithm, groups)
            selection = algorithm.select(groups, state)
            # never more than are missing; a problem has one group of each role
            kept = max(Counter(g.role for g in selection.groups).values(), default=0)
            wanted = min(selection.refill, self.prompts - kept)
            late = wanted > 0 and current().any(time.monotonic() - began > MAX_SECONDS)
            if wanted <= 0 or late:
                break
        together = algorithm.unit != "sequence"
        packed = (self.sampling.temperature, self.device, together, algorithm.learns_parts)
        batch = pack_groups(selection.groups, *packed)
        numbers = torch.tensor(places(groups, selection.groups), dtype=torch.int64)
        batch = batch.replace(rollout_N=numbers.to(self.device))
        level = Metric("level", self.curriculum_state.level, 1)
        metrics = (*selection.metrics, *seconds.metrics(), level)
        # their work was done here, more slowly
        if failed := self.sampler.statistics.failed_workers:
            metrics += (Metric("failed_workers", failed, None),)
        return Collected(batch, tuple(groups), metrics)

    def fresh(
        self, step: int, attempt: int, wanted: int, samples: Sequence[Sampling], seconds: Seconds
    ) -> Sequence[Group]:
        """The groups of `wanted` problems, an episode of each for each of `samples`, scored by the task."""
        drawn = self.curriculum_state.draw(wanted)
        problems = [self.problems[level][index] for level, index in drawn]
        asked = (problems, len(samples), samples, derive(self.seed, step, attempt))
        places, renderer = self.looked_ahead
        how = (self.workers, seconds, self.ordered, renderer if places == drawn else None)
        return rollout_groups(self.task, self.sampler, self.decoder, *asked, *how)

    def look_ahead(self) -> None:
        """Render the prompts of the problems that come next, if the curriculum does not move before: what is drawn then decides."""
        if type(self.task).run is not Task.run:
            return
        before = self.curriculum_state.state()
        drawn = self.curriculum_state.draw(self.prompts)
        self.curriculum_state.restore(before)
        own = current().share(len(drawn))
        with suppress(Exception):  # the step that asks for the prompt says what is wrong with it
            problems = [self.problems[level][index] for level, index in drawn[own.start : own.stop]]
            made = Renderer(self.decoder, problems, self.task.prompt, at_once=True)
            made.prompt(0)
            self.looked_ahead = drawn, made

    @property
    def ordered(self) -> bool:
        """Whether what is sampled may not depend on how long anything took."""
        return self.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()

    def publish(self, version: int) -> None:
        """Have the sampler use the trainer's weights as they are now."""
        self.sampler.publish(version)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """While this lasts, others may use the sampler, the task and its workers."""
        yield

    def close(self) -> None:
        """End what goes on by itself."""

    def mention_steps(self, algorithm: Algorithm, groups: Sequence[Group]) -> None:
        """Say once that there are values of steps which are not learned from."""
        said = algorithm.learns_steps or "steps" in self.reported
        if not said and any(r.score.steps for g in groups for r in g.rollouts):
            self.reported.add("steps")
            text = f"the reward scores steps, and {algorithm.name} learns from the score of the whole response alone"
            advice = "supervision=process of grpo, gspo and ppo learns from the steps"
            self.events.emit("message", f"{text}; {advice}", "warning")

    def observe(self, groups: Sequence[Group]) -> None:
        """Update the curriculum with the results of a step, and report each kind of failure once."""
        for group in groups:
            solved = [float(r.score.solved) for r in group.rollouts if r.score.valid]
            share = sum(solved) / max(1, len(solved))
            if solved and self.curriculum_state.observe(group.problem.level, share):
                self.events.emit("curriculum", f"level {self.curriculum_state.level} opens")
        for rollout in (r for group in groups for r in group.rollouts if not r.score.valid):
            kind = failure_kind(rollout.score)
            if kind not in self.reported:
                self.reported.add(kind)
                which = f"(problem {rollout.problem.id}, response {rollout.response[:80]!r})"
                text = f"could not be scored: {rollout.score.failure} {which}"
                others = f"others of this kind are counted as failed/{kind}"
                self.events.emit("message", f"{text}; {others}", "warning")

    def state(self) -> JSON:
        return self.curriculum_state.state()

    def restore(self, state: JSON) -> None:
        self.curriculum_state.restore(state)


def generate(sampler: Sampler, requests: Sequence[Request]) -> Generator[Completion, None, None]:
    """Submit all requests and yield their completions in the order of the requests, each as soon as those before it are there. What
    is not finished when the caller stops is cancelled. Nobody else may use the sampler meanwhile."""
    place = {(request.session, request.turn): n for n, request in enumerate(requests)}
    finished: dict[int, Completion] = {}
    answered = received = 0
    sampler.submit(requests)
    try:
        while answered < len(requests):
            for request, completion in sampler.poll():
                finished[place[request.session, request.turn]] = completion
                received += 1
            while answered in finished:
                yield finished.pop(answered)
                answered += 1
    finally:
        if received < len(requests):
            sampler.cancel({request.session for request in requests})


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and how many samples of it. Randomness belongs to (seed, sample)."""

    ids: tuple[int, ...]
    samples: int
    seed: int
    sampling: Sampling


def group_requests(prompts: Sequence[Prompt]) -> list[Request]:
    """A request for each sample of each prompt; sessions are numbered from 0."""
    drawn = [(n, sample) for n, prompt in enumerate(prompts) for sample in range(prompt.samples)]

    def request(session: int, n: int, sample: int) -> Request:
        prompt = prompts[n]
        return Request(prompt.ids, derive(prompt.seed, sample), prompt.sampling, session, group=n)

    return [request(session, *which) for session, which in enumerate(drawn)]


def generate_groups(
    sampler: Sampler, prompts: Sequence[Prompt]
) -> Generator[tuple[Completion, ...], None, None]:
    """The samples of each prompt, in order, each group as soon as it and those before it are complete."""
    completions = generate(sampler, group_requests(prompts))
    try:
        for prompt in prompts:
            yield tuple(islice(completions, prompt.samples))
    finally:
        completions.close()


def places(groups: Sequence[Group], selected: Sequence[Group]) -> list[int]:
    """Which of all the rollouts each selected one is. An algorithm may reorder them and score them anew; their segments stay."""
    number = {
        id(rollout.segments): n
        for n, rollout in enumerate(r for group in groups for r in group.rollouts)
    }
    return [number[id(rollout.segments)] for group in selected for rollout in group.rollouts]


def rate_groups(
    rating: Rating, groups: Sequence[Group], seconds: Seconds | None = None
) -> list[Group]:
    """Groups as a model rates them. What the task itself says stays in the part `task`: the proxy and the gold. An episode that
    failed stays without a score. Several processes rate their share each."""
    began, world = time.perf_counter(), current()
    rated = [r for g in groups for r in g.rollouts if r.score.outcome != EPISODE_FAILED]
    if world.size == 1:
        found_scores = list(rating.rate(rated))
    else:
        own = rating.rate([rated[n] for n in world.share(len(rated))])
        gathered = world.gather([score_row(score) for score in own])
        found_scores = [Score(*row) for rows in gathered for row in rows]
    scores = dict(zip(map(id, rated), found_scores, strict=True))
    found = []
    for group in groups:
        members = []
        for rollout in group.rollouts:
            gold, score = rollout.score, scores.get(id(rollout))
            if score is not None:
                parts = {} if gold.value is None else {"task": gold.value}
                merged = {**score.parts, **parts}
                outcome = score.outcome or gold.outcome
                # what turns were paid is a part of every return
                value = None if score.value is None else score.value + rollout.paid
                score = replace(score, value=value, parts=merged, outcome=outcome)
                rollout = replace(rollout, score=score)
            members.append(rollout)
        found.append(replace(group, rollouts=tuple(members)))
    if seconds is not None:
        seconds.score += time.perf_counter() - began
    return found
