"""Runs episodes, the coroutines `Task.run`, against a sampler, and scores what they sampled.

Episodes run together. Turns that they await are submitted to the sampler; while it decodes, finished turns are decoded to text, tools
run, and rollouts are scored: in this process between two bursts, in the event loop where the reward is a coroutine, in worker processes
where the task is isolated.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, starmap
from typing import Any, TypeVar

import numpy as np

from posttrain.data.rendering import Renderer
from posttrain.data.text import Decoder
from posttrain.engine.random import derive
from posttrain.errors import require
from posttrain.rewards._loop import run_to_end
from posttrain.system.files import same_folder
from posttrain.system.workers import WorkerPool
from posttrain.system.world import current
from posttrain.tasks import _rollouts
from posttrain.tasks._remote import Host
from posttrain.tasks._rollouts import as_rollouts, thinking_tokens, with_score
from posttrain.tasks.base import STOPS, EpisodeEnd, Given, Limits, Task, failed, score_group
from posttrain.turns import Seconds, Turns
from posttrain.types import (
    JSON,
    UNSCORED,
    Group,
    Problem,
    Request,
    Rollout,
    Sampler,
    Sampling,
    Score,
    Segment,
    as_number,
)

PENDING = Score.pending()
EPISODE_FAILED = "episode failed"  # the outcome of an episode whose task raised an error
Result = TypeVar("Result")


def rollout_groups(
    task: Task,
    sampler: Sampler,
    decoder: Decoder,
    problems: Sequence[Problem],
    samples: int,
    sampling: Sampling | Sequence[Sampling],
    seed: int,
    workers: WorkerPool | None = None,
    seconds: Seconds | None = None,
    ordered: bool = True,
    rendered: Renderer | None = None,
) -> list[Group]:
    """Run `samples` episodes of each problem, with one `sampling` or one each, and score them: a group for each problem, in their
    order, and for each role of its episodes. Randomness belongs to (seed, the problem's place, sample, turn). The time it took is
    added to `seconds`. `rendered` has the prompts of these problems already.

    With `ordered` (deterministic) the batches that the sampler decodes depend on the requests alone, never on how long a tool or a
    reward took: later turns are submitted when every live episode awaits one.

    Several processes do their share of the problems each, and all get all groups.
    """
    world = current()
    every = list(problems)  # a lazy sequence would make each of them anew
    own = world.share(len(every))
    given = every[own.start : own.stop]
    isolated = any(task.isolates(problem) for problem in given)
    text = "this task is scored in worker processes; give rollout_groups a WorkerPool that knows it"
    require(workers is not None or not isolated, text)
    every_sample = (sampling,) * samples if isinstance(sampling, Sampling) else sampling
    asked = (given, every_sample, seed, workers, seconds or Seconds(), ordered, own.start)
    episodes = Episodes(task, sampler, decoder, *asked, known=rendered)
    with same_folder():
        found = [group for groups in run_to_end(episodes.run()) for group in groups]
    if world.size == 1:
        return found
    place = {id(problem): n for n, problem in zip(own, given, strict=True)}
    rows = [
        [place[id(g.problem)], g.role, list(map(_rollouts.rollout_row, g.rollouts))] for g in found
    ]
    gathered = [row for rows in world.gather(rows) for row in rows]
    return [_rollouts.group_of_rows(every[n], role, members) for n, role, members in gathered]


@dataclass(slots=True, eq=False)
class Episode:
    """One conversation of an episode with the policy: what `Task.run` calls `generate`; see tasks/base.py."""

    episodes: Episodes
    draw: int  # the problem's place
    sample: int
    number: int  # unique among all conversations: the sampler's session
    seed: int
    limits: Limits
    role: str = ""
    siblings: list[Episode] = field(default_factory=list)  # all conversations of the episode
    segments: list[Segment] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    kept: bool = False  # the sampler keeps the cache for another turn
    first: int = 0  # the turn with which the sampler's session began
    routes: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.siblings.append(self)

    @property
    def problem(self) -> Problem:
        return self.episodes.problems[self.draw]

    @property
    def template(self) -> str:
        return str(self.episodes.decoder.tokenizer.chat_template or "")

    @property
    def decoder(self) -> Decoder:
        return self.episodes.decoder

    @property
    def turn(self) -> int:
        return sum(s.sampled for s in self.segments)

    @property
    def length(self) -> int:
        return sum(len(s.ids) for s in self.segments if s.sampled)

    async def __call__(
        self,
        given: Given | None = None,
        last: bool = False,
        *,
        tools: Sequence[JSON] | None = None,
        max_new_tokens: int = 0,
    ) -> Segment:
        episodes, turn = self.episodes, self.turn
        sampling = self.sampling(max_new_tokens)
        segment = episodes.given(self, given, tools)
        # one tuple for all samples: compared by identity
        shared = given is None and tools is None and not turn
        ids = episodes.rendered.prompt_ids[self.draw] if shared else tuple(segment.ids.tolist())
        if turn == self.first:  # of a session that was given up, all of it again
            ids = (*(i for s in self.segments for i in s.ids.tolist()), *ids) if turn else ids
        # first turns with the same prompt are prefilled once
        groups = episodes.groups
        group = -1 if turn else groups.setdefault((self.draw, ids), len(groups))
        seed = derive(self.seed, turn) if turn else self.seed
        number, turn = self.number, turn - self.first
        request = Request(ids, seed, sampling, number, turn, group, keep=not last)
        place = (self.draw, self.sample)
        completion = await episodes.turns.ask(request, place, shared, self.restart)
        self.kept, self.routes = not last, completion.routes
        text, offsets = episodes.decoder.decode(completion.ids)
        measured = (completion.logprobs, offsets, completion.versions)
        reply = Segment(completion.ids, text, True, *measured, completion.finish)
        self.segments += [segment, reply]
        self.check_limits(reply)
        return reply

    def restart(self) -> None:
        """Begin another session with the next turn: the sampler has forgotten this one."""
        self.first, self.number, self.kept = self.turn, next(self.episodes.sessions), False

    def sampling(self, max_new_tokens: int) -> Sampling:
        """How the next turn is sampled; an end where the turns or the tokens are used up."""
        sampling, limits = self.episodes.samples[self.sample], self.limits
        if limits.turns and self.turn >= limits.turns:
            raise EpisodeEnd("turn limit")
        wanted = [sampling.max_new_tokens, *([max_new_tokens] if max_new_tokens else [])]
        if limits.tokens:
            wanted.append(limits.tokens - self.length)
        if (limit := min(wanted)) <= 0:
            raise EpisodeEnd("token limit")
        if limit == sampling.max_new_tokens:
            return sampling
        min_new_tokens = min(sampling.min_new_tokens, limit)
        return replace(sampling, max_new_tokens=limit, min_new_tokens=min_new_tokens)

    def check_limits(self, reply: Segment) -> None:
        """End the episode where the turn that was just sampled has used up its tokens."""
        limits = self.limits
        pairs = zip(self.segments[::2], self.segments[1::2], strict=True)
        if limits.thinking and sum(starmap(thinking_tokens, pairs)) > limits.thinking:
            raise EpisodeEnd("thinking limit")
        if limits.tokens and reply.finish == "length" and self.length >= limits.tokens:
            raise EpisodeEnd("token limit")

    def reward(self, value: float) -> None:
        if not self.segments:
            raise ValueError("a reward is paid to a turn that the policy has sampled")
        last, value = self.segments[-1], as_number(value, "a turn's reward")
        if not math.isfinite(value):
            raise ValueError(f"a turn's reward must be finite, not {value}")
        self.segments[-1] = replace(last, reward=last.reward + value)

    def count(self, name: str, amount: float = 1.0) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + as_number(amount, f"the count {name}")

    def rollout(
        self, score: Score | None = None, outcome: str = "", answer: str | None = None
    ) -> Rollout:
        if not self.segments:
            raise ValueError("a rollout needs a turn that the policy has sampled")
        found = Score.pending(outcome) if outcome else PENDING
        counts = dict(self.counts)
        parts = (tuple(self.segments), found, self.role, answer, counts)
        made = Rollout(self.problem, self.sample, *parts, self.routes)
        return made if score is None else with_score(made, score)

    def session(self, role: str) -> Episode:
        seed = derive(self.siblings[0].seed, 0, len(self.siblings))
        place = (self.episodes, self.draw, self.sample, next(self.episodes.sessions))
        return Episode(*place, seed, self.limits, role, self.siblings)


@dataclass(eq=False)
class Episodes:
    """The episodes of one call of `rollout_groups`, run together until all have ended and are scored."""

    task: Task
    sampler: Sampler
    decoder: Decoder
    problems: Sequence[Problem]
    samples: Sequence[Sampling]  # how each episode of a problem is sampled
    seed: int
    workers: WorkerPool | None
    seconds: Seconds
    ordered: bool
    first: int = 0  # the place of the first problem among those of all processes
    session: int = 0  # the number of its first session
    shared: asyncio.Event | None = None  # where others use the sampler too: see `Turns`
    known: Renderer | None = None  # with prompts that were rendered before

    def __post_init__(self) -> None:
        asked = (self.problems, self.task.prompt, type(self.task).run is Task.run)
        self.rendered = self.known or Renderer(self.decoder, *asked)
        self.sessions = count(self.session)
        self.seeds = [derive(self.seed, self.first + n) for n in range(len(self.problems))]
        # by the problem's place and the prompt
        self.groups: dict[tuple[int, tuple[int, ...]], int] = {}
        every = len(self.problems) * len(self.samples)
        self.turns = Turns(self.sampler, self.seconds, self.ordered, every, self.shared)
        self.together = type(self.task).score_group is not Task.score_group

    async def run(self) -> list[list[Group]]:
        """Alternate between the sampler and the coroutines until every group is complete: those of each problem."""
        began, before = time.perf_counter(), self.seconds.generate + self.seconds.tools
        everything = asyncio.gather(*(self.draw(n) for n in range(len(self.problems))))
        everything.add_done_callback(self._ended)
        for _ in range(2):  # groups start their episodes, and these ask for their first turns
            await asyncio.sleep(0)
        try:
            while not everything.done():
                await asyncio.sleep(0)  # coroutines go on as far as they can
                await self.turns.advance()
            found = await everything
        finally:
            self.turns.close()
        total = time.perf_counter() - began
        self.seconds.score += total - (self.seconds.generate + self.seconds.tools - before)
        return found

    def _ended(self, everything: asyncio.Future[Any]) -> None:
        self.turns.changed.set()
        if not everything.cancelled():
            everything.exception()  # asyncio prints one that nobody has read, as where the sampler fails

    def given(
        self, episode: Episode, given: Given | None, tools: Sequence[JSON] | None = None
    ) -> Segment:
        """What the policy reads before a turn, as ids that are appended to the history."""
        first, draw = not episode.segments, episode.draw
        if tools is not None and not first:
            raise TypeError("generate takes tools with the first turn")
        if given is None and first:
            if tools is None:
                return self.prompt(draw)
            given = self.task.prompt(episode.problem)
        last = None if first else episode.segments[-1]
        return self.rendered.given(draw, last, () if given is None else given, tools)

    def prompt(self, draw: int) -> Segment:
        """The task's prompt, rendered once for all episodes of a problem; where every episode asks for it, at once with all others."""
        now = time.perf_counter()
        found = self.rendered.prompt(draw)
        self.seconds.generate += time.perf_counter() - now
        return found

    async def draw(self, draw: int) -> list[Group]:
        """All episodes of a problem as groups, one of each role, in the order in which roles first come."""
        problem = self.problems[draw]
        made = await asyncio.gather(*(self.episode(draw, n) for n in range(len(self.samples))))
        roles: dict[str, list[Rollout]] = {}
        for rollout in (r for rollouts in made for r in rollouts):
            roles.setdefault(rollout.role, []).append(rollout)
        return [
            Group(problem, tuple(await self.score_together(problem, members)), role)
            for role, members in roles.items()
        ]

    async def episode(self, draw: int, sample: int) -> list[Rollout]:
        """One episode to its end. What the task's code raises is a named failure of what was sampled so far."""
        seed = derive(self.seeds[draw], sample)
        problem = self.problems[draw]
        limits = self.task.limits(problem)
        generate = Episode(self, draw, sample, next(self.sessions), seed, limits)
        try:
            run = self.run_isolated if self.task.isolates_run(problem) else self.task.run
            rollouts = as_rollouts(await _timed(run(problem, generate), limits.seconds))
        except STOPS:
            raise
        except EpisodeEnd as end:
            began = [e for e in generate.siblings if e.segments]
            rollouts = [e.rollout(end.score, end.outcome) for e in began]
            score = Score.pending(end.outcome)
        except (Exception, SystemExit) as error:
            score = replace(failed(error), outcome=EPISODE_FAILED)
            rollouts = [e.rollout(score) for e in generate.siblings if e.segments]
        finally:
            self.turns.ended |= {e.number for e in generate.siblings if e.kept}
            self.turns.rest()
        if not rollouts:  # it ended before its first turn
            rollouts = [Rollout(problem, sample, (self.prompt(draw),), score)]
        if self.together and not self.task.isolates(problem):
            return rollouts  # scored when the group is complete
        if len(rollouts) == 1:  # to gather one costs as much as to run it
            return [await self.score(problem, rollouts[0])]
        return list(await asyncio.gather(*(self.score(problem, r) for r in rollouts)))

    async def run_isolated(self, problem: Problem, generate: Episode) -> object:
        """An episode in a process of its own, where there are any."""
        assert self.workers is not None
        if not self.workers.runs_episodes:
            return await self.task.run(problem, generate)
        host = Host(generate)
        return host.rollouts(await self.workers.converse(self.task, problem, host.answer))

    async def score_together(self, problem: Problem, members: list[Rollout]) -> list[Rollout]:
        """Scores of the rollouts of a group that have none: together where the task compares them, else one by one."""
        waiting = [n for n, r in enumerate(members) if r.score.failure == UNSCORED]
        if not waiting:
            return members
        together = await score_group(self.task, problem, [members[n].judged for n in waiting])
        if together is None:
            return list(await asyncio.gather(*(self.score(problem, r) for r in members)))
        for n, score in zip(waiting, together, strict=True):
            members[n] = with_score(members[n], score)
        return members

    async def score(self, problem: Problem, rollout: Rollout) -> Rollout:
        """A rollout with its score: in a worker for an isolated task, else in this process."""
        if rollout.score.failure != UNSCORED:
            return rollout
        began, turns = time.perf_counter(), self.turns
        polls = turns.polls
        if self.task.isolates(problem):
            assert self.workers is not None
            score = await self.workers.score(self.task, problem, rollout.judged)
        else:
            score = await self.task.scored(problem, rollout.judged)
        if turns.polls > polls:  # generation went on meanwhile, to its end or still
            end = time.perf_counter() if turns.submitted else turns.polled
            self.seconds.overlapped += end - began
        return with_score(rollout, score)


async def _timed(run: Awaitable[Result], seconds: float) -> Result:
    """What an episode returns; a named end where its time is over."""
    if not seconds:
        return await run
    try:
        async with asyncio.timeout(seconds) as limit:
            return await run
    except TimeoutError:
        if limit.expired():
            raise EpisodeEnd("time limit") from None
        raise
