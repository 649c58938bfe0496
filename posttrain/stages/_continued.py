"""Continues answers from a sampled prefix: the ids of the prefix are given unchanged, and only the rest is sampled."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from posttrain.data.steps import steps_of
from posttrain.data.text import Decoder
from posttrain.tasks._nested import Nested
from posttrain.tasks.base import Generate, Task
from posttrain.types import Problem, Rollout, Score, Segment

GIVEN, BEGIN = "given_ids", "given_begin"


def beginning(rollout: Rollout, end: int) -> Problem:
    """The problem of continuing a one-turn rollout after its first `end` ids."""
    ids, prompt = rollout.ids[:end], rollout.segments[0]
    facts = {**rollout.problem.facts, GIVEN: ids.tolist(), BEGIN: len(prompt.ids)}
    return replace(rollout.problem, facts=facts)


@dataclass(frozen=True)
class Continued(Nested):
    """The task, for problems made by `beginning`."""

    has_episodes = False

    task: Task

    async def run(self, problem: Problem, generate: Generate) -> Rollout:
        await generate(problem.facts[GIVEN], last=True)
        return generate.rollout(answer=joined(generate.rollout(), generate.decoder).judged)

    def observation_roles(self, template: str) -> tuple[str, ...]:
        return ()


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
