"""Several processes that work together, forked from that of the tests: to start one costs no imports."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.train import processes

LONGEST = 120.0  # seconds


@dataclass(frozen=True)
class Ended:
    """How each process ended: its exit code (or the negative of a signal's number), what it returned, what it raised."""

    codes: list[int]
    found: list[Any]
    raised: list[str]


def run(count: int, function: Callable[..., Any], *given: Any, sharding: str = "never", tensor: int = 1) -> list[Any]:
    """What `function(world, *given)` returns in each of `count` processes that have joined, as JSON."""

    def joining() -> Any:
        with processes.joined("cpu", sharding, {}, tensor) as world:
            return function(world, *given)

    return finished(start(count, joining, grouped=True))


def finished(ended: Ended) -> list[Any]:
    assert not any(ended.codes), "\n".join(ended.raised) or f"exit codes {ended.codes}"
    return ended.found


def start(count: int, function: Callable[[], Any], grouped: bool | None = None) -> Ended:
    """Run a function in processes that find in their environment what torchrun would have put there. When one fails, the others have a
    few seconds to notice."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        together = count > 1 if grouped is None else grouped
        pids = [_fork(rank, count, server, Path(folder), function, together) for rank in range(count)]
        deadline, codes = time.monotonic() + LONGEST, dict[int, int]()
        while len(codes) < count and time.monotonic() < deadline:
            for pid in pids:
                if pid not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[pid] = os.waitstatus_to_exitcode(found[1])
            if any(codes.values()):
                deadline = min(deadline, time.monotonic() + 10)
            time.sleep(0.005)
        for pid in set(pids) - set(codes):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        texts = [path.read_text() for path in sorted(Path(folder).glob("*.txt"))]
        made = [Path(folder) / f"{rank}.json" for rank in range(count)]
        found = [json.loads(path.read_text()) if path.exists() else None for path in made]
        return Ended([codes.get(pid, 1) for pid in pids], found, texts)


def _fork(rank: int, count: int, server: socket.socket, folder: Path, function: Callable[[], Any], grouped: bool) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(int(LONGEST))  # whoever hangs ends with it
        # the clock of the tests themselves has not survived the fork, and to stop it would be to wait for it
        faulthandler.dump_traceback_later = faulthandler.cancel_dump_traceback_later = lambda *_, **__: None
        torch.set_num_threads(1)
        os.environ.update(environment(rank, count, server) if grouped else {})
        with ExitStack() as stack, open(folder / f"{rank}.out", "w") as said:
            stack.callback(os.dup2, os.dup(1), 1)
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            sys.stdout = sys.stderr = said
            found = function()
        (folder / f"{rank}.json").write_text(json.dumps(found))
        code = 0
    except BaseException:
        (folder / f"{rank}.txt").write_text(f"process {rank}: {traceback.format_exc()}")
    finally:
        os._exit(code)


def environment(rank: int, count: int, server: socket.socket) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.getsockname()[1]),
        "GLOO_SOCKET_IFNAME": "lo",
        processes.SERVER_SOCKET: str(server.fileno()),
    }
