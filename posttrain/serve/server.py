"""Runs an application on a port, either in this thread until it is interrupted, or in a new thread."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from posttrain.errors import UserError, require
from posttrain.serve.app import Guard, Limits
from posttrain.trust import is_loopback

HEADER_SECONDS = 10.0  # to receive the headers of a request
IDLE_SECONDS = 60.0  # before an idle connection is closed
STOP_SECONDS = 5.0
BACKLOG = 4096


class Protocol(H11Protocol):  # type: ignore[misc]  # untyped where it is not installed
    """HTTP/1.1 that closes a connection whose headers do not arrive in time."""

    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:  # the headers have arrived
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None
        elif self.timer is None:
            self._wait()

    def _wait(self) -> None:
        self.timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server, and its token. Requests from other machines need the token."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str = ""
    hosts: Sequence[str] = ()  # names in the Host header, in addition to its addresses

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, f"port must be from 0 to 65535, not {self.port}")

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    def secured(self) -> Address:
        """This address with a new token, if one is needed and none is given."""
        if self.token or self.loopback:
            return self
        return Address(self.host, self.port, secrets.token_urlsafe(24), self.hosts)

    def listen(self) -> socket.socket:
        """Open the socket. Port 0 chooses a free port."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # asyncio sets TCP_NODELAY only if the socket names its protocol; without it, a small response waits 40 ms for an
        # acknowledgement
        found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((self.host, self.port))
            found.listen(BACKLOG)
        except (OSError, OverflowError) as error:
            found.close()
            where = f"cannot listen on {self.host}:{self.port}: {error}"
            raise UserError(f"{where}; give another port (0: any that is free) or host") from None
        return found


@dataclass(frozen=True, slots=True)
class Server:
    """A server whose port is open."""

    server: uvicorn.Server
    socket: socket.socket
    host: str

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.socket.getsockname()[1]}"

    def run(self) -> None:
        """Answer requests until Ctrl-C."""
        with suppress(KeyboardInterrupt):
            self.server.run([self.socket])

    @contextmanager
    def in_thread(self) -> Iterator[str]:
        """Answer requests in a thread while this context is open. Yields the URL."""
        answer = self.server.serve
        work = threading.Thread(target=lambda: asyncio.run(answer([self.socket])), daemon=True)
        work.start()
        try:
            yield self.url
        finally:
            self.server.should_exit = True
            work.join(STOP_SECONDS)


def make_server(app: Any, address: Address, limits: Limits) -> Server:
    return open_server(Guard(app, address.token, (address.host, *address.hosts), limits), address)


def open_server(
    app: Any, address: Address, stop: float = STOP_SECONDS, connections: int | None = None
) -> Server:
    """Open a server for an application that guards itself. After it is asked to stop, it ends within `stop` seconds."""
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(IDLE_SECONDS),
        timeout_graceful_shutdown=int(stop),
        limit_concurrency=connections,
        h11_max_incomplete_event_size=1 << 16,
    )
    return Server(uvicorn.Server(config), address.listen(), address.host)
