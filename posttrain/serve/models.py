"""The models of a server, and the thread that samples from them. Requests arrive while others are decoded; all requests of one
model are decoded together. A model is loaded at its first request; the least recently used one is unloaded to make room."""

from __future__ import annotations

import asyncio
import secrets
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakSet

import numpy as np

from posttrain.data.text import Decoder
from posttrain.engine.engine import Engine
from posttrain.engine.random import derive
from posttrain.models.policy import Policy
from posttrain.serve.conversations import Choice, Conversations, Prompt
from posttrain.serve.wire import Answer, Body, Delta, Refused
from posttrain.system.threads import Result, fulfil
from posttrain.types import Completion, Request, Segment

IDLE_SECONDS = 0.5  # the sampling thread waits this long when it has nothing to do
# conversations of a model whose ids are kept, and sessions whose caches are kept, for another turn
KEPT = 256
LONG = 1 << 20  # context length in tokens if the model states none
ID_BYTES = 8

Found = tuple[int, Completion | Exception]  # index of the choice, and its new tokens


@dataclass(slots=True, eq=False)
class Ticket:
    """One sample that a client waits for. With `streams`, the client reads it while it is decoded."""

    request: Request
    index: int
    updates: asyncio.Queue[Found]
    streams: bool
    sent: int = 0  # tokens sent so far


@dataclass(frozen=True, slots=True)
class Session:
    """A session that the engine keeps, with the ids of all its turns."""

    number: int
    turn: int
    ids: bytes


class ServedModel:
    """A loaded model. Only the sampling thread uses the engine and `tickets`; only the event loop uses the rest."""

    def __init__(self, name: str, policy: Policy, rows: int):
        self.name, self.tokenizer = name, policy.tokenizer
        self.engine = Engine(policy, rows, processes=1, bursts=1)
        self.vocabulary = len(policy.head.weight_VH)
        self.decoder = Decoder(policy.tokenizer)
        self.conversations = Conversations(policy.tokenizer, KEPT)
        self.positions = policy.positions or LONG
        self.sessions: list[Session] = []  # least recently used first
        self.tickets: dict[int, Ticket] = {}
        # those in progress, or about to begin; one that is dropped before it began leaves by itself
        self.requests: WeakSet[Any] = WeakSet()

    def take_session(self, ids: Sequence[int]) -> Session | None:
        """Take the kept session that has computed the longest prefix of these ids, so that no other request can use it."""
        whole = np.array(ids, np.int64).tobytes()
        fits = [s for s in self.sessions if len(s.ids) < len(whole) and whole.startswith(s.ids)]
        found = max(fits, key=lambda session: len(session.ids), default=None)
        if found is not None:
            self.sessions.remove(found)
        return found


class SamplingThread(threading.Thread):
    """Polls the engines of all models that have requests to decode."""

    def __init__(self) -> None:
        super().__init__(name="sampling", daemon=True)
        self.orders: deque[Callable[[], None]] = deque()
        self.awake, self.closing = threading.Event(), False
        self.models: list[ServedModel] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self.updates: list[tuple[Ticket, Completion | Exception]] = []  # not delivered yet

    def order(self, work: Callable[[], None]) -> None:
        """Queue work that the thread does between two bursts. Called from the event loop."""
        self.loop = asyncio.get_running_loop()
        self.orders.append(work)
        self.awake.set()

    async def call(self, work: Callable[[], Result]) -> Result:
        """Run `work` in the thread between two bursts, and return its result."""
        done: Future[Result] = Future()
        self.order(lambda: fulfil(done, work))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        self.closing = True
        self.awake.set()
        self.join(30)

    def run(self) -> None:
        while not self.closing:
            self.awake.clear()
            while self.orders:
                try:
                    self.orders.popleft()()
                except Exception:  # this engine cannot cancel or close; the others continue
                    traceback.print_exc()
            busy = [model for model in self.models if model.tickets]
            for model in busy:
                self.step(model)
            if self.updates and self.loop is not None:
                updates, self.updates = self.updates, []
                with suppress(RuntimeError):  # the event loop is closed, so there is no reader
                    self.loop.call_soon_threadsafe(_hand_out, updates)
            if not busy:
                self.awake.wait(IDLE_SECONDS)
        for model in self.models:
            model.engine.close()

    def submit(self, model: ServedModel, tickets: Sequence[Ticket]) -> None:
        try:
            model.engine.submit([ticket.request for ticket in tickets])
        except Exception as error:
            self.updates += [(ticket, error) for ticket in tickets]
            return
        model.tickets |= {ticket.request.session: ticket for ticket in tickets}

    def cancel(self, model: ServedModel, sessions: Sequence[int]) -> None:
        model.engine.cancel(sessions)
        for session in sessions:
            model.tickets.pop(session, None)

    def step(self, model: ServedModel) -> None:
        """Decode one burst. Deliver finished samples, and the new tokens of streamed ones."""
        try:
            finished = model.engine.poll(0.0)
        except Exception as error:  # the engine has dropped all its requests and can continue
            self.updates += [(ticket, error) for ticket in model.tickets.values()]
            self.cancel(model, [*model.tickets, *model.engine.sessions])
            return
        for request, completion in finished:
            if (ticket := model.tickets.pop(request.session, None)) is not None:
                self.updates.append((ticket, _after(completion, ticket.sent)))
        streams = {number for number, ticket in model.tickets.items() if ticket.streams}
        for number, so_far in model.engine.written(streams).items() if streams else ():
            ticket = model.tickets[number]
            if len(so_far.ids) > ticket.sent:
                self.updates.append((ticket, _after(so_far, ticket.sent)))
                ticket.sent = len(so_far.ids)


def _hand_out(updates: Sequence[tuple[Ticket, Completion | Exception]]) -> None:
    for ticket, found in updates:
        ticket.updates.put_nowait((ticket.index, found))


def _after(completion: Completion, sent: int) -> Completion:
    ids, logprobs, versions = completion.ids, completion.logprobs, completion.versions
    return Completion(ids[sent:], logprobs[sent:], versions[sent:], completion.finish)


@dataclass(eq=False)
class Models:
    """The models of a server. `load` loads a model by name, in a thread; at most `loaded` models are in memory."""

    names: dict[str, int | None]  # with their context lengths, if known
    load: Callable[[str], Policy]
    default: str  # used if a request names no model
    loaded: int = 1
    rows: int = 256
    max_new_tokens: int = 2048  # limit of an answer if its request states none
    ready: dict[str, ServedModel] = field(default_factory=dict)  # least recently used first

    def __post_init__(self) -> None:
        self.thread, self.loading = SamplingThread(), asyncio.Lock()
        self.numbers = count()
        self.thread.start()

    def close(self) -> None:
        self.thread.close()

    async def model(self, name: str) -> ServedModel:
        """The model called `name`. It is loaded at the first request."""
        name = name or self.default
        if name not in self.names:
            known = ", ".join(self.names)
            raise Refused(404, f"no model {name!r}; there are {known}", "model_not_found", "model")
        async with self.loading:
            if name not in self.ready:
                self._make_room()
                policy = await asyncio.to_thread(self.load, name)
                served = self.ready[name] = ServedModel(name, policy, self.rows)
                self.names[name] = policy.positions
                self.thread.order(lambda: self.thread.models.append(served))
            model = self.ready[name] = self.ready.pop(name)
            return model

    def _make_room(self) -> None:
        while len(self.ready) >= self.loaded:
            idle = next((model for model in self.ready.values() if not model.requests), None)
            if idle is None:
                text = f"{', '.join(self.ready)} are busy, and there is no room for another model; ask again later"
                raise Refused(503, text, "models_busy")
            del self.ready[idle.name]
            self.thread.order(lambda model=idle: self._unload(model))  # type: ignore[misc]

    def _unload(self, model: ServedModel) -> None:
        self.thread.models.remove(model)
        model.engine.close()

    async def answer(self, body: Body, retry: bool = False) -> Answer:
        """Begin to answer a request, or refuse it. The caller must read `deltas` at once, or not at all."""
        model = await self.model(body.model)
        prompts = list(model.conversations.prompts(body, model.vocabulary))
        longest = max(len(prompt.ids) for prompt in prompts)
        tokens = body.tokens(longest, model.positions, self.max_new_tokens)
        asked = ActiveRequest(self, model, body, prompts, tokens)
        model.requests.add(asked)  # at once: what waits for room runs before `deltas` does
        return Answer(model.name, [prompt.ids for prompt in prompts], asked.deltas())


@dataclass(eq=False)
class ActiveRequest:
    """A request in progress, with a ticket and a choice for each sample of each prompt."""

    models: Models
    model: ServedModel
    body: Body
    prompts: Sequence[Prompt]
    tokens: int  # token limit of an answer
    updates: asyncio.Queue[Found] = field(default_factory=asyncio.Queue)

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield the pieces of all choices as they arrive. When this ends, for any reason, decoding for it stops."""
        body, model, thread = self.body, self.model, self.models.thread
        tickets = self.tickets()
        choices = [
            Choice(model.decoder, n, body.stops, tools=model.conversations.reader(prompt.tools))
            for n, prompt in enumerate(prompt for prompt in self.prompts for _ in range(body.n))
        ]
        running = set(range(len(tickets)))
        thread.order(lambda: thread.submit(model, tickets))
        try:
            while running:
                index, found = await self.updates.get()
                if isinstance(found, Exception):
                    raise found
                if index not in running:
                    continue
                choice = choices[index]
                delta = choice.feed(found.ids.tolist(), found.logprobs.tolist(), found.finish)
                if choice.ended:
                    self.keep(tickets[index].request, self.prompts[index // body.n], choice)
                    running.discard(index)
                yield delta
        finally:
            model.requests.discard(self)
            self.cancel(tickets[index].request.session for index in running)

    def tickets(self) -> list[Ticket]:
        """Make one ticket for each sample. A prompt that continues the ids of a kept session becomes a turn of that session."""
        body, numbers, found = self.body, self.models.numbers, list[Ticket]()
        sampling, alone = body.sampling(self.tokens), body.n == 1
        seed = secrets.randbits(62) if body.seed is None else body.seed % (1 << 62)
        for prompt in self.prompts:
            ids, group, turn = prompt.ids, next(numbers), 0
            session = self.model.take_session(ids) if alone else None
            if session is not None:
                ids, turn = ids[len(session.ids) // ID_BYTES :], session.turn + 1
            for _ in range(body.n):
                number = next(numbers) if session is None else session.number
                own = derive(seed, len(found)) if found else seed
                request = Request(ids, own, sampling, number, turn, group, keep=alone)
                streams = body.stream or bool(body.stops)
                found.append(Ticket(request, len(found), self.updates, streams))
        return found

    def keep(self, request: Request, prompt: Prompt, choice: Choice) -> None:
        """Keep a finished turn, and the session that computed it, for the next turn."""
        ids = np.array(choice.ids, np.int64)
        if prompt.messages:
            reply = Segment(ids, choice.whole.text, True, finish=choice.ended)
            self.model.conversations.add(prompt, choice.whole, reply)
        if choice.ended == "cut":
            self.cancel([request.session])
        elif request.keep:
            whole = np.concatenate([np.array(prompt.ids, np.int64), ids]).tobytes()
            sessions = self.model.sessions
            sessions.append(Session(request.session, request.turn, whole))
            self.cancel(sessions.pop(0).number for _ in range(len(sessions) - KEPT))

    def cancel(self, sessions: Iterable[int]) -> None:
        thread, gone = self.models.thread, list(sessions)
        if gone:
            thread.order(lambda: thread.cancel(self.model, gone))
