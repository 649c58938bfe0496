"""The processes that run one program together, each with its share of the work. The base class `World` is a single process.

Every process (rank) runs the same stages. Decisions use only figures that all processes have, so that none continues while another
waits. `train/processes.py` has the version for several processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.types import JSON


class World:
    """A single process. Processes exchange JSON that may hold NumPy arrays."""

    rank = 0
    size = 1
    sharding = "never"  # of the trained weights: auto, always, never
    tensor = 1  # neighbouring ranks that divide the layers of a model; they have the same share of a step

    @property
    def shares(self) -> int:
        """The number of parts into which a step is cut."""
        return self.size // self.tensor

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes the run directory and prints."""
        return self.rank == 0

    def same(self, value: JSON) -> JSON:
        """The first process's value."""
        return value

    def gather(self, value: JSON) -> list[JSON]:
        """The values of all processes, in the order of their ranks."""
        return [value]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return flag

    def share(self, count: int) -> range:
        """The indices of this process's share of `count` items: contiguous, and equal in number up to one."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def begin(self, work: str, together: bool) -> str:
        """Announce the next work to the other processes. They take part in it if `together`; otherwise they wait while the first
        process does it."""
        return work

    def end(self) -> None:
        """Wait until every process has finished the work."""


ALONE = World()
_current = ALONE


def current() -> World:
    """The processes that this one works with."""
    return _current


@contextmanager
def using(world: World) -> Iterator[World]:
    """Work with these processes within the block; with `ALONE`, without the others."""
    global _current
    before, _current = _current, world
    try:
        yield world
    finally:
        _current = before
