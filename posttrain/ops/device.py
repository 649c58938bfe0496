"""What a CUDA device is, and how much of its memory this process may take."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether tiles that were chosen for an H100 or H200 fit: others may have too little shared memory for them."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of host memory on a device, without waiting for what the device is at: from pinned memory, since CUDA may copy other
    memory while the host waits, in its turn after all that was launched."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def device_bytes(device: torch.device) -> float:
    """Bytes of a CUDA device: all of it, or as much as torch.cuda.set_per_process_memory_fraction leaves this process."""
    whole = float(torch.cuda.get_device_properties(device).total_memory)
    return whole * torch.cuda.get_per_process_memory_fraction(device.index)


def free_bytes(device: torch.device) -> float:
    """Bytes of it that are left, with what torch's allocator holds and nobody uses."""
    held = torch.cuda.memory_reserved(device)
    left = min(float(torch.cuda.mem_get_info(device)[0]), device_bytes(device) - held)
    return left + held - torch.cuda.memory_allocated(device)
