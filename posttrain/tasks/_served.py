"""Serves one episode at its own address: the policy in training samples the answers to a program's requests, kept as ids."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from posttrain.serve.app import Limits, application
from posttrain.serve.conversations import Choice, Conversations, Prompt, Turn
from posttrain.serve.server import Address, make_server
from posttrain.serve.wire import Answer, Body, Delta, Refused
from posttrain.tasks.base import EpisodeEnd, Generate
from posttrain.types import Rollout, Segment

MODEL = "policy"
MANY = 1 << 30
LIMITS = Limits(requests=8192)

Answered = tuple[list[tuple[int, ...]], list[Delta]]  # prompts, and the complete choices


@dataclass(slots=True, eq=False)
class RecordedRequest:
    """A request of the program: its answer, and how many clients wait for it or have read it."""

    answered: asyncio.Future[Answered]
    clients: int = 0

    def leave(self) -> None:
        self.clients -= 1


@dataclass(eq=False)
class ServedEpisode:
    """Answers the requests of one episode, one after the other. It runs in the event loop of the episodes; the server calls
    `answer` in its own. Turns are sampled with the stage's settings, whatever temperature is requested; a stop text or a token
    limit cuts them."""

    generate: Generate
    max_calls: int
    calls: int = 0
    ended: str = ""  # the limit that was exceeded
    turns: list[Turn] = field(default_factory=list)
    final: str = ""  # the text of the last answer
    asked: dict[str, list[RecordedRequest]] = field(default_factory=dict)  # by their bodies

    def __post_init__(self) -> None:
        self.loop, self.lock = asyncio.get_running_loop(), asyncio.Lock()
        self.decoder = self.generate.decoder
        self.conversations = Conversations(self.decoder.tokenizer, MANY)
        self.names = {MODEL: None}
        self.free = [self.generate]  # the episode's first conversation, until it begins
        # conversations in the sampler's cache, by their last turn
        self.sessions: dict[Turn, Generate] = {}

    async def answer(self, body: Body, retry: bool) -> Answer:
        prompts: list[Sequence[int]] = []
        return Answer(MODEL, prompts, self._deltas(body, retry, prompts))

    async def _deltas(
        self, body: Body, retry: bool, prompts: list[Sequence[int]]
    ) -> AsyncIterator[Delta]:
        """Yield complete choices. If the client disconnects, sampling continues, so that the answer is there when it asks
        again."""
        found = asyncio.run_coroutine_threadsafe(self._ask(body, retry), self.loop)
        asked, (given, choices) = await asyncio.wrap_future(found)
        prompts += given
        try:
            for choice in choices:
                yield replace(choice)
        except BaseException:  # the client has left
            self.loop.call_soon_threadsafe(asked.leave)
            raise

    async def _ask(self, body: Body, retry: bool) -> tuple[RecordedRequest, Answered]:
        """Return the record of a request with its answer, or that of the earlier one that it repeats: one marked as a retry, or one
        whose client left before it had the answer. Equal requests at the same time are samples of their own."""
        same = self.asked.setdefault(body.model_dump_json(), [])
        if before := [one for one in same if not one.clients] or (same[-1:] if retry else []):
            asked = before[0]
            self.generate.count("agent/retries")
        else:
            asked = RecordedRequest(asyncio.ensure_future(self._complete(body)))
            same.append(asked)
        asked.clients += 1
        try:
            return asked, await asyncio.shield(asked.answered)
        except asyncio.CancelledError:
            asked.leave()
            raise

    async def _complete(self, body: Body) -> Answered:
        async with self.lock:  # an episode samples one turn at a time
            self.calls += 1
            if self.calls > self.max_calls:
                self.ended = self.ended or "call limit"
                raise Refused(400, f"an episode has at most {self.max_calls} calls", "call_limit")
            found = self.conversations.prompts(body, len(self.decoder.tokenizer))
            prompts = [one if one.messages else self._continued(one) for one in found]
            choices = [
                await self._sample(body, prompt, place * body.n + n)
                for place, prompt in enumerate(prompts)
                for n in range(body.n)
            ]
            return [prompt.ids for prompt in prompts], choices

    def _continued(self, prompt: Prompt) -> Prompt:
        """A prompt of text or ids as the next turn of the longest conversation that it continues."""
        ids = prompt.ids
        whole = [((), None), *((turn.ids, turn) for turn in self.turns)]
        begins = [(own, turn) for own, turn in whole if own != ids and own == ids[: len(own)]]
        own, before = max(begins, key=lambda pair: len(pair[0]))
        return Prompt(before, ids[len(own) :], ())

    async def _sample(self, body: Body, prompt: Prompt, index: int) -> Delta:
        """Sample one choice. If it continues a conversation that the sampler keeps, that conversation goes on; else a new one
        begins with its ids."""
        kept = self.sessions.pop(prompt.before, None) if prompt.before is not None else None
        session = kept or (self.free.pop() if self.free else self.generate.session(""))
        try:
            reply = await session(prompt.given if kept else prompt.ids)
        except EpisodeEnd as end:
            self.ended = self.ended or end.outcome
            self.free += [] if kept else [session]  # nothing was sampled in it
            raise Refused(400, str(end), "context_length_exceeded", "messages") from None
        reader = self.conversations.reader(prompt.tools)
        choice = Choice(self.decoder, index, body.stops, body.limit or MANY, reader)
        assert reply.logprobs is not None
        choice.feed(reply.ids.tolist(), reply.logprobs.tolist(), reply.finish)
        segment = choice.segment(reply)
        if prompt.messages:
            turn = self.conversations.add(prompt, choice.whole, segment)
        else:
            turn = Turn(prompt.before, prompt.given, segment)
        if choice.ended != "cut":
            self.sessions[turn] = session
        self.turns.append(turn)
        self.final = choice.whole.text
        return choice.whole

    async def close(self) -> None:
        """Cancel sampling in progress."""
        work = [one.answered for same in self.asked.values() for one in same]
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    def rollouts(self, like: Rollout) -> list[Rollout]:
        """Return a rollout for each conversation: `like` this one, with its segments. A turn that several share is trained on
        once, in the first of them."""
        parents = {turn.before for turn in self.turns}
        found, learned = [], set[Turn]()
        for leaf in (turn for turn in self.turns if turn not in parents):
            segments: list[Segment] = []
            for turn in leaf.path():
                text, offsets = self.decoder.decode(turn.given)
                given = np.array(turn.given, np.int64)
                segments.append(Segment(given, text, sampled=False, offsets=offsets))
                reply = turn.reply
                if turn in learned:
                    reply = Segment(reply.ids, reply.text, sampled=False, offsets=reply.offsets)
                segments.append(reply)
                learned.add(turn)
            found.append(replace(like, segments=tuple(segments)))
        return found


class EpisodeServer:
    """The server of this process, in a thread. The address of an episode cannot be guessed."""

    def __init__(self) -> None:
        self.episodes: dict[str, ServedEpisode] = {}
        app = application(self.find, LIMITS, "/{episode}")
        self.running = make_server(app, Address(port=0), LIMITS).in_thread()
        self.url = self.running.__enter__()  # it ends with the process

    def find(self, request: Any) -> ServedEpisode:
        found = self.episodes.get(request.path_params["episode"])
        if found is None:
            raise Refused(404, "this episode has ended", "episode_ended")
        return found

    @contextmanager
    def serving(self, episode: ServedEpisode) -> Iterator[tuple[str, str]]:
        """Yield the base URL of an episode, and a key."""
        name = secrets.token_urlsafe(16)
        self.episodes[name] = episode
        try:
            yield f"{self.url}/{name}/v1", name
        finally:
            del self.episodes[name]


@lru_cache(maxsize=1)
def _server(process: int) -> EpisodeServer:
    return EpisodeServer()


def episode_server() -> EpisodeServer:
    """Return the server, which starts at the first call; a forked process has its own."""
    return _server(os.getpid())
