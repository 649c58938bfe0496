"""The cores that this process may use, and the number of threads that OMP_NUM_THREADS asks for."""

from __future__ import annotations

import os
import re
import sys

from posttrain.errors import require

MAX_THREADS_A_CORE = 8  # threads or processes a core; more would only wait for each other


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def requested_threads() -> int:
    """OMP_NUM_THREADS: a number, or a list with one number for each level of nested threads, of which the first counts. 0 if it is
    not set or not such a number, which OpenMP ignores."""
    found = re.match(r"\s*([0-9]{1,9})\s*(,|$)", os.environ.get("OMP_NUM_THREADS", ""))
    return int(found[1]) if found else 0


def check_threads(count: int, name: str) -> None:
    """Raise an error for a number of threads that would exhaust the machine."""
    many = f"{name}={count} is more than {MAX_THREADS_A_CORE} for each of the {cores()} core(s)"
    fine = count <= MAX_THREADS_A_CORE * cores()
    require(fine, f"{many} that this process may use; use {cores()} or fewer")


def require_posix(what: str, instead: str) -> None:
    """Raise an error on Windows, which cannot pass open files or signals to other processes."""
    require(sys.platform != "win32", f"{what} needs Linux or macOS, or WSL on Windows; {instead}")


def device(name: str) -> str:
    """The device that a setting names. `auto` is CUDA if torch has it."""
    import torch

    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
