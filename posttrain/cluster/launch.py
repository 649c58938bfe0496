"""Starts the processes of a run on this machine (`processes=N`), and ends all of them when one is failed.

Each is `python -m posttrain` with the same words and, in its environment, what torchrun would put there. The first one writes the run
directory and prints. They find each other on a socket of the loopback interface that is open before they start, so that no port can be
taken in between, and they end with this process, even where it is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from posttrain.errors import UserError
from posttrain.runs.console import write_text
from posttrain.runs.layout import CONFIG
from posttrain.system.processes import PEER_FAILED, STARTED
from posttrain.train.processes import SERVER_SOCKET

COMMAND = (sys.executable, "-m", "posttrain")
LOOPBACK = "127.0.0.1"
POLL = 0.05  # seconds between two looks at the processes
# seconds that the others have to end by themselves: after one was failed, and after one ended for a reason that all have
GRACE, ENDING = 5.0, 120.0
SAID = (1, 2, 3, 130)  # exit codes of a process that has said why


@dataclass(eq=False)
class Started:
    """One process of the run, and what it said on stderr; the first one says it to the terminal."""

    rank: int
    process: subprocess.Popen[bytes]
    said: IO[bytes] | None

    def text(self) -> str:
        if self.said is None:
            return ""
        self.said.seek(0)
        return self.said.read().decode(errors="replace")


def launch(words: Sequence[str], count: int, directory: Path) -> int:
    """Run `posttrain WORDS` in `count` processes; the exit code of the run."""
    with server_socket() as server, forwarded() as started:
        try:
            for rank in range(count):
                started.append(_start(words, rank, count, server))
            failed = _wait(started)
        finally:
            _end(started)
    if failed is None:
        return 0
    return _report(failed, started, directory)


@contextmanager
def server_socket() -> Iterator[socket.socket]:
    """A socket that listens on a free port of the loopback interface."""
    with socket.socket() as server:
        try:
            server.bind((LOOPBACK, 0))
            server.listen(1024)
        except OSError as error:
            raise UserError(
                f"processes: no port of {LOOPBACK} is free ({error.strerror})"
            ) from None
        yield server


@contextmanager
def forwarded() -> Iterator[list[Started]]:
    """A list of processes to which Ctrl-C and SIGTERM are passed on: each decides when to stop."""
    started: list[Started] = []

    def handler(number: int, frame: FrameType | None) -> None:
        for one in started:
            if one.process.poll() is None:
                one.process.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield started
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


def _start(words: Sequence[str], rank: int, count: int, server: socket.socket) -> Started:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(server.getsockname()[1]),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "NCCL_SOCKET_IFNAME": "lo",
        SERVER_SOCKET: str(server.fileno()),
        STARTED: str(os.getpid()),
    }
    first = rank == 0
    said = None if first else tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
    process = subprocess.Popen(
        [*COMMAND, *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=None if first else subprocess.DEVNULL,
        stderr=said,
        pass_fds=(server.fileno(),) if first else (),
        process_group=0,  # signals of the terminal come through this process alone
    )
    return Started(rank, process, said)


def _wait(started: Sequence[Started]) -> Started | None:
    """The process that failed first, once all have ended or had the time to; None where none did."""
    failed: Started | None = None
    deadline = float("inf")
    while time.monotonic() < deadline:
        alive = [one for one in started if one.process.poll() is None]
        ended = [one for one in started if one.process.returncode not in (None, 0)]
        # a process that only noticed the end of another is not the cause
        causes = sorted(ended, key=lambda one: one.process.returncode == PEER_FAILED)
        if causes and (failed is None or failed.process.returncode == PEER_FAILED):
            failed = causes[0]
            patience = ENDING if failed.process.returncode in SAID[1:] else GRACE
            deadline = min(deadline, time.monotonic() + patience)
        if not alive:
            break
        time.sleep(POLL)
    # the first process may end as it should, in the middle of a run: it waits for people, and the others noticed its end
    ended_well = (
        failed is not None
        and failed.process.returncode == PEER_FAILED
        and started[0].process.returncode == 0
    )
    return None if ended_well else failed


def _end(started: Sequence[Started]) -> None:
    """End what is left, and what it has started."""
    for one in started:
        if one.process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(one.process.pid, signal.SIGKILL)
    for one in started:
        one.process.wait(30)


def _report(failed: Started, started: Sequence[Started], directory: Path) -> int:
    """Say why a run ended, in one line, unless its first process has."""
    first = started[0].process.returncode
    if first in SAID:
        return first
    code = failed.process.returncode
    write_text(failed.text(), sys.stderr)
    if code in SAID[1:]:
        return code
    how = (
        f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    )
    text = f"process {failed.rank} of {len(started)} {how}; the others were stopped"
    if (directory / CONFIG).is_file():
        text += f"; continue with: posttrain resume {directory}"
    write_text(f"posttrain: {text}\n", sys.stderr)
    return 1
