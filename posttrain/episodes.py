"""Runs episodes (the coroutines `Task.run`) against a sampler, and scores their rollouts.

All episodes of a step run concurrently. The turns that they await are submitted to the sampler together. While it generates, finished
turns are decoded to text, tools run and rollouts are scored: in this process between two bursts of decoding, in the event loop if the
reward is a coroutine, in worker processes if the task is isolated.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product, starmap
from typing import Any, TypeVar

import numpy as np

from posttrain import types
from posttrain.data.rendering import Renderer
from posttrain.data.text import Decoder
from posttrain.engine.random import derive
from posttrain.errors import require
from posttrain.rewards._loop import run_to_end
from posttrain.rewards.compose import as_score
from posttrain.system.files import same_folder
from posttrain.system.workers import WorkerPool
from posttrain.system.world import current
from posttrain.tasks import _rollouts
from posttrain.tasks._remote import Host
from posttrain.tasks._rollouts import as_rollouts, thinking_tokens, with_score
from posttrain.tasks.base import FAULTS, EpisodeEnd, Given, Limits, Task, failed, score_group
from posttrain.turns import Seconds, Turns
from posttrain.types import JSON, Group, Problem, Rollout, Sampler, Sampling, Score, Segment

CANCEL_SECONDS = 5.0  # for episodes to end what they have begun, such as programs
EPISODE_FAILED = "episode failed"  # the outcome if the task's code raised an error
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
    """Run `samples` episodes of each problem and score them. Returns the groups in the order of the problems: one for each problem and
    role. `sampling` is for all episodes, or one for each. The randomness of a turn depends on (seed, index of the problem, sample,
    turn) alone. The time spent is added to `seconds`. `rendered` holds the prompts, if they are rendered already.

    With `ordered` (deterministic), the batches that the sampler decodes depend on the requests alone, never on how long a tool or a
    reward took: later turns are submitted when every live episode awaits one.

    With several processes, each runs its share of the problems, and all receive all groups.
    """
    world = current()
    every = list(problems)  # a lazy sequence would create a problem again at each access
    own = world.share(len(every))
    given = every[own.start : own.stop]
    isolated = any(task.isolates(problem) for problem in given)
    text = "this task is scored in worker processes; give rollout_groups a WorkerPool that knows it"
    require(workers is not None or not isolated, text)
    each = (sampling,) * samples if isinstance(sampling, Sampling) else sampling
    seconds = seconds or Seconds()
    episodes = Episodes(
        task, sampler, decoder, given, each, seed, workers, seconds, ordered, own.start, rendered
    )
    with same_folder():
        found = [group for groups in run_to_end(episodes.run()) for group in groups]
    if world.size == 1:
        return found
    at = {id(problem): n for n, problem in zip(own, given, strict=True)}
    rows = [[at[id(g.problem)], g.role, [*map(_rollouts.rollout_row, g.rollouts)]] for g in found]
    gathered = [row for rows in world.gather(rows) for row in rows]
    return [_rollouts.group_of_rows(every[n], role, members) for n, role, members in gathered]


@dataclass(slots=True, eq=False)
class Episode:
    """One conversation with the policy: the `generate` argument of `Task.run`. tasks/base.py documents its methods (`Generate`)."""

    episodes: Episodes
    draw: int  # the index of the problem
    sample: int
    number: int  # the sampler's session, unique among all conversations
    seed: int
    limits: Limits
    role: str = ""
    siblings: list[Episode] = field(default_factory=list)  # all conversations of the episode
    segments: list[Segment] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    kept: bool = False  # the sampler keeps the cache for another turn
    first: int = 0  # the turn at which the sampler's session began
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
        written: int = 0,
    ) -> Segment:
        episodes, turn = self.episodes, self.turn
        if turn > self.first and not self.kept:  # a turn after the one that was called the last
            self.restart()
        sampling = self.sampling(max_new_tokens, written)
        segment = episodes.given(self, given, tools)
        # all samples of the task's own prompt share one tuple of ids, which compares fast
        shared = given is None and tools is None and not turn
        ids = episodes.rendered.prompt_ids[self.draw] if shared else tuple(segment.ids.tolist())
        if turn == self.first:  # a new session after `restart` needs the whole history
            ids = (*(i for s in self.segments for i in s.ids.tolist()), *ids) if turn else ids
        # the sampler prefills first turns of the same group once
        groups = episodes.groups
        group = -1 if turn else groups.setdefault((self.draw, ids), len(groups))
        seed = derive(self.seed, turn) if turn else self.seed
        at = turn - self.first
        request = types.Request(ids, seed, sampling, self.number, at, group, keep=not last)
        made = await episodes.turns.ask(request, (self.draw, self.sample), shared, self.restart)
        self.kept, self.routes = not last, made.routes
        text, offsets = episodes.decoder.decode(made.ids)
        reply = Segment(made.ids, text, True, made.logprobs, offsets, made.versions, made.finish)
        self.segments += [segment, reply]
        self.check_limits(reply)
        return reply

    def restart(self) -> None:
        """Use a new session from the next turn on, because the sampler has dropped this one."""
        self.first, self.number, self.kept = self.turn, next(self.episodes.sessions), False

    def sampling(self, max_new_tokens: int, written: int = 0) -> Sampling:
        """The sampling settings of the next turn. Ends the episode if its turns or tokens are used up."""
        sampling, limits = self.episodes.samples[self.sample], self.limits
        if limits.turns and self.turn >= limits.turns:
            raise EpisodeEnd("turn limit")
        wanted = [sampling.max_new_tokens, *([max_new_tokens] if max_new_tokens else [])]
        if limits.tokens:
            wanted.append(limits.tokens - self.length - written)
        if (limit := min(wanted)) <= 0:
            raise EpisodeEnd("token limit")
        fewest = min(max(0, sampling.min_new_tokens - written), limit)
        if (limit, fewest) == (sampling.max_new_tokens, sampling.min_new_tokens):
            return sampling
        return replace(sampling, max_new_tokens=limit, min_new_tokens=fewest)

    def check_limits(self, reply: Segment) -> None:
        """End the episode if the turn that was just sampled used up its tokens or those for reasoning."""
        limits = self.limits
        pairs = zip(self.segments[::2], self.segments[1::2], strict=True)
        if limits.thinking and sum(starmap(thinking_tokens, pairs)) > limits.thinking:
            raise EpisodeEnd("thinking limit")
        if limits.tokens and reply.finish == "length" and self.length >= limits.tokens:
            raise EpisodeEnd("token limit")

    def reward(self, value: float) -> None:
        if not self.segments:
            raise ValueError("a reward is paid to a turn that the policy has sampled")
        last, value = self.segments[-1], types.as_number(value, "a turn's reward")
        if not math.isfinite(value):
            raise ValueError(f"a turn's reward must be finite, not {value}")
        self.segments[-1] = replace(last, reward=last.reward + value)

    def count(self, name: str, amount: float = 1.0) -> None:
        number = types.as_number(amount, f"the count {name}")
        self.counts[name] = self.counts.get(name, 0.0) + number

    def rollout(
        self, score: Score | float | None = None, outcome: str = "", answer: str | None = None
    ) -> Rollout:
        if not self.segments:
            raise ValueError("a rollout needs a turn that was sampled: await generate() first")
        pending = Score.pending(outcome)
        segments, counts = tuple(self.segments), dict(self.counts)
        made = Rollout(
            self.problem, self.sample, segments, pending, self.role, answer, counts, self.routes
        )
        return made if score is None else with_score(made, as_score(score))

    def session(self, role: str) -> Episode:
        seed = derive(self.siblings[0].seed, 0, len(self.siblings))
        number = next(self.episodes.sessions)
        return Episode(
            self.episodes, self.draw, self.sample, number, seed, self.limits, role, self.siblings
        )


@dataclass(eq=False)
class Episodes:
    """All episodes of one call of `rollout_groups`: runs them concurrently until each has ended and is scored."""

    task: Task
    sampler: Sampler
    decoder: Decoder
    problems: Sequence[Problem]
    samples: Sequence[Sampling]  # how each episode of a problem is sampled
    seed: int
    workers: WorkerPool | None
    seconds: Seconds
    ordered: bool
    first: int = 0  # the index of the first problem among those of all processes
    known: Renderer | None = None  # holds prompts that are rendered already
    session: int = 0  # the number of the first session
    shared: asyncio.Event | None = None  # if others use the sampler, too; see `Turns`

    def __post_init__(self) -> None:
        self.rendered = self.known or Renderer(
            self.decoder, self.problems, self.task.prompt, at_once=type(self.task).run is Task.run
        )
        self.sessions = count(self.session)
        self.seeds = [derive(self.seed, self.first + n) for n in range(len(self.problems))]
        # group numbers by (index of the problem, ids of the prompt)
        self.groups: dict[tuple[int, tuple[int, ...]], int] = {}
        every = product(range(len(self.problems)), range(len(self.samples)))
        live: dict[tuple[int, int], set[int]] = {place: set() for place in every}
        self.turns = Turns(self.sampler, self.seconds, self.ordered, live, self.shared)
        self.together = type(self.task).score_group is not Task.score_group

    async def run(self) -> list[list[Group]]:
        """Alternate between the coroutines and the sampler until all groups are complete. Returns those of each problem."""
        began, before = time.perf_counter(), self.seconds.generate + self.seconds.tools
        everything = asyncio.gather(*(self.draw(n) for n in range(len(self.problems))))
        everything.add_done_callback(self._ended)
        for _ in range(2):  # let groups start their episodes, and these ask for their first turns
            await asyncio.sleep(0)
        try:
            while not everything.done():
                await asyncio.sleep(0)  # let coroutines run until they wait
                await self.turns.advance()
            found = await everything
        finally:
            everything.cancel()  # if this was cancelled, or the sampler failed
            await asyncio.wait([everything], timeout=CANCEL_SECONDS)
            self.turns.close()
        total = time.perf_counter() - began
        self.seconds.score += total - (self.seconds.generate + self.seconds.tools - before)
        return found

    def _ended(self, everything: asyncio.Future[Any]) -> None:
        self.turns.changed.set()
        if not everything.cancelled():
            everything.exception()  # asyncio prints an exception that nothing has read, such as the sampler's

    def given(
        self, episode: Episode, given: Given | None, tools: Sequence[JSON] | None = None
    ) -> Segment:
        """The tokens that the policy reads before its next turn; they are appended to the history."""
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
        """The task's prompt, rendered once for all episodes of a problem. For a single-turn task all prompts are rendered together."""
        now = time.perf_counter()
        found = self.rendered.prompt(draw)
        self.seconds.generate += time.perf_counter() - now
        return found

    async def draw(self, draw: int) -> list[Group]:
        """Run all episodes of a problem. Returns one group for each role, in the order of their first rollouts."""
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
        """Run one episode to its end. If the task's code raises an error, the rollouts so far get a named failure as their score."""
        seed = derive(self.seeds[draw], sample)
        problem = self.problems[draw]
        limits = self.task.limits(problem)
        generate = Episode(self, draw, sample, next(self.sessions), seed, limits)
        try:
            run = self.run_isolated if self.task.isolates_run(problem) else self.task.run
            rollouts = as_rollouts(await _timed(run(problem, generate), limits.seconds))
        except EpisodeEnd as end:
            began = [e for e in generate.siblings if e.segments]
            rollouts = [e.rollout(end.score, end.outcome) for e in began]
            score = Score.pending(end.outcome)
        except FAULTS as error:
            score = replace(failed(error), outcome=EPISODE_FAILED)
            rollouts = [e.rollout(score) for e in generate.siblings if e.segments]
        finally:
            self.turns.ended |= {e.number for e in generate.siblings if e.kept}
            self.turns.end((draw, sample))
        if not rollouts:  # it ended before its first turn
            rollouts = [Rollout(problem, sample, (self.prompt(draw),), score)]
        if self.together and not self.task.isolates(problem):
            return rollouts  # scored when the group is complete
        if len(rollouts) == 1:  # to gather one costs as much as to run it
            return [await self.score(problem, rollouts[0])]
        return list(await asyncio.gather(*(self.score(problem, r) for r in rollouts)))

    async def run_isolated(self, problem: Problem, generate: Episode) -> object:
        """Run an episode in a worker process, if the pool has processes for episodes."""
        assert self.workers is not None
        if not self.workers.runs_episodes:
            return await self.task.run(problem, generate)
        host = Host(generate)
        return host.rollouts(await self.workers.converse(self.task, problem, host.answer))

    async def score_together(self, problem: Problem, members: list[Rollout]) -> list[Rollout]:
        """Score the unscored rollouts of a group: together if the task compares them, else one by one."""
        waiting = [n for n, r in enumerate(members) if r.score.failure == types.UNSCORED]
        if not waiting:
            return members
        together = await score_group(self.task, problem, [members[n].judged for n in waiting])
        if together is None:
            return list(await asyncio.gather(*(self.score(problem, r) for r in members)))
        for n, score in zip(waiting, together, strict=True):
            members[n] = with_score(members[n], score)
        return members

    async def score(self, problem: Problem, rollout: Rollout) -> Rollout:
        """Score a rollout: in a worker process if the task is isolated, else in this process."""
        if rollout.score.failure != types.UNSCORED:
            return rollout
        began, turns = time.perf_counter(), self.turns
        polls = turns.polls
        if self.task.isolates(problem):
            assert self.workers is not None
            score = await self.workers.score(self.task.scorer, problem, rollout.judged)
        else:
            score = await self.task.scored(problem, rollout.judged)
        if turns.polls > polls:  # the sampler generated meanwhile
            end = time.perf_counter() if turns.submitted else turns.polled
            self.seconds.overlapped += end - began
        return with_score(rollout, score)


async def _timed(run: Awaitable[Result], seconds: float) -> Result:
    """Await an episode, and end it by `EpisodeEnd` after `seconds` (0: no limit)."""
    if not seconds:
        return await run
    try:
        async with asyncio.timeout(seconds) as limit:
            return await run
    except TimeoutError:
        if limit.expired():
            raise EpisodeEnd("time limit") from None
        raise
