"""How torch computes in this process: the number of threads on a CPU, and kernels that add in a fixed order on a GPU."""

from __future__ import annotations

import os

import torch

ONE_THREAD = 1_000_000  # parameters below which one thread is at least as fast as two (measured by benchmarks/threads.py)
AVAILABLE = torch.get_num_threads()  # torch's own default, before anything changed it
# cuBLAS buffers of a fixed size, so that it splits a matrix product in the same way every time
WORKSPACE = ":4096:8"


def use_threads(parameters: int, threads: int = 0) -> None:
    """Set torch's threads for a model: `threads`, or where that is 0 one for a tiny model and else what torch found. To pass a few
    microseconds of work to a second core costs more than it saves."""
    torch.set_num_threads(threads or (1 if parameters < ONE_THREAD else AVAILABLE))


def use_deterministic_kernels(device: str) -> None:
    """Have every operator of this process run in one order; one that cannot raises an error that names it. To be called before
    anything has run on the device. On the CPU nothing is to be done: there the order is fixed for a number of threads."""
    if not device.startswith("cuda"):
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
    # not as warnings: flash attention would stay in its other order
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
