"""Runs the application: a socket, uvicorn, and the address with its token, printed once."""

from __future__ import annotations

import socket
import subprocess
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from posttrain.errors import UserError
from posttrain.studio.app import make_app
from posttrain.studio.guard import LOOPBACK

# small enough for three minutes on a CPU
DEMO = [
    "run",
    "instructgpt",
    "pretrain.steps=400",
    "compared=1000",
    "reward.steps=100",
    "steps=25",
    "prompts=64",
    "problems=200",
]
LIMITS = {
    "limit_concurrency": 200,
    "timeout_keep_alive": 30,
    "timeout_graceful_shutdown": 1,
    "h11_max_incomplete_event_size": 65536,
}


def serve(
    roots: Sequence[Path],
    host: str,
    port: int,
    names: frozenset[str],
    local: bool,
    models: str = "",
    demo: bool = False,
    browser: bool = False,
) -> None:
    """Serve until Ctrl-C."""
    app = make_app(roots, hosts=LOOPBACK | names, local=local, serve=models)
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            raise UserError(
                f"cannot listen at {host}:{port}: {error.strerror}; choose another --port"
            ) from None
        chosen = listening.getsockname()[1]
        name = min(names - {host}, default=host)
        shown = f"[{name}]" if ":" in name else name
        address = f"http://{shown}:{chosen}/" + ("" if local else f"?token={app.token}")
        sys.stdout.write(f"studio: {address}\n")
        if not local:
            sys.stdout.write(
                "the token lets anyone who has the address see and change what is here; the connection is not encrypted\n"
            )
        sys.stdout.flush()
        if demo:
            start_demo(roots[0])
        if browser:
            webbrowser.open(address)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, **LIMITS
        )
        uvicorn.Server(config).run(sockets=[listening])


def start_demo(root: Path) -> None:
    """Start training a small run where there is none yet, in a process of its own."""
    directory = root / "demo"
    if directory.exists():
        return
    log = root / "demo.log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "posttrain", *DEMO, f"out={directory}"]
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    sys.stdout.write(
        f"a demo run is being trained in {directory}; it appears in the table of runs\n"
    )
    sys.stdout.flush()
