"""Runs the application with uvicorn on a port, and prints the address with its token once."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from posttrain.serve.server import Address, open_server
from posttrain.studio.app import make_app
from posttrain.studio.guard import LOOPBACK
from posttrain.studio.jobs import start_demo

STOP_SECONDS, CONNECTIONS = 1.0, 200
NOT_LOCAL = "anyone with the address can see and change what is here; nothing is encrypted\n"


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
    server = open_server(app, address, STOP_SECONDS, CONNECTIONS)
    with server.socket:
        shown = replace(server, host=min(names, default=address.host)).url
        opened = f"{shown}/" if local else f"{shown}/?token={app.token}"
        sys.stdout.write(f"studio: {opened}\n" + ("" if local else NOT_LOCAL))
        if demo:
            start_demo(roots[0])
            place = roots[0] / "demo"
            sys.stdout.write(f"a demo run is trained in {place}; the table of runs shows it\n")
        sys.stdout.flush()
        if browser:
            webbrowser.open(opened)
        server.run()
