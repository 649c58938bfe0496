"""Continues answers from the ends of their steps, to estimate what a state is worth: the ids of a prefix are given unchanged, and only
the rest is sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from posttrain.data.steps import Step, steps_of
from posttrain.data.text import Decoder
from posttrain.errors import UserError
from posttrain.tasks._nested import Nested
from posttrain.tasks.base import Generate, Limits, Task
from posttrain.types import Group, Problem, Rollout, Score, Segment

GIVEN, BEGIN, LEFT = "given_ids", "given_begin", "given_left"
Key = tuple[str, bytes]  # of a prefix: its problem, its ids


def beginning(rollout: Rollout, end: int, limit: int = 0) -> Problem:
    """The problem of continuing a one-turn rollout after its first `end` ids, up to `limit` tokens in all (0: those of the sampling
    settings are for the rest)."""
    ids, prompt = rollout.ids[:end], rollout.segments[0]
    left = limit + len(prompt.ids) - end if limit else 0
    given = {GIVEN: ids.tolist(), BEGIN: len(prompt.ids), LEFT: left}
    return replace(rollout.problem, facts={**rollout.problem.facts, **given})


@dataclass(frozen=True)
class Continued(Nested):
    """The task, for problems made by `beginning`."""

    has_episodes = False  # the task's own `run` is not called, so any will do

    task: Task

    @property
    def scorer(self) -> Task:
        return self.task

    def limits(self, problem: Problem) -> Limits:
        # a limit of reasoning only names the outcome of a single turn
        return replace(self.task.limits(problem), thinking=0)

    async def run(self, problem: Problem, generate: Generate) -> Rollout:
        given, begin, left = (problem.facts[key] for key in (GIVEN, BEGIN, LEFT))
        await generate(given, last=True, max_new_tokens=left, written=len(given) - begin)
        return generate.rollout(answer=joined(generate.rollout(), generate.decoder).judged)

    def observation_roles(self, template: str) -> tuple[str, ...]:
        return ()


def complete(
    answers: Iterable[tuple[Rollout, Sequence[Step]]],
    ask: Callable[[list[Problem]], Iterable[Group]],
    limit: int = 0,
) -> dict[Key, Group]:
    """The completions of every prefix that ends a step, except the last step of an answer. Equal prefixes are completed once. `ask`
    samples them."""
    begun: dict[Key, Problem] = {}
    for rollout, steps in answers:
        for step in steps[:-1]:
            begun.setdefault(key_of(rollout, step), beginning(rollout, step.through + 1, limit))
    return dict(zip(begun, ask([*begun.values()]), strict=True))


def value_steps(
    groups: Sequence[Group],
    separator: str,
    ask: Callable[[list[Problem]], Iterable[Group]],
    limit: int,
    unpaid: bool,
) -> tuple[list[Group], int]:
    """Groups whose responses have the values of their steps but the last, and the number of prefixes that were completed. The value
    of a step, at the last token of its separator, is the mean score of the completions from there; `unpaid` ones that `limit` cut
    off have at most 0. Where none could be scored, or several steps end in one token, a step goes on into the next."""
    written = [r for g in groups for r in g.rollouts if r.score.valid and r.response.strip()]
    try:
        found = {id(r): [*{s.through: s for s in steps_of(r, separator)}.values()] for r in written}
    except TimeoutError as error:  # a pattern that backtracks
        raise UserError(str(error)) from error
    completed = complete([(r, found[id(r)]) for r in written], ask, limit)
    values = {key: _mean(group, unpaid) for key, group in completed.items()}

    def valued(rollout: Rollout) -> Rollout:
        steps = []
        for step in found.get(id(rollout), [])[:-1]:
            prompt, response = rollout.segments
            assert response.offsets is not None
            place = int(response.offsets[step.through - len(prompt.ids)])
            if (value := values[key_of(rollout, step)]) is not None:
                steps.append((place, value))
        return replace(rollout, score=replace(rollout.score, steps=tuple(steps)))

    made = [replace(g, rollouts=tuple(map(valued, g.rollouts))) for g in groups]
    return made, len(completed)


def _mean(group: Group, unpaid: bool) -> float | None:
    values = []
    for rollout in group.rollouts:
        if (value := rollout.score.value) is not None:
            values.append(min(0.0, value) if unpaid and rollout.finish == "length" else value)
    return sum(values) / len(values) if values else None


def key_of(rollout: Rollout, step: Step) -> Key:
    return rollout.problem.id, rollout.ids[: step.through + 1].tobytes()


def joined(rollout: Rollout, decoder: Decoder) -> Rollout:
    """A continued rollout in the form of one sampled at once: the prompt, and everything that the policy wrote. Other rollouts are
    returned unchanged."""
    if BEGIN not in rollout.problem.facts:
        return rollout
    given, turn = rollout.segments
    begin = rollout.problem.facts[BEGIN]
    ids = np.concatenate([given.ids[begin:], turn.ids])
    text, offsets = decoder.decode(ids)
    prompt = Segment(given.ids[:begin], decoder.decode(given.ids[:begin])[0], False)
    response = Segment(ids, text, True, offsets=offsets, finish=turn.finish)
    return Rollout(rollout.problem, rollout.sample, (prompt, response), Score.pending())


def cut(rollout: Rollout, count: int, steps: str, decoder: Decoder) -> Rollout:
    """The rollout up to the end of step `count`, including the separator. A rollout with no more steps than that is returned
    unchanged."""
    found = steps_of(rollout, steps)
    if len(found) <= count:
        return rollout
    prompt, response = rollout.segments
    ids = response.ids[: found[count - 1].through + 1 - len(prompt.ids)]
    text, offsets = decoder.decode(ids)
    shorter = Segment(ids, text, True, offsets=offsets, finish="step")
    return replace(rollout, segments=(prompt, shorter))
