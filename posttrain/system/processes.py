"""Forks worker processes. Each reads requests from one pipe, replies through another, and ends with this process."""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

DEATH_SIGNAL = 1  # prctl: be killed when the parent dies
STARTED = "POSTTRAIN_STARTED"  # the id of the parent process, if `processes=N` started this one
PEER_FAILED = 75  # exit code of a process that noticed the failure of another process of its run
OUT_OF_MEMORY = 76  # exit code of a process that ran out of memory while others wait for it
HALVED = "POSTTRAIN_HALVED"  # set in processes restarted after that, with half the token budget
# called when the import of a user's file begins (True) and ends (False)
on_import: list[Callable[[bool], None]] = []
# sent when the terminal is closed; Windows has none
HANGUP: int | None = getattr(signal, "SIGHUP", None)
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _python() -> tuple[str, ...]:
    """The beginning of a command for another process of Python, which imports from where this one does. Without -P it would also
    import from the current folder, where a user's `random.py` would replace the standard library's."""
    with suppress(OSError):  # the folder has been removed
        if {"", os.getcwd()} & {*sys.path}:
            return (sys.executable,)
    return sys.executable, "-P"


PYTHON = _python()


def fork(live: Callable[[int, int], None]) -> tuple[int, int, int]:
    """Fork a process that runs `live(questions, answers)` with its ends of two pipes. Returns its process id, our end of the
    questions, which never blocks, and our end of the answers. The kernel ends the new process when this one dies, even by SIGKILL and
    in the middle of work that hangs: an orphan would hold the run's lock."""
    theirs, into = os.pipe()
    out, ours = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python warns about a fork while other threads run. The child uses one thread, and waiting for it has a time limit.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        os.close(theirs)
        os.close(ours)
        os.set_blocking(into, False)
        return pid, into, out
    code = 1
    try:
        if LIBC is not None:
            LIBC.prctl(DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() == parent:  # otherwise the parent died before prctl
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)  # the parent decides when to stop
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(into)
            os.close(out)
            live(theirs, ours)
        code = 0
    finally:
        os._exit(code)


def start(
    command: Sequence[str], environment: Mapping[str, str], **streams: Any
) -> subprocess.Popen[bytes]:
    """Start a program that ends with this process (it calls `end_with_parent`). Signals of the terminal come to this process alone."""
    own = {**environment, STARTED: str(os.getpid())}
    none = subprocess.DEVNULL
    return subprocess.Popen(command, env=own, stdin=none, process_group=0, **streams)


def start_piped(
    command: Sequence[str], environment: Mapping[str, str], handles: Sequence[int], **streams: Any
) -> tuple[subprocess.Popen[bytes], int, int]:
    """`start` a program whose last two arguments are its ends of two pipes, and that inherits `handles`. Returns it, our end of what it
    reads, which never blocks, and our end of what it writes."""
    theirs, into = os.pipe()
    out, ours = os.pipe()
    try:
        ends, inherited = [str(theirs), str(ours)], [theirs, ours, *handles]
        process = start([*command, *ends], environment, pass_fds=inherited, **streams)
    finally:
        os.close(theirs)
        os.close(ours)
    os.set_blocking(into, False)
    return process, into, out


def end_with_parent() -> None:
    """Make the kernel end this process with the one that started it."""
    parent = os.environ.get(STARTED)
    if parent is None or LIBC is None:
        return
    LIBC.prctl(DEATH_SIGNAL, signal.SIGKILL)
    if str(os.getppid()) != parent:  # the parent died before prctl
        os._exit(PEER_FAILED)


def end(pid: int, into: int | None, out: int) -> None:
    """End a child and close its pipes."""
    if into is not None:
        os.close(into)
    os.close(out)
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def open_streams() -> None:
    """Open the standard streams that were closed (`>&-`, some daemons). A file of the run would otherwise get the number of one, and
    what libraries print."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            setattr(sys, name, os.fdopen(handle, mode, closefd=False))


class Terminal:
    """The terminal that this process writes to, if it does."""

    def __init__(self) -> None:
        self.handles = [handle for handle in (1, 2) if os.isatty(handle)]

    def lost(self) -> bool:
        """Whether it was closed. What is written to it from now on is discarded: it would raise an error."""
        gone = [handle for handle in self.handles if not os.isatty(handle)]
        _discard(gone)
        return bool(gone)

    def hang_up(self) -> None:
        """Discard what is written from now on, except to files: what reads a pipe, such as `tee`, ends with the terminal."""
        for handle in (1, 2):
            with suppress(OSError):  # one that is closed
                _discard([] if stat.S_ISREG(os.fstat(handle).st_mode) else [handle])


def _discard(handles: Sequence[int]) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for handle in handles:
        os.dup2(nowhere, handle)
    os.close(nowhere)


def stop_signals() -> list[int]:
    """The signals that ask to stop. Without that of a closed terminal where it is ignored, as by nohup."""
    numbers: list[int] = [signal.SIGINT, signal.SIGTERM]
    if HANGUP is not None and signal.getsignal(HANGUP) != signal.SIG_IGN:
        numbers.append(HANGUP)
    return numbers


def processor_time(pid: int) -> float:
    """The processor time that a process has used, in kernel ticks; 0 without /proc."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            columns = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return float(columns[11]) + float(columns[12])


def write_all(handle: int, data: bytes, deadline: float = math.inf) -> None:
    """Write all data into a pipe. TimeoutError if the other end has not read it by the deadline."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(handle, view) :]
        except BlockingIOError:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError from None
            select.select([], [handle], [], min(left, 60.0))
