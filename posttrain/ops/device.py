"""Properties of a CUDA device, and how much of its memory this process may use."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

MARGIN = 0.08  # the share of a device's memory that caches and estimates leave free


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device is an H100 or H200. Tile sizes are chosen for these; others may have too little shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def sent(data: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """Copy host data to a device without waiting for the device. The copy is from pinned memory: CUDA may copy other memory
    synchronously, after everything that was launched before."""
    tensor = torch.as_tensor(data)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def device_bytes(device: torch.device) -> float:
    """The memory of a CUDA device in bytes: all of it, or the share that torch.cuda.set_per_process_memory_fraction allows."""
    whole = float(torch.cuda.get_device_properties(device).total_memory)
    return whole * torch.cuda.get_per_process_memory_fraction(device.index)


def free_bytes(device: torch.device) -> float:
    """Free bytes of a CUDA device, including those that torch's allocator holds but does not use."""
    held = torch.cuda.memory_reserved(device)
    left = min(float(torch.cuda.mem_get_info(device)[0]), device_bytes(device) - held)
    return left + held - torch.cuda.memory_allocated(device)


def usable_bytes(device: torch.device) -> float:
    """Free bytes of a CUDA device less a margin; of a device that others fill, half of what is free."""
    free = free_bytes(device)
    return max(0.0, free / 2, free - MARGIN * device_bytes(device))
