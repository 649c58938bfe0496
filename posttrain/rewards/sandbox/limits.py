"""How much a program may use. Every limit is enforced outside the program; the exceeded limit names the outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from posttrain.errors import Checked, Count, Positive, Range

MEGABYTE = 1 << 20
Size = Annotated[int, Range(ge=1, le=1 << 40)]
Memory = Annotated[int, Range(ge=64 * MEGABYTE, le=1 << 40, text="at least 64 MiB")]


@dataclass(frozen=True, slots=True)
class Limits(Checked):
    """Limits of a program. `wall` covers all of its tests together. The others apply to one run: a whole program for a
    `StdioTest`, all calls of a program for `CallTest`s. A program is one process, so `memory` and `files` are totals.

    >>> Limits(wall=1.5).cpu_seconds
    3
    """

    where: ClassVar[str] = "a limit of the sandbox: "

    # seconds, from the moment the program is handed over; starting an interpreter does not count
    wall: Annotated[float, Range(gt=0, le=3600)] = 10.0
    cpu: Positive | None = None  # seconds of processor time; None: the wall limit plus one second
    # bytes of address space; the minima of `memory` and `open_files` are what an interpreter needs
    memory: Memory = 536_870_912  # 512 MiB
    threads: Count = 64  # including the first one
    files: Size = 16 * MEGABYTE  # bytes of all files in its /tmp, which is in memory
    open_files: Annotated[int, Range(ge=16)] = 64
    output: Size = 4 * MEGABYTE  # bytes of stdout, and of stderr
    result: Size = MEGABYTE  # bytes of one returned value in its encoded form
    source: Size = MEGABYTE // 4  # characters of the program

    @property
    def cpu_seconds(self) -> int:
        return math.ceil(self.wall + 1 if self.cpu is None else self.cpu)
