"""The processes that run one program together, each on its share of the work. One process alone needs nothing of this.

Every process (rank) runs the same stages. What is decided is decided from figures that all of them have, so that none goes on while
another waits; `train/processes.py` has the version for several.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.types import JSON


class World:
    """One process alone. What is exchanged is JSON that may hold NumPy arrays."""

    rank = 0
    size = 1
    sharding = "never"  # of the weights that learn: auto, always, never
    tensor = 1  # neighbours that divide the layers of a model, and have the same share of a step

    @property
    def shares(self) -> int:
        """Into how many parts a step is cut."""
        return self.size // self.tensor

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes the run directory and prints."""
        return self.rank == 0

    def same(self, value: JSON) -> JSON:
        """The value that the first process has."""
        return value

    def gather(self, value: JSON) -> list[JSON]:
        """The values of all processes, in the order of their ranks."""
        return [value]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return flag

    def share(self, count: int) -> range:
        """Which of `count` things are this process's: neighbours, as many as others have, or one more."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def begin(self, work: str, together: bool) -> str:
        """Tell the others what comes next: `work`, which they do too, or leave to the first process and wait."""
        return work

    def end(self) -> None:
        """Wait until every process has done the work that was begun."""


ALONE = World()
_current = ALONE


def current() -> World:
    """The processes that this one works with."""
    return _current


@contextmanager
def using(world: World) -> Iterator[World]:
    """Work with these processes while this lasts; with `ALONE`, without the others."""
    global _current
    before, _current = _current, world
    try:
        yield world
    finally:
        _current = before
