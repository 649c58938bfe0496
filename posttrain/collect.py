"""Where steps come from: examples drawn from a data set, or rollouts that the policy makes and a task scores."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch

from posttrain.algorithms.base import Algorithm, State
from posttrain.data.chat import render_prompt
from posttrain.data.curriculum import CurriculumState
from posttrain.data.stream import Mixture, Stream
from posttrain.data.text import Decoder
from posttrain.engine.random import derive
from posttrain.events import Events
from posttrain.scoring import Workers, score_group
from posttrain.tasks.base import Task
from posttrain.train.pack import pack_examples, pack_groups
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
    Rollout,
    Sampler,
    Sampling,
    Score,
    Segment,
)

Item = Example | tuple[Example, ...]
MAX_ROUNDS = 4  # how often a step may ask for more groups before it goes on with what it has
MAX_SECONDS = 1800.0  # a step that has sampled for so long does not ask again
# words by which a model doubts what it wrote: R1-Zero's "aha"
REFLECTION = re.compile(
    r"\b(?:wait|hmm+|mistake|(?:re|double)-?check|let me (?:check|verify|re-?\w+)|on second thought)\b",
    re.I,
)


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """The material of one step."""

    batch: Batch
    groups: tuple[Group, ...] = ()
    metrics: tuple[Metric, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)


class Examples:
    """Steps of `batch` examples each, in an order that a seed decides. Several sets are mixed by weight. An item of a set may be
    a unit of several examples: a pair, a ranking."""

    def __init__(
        self,
        sets: Sequence[Sequence[Item]],
        weights: Sequence[float],
        batch: int,
        seed: int,
        device: torch.device,
    ):
        self.sets, self.batch, self.device = sets, batch, device
        self.mixture = Mixture(
            weights, [Stream(len(s), derive(seed, n) >> 1) for n, s in enumerate(sets)], seed
        )

    def collect(self, step: int, algorithm: Algorithm, state: State) -> Collected:
        drawn = [self.sets[source][index] for source, index in self.mixture.take(self.batch)]
        units = [item if isinstance(item, tuple) else (item,) for item in drawn]
        batch = pack_examples(
            [replace(e, unit=n) for n, unit in enumerate(units) for e in unit], self.device
        )
        return Collected(batch, metrics=(Metric("length", batch.tokens, batch.sequences),))

    def observe(self, groups: Sequence[Group]) -> None:
        pass

    def state(self) -> JSON:
        return self.mixture.state()

    def restore(self, state: JSON) -> None:
        self.mixture.restore(state)


class Rollouts:
    """Steps of `prompts` groups each: problems drawn by a curriculum, answered by a sampler, scored by the task."""

    def __init__(
        self,
        task: Task,
        sampler: Sampler,
        tokenizer: object,
        curriculum_state: CurriculumState,
        prompts: int,
        sampling: Sampling,
        seed: int,
        device: torch.device,
        rating: Rating | None = None,
        events: Events | None = None,
    ):
        self.rating, self.events = rating, events or Events()
        self.task, self.sampler, self.tokenizer, self.curriculum_state = (
            task,
            sampler,
            tokenizer,
            curriculum_state,
        )
        self.prompts, self.sampling, self.seed, self.device = prompts, sampling, seed, device
        self.decoder = Decoder(tokenizer)
        self.problems = {level: task.problems("train", level) for level in task.levels}
        self.reported: set[str] = set()  # kinds of failures, each of which is a message once
        for text in task.ready():
            self.events.emit("message", text)

    def collect(self, step: int, algorithm: Algorithm, state: State) -> Collected:
        """Draw, sample, score; let the algorithm select, and ask again while it wants more."""
        seconds = {"generate": 0.0, "score": 0.0}
        groups: list[Group] = []
        began = time.monotonic()
        wanted = self.prompts
        for attempt in range(MAX_ROUNDS):
            problems = [
                self.problems[level][index] for level, index in self.curriculum_state.draw(wanted)
            ]
            fresh = rollout_groups(
                self.task,
                self.sampler,
                self.tokenizer,
                self.decoder,
                problems,
                algorithm.group_size,
                self.sampling,
                derive(self.seed, step, attempt),
                seconds,
            )
            groups += fresh if self.rating is None else rate_groups(self.rating, fresh, seconds)
            self.mention_steps(algorithm, groups)
            selection = algorithm.select(groups, state)
            wanted = min(
                selection.refill, self.prompts - len(selection.groups)
            )  # never more than are missing
            if wanted <= 0 or time.monotonic() - began > MAX_SECONDS:
                break
        together = algorithm.unit in ("pair", "ranking")
        batch = pack_groups(
            selection.groups or groups[:1], self.sampling.temperature, self.device, together
        )
        if (
            not selection.groups
        ):  # nothing to learn from: a step in which nothing is valid has no loss and is skipped
            batch = batch.replace(valid_N=torch.zeros_like(batch.valid_N))
        batch = batch.replace(
            rollout_N=torch.tensor(
                places(groups, selection.groups or groups[:1]), device=self.device
            )
        )
        metrics = (
            *selection.metrics,
            *group_metrics(groups),
            Metric("level", self.curriculum_state.level, 1),
        )
        if (
            failed := self.sampler.statistics.failed_workers
        ):  # their work was done here, more slowly
            metrics += (Metric("failed_workers", failed, None),)
        return Collected(batch, tuple(groups), metrics, seconds)

    def mention_steps(self, algorithm: Algorithm, groups: Sequence[Group]) -> None:
        """Say once that there are values of steps which are not learned from."""
        if (
            not algorithm.learns_steps
            and "steps" not in self.reported
            and any(r.score.steps for g in groups for r in g.rollouts)
        ):
            self.reported.add("steps")
            advice = "set" if hasattr(algorithm, "supervision") else "use grpo, gspo or ppo with"
            self.events.emit(
                "message",
                f"the reward scores steps, and {algorithm.name} learns from the score of the whole response "
                f"alone; {advice} supervision=process to learn from the steps",
                "warning",
            )

    def observe(self, groups: Sequence[Group]) -> None:
        """Update the curriculum with the results of a step, and report each kind of failure once."""
        for group in groups:
            solved = [float(r.score.solved) for r in group.rollouts if r.score.valid]
            if solved and self.curriculum_state.observe(
                group.problem.level, sum(solved) / len(solved)
            ):
                self.events.emit("curriculum", f"level {self.curriculum_state.level} opens")
        for rollout in (r for group in groups for r in group.rollouts if not r.score.valid):
            kind = failure_kind(rollout.score)
            if kind not in self.reported:
                self.reported.add(kind)
                self.events.emit(
                    "message",
                    f"could not be scored: {rollout.score.failure} (problem {rollout.problem.id}, response "
                    f"{rollout.response[:80]!r}); others of this kind are counted as failed/{kind}",
                    "warning",
                )

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


def generate_groups(
    sampler: Sampler, prompts: Sequence[Prompt]
) -> Generator[tuple[Completion, ...], None, None]:
    """The samples of each prompt, in order, each group as soon as it and those before it are complete."""
    drawn = [(n, sample) for n, prompt in enumerate(prompts) for sample in range(prompt.samples)]
    completions = generate(
        sampler,
        [
            Request(
                prompts[n].ids,
                derive(prompts[n].seed, sample),
                prompts[n].sampling,
                session,
                group=n,
            )
            for session, (n, sample) in enumerate(drawn)
        ],
    )
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


def rollout_groups(
    task: Task,
    sampler: Sampler,
    tokenizer: object,
    decoder: Decoder,
    problems: Sequence[Problem],
    group: int,
    sampling: Sampling,
    seed: int,
    seconds: dict[str, float] | None = None,
) -> list[Group]:
    """Sample `group` responses to each problem and score them. Randomness belongs to (seed, problem's place, sample). The time it took
    is added to `seconds`.

    Rewards of an `isolated` task are computed in worker processes while later groups are still being written.
    """
    began, problems = (
        time.perf_counter(),
        list(problems),
    )  # a lazy sequence would make each of them anew
    prompts = [render_prompt(tokenizer, task.prompt(p), f"problem {p.id}") for p in problems]
    asked = [Prompt(ids, group, derive(seed, n), sampling) for n, ids in enumerate(prompts)]
    written: list[list[tuple[Segment, Segment]]] = []
    scores: list[Sequence[Score] | None] = []  # of each problem; None while workers have it
    scoring = 0.0
    with Workers(task, seconds=task.seconds, problems=problems) as workers:
        for problem, prompt, completions in zip(
            problems, asked, generate_groups(sampler, asked), strict=True
        ):
            now = time.perf_counter()
            written.append(segments(decoder, prompt.ids, completions))
            responses = [response.text for _, response in written[-1]]
            if task.isolates(problem):
                workers.submit(problem, responses)
                scores.append(None)
            else:
                scores.append(score_group(task, problem, responses))
            scoring += time.perf_counter() - now
        now = time.perf_counter()
        late = iter(workers.results())
        scoring += time.perf_counter() - now
    if seconds is not None:
        seconds["score"] += scoring
        seconds["generate"] += time.perf_counter() - began - scoring
    groups = []
    for problem, members, found in zip(problems, written, scores, strict=True):
        given = late if found is None else iter(found)
        groups.append(
            Group(
                problem,
                tuple(Rollout(problem, n, parts, next(given)) for n, parts in enumerate(members)),
            )
        )
    return groups


def segments(
    decoder: Decoder, prompt_ids: Sequence[int], completions: Sequence[Completion]
) -> list[tuple[Segment, Segment]]:
    """Prompt and response of each sample, with their text."""
    prompt_text, offsets = decoder.decode(prompt_ids)
    prompt = Segment(
        np.array(prompt_ids, dtype=np.int64), prompt_text, sampled=False, offsets=offsets
    )
    pairs = []
    for completion in completions:
        text, offsets = decoder.decode(completion.ids)
        pairs.append(
            (
                prompt,
                Segment(
                    completion.ids,
                    text,
                    True,
                    completion.logprobs,
                    offsets,
                    completion.versions,
                    completion.finish,
                ),
            )
        )
    return pairs


def rate_groups(
    rating: Rating, groups: Sequence[Group], seconds: dict[str, float] | None = None
) -> list[Group]:
    """Groups as a model rates them. What the task itself says stays beside it as the part `task`: the proxy and the gold."""
    began = time.perf_counter()
    scores = iter(rating.rate([r for g in groups for r in g.rollouts]))
    rated = []
    for group in groups:
        members = []
        for rollout in group.rollouts:
            score, gold = next(scores), rollout.score
            parts = {**score.parts} if gold.value is None else {**score.parts, "task": gold.value}
            members.append(
                replace(
                    rollout,
                    score=replace(score, parts=parts, outcome=score.outcome or gold.outcome),
                )
            )
        rated.append(Group(group.problem, tuple(members)))
    if seconds is not None:
        seconds["score"] += time.perf_counter() - began
    return rated


def failure_kind(score: Score) -> str:
    """The class of a failure, as a column's name: what stands before the first colon.

    >>> failure_kind(Score.failed("ValueError: no such file")), failure_kind(Score.failed("timeout: no score within 5 s"))
    ('ValueError', 'timeout')
    """
    words = str(score.failure).split(":")[0].split()
    return "_".join(words)[:40] or "unnamed"


def group_metrics(groups: Sequence[Group]) -> tuple[Metric, ...]:
    """What a step's rollouts look like: reward and its parts, length, truncation, failures."""
    rollouts = [r for g in groups for r in g.rollouts]
    scored = [r for r in rollouts if r.score.value is not None]
    tokens = sum(r.length for r in rollouts)
    metrics = [
        Metric(
            "reward", sum(r.score.value for r in scored if r.score.value is not None), len(scored)
        ),
        Metric("length", sum(r.length for r in rollouts), len(rollouts)),
        # the mean of -log p over what was sampled is an unbiased estimate of the entropy per token
        Metric(
            "entropy",
            -sum(
                float(s.logprobs.sum())
                for r in rollouts
                for s in r.segments
                if s.logprobs is not None
            ),
            tokens,
        ),
        Metric("truncated", sum(r.finish == "length" for r in rollouts), len(rollouts)),
        Metric("failed", len(rollouts) - len(scored), len(rollouts)),
        Metric(
            "reflection", sum(bool(REFLECTION.search(r.response)) for r in rollouts), len(rollouts)
        ),
    ]
    kinds = Counter(failure_kind(r.score) for r in rollouts if not r.score.valid)
    metrics += [
        Metric(f"failed/{kind}", count, len(rollouts)) for kind, count in sorted(kinds.items())
    ]
    for part in sorted({name for r in scored for name in r.score.parts}):
        values = [r.score.parts[part] for r in scored if part in r.score.parts]
        metrics.append(Metric(f"reward/{part}", sum(values), len(values)))
    return tuple(metrics)
