"""Pinned numbers: where they hold to the bit, and whether they are to be written again."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

WRITE = os.environ.get("PIN_TRAJECTORIES") == "1"


def maker() -> str:
    """The processor's vendor: libraries of linear algebra choose their kernels by it too."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), platform.machine())


def place() -> dict[str, str]:
    """Where bits can be expected to be the same."""
    return {"torch": torch.__version__, "instructions": torch.backends.cpu.get_cpu_capability(), "processor": maker()}
