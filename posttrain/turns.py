"""The turns that episodes await: collects their requests, submits them to the sampler together, and delivers the completions, in the
order of the requests if the run is deterministic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, fields

from posttrain.errors import UserError
from posttrain.tasks.base import ContextFull
from posttrain.types import Completion, Metric, Request, Sampler

POLL_SECONDS = 0.02  # how long a remote sampler may wait for a completion; scoring goes on after it
Key = tuple[int, int]  # session and turn
Place = tuple[int, int]  # an episode: the index of its problem, and its sample


@dataclass(slots=True)
class Seconds:
    """How the time of collecting was spent. Only `overlapped` is concurrent with the others."""

    generate: float = 0.0  # in the sampler, and rendering prompts
    # decoding to text and scoring, while generation waited or had ended
    score: float = 0.0
    tools: float = 0.0  # waiting for episodes that do not await `generate`
    overlapped: float = 0.0  # scoring in workers and in the event loop during generation

    def metrics(self) -> tuple[Metric, ...]:
        used = zip(fields(self), astuple(self), strict=True)
        always = ("generate", "score")
        return tuple(Metric(f"seconds/{f.name}", s, None) for f, s in used if s or f.name in always)


@dataclass(slots=True, eq=False)
class Turn:
    """A request that an episode awaits."""

    request: Request
    place: Place  # the order of requests
    own: bool  # whether the ids are the task's own prompt
    restart: Callable[[], None]  # starts a new session of the episode
    completion: asyncio.Future[Completion]


@dataclass(eq=False)
class Turns:
    """The turns of all episodes that run concurrently. An episode may await several at once, of different conversations."""

    sampler: Sampler
    seconds: Seconds
    ordered: bool
    # of each episode that has not ended, the sessions in which it awaits a turn
    live: dict[Place, set[int]]
    # If others use the sampler, too: set when turns are submitted. Another coroutine then polls and calls `receive`.
    shared: asyncio.Event | None
    asked: list[Turn] = field(default_factory=list)  # not submitted yet
    submitted: dict[Key, Turn] = field(default_factory=dict)  # in the order of submission
    completed: dict[Key, Completion] = field(default_factory=dict)  # not delivered yet
    ended: set[int] = field(default_factory=set)  # sessions whose caches can be freed
    # sessions that sample what nobody waits for: cancelled together, since each call looks at all rows of the sampler
    withdrawn: set[int] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    # how often the sampler was polled, and when it was polled last
    polls: int = 0
    polled: float = 0.0

    @property
    def running(self) -> bool:
        """Whether an episode neither awaits a turn nor has ended."""
        return not all(self.live.values())

    async def advance(self) -> None:
        """Submit the asked turns and poll the sampler. If nothing is being generated, wait."""
        if self.withdrawn:
            self.sampler.cancel(self.withdrawn)
            self.withdrawn = set()
        round_over = not self.submitted and not self.running
        if self.asked and (round_over or not self.ordered):
            self.submit()
        if self.submitted and self.shared is None:
            self.poll()
        else:
            await self.idle()

    def close(self) -> None:
        """Cancel all sessions at the sampler."""
        awaited = {session for session, _ in self.submitted}
        self.sampler.cancel(self.ended | self.withdrawn | awaited)

    def submit(self) -> None:
        """Submit the asked turns to the sampler, sorted by (problem, sample, session)."""
        now = time.perf_counter()
        self.sampler.cancel(self.ended)
        self.ended = set()
        turns = sorted(self.asked, key=lambda t: (*t.place, t.request.session))
        self.asked = []
        self.submitted |= {(t.request.session, t.request.turn): t for t in turns}
        later = [turn for turn in turns if turn.request.turn]
        first = [turn for turn in turns if not turn.request.turn]
        for batch in filter(None, (later, first)):
            self.submit_batch(batch)
        if self.shared is not None:
            self.shared.set()
        self.seconds.generate += time.perf_counter() - now

    def submit_batch(self, turns: Sequence[Turn]) -> None:
        """Submit turns together. If a turn is too long for the context, its episode ends; with unknown token ids, it fails;
        but if the task's own prompt is wrong, the error ends the run."""
        try:
            self.sampler.submit([turn.request for turn in turns])
        except (UserError, ValueError) as error:
            if len(turns) > 1:
                for turn in turns:
                    self.submit_batch([turn])
                return
            request = turns[0].request
            if turns[0].own:
                raise
            del self.submitted[request.session, request.turn]
            full = isinstance(error, UserError)
            self.deliver(turns[0], ContextFull(str(error)) if full else error)

    def poll(self) -> None:
        """Let the sampler decode one burst."""
        now = time.perf_counter()
        found = self.sampler.poll(POLL_SECONDS)
        self.seconds.generate += time.perf_counter() - now
        self.receive(found)

    def receive(self, found: Sequence[tuple[Request, Completion]]) -> None:
        """Deliver the finished turns. If `ordered`, a turn waits for those submitted before it."""
        for request, completion in found:
            if (request.session, request.turn) in self.submitted:  # it may have been withdrawn
                self.completed[request.session, request.turn] = completion
        self.polls, self.polled = self.polls + 1, time.perf_counter()
        for key in list(self.submitted if self.ordered else self.completed):
            if key not in self.completed:
                return
            self.deliver(self.submitted.pop(key), self.completed.pop(key))

    def deliver(self, turn: Turn, found: Completion | Exception) -> None:
        self.live[turn.place].remove(turn.request.session)
        if turn.completion.done():  # its episode was cancelled
            return
        if isinstance(found, Exception):
            turn.completion.set_exception(found)
        else:
            turn.completion.set_result(found)

    async def idle(self) -> None:
        """Wait until an episode asks for a turn or ends."""
        now, tools = time.perf_counter(), self.running
        await self.changed.wait()
        self.changed.clear()
        if tools:
            self.seconds.tools += time.perf_counter() - now

    async def ask(
        self, request: Request, place: Place, own: bool, restart: Callable[[], None]
    ) -> Completion:
        """Ask for a turn and wait for its completion."""
        awaited = self.live.get(place)
        if awaited is None or request.session in awaited:
            rule = "samples one turn at a time, and none after its episode has ended"
            raise ValueError(f"a conversation {rule}; generate.session opens another one")
        awaited.add(request.session)
        turn = Turn(request, place, own, restart, asyncio.get_running_loop().create_future())
        self.asked.append(turn)
        self.changed.set()
        try:
            return await turn.completion
        except asyncio.CancelledError:
            self.withdraw(turn)
            raise

    def withdraw(self, turn: Turn) -> None:
        """Remove a turn that nobody waits for any longer."""
        key = turn.request.session, turn.request.turn
        if turn in self.asked:  # it was not submitted yet
            self.asked.remove(turn)
            self.live[turn.place].remove(turn.request.session)
            return
        if self.submitted.get(key) is turn:
            del self.submitted[key]
            self.completed.pop(key, None)
            self.live[turn.place].remove(turn.request.session)
        # Otherwise it was delivered after the cancellation. Either way the session may hold a turn that the episode lacks.
        self.withdrawn.add(turn.request.session)
        self.changed.set()
        turn.restart()

    def end(self, place: Place) -> None:
        """An episode has ended. Turns that it asked for and left are withdrawn, and what waits for them is cancelled."""
        if self.live[place]:
            for turn in [t for t in (*self.asked, *self.submitted.values()) if t.place == place]:
                self.withdraw(turn)
                turn.completion.cancel()
        del self.live[place]
        self.changed.set()
