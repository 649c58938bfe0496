"""Checks every request before it reaches a page: the Host header, the origin, the token, and limits.

- The Host header must name this server: a site that points its own name at 127.0.0.1 (DNS rebinding) is refused.
- A request that may change something (every method but GET and HEAD) needs the token in a header, which another site cannot set, JSON
  as its content type, and, if the browser sends an Origin, this server's origin.
- Requests from other machines always need the token, in a cookie that the first address, `/?token=...`, sets.
- Model output is untrusted: the content security policy runs no script except our files, loads nothing from other hosts, and sends
  nothing to them.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse

from posttrain.errors import UserError, require

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE, HEADER = "posttrain_studio", "x-studio-token"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
BODY_BYTES, BODY_SECONDS = 2 << 20, 20.0
TRIES, TRY_SECONDS = 20, 60.0  # wrong tokens in these seconds, after which a wrong one gets 429
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}


@dataclass(slots=True)
class Guard:
    """Wraps an application. `hosts` are the names of this server; `local` means that only this machine can connect.

    `serve.app.Guard` is another class because its clients are programs, which send a bearer token with every request, any content
    type, and any address of the machine as host, while a page has a cookie, reads without a token, and may send only JSON."""

    app: App
    token: str
    hosts: frozenset[str] = LOOPBACK
    local: bool = True
    _wrong: deque[float] = field(default_factory=lambda: deque(maxlen=TRIES))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a web socket: this server has none
        asked = HTTPConnection(scope)
        if refused := self._refusal(scope, asked):
            status, reason = refused
            await PlainTextResponse(reason, status, HEADERS)(scope, receive, send)
            return
        if scope["path"] == "/" and self._right(asked.query_params.get("token", "")):
            cookie = f"{COOKIE}={self.token}; Path=/; HttpOnly; SameSite=Strict"
            more = {"location": "/", "set-cookie": cookie}
            await PlainTextResponse("", 303, HEADERS | more)(scope, receive, send)
            return
        await self.app(scope, _limited(receive), _with_headers(send))

    def _refusal(self, scope: Scope, asked: HTTPConnection) -> tuple[int, str] | None:
        """Status and reason for a refusal; None to accept."""
        headers = asked.headers
        if _name(headers.get("host", "")) not in self.hosts:
            return 421, "this server does not answer to that host name"
        safe = scope["method"] in ("GET", "HEAD")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != headers["host"]:
            return 403, "the request comes from another site"
        elsewhere = headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")
        if elsewhere and not (safe and headers.get("sec-fetch-mode") == "navigate"):
            return 403, "the request comes from another site"
        if int(headers.get("content-length") or 0) > BODY_BYTES:
            return 413, f"at most {BODY_BYTES:,} bytes can be sent"
        if not safe and not headers.get("content-type", "").startswith("application/json"):
            return 415, "send JSON"
        query = asked.query_params.get("token", "")
        opening = safe and scope["path"] == "/" and bool(query)
        if safe and self.local and not opening:
            return None
        given = headers.get(HEADER) or (query if opening else "")
        if safe and not given:
            given = asked.cookies.get(COOKIE, "")
        return None if self._right(given) else self._wrong_token()

    def _right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())

    def _wrong_token(self) -> tuple[int, str]:
        now = time.monotonic()
        many = len(self._wrong) == TRIES and now - self._wrong[0] < TRY_SECONDS
        self._wrong.append(now)
        if many:
            return 429, "too many wrong tokens; wait a minute"
        return 401, "a token is needed: open the address that was printed"


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    return (name if name and port.isdigit() else host).lower()


def _limited(receive: Receive) -> Receive:
    """Limit the size of a request's body and the time that it may take to arrive."""
    state = {"bytes": 0, "done": False}

    async def limited() -> MutableMapping[str, Any]:
        if state["done"]:
            return await receive()  # wait for the disconnect, which ends a stream
        try:
            message = await asyncio.wait_for(receive(), BODY_SECONDS)
        except TimeoutError:
            raise UserError(f"the request took more than {BODY_SECONDS:.0f} s to arrive") from None
        state["bytes"] += len(message.get("body", b""))
        state["done"] = not message.get("more_body", False)
        require(state["bytes"] <= BODY_BYTES, f"at most {BODY_BYTES:,} bytes can be sent")
        return message

    return limited


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            held = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                held.setdefault(name, value)
        await send(message)

    return sending
