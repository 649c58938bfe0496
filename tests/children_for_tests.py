"""Which processes this one has started and not yet taken leave of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.data import safe_readers


def children() -> set[int]:
    """Children of every thread of this process, on Linux."""
    return {int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


@contextmanager
def no_child_left() -> Iterator[None]:
    """Whoever is started inside is gone at the end; those of other tests (a fork server, a pool) may stay."""
    before = children()
    yield
    renderer = safe_readers._renderer.process  # kept for the next template
    left = children() - before - ({renderer.pid} if renderer else set())
    assert not left, f"left behind: {left}"
