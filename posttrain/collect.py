"""Collects the material of each step: examples from a data set, saved groups, or rollouts that are sampled and scored."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from posttrain import types
from posttrain.algorithms.base import Algorithm, State
from posttrain.branches import Continued, value_steps
from posttrain.data.curriculum import CurriculumState
from posttrain.data.rendering import Renderer
from posttrain.data.stream import Mixture, Stream
from posttrain.data.text import Decoder
from posttrain.engine.random import derive, derive_each
from posttrain.episodes import EPISODE_FAILED, rollout_groups
from posttrain.events import Events
from posttrain.runs.metrics import failure_kind
from posttrain.system.workers import WorkerPool
from posttrain.system.world import current
from posttrain.tasks._rollouts import score_row
from posttrain.tasks.base import Task
from posttrain.train.pack import pack_examples, pack_groups
from posttrain.turns import Seconds
from posttrain.types import JSON, Batch, Completion, Group, Metric, Request, Sampler, Sampling

Item = types.Example | tuple[types.Example, ...]
MAX_ROUNDS = 4  # of sampling in a step; then it trains on the groups that it has
MAX_SECONDS = 1800.0  # after this long a step starts no further round of sampling


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """The material of one step. `metrics` are about collecting; the loop computes those of the groups while the device trains."""

    batch: Batch
    groups: tuple[Group, ...] = ()
    metrics: tuple[Metric, ...] = ()


class Source:
    """Collects the batch of each step."""

    # the order of the items; checkpoints save its state
    order: Mixture | Stream | CurriculumState

    @property
    def models(self) -> Sequence[torch.nn.Module]:
        """The frozen models that score; a checkpoint records a checksum of their weights."""
        return ()

    def collect(self, step: int, algorithm: Algorithm, state: State) -> Collected:
        raise NotImplementedError

    def observe(self, groups: Sequence[Group]) -> None:
        """Called with the groups of a step after its update."""

    def look_ahead(self) -> None:
        """Prepare for the next step while the device computes. This may save time, but changes no result."""

    def state(self) -> JSON:
        return self.order.state()

    def restore(self, state: JSON) -> None:
        self.order.restore(state)


@dataclass(eq=False)
class Examples(Source):
    """Draws `batch` items a step, in an order given by the seed. Several sets are mixed by weight. An item may consist of several
    examples: a pair, a ranking."""

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
        """Draw the next batch. With `together`, micro-batches keep the examples of an item together."""
        drawn = [self.sets[source][index] for source, index in self.order.take(self.batch)]
        units = [item if isinstance(item, tuple) else (item,) for item in drawn]
        examples = [replace(e, unit=n) for n, unit in enumerate(units) for e in unit]
        return pack_examples(examples, self.device, together)


@dataclass(eq=False)
class SavedGroups(Source):
    """Draws `batch` groups a step that were sampled and scored earlier, in an order given by the seed. Where the sampler's log-probs
    are unknown, `logprobs` computes those of the policy at the start of the step in their place."""

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
        """Draw the next groups. A request to refill is ignored, because nothing is sampled here."""
        drawn = [self.groups[n] for n in self.order.take(self.batch)]
        selection = algorithm.select(drawn, state)
        batch = pack_selection(selection, algorithm, self.temperature, self.device)
        if self.logprobs is not None and batch.sequences:
            batch = batch.replace(behaviour_T=self.logprobs(batch).where(batch.mask_T, 0.0))
        rewards = [value for group in drawn for value in group.rewards]
        reward = Metric("reward", sum(rewards), len(rewards))
        # another policy sampled these tokens: its log-probs are expected to differ from the trainer's
        batch = batch.replace(stale_T=batch.mask_T)
        return Collected(batch, metrics=(*selection.metrics, reward))


@dataclass(eq=False)
class Rollouts(Source):
    """Samples `prompts` groups a step: the curriculum draws problems, the sampler answers them, the task scores the answers."""

    task: Task
    sampler: Sampler
    tokenizer: object
    curriculum_state: CurriculumState
    prompts: int
    sampling: Sampling
    seed: int
    device: torch.device
    rating: types.Rating | None = None
    events: Events = field(default_factory=Events)
    workers: WorkerPool | None = None
    # by level; default: the task's
    problems: Mapping[int, Sequence[types.Problem]] = field(default_factory=dict)
    # kinds of failures that were reported; each is reported once
    reported: set[str] = field(default_factory=set, init=False)
    # (level, index) of the problems whose prompts are rendered already, and the prompts
    looked_ahead: tuple[list[tuple[int, int]], Renderer | None] = field(
        default=([], None), init=False
    )

    def __post_init__(self) -> None:
        task, self.decoder, self.order = self.task, Decoder(self.tokenizer), self.curriculum_state
        self.problems = self.problems or {n: task.problems("train", n) for n in task.levels}
        for text in task.ready():
            self.events.emit("message", text)

    @property
    def models(self) -> Sequence[torch.nn.Module]:
        return () if self.rating is None else self.rating.models

    def collect(self, step: int, algorithm: Algorithm, state: State) -> Collected:
        """Draw problems, sample and score. Repeat while the algorithm's selection asks for more groups."""
        seconds = Seconds()
        groups: list[Group] = []
        more: tuple[Metric, ...] = ()
        began = time.monotonic()
        wanted = self.prompts
        for attempt in range(MAX_ROUNDS):
            samples = algorithm.samples(self.sampling)
            fresh = self.sample_groups(step, attempt, wanted, samples, seconds)
            fresh = fresh if self.rating is None else rate_groups(self.rating, fresh, seconds)
            if algorithm.branches.completions:
                seed = derive(self.seed, step, attempt, 1)
                fresh, completions = self.value_steps(fresh, algorithm, seed, seconds)
                more += (Metric("completions", completions, None),)
            groups += fresh
            self.warn_unused_steps(algorithm, groups)
            selection = algorithm.made("select", algorithm.select(groups, state), types.Selection)
            # at most the missing ones; a problem has one group for each role
            kept = max(Counter(g.role for g in selection.groups).values(), default=0)
            wanted = min(selection.refill, self.prompts - kept)
            late = wanted > 0 and current().any(time.monotonic() - began > MAX_SECONDS)
            if wanted <= 0 or late:
                break
        batch = pack_selection(selection, algorithm, self.sampling.temperature, self.device)
        numbers = torch.tensor(rollout_indices(groups, selection.groups), dtype=torch.int64)
        batch = batch.replace(rollout_N=numbers.to(self.device))
        level = Metric("level", self.curriculum_state.level, 1)
        metrics = (*selection.metrics, *seconds.metrics(), level, *more)
        # other processes took over their work, more slowly
        if failed := self.sampler.statistics.failed_workers:
            metrics += (Metric("failed_workers", failed, None),)
        return Collected(batch, tuple(groups), metrics)

    def sample_groups(
        self, step: int, attempt: int, wanted: int, samples: Sequence[Sampling], seconds: Seconds
    ) -> Sequence[Group]:
        """Draw `wanted` problems, sample each once with each of `samples`, and let the task score the rollouts."""
        drawn = self.curriculum_state.draw(wanted)
        rendered_for, renderer = self.looked_ahead
        return rollout_groups(
            self.task,
            self.sampler,
            self.decoder,
            [self.problems[level][index] for level, index in drawn],
            len(samples),
            samples,
            derive(self.seed, step, attempt),
            workers=self.workers,
            seconds=seconds,
            ordered=self.ordered,
            rendered=renderer if rendered_for == drawn else None,
        )

    def value_steps(
        self, groups: Sequence[Group], algorithm: Algorithm, seed: int, seconds: Seconds
    ) -> tuple[list[Group], int]:
        """The groups with the values of their steps, and how many completions were sampled for these."""
        count, separator, unpaid = algorithm.branches
        task, limit = Continued(self.task), self.sampling.max_new_tokens

        def ask(begun: list[types.Problem]) -> list[Group]:
            own = (task, self.sampler, self.decoder, begun, count, self.sampling, seed)
            return rollout_groups(*own, workers=self.workers, seconds=seconds, ordered=self.ordered)

        made, completed = value_steps(groups, separator, ask, limit, unpaid)
        return made, completed * count

    def look_ahead(self) -> None:
        """Render the prompts of the problems that the curriculum would draw next. `sample_groups` uses them only if it draws the same
        problems: the curriculum may move in between."""
        if type(self.task).run is not Task.run:
            return
        before = self.curriculum_state.state()
        drawn = self.curriculum_state.draw(self.prompts)
        self.curriculum_state.restore(before)
        own = current().share(len(drawn))
        with suppress(Exception):  # the step that needs the prompt raises the error
            problems = [self.problems[level][index] for level, index in drawn[own.start : own.stop]]
            made = Renderer(self.decoder, problems, self.task.prompt, at_once=True)
            made.prompt(0)
            self.looked_ahead = drawn, made

    @property
    def ordered(self) -> bool:
        """Whether samples must not depend on timing."""
        return self.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()

    def publish(self, version: int) -> None:
        """Make the sampler use the trainer's current weights."""
        self.sampler.publish(version)

    @contextmanager
    def drained(self) -> Iterator[None]:
        """Wait for background sampling (here: none) to finish, so that others may use the sampler, the task and its workers."""
        yield

    def close(self) -> None:
        """Stop background sampling. This source has none."""

    def warn_unused_steps(self, algorithm: Algorithm, groups: Sequence[Group]) -> None:
        """Warn once if the reward scores steps and the algorithm ignores these scores."""
        said = algorithm.learns_steps or "steps" in self.reported
        if not said and any(r.score.steps for g in groups for r in g.rollouts):
            self.reported.add("steps")
            text = f"the reward scores steps, and {algorithm.name} learns from the score of the whole response alone"
            advice = "supervision=process of grpo, gspo and ppo learns from the steps"
            self.events.emit("message", f"{text}; {advice}", "warning")

    def observe(self, groups: Sequence[Group]) -> None:
        """Update the curriculum with the scores of a step, and report each kind of failure once."""
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


def generate(sampler: Sampler, requests: Sequence[Request]) -> Generator[Completion, None, None]:
    """Submit all requests and yield their completions in the same order, each as soon as it and those before it are finished. If the
    caller stops early, the rest is cancelled. Nothing else may use the sampler meanwhile."""
    place = {request.session: n for n, request in enumerate(requests)}
    finished: dict[int, Completion] = {}
    answered = received = 0
    sampler.submit(requests)
    try:
        while answered < len(requests):
            for request, completion in sampler.poll():
                finished[place[request.session]] = completion
                received += 1
            while answered in finished:
                yield finished.pop(answered)
                answered += 1
    finally:
        if received < len(requests):
            sampler.cancel({request.session for request in requests})


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and how many samples to draw from it. The randomness of a sample depends on `seed` and its index alone."""

    ids: tuple[int, ...]
    samples: int
    seed: int
    sampling: Sampling


def group_requests(prompts: Sequence[Prompt]) -> list[Request]:
    """Make a request for each sample of each prompt. Sessions are numbered from 0."""
    drawn = [(n, sample) for n, prompt in enumerate(prompts) for sample in range(prompt.samples)]
    seeds = derive_each((prompts[n].seed for n, _ in drawn), (sample for _, sample in drawn))
    return [
        Request(prompts[n].ids, seed, prompts[n].sampling, session, group=n)
        for session, ((n, _), seed) in enumerate(zip(drawn, seeds, strict=True))
    ]


def generate_groups(
    sampler: Sampler, prompts: Sequence[Prompt]
) -> Generator[tuple[Completion, ...], None, None]:
    """Yield the samples of each prompt in order, each group as soon as it and those before it are complete."""
    completions = generate(sampler, group_requests(prompts))
    try:
        for prompt in prompts:
            yield tuple(islice(completions, prompt.samples))
    finally:
        completions.close()


def pack_selection(
    selection: types.Selection, algorithm: Algorithm, temperature: float, device: torch.device
) -> Batch:
    """Pack the selected groups into a batch as the algorithm needs it."""
    together = algorithm.unit != "sequence"
    return pack_groups(selection.groups, temperature, device, together, algorithm.learns_parts)


def rollout_indices(groups: Sequence[Group], selected: Sequence[Group]) -> list[int]:
    """The index of each selected rollout among all rollouts. An algorithm may reorder rollouts and change their scores, but keeps their
    segments, so these identify a rollout."""
    number = {
        id(rollout.segments): n
        for n, rollout in enumerate(r for group in groups for r in group.rollouts)
    }
    return [number[id(rollout.segments)] for group in selected for rollout in group.rollouts]


def rate_groups(
    rating: types.Rating, groups: Sequence[Group], seconds: Seconds | None = None
) -> list[Group]:
    """Replace the scores of groups by those of a model. The task's own score stays as the part `task`, to compare proxy and gold
    reward. A failed episode stays without a score. Each of several processes rates its share."""
    began, world = time.perf_counter(), current()
    rated = [r for g in groups for r in g.rollouts if r.score.outcome != EPISODE_FAILED]
    if world.size == 1:
        found_scores = list(rating.rate(rated))
    else:
        own = rating.rate([rated[n] for n in world.share(len(rated))])
        gathered = world.gather([score_row(score) for score in own])
        found_scores = [types.Score(*row) for rows in gathered for row in rows]
    scores = dict(zip(map(id, rated), found_scores, strict=True))
    found = []
    for group in groups:
        members = []
        for rollout in group.rollouts:
            gold, score = rollout.score, scores.get(id(rollout))
            if score is not None:
                parts = {} if gold.value is None else {"task": gold.value}
                outcome = score.outcome or gold.outcome
                # a return includes the rewards of single turns
                value = None if score.value is None else score.value + rollout.paid
                score = replace(score, value=value, parts={**score.parts, **parts}, outcome=outcome)
                rollout = replace(rollout, score=score)
            members.append(rollout)
        found.append(replace(group, rollouts=tuple(members)))
    if seconds is not None:
        seconds.score += time.perf_counter() - began
    return found
