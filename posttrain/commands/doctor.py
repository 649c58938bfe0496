"""What this machine has for posttrain, in about ten lines, and what to fix. `broken` stops training; `note` costs something."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from posttrain import __version__ as VERSION
from posttrain.errors import UserError
from posttrain.system import machine

OK, NOTE, BROKEN = "ok", "note", "broken"
PYTHON = ((3, 11), (3, 14))  # from, and before
NEEDED = {
    "torch": "2.11",
    "transformers": "5.16",
    "safetensors": "0",
    "numpy": "0",
    "rich": "0",
    "pyyaml": "0",
    "pydantic": "2",
    "jinja2": "3.1.6",
    "filelock": "4.2",
}
EXTRAS = {
    "gguf": "GGUF files",
    "peft": "LoRA",
    "torchao": "8-bit moments",
    "datasets": "hub data sets",
    "httpx": "judges",
    "sandlock": "the sandbox",
}
MIN_DISK = 5e9  # bytes; a small model's checkpoints and export
MIN_MEMORY = 2e9


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what is there, and what to do about it."""

    name: str
    state: str  # ok | note | broken
    text: str
    fix: str = ""


def examine(folder: Path | None = None) -> list[Finding]:
    """Look at everything; `folder` is where runs will be written."""
    folder = folder or Path.cwd()
    checks: tuple[Callable[[], Finding], ...] = (
        python,
        packages,
        accelerator,
        threads,
        memory,
        lambda: disk(folder),
        lambda: writing(folder),
        sandbox,
        extras,
        hub,
    )
    return [check() for check in checks]


def lines(findings: list[Finding]) -> list[str]:
    """For people: a line each, then what to fix."""
    width = max(len(f.name) for f in findings)
    shown = [f"{f.state:<6} {f.name:<{width}}  {f.text}" for f in findings]
    fixes = [f"  {f.name}: {f.fix}" for f in findings if f.fix]
    return [*shown, *(["to fix:", *fixes] if fixes else ["nothing to fix"])]


def healthy(findings: list[Finding]) -> bool:
    return all(f.state != BROKEN for f in findings)


def python() -> Finding:
    text = f"posttrain {VERSION}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    if not PYTHON[0] <= sys.version_info[:2] < PYTHON[1]:
        return Finding("environment", BROKEN, text, "use Python 3.11, 3.12 or 3.13")
    return Finding("environment", OK, text)


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> numbers("2.13.0+cpu") >= numbers("2.11")
    True
    """
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def packages() -> Finding:
    found, wrong = [], []
    for name, least in NEEDED.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        found.append(f"{name} {version}")
        if numbers(version) < numbers(least):
            wrong.append(f"{name} {version} is older than {least}")
    text = ", ".join(found[:3]) + f" and {max(0, len(found) - 3)} more"
    if wrong:
        return Finding(
            "packages", BROKEN, f"{text}; {', '.join(wrong)}", "pip install --upgrade posttrain"
        )
    return Finding("packages", OK, text)


def accelerator() -> Finding:
    try:
        import torch
    except (
        ImportError,
        OSError,
    ) as error:  # a torch that cannot be loaded is what this is here to find
        return Finding(
            "gpu",
            BROKEN,
            f"torch cannot be imported: {error}",
            "reinstall torch; see pytorch.org for your system",
        )
    if not torch.cuda.is_available():
        seen = shutil.which("nvidia-smi") is not None
        fix = (
            "the driver is there, but this torch does not use it; install a torch for CUDA"
            if seen
            else ""
        )
        return Finding(
            "gpu", NOTE if seen else OK, "none that torch sees: small models train on the CPU", fix
        )
    index = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(index)
    facts = torch.cuda.get_device_properties(index)
    text = f"{torch.cuda.device_count()} x {facts.name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free, CUDA {torch.version.cuda}"
    if not torch.cuda.is_bf16_supported():
        return Finding(
            "gpu",
            NOTE,
            f"{text}, no bfloat16",
            "training uses bfloat16 on CUDA: use a newer GPU, or device=cpu",
        )
    if free < 0.5 * total:
        return Finding(
            "gpu",
            NOTE,
            text,
            "another process holds more than half of the GPU's memory; see nvidia-smi",
        )
    return Finding("gpu", OK, text)


def threads() -> Finding:
    cores, asked = machine.cores(), os.environ.get("OMP_NUM_THREADS", "")
    text = f"{cores} cores" + (f", OMP_NUM_THREADS={asked}" if asked else "")
    if machine.requested_threads() > cores:
        return Finding(
            "threads",
            NOTE,
            text,
            f"OMP_NUM_THREADS is above the {cores} cores this process may use: unset it",
        )
    return Finding("threads", OK, text)


def memory() -> Finding:
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free, total = (int(rows[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError):
        return Finding("memory", OK, "not known on this system")
    text = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return (
        Finding("memory", NOTE, text, "close something: training needs about 2 GiB")
        if free < MIN_MEMORY
        else Finding("memory", OK, text)
    )


def disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    text = f"{free / 2**30:.1f} GiB free in {folder}"
    if free < MIN_DISK:
        return Finding(
            "disk",
            NOTE,
            text,
            "checkpoints of anything but a tiny model will not fit: free some space, or set out= elsewhere",
        )
    return Finding("disk", OK, text)


def writing(folder: Path) -> Finding:
    """A run directory needs files that can be locked, renamed over each other and synced."""
    from posttrain.runs.lock import Lock

    try:
        with tempfile.TemporaryDirectory(prefix=".posttrain-doctor-", dir=folder) as made:
            lock = Lock(Path(made) / "lock")
            lock.release()
            one, two = Path(made) / "one", Path(made) / "two"
            one.write_text("1")
            os.replace(one, two)
            with two.open("rb") as file:
                os.fsync(file.fileno())
    except (OSError, UserError) as error:
        reason = getattr(error, "strerror", None) or error
        return Finding(
            "writing",
            BROKEN,
            f"cannot write runs in {folder}: {reason}",
            "go to a directory you may write to, or set out=",
        )
    return Finding("writing", OK, "files can be written, locked and replaced here")


def sandbox() -> Finding:
    try:
        from posttrain.rewards.sandbox.isolation import describe

        return Finding("sandbox", OK, describe().removeprefix("code sandbox: "))
    except UserError as error:
        return Finding("sandbox", NOTE, "none: rewards that run programs are refused", str(error))
    except (ImportError, OSError) as error:
        return Finding(
            "sandbox",
            NOTE,
            f"cannot be tried: {error}",
            "rewards that run programs need Linux and a sandbox",
        )


def extras() -> Finding:
    there, absent = [], []
    for name, purpose in EXTRAS.items():
        try:
            there.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            absent.append(f"{name} ({purpose})")
    text = f"{', '.join(there) or 'none'}" + (f"; absent: {', '.join(absent)}" if absent else "")
    return Finding("extras", OK, text)


def hub() -> Finding:
    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    place = next((p for p in (home, *home.parents) if p.exists()), home)
    text = f"{'offline' if offline else 'online'}, models are kept in {home}"
    if not os.access(place, os.W_OK):
        return Finding(
            "hub", NOTE, text, f"{place} cannot be written: set HF_HOME to a directory of yours"
        )
    return Finding("hub", OK, text)
