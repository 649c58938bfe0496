"""Which processes this one has started and not yet taken leave of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def children() -> set[int]:
    """Children of every thread of this process, on Linux."""
    return {int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


@contextmanager
def no_child_left() -> Iterator[None]:
    """Whoever is started inside is gone at the end; those of other tests (a fork server, a pool) may stay."""
    before = children()
    yield
    assert not children() - before, f"left behind: {children() - before}"
