"""A Python interpreter in the sandbox of the code reward; its variables are kept between the calls of an episode."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from posttrain.errors import Range
from posttrain.rewards.code import blocks, run_cells
from posttrain.rewards.sandbox import isolation
from posttrain.rewards.sandbox.limits import Limits
from posttrain.rewards.sandbox.mechanisms import Infrastructure
from posttrain.rewards.sandbox.session import Ended
from posttrain.tasks.tools.base import Tool, ToolError, ToolFailure

# programs that run at once over all episodes: each has open files here, and more than there are cores only wait for each other
_at_once = threading.BoundedSemaphore(2 * (os.cpu_count() or 1))


@dataclass(frozen=True)
class Python(Tool):
    """An interpreter lives for one call: the earlier cells of the episode run again before the new one, within `wall` seconds
    altogether. So no process is kept between turns; random or slow cells are random or slow again. A cell that exceeded a limit
    is not run again."""

    sandbox: str = "auto"  # as in the code reward
    wall: Annotated[float, Range(gt=0, le=600)] = 5.0  # seconds

    @property
    def seconds(self) -> float:
        return self.wall + 60.0  # an interpreter may have to start first

    def ready(self) -> tuple[str, ...]:
        isolation.choose(self.sandbox)
        return super().ready()

    def begin(self) -> Callable[..., Any]:
        cells: list[str] = []

        def python(code: str) -> str:
            """Run Python. Variables are kept. The result is what is printed, and the value of the last line.

            Args:
                code: the program
            """
            *_, cell = (code, *(body for _, body in blocks(code)))  # its last block, if it has any
            try:
                with _at_once:
                    printed = run_cells([*cells, cell], Limits(wall=self.wall), self.sandbox)
            except Ended as ended:
                raise ToolError(f"the program was ended: {ended.outcome}") from None
            except (Infrastructure, OSError) as error:
                raise ToolFailure(f"the sandbox failed: {error}") from error
            cells.append(cell)
            return printed or "(nothing was printed)"

        return python
