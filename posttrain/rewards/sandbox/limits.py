"""How much a program may use. Every limit is enforced outside of the program; the one that it exceeds names the outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass

from posttrain.errors import require

MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run: a whole program for a `StdioTest`, all calls of a program for `CallTest`s.

    A program is one process, so `memory` is the total. Nothing is writable, so there is no limit on disk.

    >>> Limits(wall=1.5).cpu_seconds
    3
    """

    wall: float = 5.0  # seconds, from the moment the program is handed over
    cpu: float | None = None  # seconds of processor time; None: the wall limit and a second
    memory: int = 512 * MEGABYTE  # bytes of address space
    threads: int = 64  # the first one included
    open_files: int = 64
    output: int = 4 * MEGABYTE  # bytes of stdout, and of stderr
    result: int = MEGABYTE  # bytes of one returned value as it is sent
    source: int = MEGABYTE // 4  # characters of the program

    def __post_init__(self) -> None:
        require(
            0 < self.wall <= 3600, f"the wall limit must lie in (0, 3600] seconds, not {self.wall}"
        )
        require(self.cpu is None or self.cpu > 0, f"the cpu limit must be positive, not {self.cpu}")
        require(
            self.memory >= 64 * MEGABYTE,
            f"an interpreter needs at least 64 MB of memory, not {self.memory} bytes",
        )
        for name in ("threads", "output", "result", "source"):
            require(
                getattr(self, name) >= 1,
                f"the limit on {name} must be at least 1, not {getattr(self, name)}",
            )
        require(
            self.open_files >= 16,
            f"an interpreter needs at least 16 open files, not {self.open_files}",
        )

    @property
    def cpu_seconds(self) -> int:
        return math.ceil(self.wall + 1 if self.cpu is None else self.cpu)
