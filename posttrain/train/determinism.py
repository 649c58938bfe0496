"""The same bits from the same numbers on a GPU, where kernels may add in the order in which they happen to finish."""

from __future__ import annotations

import os

import torch

WORKSPACE = ":4096:8"  # of cuBLAS: buffers of a fixed size, so that it splits a matrix product in the same way every time


def use_deterministic_kernels(device: str) -> None:
    """Have every operator of this process run in one order; one that cannot stops with its name. To be called before anything has run
    on the device. On the CPU nothing is to be done: there the order is fixed for a number of threads."""
    if not device.startswith("cuda"):
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
    torch.use_deterministic_algorithms(
        True
    )  # not as warnings: flash attention would stay in its other order
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
