"""Starts the processes of a run on this machine (`processes=N`), and ends all of them if one fails.

Each process is `python -m posttrain` with the same arguments and the environment variables that torchrun would set. The first process
writes the run directory and prints. They connect through a socket on the loopback interface that is open before they start, so that
no other program can take its port. They end with this process, even if it is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from posttrain.errors import UserError
from posttrain.runs.console import write_text
from posttrain.runs.layout import CONFIG
from posttrain.system import processes
from posttrain.system.files import how_to_continue
from posttrain.train.processes import LONGEST_WAIT, SERVER_SOCKET

if TYPE_CHECKING:  # it imports this file
    from posttrain.cluster.ray_cluster import NodeProcess, Ranks

COMMAND = (*processes.PYTHON, "-m", "posttrain")
LOOPBACK = "127.0.0.1"
POLL = 0.05  # seconds between two checks of the processes
# seconds that the other processes have to end by themselves: after one failed, and after one ended for a reason that all share
GRACE, ENDING = 5.0, 120.0
# if all processes are on this machine
ON_LOOPBACK = {
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    "NCCL_SOCKET_IFNAME": "lo",
}
NODE_FAILED = "was lost with its node or its actor"
HANGS = f"does not answer (the others wait for {LONGEST_WAIT:g} s, see POSTTRAIN_WAIT)"
REFUSED, HUNG_UP, INTERRUPTED = 2, 129, 130
SAID = (1, REFUSED, 3, HUNG_UP, INTERRUPTED)  # exit codes of a process that has reported why


@dataclass(eq=False)
class Started:
    """One process of the run and its stderr. The first process writes to the terminal."""

    rank: int
    process: subprocess.Popen[bytes] | NodeProcess
    said: IO[bytes] | None = None
    fate: str = ""  # how it ended, if the exit code does not tell

    def text(self) -> str:
        if self.said is None:
            return ""
        self.said.seek(0)
        return self.said.read().decode(errors="replace")

    def ended(self) -> str:
        """How it ended, in words."""
        code = self.process.returncode
        if self.fate or code is None:
            return self.fate or "did not end"
        return (
            f"was ended by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )

    def gone(self) -> bool:
        """Whether it was lost with its node."""
        return False

    def end(self) -> None:
        """End it and the processes that it started."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)


def launch(
    words: Sequence[str],
    count: int,
    directory: Path,
    places: Callable[[int], Ranks] | None = None,
    shrinks: bool = False,
) -> int:
    """Run `posttrain WORDS` in `count` processes, and return the exit code of the run. If one process runs out of memory while the
    others wait for it, all restart once from the last checkpoint with half the token budget. `places` says where they start. If some
    are lost with their nodes and the group `shrinks`, the run continues from the last checkpoint with the remaining processes."""
    more: dict[str, str] = {}
    while True:
        with places(count) if places else nullcontext() as found:
            started, failed = run_group(words, count, found, more)
        if failed is None:
            return 0
        failures = [one for one in started if one.fate == NODE_FAILED]
        if out_of_memory(started, more):
            words = resumed(words, directory)
        elif failures and shrinks:
            count -= len(failures)
            text = f"{len(failures)} process(es) were lost with their nodes; going on with {count} from the last checkpoint"
            write_text(f"posttrain: {text}\n", sys.stderr)
            words = resumed(words, directory, f"processes={count}")
        else:
            return report(failed, started, directory)


def out_of_memory(started: Sequence[Started], more: dict[str, str]) -> bool:
    """Whether a process ran out of memory for the first time. `more` then makes the next processes halve the token budget."""
    found = [one.rank for one in started if one.process.poll() == processes.OUT_OF_MEMORY]
    if not found or processes.HALVED in more:
        return False
    more[processes.HALVED] = "1"
    text = f"memory: process {found[0]} of {len(started)} ran out of memory; token_budget is halved in all, and the run goes on"
    text += " from its last checkpoint: the gradient is the same; the next time stops"
    write_text(f"posttrain: {text}\n", sys.stderr)
    return True


def resumed(words: Sequence[str], directory: Path, *more: str) -> list[str]:
    """The command that resumes the run of another command."""
    if not (directory / CONFIG).is_file():
        return [*words, *more]
    return ["resume", str(directory), *(w for w in words if w == "--allow-code"), *more]


def run_group(
    words: Sequence[str], count: int, places: Ranks | None, shared: Mapping[str, str]
) -> tuple[list[Started], Started | None]:
    """Run the processes to their end. Returns them, and the one that failed first."""
    started: list[Started] = []
    with server_socket(places.address if places else LOOPBACK) as server:
        try:
            for rank in range(count):
                environment = variables(rank, count, server) | dict(shared)
                if places is None or not rank:
                    here = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
                    more = places.variables() if places else ON_LOOPBACK | here
                    started.append(_start(words, rank, environment | more, server))
                else:
                    started.append(places.start(words, rank, environment))
            with forwarded(started):
                return started, _wait(started)
        finally:
            for one in started:
                one.end()
            for one in started:
                one.process.wait(30)


@contextmanager
def server_socket(address: str) -> Iterator[socket.socket]:
    """A socket that listens on a free port of the loopback interface, or of the address by which other nodes of a cluster reach this
    one."""
    with socket.socket() as server:
        try:
            server.bind((address, 0))
            server.listen(1024)
        except OSError as error:
            raise UserError(f"processes: no port of {address} is free ({error.strerror})") from None
        yield server


@contextmanager
def forwarded(started: Sequence[Started]) -> Iterator[None]:
    """Forward Ctrl-C, SIGTERM and SIGHUP to the processes, each of which decides when to stop."""
    terminal = processes.Terminal()

    def handler(number: int, frame: FrameType | None) -> None:
        terminal.hang_up() if number == processes.HANGUP else terminal.lost()
        for one in started:
            if one.process.poll() is None:
                one.process.send_signal(number)

    numbers = processes.stop_signals()
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


def variables(rank: int, count: int, server: socket.socket) -> dict[str, str]:
    """The environment variables that torchrun would set for a process."""
    address, port = server.getsockname()[:2]
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": str(address),
        "MASTER_PORT": str(port),
        SERVER_SOCKET: str(server.fileno()),
    }


def _start(
    words: Sequence[str], rank: int, environment: dict[str, str], server: socket.socket
) -> Started:
    first = rank == 0
    said = None if first else tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
    process = processes.start(
        [*COMMAND, *words],
        os.environ | environment,
        stdout=None if first else subprocess.DEVNULL,
        stderr=said,
        pass_fds=(server.fileno(),) if first else (),
    )
    return Started(rank, process, said)


def _wait(started: Sequence[Started]) -> Started | None:
    """Wait until all processes have ended or had time to. Returns the one that failed first, or None."""
    failed: Started | None = None
    deadline = float("inf")
    while time.monotonic() < deadline:
        alive = [one for one in started if one.process.poll() is None]
        ended = [one for one in started if one.process.returncode not in (None, 0)]
        # a process that only noticed the end of another is not the cause
        causes = sorted(ended, key=lambda one: one.process.returncode == processes.PEER_FAILED)
        if causes and (failed is None or failed.process.returncode == processes.PEER_FAILED):
            failed = causes[0]
            patience = ENDING if failed.process.returncode in SAID[1:] else GRACE
            deadline = min(deadline, time.monotonic() + patience)
        # the first process has reported why, and will not answer the others
        if started[0].process.returncode == REFUSED:
            deadline = min(deadline, time.monotonic() + GRACE)
        if not alive:
            break
        time.sleep(POLL)
    if failed is None:
        return None
    failures = [one for one in started if one.gone()]
    for one in failures:
        one.fate = NODE_FAILED
    if failures or failed.process.returncode != processes.PEER_FAILED:
        return failures[0] if failures else failed
    if started[0].process.returncode == 0:
        return None  # no failure: the run ended to wait for people, and the others noticed
    hanging = [one for one in started if one.process.poll() is None]
    for one in hanging:
        one.fate = HANGS
    return hanging[0] if hanging else failed


def report(failed: Started, started: Sequence[Started], directory: Path) -> int:
    """Print in one line why a run ended, unless its first process has."""
    first = started[0].process.returncode
    if first in SAID:
        return first
    code = failed.process.returncode
    write_text(failed.text(), sys.stderr)
    if code in SAID[1:]:
        return code
    if -(code or 0) in (signal.SIGINT, signal.SIGTERM, processes.HANGUP):  # before it could report
        write_text("posttrain: interrupted\n", sys.stderr)
        return HUNG_UP if -code == processes.HANGUP else INTERRUPTED
    text = f"process {failed.rank} of {len(started)} {failed.ended()}"
    hanging = [str(one.rank) for one in started if one.fate == HANGS]
    if len(hanging) > 1:  # it is unknown which of them the others wait for
        text = f"one of the processes {', '.join(hanging)} of {len(started)} {HANGS}"
    text += "; the others were stopped"
    if (directory / CONFIG).is_file():
        text += f"; continue with: {how_to_continue(directory)}"
    write_text(f"posttrain: {text}\n", sys.stderr)
    return 1
