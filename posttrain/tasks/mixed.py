"""Several tasks as one: problems of each in fixed shares; the task of a problem scores its responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from posttrain.errors import UserError, require
from posttrain.rewards._functions import then
from posttrain.rewards.compose import as_score
from posttrain.tasks._procedural import Procedural, require_split
from posttrain.tasks.base import Generate, Task
from posttrain.types import Problem, Rollout, Score


@dataclass(frozen=True, kw_only=True)
class Source:
    """A task with its name in the mixture. Of every block of sum(weights) problems, `weight` come from it."""

    name: str
    task: Task
    weight: int = 1


def _of_source(name: str) -> Any:
    """Make a method that calls the method `name` of the task that a problem came from."""

    def method(self: Mixed, problem: Problem) -> Any:
        source, own = self.source(problem)
        return getattr(source.task, name)(own)

    return method


@dataclass(frozen=True)
class Mixed(Task):
    """A problem's id is the source's name and the id in its own task, as in `sums/train/2/7`. Scores keep their parts and get
    one more, named like the source, with the value: a curve for each. Groups compare responses of one source only.

    Each source gives problems of its target level; there is no curriculum over a mixture.
    """

    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        example = "{name: sums, task: {name: arithmetic}}"
        require(names, f"mixed: give at least one source, such as {example}")
        different = len(set(names)) == len(names)
        require(different, f"mixed: sources need different names: {', '.join(names)}")
        for name, weight in zip(names, self._weights, strict=True):
            fine = bool(name) and "/" not in name
            require(fine, f"mixed: {name!r} is no name of a source: it may not hold '/'")
            require(weight > 0, f"mixed: the weight of {name} must be positive, not {weight}")

    @property
    def _weights(self) -> list[int]:
        return [source.weight for source in self.sources]

    @property
    def alphabet(self) -> str | None:
        """Return all characters of the sources; None if one does not declare its own."""
        inner = [getattr(source.task, "alphabet", None) for source in self.sources]
        known = [each for each in inner if each is not None]
        return "".join(sorted(set("".join(known)))) if len(known) == len(inner) else None

    def problems(self, split: str, level: int | None = None) -> Procedural:
        """Return blocks of sum(weights) problems, each with its share of every source, until the shortest source ends."""
        require_split(split)
        inner = tuple(source.task.problems(split) for source in self.sources)
        blocks = min(len(own) // weight for own, weight in zip(inner, self._weights, strict=True))
        return Procedural(partial(self._problem, inner), range(blocks * sum(self._weights)))

    def _problem(self, inner: tuple[Sequence[Problem], ...], index: int) -> Problem:
        block, place = divmod(index, sum(self._weights))
        for source, problems in zip(self.sources, inner, strict=True):
            if place < source.weight:
                found = problems[block * source.weight + place]
                return replace(found, id=f"{source.name}/{found.id}")
            place -= source.weight
        raise AssertionError(f"problem {index} of a mixture belongs to no source")

    def source(self, problem: Problem) -> tuple[Source, Problem]:
        """Return the source of a problem, and its problem there."""
        name, _, own = problem.id.partition("/")
        for source in self.sources:
            if source.name == name:
                return source, replace(problem, id=own)
        known = ", ".join(source.name for source in self.sources)
        raise UserError(f"mixed: problem {problem.id} comes from none of {known}")

    prompt = _of_source("prompt")
    demonstration = _of_source("demonstration")
    limits = _of_source("limits")
    isolates = _of_source("isolates")
    isolates_run = _of_source("isolates_run")

    async def run(self, problem: Problem, generate: Generate) -> Rollout | Sequence[Rollout]:
        source, own = self.source(problem)
        made = await source.task.run(own, generate)
        rollouts = [made] if isinstance(made, Rollout) else made
        return [replace(r, score=_named(source.name, r.score)) for r in rollouts]

    def score(self, problem: Problem, response: str) -> Score:
        source, own = self.source(problem)
        found = [source.task.score(own, response)]  # a coroutine, if a user's reward is one
        return then(found, lambda scores: _named(source.name, scores[0]))  # type: ignore[no-any-return]

    def score_group(self, problem: Problem, responses: Sequence[str]) -> Sequence[Score] | None:
        source, own = self.source(problem)
        name, found = source.name, source.task.score_group(own, responses)
        return found and then([found], lambda groups: [_named(name, score) for score in groups[0]])

    def ready(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line for source in self.sources for line in source.task.ready()))

    def observation_roles(self, template: str) -> tuple[str, ...]:
        roles = (role for s in self.sources for role in s.task.observation_roles(template))
        return tuple(dict.fromkeys(roles))

    def tags(self, template: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tag for s in self.sources for tag in s.task.tags(template)))

    @property
    def resettable(self) -> bool:
        return all(source.task.resettable for source in self.sources)

    @property
    def isolated(self) -> bool:
        return any(source.task.isolated for source in self.sources)

    @property
    def seconds(self) -> float:
        return max(source.task.seconds for source in self.sources)


def _named(name: str, score: Score) -> Score:
    score = as_score(score)  # a user's task may return a number
    if score.value is None:
        return score
    return replace(score, parts={**score.parts, name: score.value})
