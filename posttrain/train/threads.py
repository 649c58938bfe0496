"""How many threads torch should use on a CPU: more are slower for a model whose operators take microseconds."""

from __future__ import annotations

import torch

ONE_THREAD = 1_000_000  # parameters below which one thread is at least as fast as two (measured by benchmarks/threads.py)
AVAILABLE = torch.get_num_threads()  # what torch found, before anyone changed it


def recommended_threads(parameters: int) -> int:
    """1 for a tiny model, else what torch found. Handing a few microseconds of work to a second core costs more than it saves."""
    return 1 if parameters < ONE_THREAD else AVAILABLE


def use_threads(parameters: int, threads: int = 0) -> None:
    """Set torch's threads for a model: `threads`, or the recommended number where that is 0."""
    torch.set_num_threads(threads or recommended_threads(parameters))
