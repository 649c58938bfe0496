"""Writes the stacks of every thread, in this process and its workers, while a step hangs.

A thread in C writes those of this process, also if nothing else can run any more. Reward workers and generation helpers are forked from
this process and inherit its handler of SIGUSR1, which writes where they stand and lets them go on; programs that were started are not
forks, catch nothing, and are left alone. `kill -USR1 PID` does the same by hand.
"""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from posttrain.system.files import open_file
from posttrain.system.workers import stacks

SIGNAL = getattr(signal, "SIGUSR1", None)
INTERVAL = 0.25  # seconds between two readings of the clock
WRITING = 0.1  # seconds that a process has for its stacks before the next is asked


class Watchdog:
    """Writes stacks to a file when a step takes too long, even if it never ends. The file is kept only if something was written."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = io.TextIOWrapper(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        self._deadline: float | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        # another handler (of a cluster, or the user's own) is left in place: then workers cannot be asked
        self._registered = SIGNAL is not None and signal.getsignal(SIGNAL) == signal.SIG_DFL
        if self._registered and SIGNAL is not None:
            faulthandler.register(SIGNAL, file=self._file, all_threads=True)

    @contextmanager
    def step(self, seconds: float | None) -> Iterator[None]:
        """Watch one step; None: no limit."""
        if seconds is None:
            yield
            return
        if self._thread is None and self._registered:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        faulthandler.dump_traceback_later(seconds, file=self._file)
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        """The watching thread: signals the workers when a step's time is over."""
        while not self._over.wait(INTERVAL):
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                self._deadline = None
                ask_workers(self._file)

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(60)
        if self._registered and SIGNAL is not None:
            faulthandler.unregister(SIGNAL)
        self._file.close()
        if self.path.exists() and self.path.stat().st_size == 0:
            self.path.unlink()
            with suppress(OSError):  # other alarms have left something there
                self.path.parent.rmdir()


def ask_workers(file: TextIO) -> None:
    """Make every process that was forked from this one, or for it by the fork server of its workers, write its stacks to the file,
    one after the other. Workers are older than the file and write to a file of their own."""
    own = stacks().fileno()
    for pid in forks():
        file.write(f"\nprocess {pid}, a worker of process {os.getpid()}:\n")
        file.flush()
        written = os.fstat(own).st_size
        with suppress(ProcessLookupError, PermissionError):
            assert SIGNAL is not None
            os.kill(pid, SIGNAL)
        time.sleep(WRITING)
        file.write(os.pread(own, 1 << 20, written).decode(errors="replace"))
        file.flush()


def forks() -> list[int]:
    """Descendants of this process that handle the signal; it would end the others. None without /proc."""
    assert SIGNAL is not None
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        for tasks in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with suppress(OSError):
                waiting += (children := [int(word) for word in tasks.read_text().split()])
                found += children
    return [pid for pid in sorted(found) if _caught(pid) >> (SIGNAL - 1) & 1]


def _caught(pid: int) -> int:
    """The signals that a process has handlers for, as bits."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return int(line.split()[1], 16)
    return 0
