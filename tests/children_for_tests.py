"""Processes that this one or another has started, and whether they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from posttrain.data import safe_readers


def children(pid: int | str = "self") -> set[int]:
    """Children of every thread of a process, on Linux."""
    found: set[int] = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found |= set(map(int, file.read_text().split()))
    return found


def descendants(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        found += children(one)
    return found[1:]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextmanager
def no_child_left() -> Iterator[None]:
    """Whoever is started inside is gone at the end; those of other tests (a fork server, a pool) may stay."""
    before = children()
    yield
    renderer = safe_readers._renderer.process  # kept for the next template
    left = children() - before - ({renderer.pid} if renderer else set())
    assert not left, f"left behind: {left}"
