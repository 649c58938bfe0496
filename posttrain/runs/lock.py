"""One writer per run, also if the directory is on a network file system.

It takes two locks of the filelock package, because neither is enough alone. The operating system's lock on `lock` is released
when its holder dies in any way; but some network file systems have none, or limit it to one host. The lease `lock.holder` works
on any file system that can refuse to create a file twice; it names the holder, which touches it every few seconds. filelock
takes over the lease of a process that is provably dead. This module adds two cases: a killed process that its parent has not
waited for is dead too, and a lease that was not touched for a minute, by the file server's own clock, is taken at once instead
of after a minute of watching it.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, LeaseSettingsMismatch, OwnerRecord, SoftFileLease, Timeout

from posttrain.errors import UserError

HEARTBEAT = 10.0  # seconds between two touches of the lease
STALE = 60.0  # seconds without a touch, after which a holder on another host counts as dead
UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class Lock:
    """Held from construction to `release`. `lost` names another process that has taken over the run in the meantime."""

    def __init__(self, path: Path) -> None:
        self._claim = path.with_name(f"{path.name}.holder")
        self._lease = SoftFileLease(
            self._claim, lease_duration=STALE, heartbeat_interval=HEARTBEAT, thread_local=False
        )
        self._file: FileLock | None = None
        try:
            self._file = system_lock(path)
            self._acquire()
        except (Timeout, LeaseSettingsMismatch):
            written = f"run {path.parent} is being written by {self._holder()}"
            self.release()
            hint = "wait for it, stop it, or choose another directory"
            raise UserError(f"{written}; {hint}") from None
        except BaseException:
            self.release()
            raise

    def _acquire(self) -> None:
        with suppress(Timeout, LeaseSettingsMismatch):
            self._lease.acquire(timeout=0)
            return
        owner = self._lease.owner
        dead = owner is not None and is_zombie(owner)
        if (owner and is_running(owner)) or not (dead or self._silence() > STALE):
            raise Timeout(str(self._claim))
        self._lease.force_break()
        self._lease.acquire(timeout=0)
        # other processes may have found it stale too: the last one to write gets it
        time.sleep(0.2)
        owner = self._lease.owner
        if owner is None or owner.token != self._lease.token:
            raise Timeout(str(self._claim))

    def _silence(self) -> float:
        """Return the seconds since the lease was touched, by the clock of the file server: hosts need not agree on the time."""
        probe = self._claim.with_name(f".{self._claim.name}.{secrets.token_hex(8)}")
        try:
            probe.touch()
            return probe.stat().st_mtime - self._claim.stat().st_mtime
        except FileNotFoundError:
            return STALE + 1.0  # released in the meantime
        finally:
            probe.unlink(missing_ok=True)

    def _holder(self) -> str:
        owner = self._lease.owner
        return f"process {owner.pid} on {host(owner)}" if owner else "another process"

    @property
    def lost(self) -> str:
        """Return the process that holds the run now; "" while this one does. A takeover is noticed at the second heartbeat
        after it."""
        taken = self._lease.compromise is not None
        return f"{self._holder()} has taken the run over; this process stops" if taken else ""

    def release(self) -> None:
        """Let the next writer in. The file `lock` stays: removing it would let two writers lock two files of the same name."""
        self._lease.release()
        if self._file is not None:
            self._file.release()


def system_lock(path: Path) -> FileLock | None:
    """Take the operating system's lock without waiting; None if the file system has none."""
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return None
    return lock


def live_owner(path: Path) -> int | None:
    """Return the pid of the process that holds the lease of a run, or 0 if it is on another host; None if none does. Takes no
    lock."""
    claim = path.with_name(f"{path.name}.holder")
    owner = SoftFileLease(claim, lease_duration=STALE, heartbeat_interval=HEARTBEAT).owner
    with suppress(OSError):
        if owner is None or is_zombie(owner):
            return None
        # of a process here its start is the proof: clocks jump, and the file server has its own
        if not is_running(owner) and time.time() - claim.stat().st_mtime > STALE:
            return None
        if host(owner) != socket.gethostname():
            return 0
        with suppress(PermissionError):  # a process of another user
            if sys.platform != "win32":  # on Windows, signal 0 is Ctrl-C
                os.kill(owner.pid, 0)
        return owner.pid
    return None


def host(owner: OwnerRecord) -> str:
    """Return the name of the owner's host, without the pid namespace that filelock adds to distinguish containers."""
    return owner.hostname.partition("?")[0]


def is_zombie(owner: OwnerRecord) -> bool:
    """Whether the owner is a process of this host that was killed and not yet waited for."""
    return _state(owner) in ("Z", "X")


def is_running(owner: OwnerRecord) -> bool:
    """Whether the owner is certainly a process of this host that has not ended."""
    return _state(owner) not in ("", "Z", "X")


def _state(owner: OwnerRecord) -> str:
    """The state of the owner's process; "" if it is not certain that it is here. Hosts may share a name and containers have numbers
    of their own, so the boot and the start in it must be those that filelock records."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")
        fields = Path(f"/proc/{owner.pid}/stat").read_text().rpartition(")")[2].split()
        here = host(owner) == socket.gethostname()
        return fields[0] if here and owner.start == int(boot, 16) << 64 | int(fields[19]) else ""
    return ""
