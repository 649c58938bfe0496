"""Turns that episodes await of a sampler: submitted together, and delivered in the order of the requests where that counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, fields

from posttrain.errors import UserError
from posttrain.tasks.base import ContextFull
from posttrain.types import Completion, Metric, Request, Sampler

POLL_SECONDS = 0.02  # that a sampler elsewhere may wait for a completion while others score
Key = tuple[int, int]  # session and turn


@dataclass(slots=True)
class Seconds:
    """Where the time of collecting went. Only `overlapped` runs at the same time as the others."""

    generate: float = 0.0  # in the sampler, and rendering prompts
    # decoding to text and scoring that generation waited for, or that came after it
    score: float = 0.0
    tools: float = 0.0  # waiting for episodes that did not await `generate`
    overlapped: float = 0.0  # scoring in workers and in the event loop while generation went on

    def metrics(self) -> tuple[Metric, ...]:
        used = zip(fields(self), astuple(self), strict=True)
        always = ("generate", "score")
        return tuple(Metric(f"seconds/{f.name}", s, None) for f, s in used if s or f.name in always)


@dataclass(slots=True, eq=False)
class Turn:
    """A request that an episode awaits."""

    request: Request
    place: tuple[int, int]  # of the problem, and the episode's among those of the problem
    own: bool  # it is the task's own prompt
    restart: Callable[[], None]  # begins another session of the episode
    completion: asyncio.Future[Completion]


@dataclass(eq=False)
class Turns:
    """The turns of episodes that run together. `running` of them neither await a turn nor have ended."""

    sampler: Sampler
    seconds: Seconds
    ordered: bool
    running: int
    # where others use the sampler too: set when turns are submitted. What polls it calls `receive`
    shared: asyncio.Event | None
    asked: list[Turn] = field(default_factory=list)  # not submitted yet
    submitted: dict[Key, Turn] = field(default_factory=dict)  # in their order
    completed: dict[Key, Completion] = field(default_factory=dict)  # not delivered yet
    ended: set[int] = field(default_factory=set)  # sessions whose caches can go
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    # how often the sampler was polled, and when last
    polls: int = 0
    polled: float = 0.0

    async def advance(self) -> None:
        """Submit what is asked, and let the sampler go on; wait where nothing is being generated."""
        round_over = not self.submitted and not self.running
        if self.asked and (round_over or not self.ordered):
            self.submit()
        if self.submitted and self.shared is None:
            self.poll()
        else:
            await self.idle()

    def close(self) -> None:
        """Have the sampler forget all sessions."""
        open_sessions = {turn.request.session for turn in self.submitted.values()}
        self.sampler.cancel(self.ended | open_sessions)

    def submit(self) -> None:
        """Hand the asked turns to the sampler, in the order of (draw, sample, session)."""
        now = time.perf_counter()
        self.sampler.cancel(self.ended)
        self.ended = set()
        turns = sorted(self.asked, key=lambda t: (*t.place, t.request.session))
        self.asked = []
        self.submitted |= {(t.request.session, t.request.turn): t for t in turns}
        later = [turn for turn in turns if turn.request.turn]
        first = [turn for turn in turns if not turn.request.turn]
        for batch in filter(None, (later, first)):
            self.hand_over(batch)
        if self.shared is not None:
            self.shared.set()
        self.seconds.generate += time.perf_counter() - now

    def hand_over(self, turns: Sequence[Turn]) -> None:
        """Submit turns together. What the policy, its tools or its task gave ends the episode where it is too long; the task's own
        prompt ends the run."""
        try:
            self.sampler.submit([turn.request for turn in turns])
        except UserError as error:
            if len(turns) > 1:
                for turn in turns:
                    self.hand_over([turn])
                return
            request = turns[0].request
            if turns[0].own:
                raise
            del self.submitted[request.session, request.turn]
            self.deliver(turns[0], ContextFull(str(error)))

    def poll(self) -> None:
        """Let the sampler go on for a burst."""
        now = time.perf_counter()
        found = self.sampler.poll(POLL_SECONDS)
        self.seconds.generate += time.perf_counter() - now
        self.receive(found)

    def receive(self, found: Sequence[tuple[Request, Completion]]) -> None:
        """Deliver what is finished, in the order of the requests where that counts."""
        for request, completion in found:
            if (request.session, request.turn) in self.submitted:  # else it was withdrawn
                self.completed[request.session, request.turn] = completion
        self.polls, self.polled = self.polls + 1, time.perf_counter()
        for key in list(self.submitted if self.ordered else self.completed):
            if key not in self.completed:
                return
            self.deliver(self.submitted.pop(key), self.completed.pop(key))

    def deliver(self, turn: Turn, found: Completion | ContextFull) -> None:
        self.running += 1
        if turn.completion.done():  # its episode was given up
            return
        if isinstance(found, ContextFull):
            turn.completion.set_exception(found)
        else:
            turn.completion.set_result(found)

    async def idle(self) -> None:
        """Nothing is being generated: until an episode asks for a turn or everything is scored."""
        now, tools = time.perf_counter(), self.running > 0
        await self.changed.wait()
        self.changed.clear()
        if tools:
            self.seconds.tools += time.perf_counter() - now

    async def ask(
        self, request: Request, place: tuple[int, int], own: bool, restart: Callable[[], None]
    ) -> Completion:
        """Wait for a turn of an episode."""
        turn = Turn(request, place, own, restart, asyncio.get_running_loop().create_future())
        self.asked.append(turn)
        self.rest()
        try:
            return await turn.completion
        except asyncio.CancelledError:
            self.withdraw(turn)
            raise

    def withdraw(self, turn: Turn) -> None:
        """Give up a turn whose episode has ended before it was there."""
        key = turn.request.session, turn.request.turn
        if turn in self.asked:  # the sampler knows nothing of it
            self.asked.remove(turn)
            self.running += 1
            return
        if self.submitted.get(key) is turn:
            del self.submitted[key]
            self.completed.pop(key, None)
            self.running += 1
        # else it was delivered after the wait for it had ended; the session has a turn that the episode has not
        self.sampler.cancel({turn.request.session})
        turn.restart()

    def rest(self) -> None:
        """An episode awaits a turn or has ended."""
        self.running -= 1
        self.changed.set()
