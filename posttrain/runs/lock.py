"""One writer a run, also where the directory lies on a network file system.

Two locks, because neither is enough alone. The operating system's lock on `lock` is dropped when its holder dies, however it dies;
but some network file systems have none, or keep it to one host. The claim `lock.holder` works on any file system that can make a hard
link or refuse to create a file twice; it says who holds the run, and its holder touches it every few seconds. A claim is stale when its
holder is provably dead (same host: no such process, or the host was started anew) or, from another host, when it was not touched for a
minute by the file server's own clock. A holder whose claim was taken from it finds out at its next beat, and its writer stops.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.errors import UserError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

BEAT = 10.0  # seconds between two signs of life
STALE = 60.0  # of silence, after which a holder on another host counts as dead
GONE = "gone"
HELD = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Holder:
    """A process, told apart from every other one: `started` because numbers are reused, `space` because containers share them."""

    process: int
    host: str
    boot: str
    space: str
    started: str
    token: str

    @classmethod
    def me(cls) -> Holder:
        pid = os.getpid()
        return cls(
            pid, socket.gethostname(), _boot(), _space(), _started(pid), secrets.token_hex(8)
        )

    def neighbour(self, other: Holder) -> bool:
        """Whether the other's process number means something here."""
        return (self.host, self.space) == (other.host, other.space)

    def dead(self, other: Holder) -> bool | None:
        """Whether `other` has died; None where it cannot be known from here."""
        if (
            not self.neighbour(other) or sys.platform == "win32"
        ):  # where signal 0 is no question but an end
            return None
        if self.boot != other.boot:
            return True
        if other.process == self.process and other.started == self.started:
            return False
        try:
            os.kill(other.process, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        now = _started(other.process)
        return now == GONE or bool(now and other.started and now != other.started)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


class Lock:
    """Held from construction to `release`. `lost` says that somebody else took the run over in the meantime."""

    def __init__(self, path: Path) -> None:
        self.lost = ""
        self._claim, self._me = path.with_name(f"{path.name}.holder"), Holder.me()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(path)
        except BaseException:
            os.close(self._fd)
            raise
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._beating.start()

    def _take(self, path: Path) -> None:
        try:
            _lock(self._fd)
        except OSError as error:
            if error.errno in HELD:
                raise _taken(path, _read(self._claim)) from None
            if error.errno not in UNSUPPORTED:
                raise
        for attempt in range(3):  # a stale claim is removed once; whoever comes between wins
            if self._link():
                if attempt:  # others may have found it stale too: who still stands there after a moment has it
                    time.sleep(0.2)
                if not attempt or _read(self._claim) == self._me:
                    return
                break
            found = _read(self._claim)
            if not self._stale(found):
                raise _taken(path, found)
            self._remove(found)
        raise _taken(path, _read(self._claim))

    def _link(self) -> bool:
        """Publish the claim whole: written under another name, then linked, which only one can do."""
        own = self._claim.with_name(f".{self._claim.name}.{self._me.token}")
        data = json.dumps(asdict(self._me)).encode()
        try:
            own.write_bytes(data)
            try:
                os.link(own, self._claim)
                return True
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in (errno.EPERM, *UNSUPPORTED):
                    raise
            try:  # no hard links here (FAT, some network shares)
                fd = os.open(self._claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                return False
            try:
                os.write(fd, data)
            finally:
                os.close(fd)
            return True
        finally:
            with suppress(OSError):
                own.unlink()

    def _stale(self, found: Holder | None) -> bool:
        dead = self._me.dead(found) if found is not None else None
        return self._silence() > STALE if dead is None else dead

    def _silence(self) -> float:
        """Seconds since the claim was touched, by the clock of whoever keeps the files: hosts need not agree on the time."""
        probe = self._claim.with_name(f".{self._claim.name}.{self._me.token}.now")
        try:
            probe.touch()
            return probe.stat().st_mtime - self._claim.stat().st_mtime
        except FileNotFoundError:
            return STALE + 1.0  # gone meanwhile: try for it
        finally:
            with suppress(OSError):
                probe.unlink()

    def _remove(self, stale: Holder | None) -> None:
        """Take a stale claim away, and put it back where it turned out to be somebody's fresh one."""
        aside = self._claim.with_name(f".{self._claim.name}.{self._me.token}.stale")
        try:
            self._claim.rename(aside)
        except FileNotFoundError:
            return
        if _read(aside) != stale:
            with suppress(OSError):
                os.link(aside, self._claim)
        with suppress(OSError):
            aside.unlink()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            found = _read(self._claim)
            if found is not None and found != self._me:
                self.lost = f"{found} has taken the run over"
                return
            with suppress(OSError):  # a full or absent disk: the writer itself will say so
                os.utime(self._claim)

    def release(self) -> None:
        """Let the next writer in. `lock` stays: removing it would let two writers lock two files of one name."""
        self._ended.set()
        self._beating.join(BEAT)
        if _read(self._claim) == self._me:
            with suppress(OSError):
                self._claim.unlink()
        os.close(self._fd)


def _taken(path: Path, holder: Holder | None) -> UserError:
    who = str(holder) if holder is not None else "another process"
    return UserError(
        f"run {path.parent} is being written by {who}; wait for it, stop it, or choose another directory"
    )


def _read(claim: Path) -> Holder | None:
    """Whose claim it is; None where there is none, or it says nothing."""
    try:
        return Holder(**json.loads(claim.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _boot() -> str:
    return _text(Path("/proc/sys/kernel/random/boot_id"))


def _space() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _started(pid: int) -> str:
    """When a process started, in ticks since the host did; "" where it cannot be known, GONE where it only waits to be buried."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    if fields[:1] in (["Z"], ["X"]):
        return GONE
    return fields[19] if len(fields) > 19 else ""


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _lock(fd: int) -> None:
    """Lock without waiting; OSError when somebody else has it."""
    if sys.platform == "win32":
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
