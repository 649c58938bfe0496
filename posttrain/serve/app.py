"""The HTTP side of a server: its routes, the checks before a request is read, and responses in one piece or as server-sent
events."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import socket
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from posttrain.serve import wire
from posttrain.trust import ip_of
from posttrain.types import JSON

RETRY = "x-stainless-retry-count"  # in the headers of OpenAI's clients
Result = TypeVar("Result")
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Source(Protocol):
    """Answers requests: the models of a server, or the policy of an episode."""

    @property
    def names(self) -> Mapping[str, int | None]:
        """Model names, each with its context length if known."""

    async def answer(self, body: wire.Body, retry: bool) -> wire.Answer:
        """Begin to answer. `retry`: the client sent this request before and did not receive the answer."""


class Scores(Protocol):
    """Scores answers."""

    def names(self) -> Mapping[str, str]:
        """Names of what can score, each with its kind: a policy gives log-probs; a reward_model and the reward of a stage give
        rewards."""

    async def score(self, body: wire.ScoreBody) -> JSON:
        """The scores of a request's items."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server. A request beyond them is refused, before its body is read if possible."""

    body_bytes: int = 4 << 20
    requests: int = 1024  # requests in progress or waiting
    read_seconds: float = 30.0  # to receive the body of a request
    send_seconds: float = 60.0  # for a client to read what is sent


@dataclass(eq=False)
class Guard:
    """Checks each request before the application sees it: the token, the host, the number and size of requests, and timeouts."""

    app: Any
    token: str = ""
    hosts: Sequence[str] = ()
    limits: Limits = Limits()
    busy: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_in_time(message: Any) -> None:
            async with asyncio.timeout(self.limits.send_seconds):
                await send(message)

        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        try:
            self.check(headers)
        except wire.Refused as error:
            more = {429: {"retry-after": "1"}, 413: {"connection": "close"}}.get(error.status)
            await JSONResponse(error.body(), error.status, more)(scope, receive, send_in_time)
            return
        self.busy += 1
        try:
            await self.app(scope, receive, send_in_time)
        except (TimeoutError, ClientDisconnect):  # the client does not read, or has disconnected
            return
        finally:
            self.busy -= 1

    def check(self, headers: Mapping[str, str]) -> None:
        host = headers.get("host", "")
        if not permitted(host, self.hosts):
            text = f"the host {host[:100]!r} is not this server's; name it with --name"
            raise wire.Refused(403, text, "host_not_allowed")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise wire.Refused(403, "requests of other sites are refused", "origin_not_allowed")
        given = headers.get("authorization", "").removeprefix("Bearer ").strip()
        if self.token and not hmac.compare_digest(given.encode(), self.token.encode()):
            needed = "a token is needed: Authorization: Bearer TOKEN"
            raise wire.Refused(401, needed, "invalid_api_key")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self.limits.body_bytes:
            raise too_large(self.limits)
        if self.busy >= self.limits.requests:
            text = f"{self.busy} requests are being answered; ask again later"
            raise wire.Refused(429, text, "queue_full")


def permitted(host: str, hosts: Sequence[str]) -> bool:
    """Whether a Host header names this server: by an IP address, which cannot be the name of another site, or by one of
    `hosts`."""
    name = re.sub(r":[0-9]+$", "", host).lower()
    own = ("localhost", socket.gethostname().lower(), *(h.lower() for h in hosts))
    return name in own or ip_of(name.strip("[]")) is not None


def too_large(limits: Limits) -> wire.Refused:
    text = f"a body has at most {limits.body_bytes:,} bytes, and says how many"
    return wire.Refused(413, text, "body_too_large")


async def read(request: Request, limits: Limits) -> bytes:
    """Read the body. Refuse one that is too long or arrives too late."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.read_seconds):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > limits.body_bytes:
                    raise too_large(limits)
    except TimeoutError:
        text = f"the body did not come within {limits.read_seconds:g} s"
        raise wire.Refused(408, text, "request_timeout") from None
    return b"".join(parts)


async def respond(
    find: Callable[[Request], Source], limits: Limits, kind: type[wire.Body], request: Request
) -> Response:
    """Answer a completion request, in one piece or as a stream. If the client disconnects, decoding for it stops."""
    try:
        body = wire.read_body(await read(request, limits), kind)
        answer = await find(request).answer(body, request.headers.get(RETRY, "0") != "0")
        form = wire.Form(body, answer)
        if not body.stream:
            return JSONResponse(form.whole(await connected(request, collected(answer.deltas))))
        # a refusal by the engine sets the status
        first = await connected(request, anext(answer.deltas))
    except Exception as error:
        return _answered(error)
    chunks = events(form, first, answer.deltas)
    unbuffered = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(chunks, media_type="text/event-stream", headers=unbuffered)


async def collected(deltas: AsyncIterator[wire.Delta]) -> list[wire.Delta]:
    """Wait for all choices and return them in order."""
    found: dict[int, wire.Delta] = {}
    async for delta in deltas:
        found.setdefault(delta.index, wire.Delta(delta.index)).add(delta)
    return [found[index] for index in sorted(found)]


async def connected(request: Request, waited: Awaitable[Result]) -> Result:
    """Wait for a result as long as the client does."""

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, gone = asyncio.ensure_future(waited), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return await work
    finally:
        for task in (work, gone):
            task.cancel()


async def events(
    form: wire.Form, first: wire.Delta, deltas: AsyncIterator[wire.Delta]
) -> AsyncIterator[str]:
    """Write a stream of server-sent events. An error in the middle is sent as an event, which clients raise."""
    begun: set[int] = set()
    tokens = 0

    def chunks(delta: wire.Delta) -> str:
        found = form.chunks(delta, delta.index not in begun)
        begun.add(delta.index)
        return "".join(map(event, found))

    async with aclosing(deltas):  # type: ignore[type-var]
        try:
            tokens += len(first.ids)
            yield chunks(first)
            async for delta in deltas:
                tokens += len(delta.ids)
                if text := chunks(delta):
                    yield text
            yield "".join(map(event, form.last(tokens)))
        except Exception as error:
            yield event(_logged(error).body())
    yield "data: [DONE]\n\n"


def event(tree: JSON) -> str:
    return f"data: {json.dumps(tree)}\n\n"


async def score(scores: Scores, limits: Limits, request: Request) -> Response:
    """List what can score, or score the items that were sent."""
    if request.method != "POST":
        cards = [{"id": name, "kind": kind} for name, kind in scores.names().items()]
        return JSONResponse({"object": "list", "data": cards})
    try:
        body = wire.read_body(await read(request, limits), wire.ScoreBody)
        return JSONResponse(await scores.score(body))
    except Exception as error:
        return _answered(error)


def _answered(error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        raise error
    found = _logged(error)
    return JSONResponse(found.body(), found.status)


def _logged(error: Exception) -> wire.Refused:
    found = wire.refusal(error)
    if found.status >= 500 and not isinstance(error, wire.Refused):
        traceback.print_exception(error)
    return found


def application(
    find: Callable[[Request], Source],
    limits: Limits,
    prefix: str = "",
    scores: Scores | None = None,
) -> Starlette:
    """Make the routes of a server. `find` returns the source that answers a request; `scores` scores answers."""

    async def models(request: Request) -> Response:
        card = {"object": "model", "created": 0, "owned_by": "posttrain"}
        known = find(request).names.items()
        cards = [{"id": name, **card, "max_model_len": length} for name, length in known]
        return JSONResponse({"object": "list", "data": cards})

    async def health(request: Request) -> Response:
        return Response()

    async def refused(request: Request, error: Exception) -> Response:
        return _answered(error)

    async def missing(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        known = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models"
        known += ", GET and POST /v1/score" if scores else ""
        text = f"{request.method} {request.url.path[:100]}: there are {known}"
        return _answered(wire.Refused(status, text, "unknown_url"))

    complete = partial(respond, find, limits)
    chat, text = partial(complete, wire.ChatBody), partial(complete, wire.TextBody)
    routes = [
        Route(f"{prefix}/v1/chat/completions", chat, methods=["POST"]),
        Route(f"{prefix}/v1/completions", text, methods=["POST"]),
        Route(f"{prefix}/v1/models", models),
        Route("/health", health),
    ]
    if scores is not None:
        routes.append(Route("/v1/score", partial(score, scores, limits), methods=["GET", "POST"]))
    handlers = {404: missing, 405: missing, wire.Refused: refused}
    return Starlette(routes=routes, exception_handlers=handlers)
