"""Runs the application: a port, uvicorn, and the address with its token, printed once."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn

from posttrain.serve.server import Address, Protocol
from posttrain.studio.app import make_app
from posttrain.studio.guard import LOOPBACK
from posttrain.studio.jobs import start_demo

SERVING: dict[str, Any] = {
    "log_level": "warning",
    "access_log": False,
    "server_header": False,
    "lifespan": "off",
    "ws": "none",
}
LIMITS: dict[str, Any] = {
    "limit_concurrency": 200,
    "timeout_keep_alive": 30,
    "timeout_graceful_shutdown": 1,
}
NOT_LOCAL = (
    "anyone with the address can see and change what is here; the connection is not encrypted\n"
)


def serve(
    roots: Sequence[Path],
    address: Address,
    models: str = "",
    demo: bool = False,
    browser: bool = False,
) -> None:
    """Serve until Ctrl-C."""
    names = frozenset(address.hosts)
    local = address.loopback and not names
    app = make_app(roots, hosts=LOOPBACK | names | {address.host}, local=local, serve=models)
    with address.listen() as listening:
        name = min(names, default=address.host)
        shown = f"[{name}]" if ":" in name else name
        opened = f"http://{shown}:{listening.getsockname()[1]}/" + (
            "" if local else f"?token={app.token}"
        )
        sys.stdout.write(f"studio: {opened}\n" + ("" if local else NOT_LOCAL))
        if demo:
            start_demo(roots[0])
            sys.stdout.write(
                f"a demo run is being trained in {roots[0] / 'demo'}; it appears in the table of runs\n"
            )
        sys.stdout.flush()
        if browser:
            webbrowser.open(opened)
        config = uvicorn.Config(
            app, http=Protocol, h11_max_incomplete_event_size=1 << 16, **SERVING, **LIMITS
        )
        uvicorn.Server(config).run(sockets=[listening])
