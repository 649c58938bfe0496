"""One writer a run: a lock that the operating system drops when its holder dies, however it dies."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from posttrain.errors import UserError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


class Lock:
    """Held from construction to `release`. The file also says who holds it, for the message the second writer gets."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _take(self._fd)
        except (BlockingIOError, PermissionError):  # held; a file system without locks is another error, and propagates
            holder = os.read(self._fd, 200).decode(errors="replace").strip() or "another process"
            os.close(self._fd)
            raise UserError(
                f"run {path.parent} is being written by {holder}; wait for it, stop it, or choose another directory"
            ) from None
        with suppress(OSError):  # the lock holds even where a full disk has no room for the name
            os.ftruncate(self._fd, 0)
            os.write(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def release(self) -> None:
        """Let the next writer in. The file stays: removing it would let two writers lock two files of one name."""
        os.ftruncate(self._fd, 0)
        os.close(self._fd)


def _take(fd: int) -> None:
    """Lock without waiting; OSError when somebody else has it."""
    if sys.platform == "win32":
        os.lseek(fd, 1 << 30, os.SEEK_SET)  # Windows forbids reading locked bytes; the holder's name must stay readable
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        os.lseek(fd, 0, os.SEEK_SET)
    else:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
