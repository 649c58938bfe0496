"""Checks this machine: versions, GPU, threads, memory, disk, locks, sandbox. `broken` stops training; `note` costs something."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from posttrain import __version__ as VERSION
from posttrain.errors import UserError, many
from posttrain.system import machine

OK, NOTE, BROKEN = "ok", "note", "broken"
PYTHON = ((3, 11), (3, 14))  # the first supported version, and the first that is not
NEEDED = {"torch": "2.11", "transformers": "5.16", "safetensors": "0", "numpy": "0", "rich": "0"}
NEEDED |= {"pyyaml": "0", "pydantic": "2", "jinja2": "3.1.6", "filelock": "4.2"}
EXTRAS = {"gguf": "GGUF files", "peft": "LoRA", "torchao": "8-bit moments"}
EXTRAS |= {"datasets": "hub data sets", "openai": "judges"}
MIN_DISK = 5e9  # bytes; room for a small model's checkpoints and export
MIN_MEMORY = 2e9


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was checked, what was found, and what to do about it."""

    name: str
    state: str  # ok | note | broken
    text: str
    fix: str = ""


def finding(name: str, text: str, fix: str = "", state: str = NOTE) -> Finding:
    """Return a finding of this state if there is something to fix, else one of state ok."""
    return Finding(name, state if fix else OK, text, fix)


def examine() -> list[Finding]:
    """Run all checks. It assumes that runs will be written in the current folder."""
    folder = Path.cwd()
    here = [python(), packages(), accelerator(), threads(), memory(), disk(folder), writing(folder)]
    return [*here, sandbox(), extras(), hub()]


def lines(findings: list[Finding]) -> list[str]:
    """Return a line for each finding, then what to fix."""
    width = max(len(f.name) for f in findings)
    shown = [f"{f.state:<6} {f.name:<{width}}  {f.text}" for f in findings]
    fixes = [f"  {f.name}: {f.fix}" for f in findings if f.fix]
    return [*shown, *(["to fix:", *fixes] if fixes else ["nothing to fix"])]


def healthy(findings: list[Finding]) -> bool:
    return all(f.state != BROKEN for f in findings)


def python() -> Finding:
    text = f"posttrain {VERSION}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    fits = PYTHON[0] <= sys.version_info[:2] < PYTHON[1]
    return finding("environment", text, "" if fits else "use Python 3.11, 3.12 or 3.13", BROKEN)


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version.

    >>> numbers("2.13.0+cpu") >= numbers("2.11")
    True
    """
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def installed(name: str) -> str:
    """Return the version of a package; "" if it is absent."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def packages() -> Finding:
    versions = {name: installed(name) for name in NEEDED}
    found = [f"{name} {version}" for name, version in versions.items() if version]
    wrong = [f"{name} is missing" for name, version in versions.items() if not version]
    old = [n for n, v in versions.items() if v and numbers(v) < numbers(NEEDED[n])]
    wrong += [f"{name} {versions[name]} is older than {NEEDED[name]}" for name in old]
    text = "; ".join([f"{', '.join(found[:3])} and {max(0, len(found) - 3)} more", *wrong])
    return finding("packages", text, "pip install --upgrade posttrain" if wrong else "", BROKEN)


def accelerator() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        fix = "reinstall torch; see pytorch.org for your system"
        return finding("gpu", f"torch cannot be imported: {error}", fix, BROKEN)
    fix = ""
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is not None:
            fix = "the driver is there, but this torch does not use it; install a torch for CUDA"
        return finding("gpu", "none that torch can use: small models train on the CPU", fix)
    index = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_properties(index).name
    room = f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    text = f"{torch.cuda.device_count()} x {name}, {room}, CUDA {torch.version.cuda}"
    if not torch.cuda.is_bf16_supported():
        text += ", no bfloat16"
        fix = "training uses bfloat16 on CUDA: use a newer GPU, or device=cpu"
    elif free < 0.5 * total:
        fix = "another process holds more than half of the GPU's memory; see nvidia-smi"
    elif torch.cuda.get_device_capability(index) == (9, 0) and not installed("quack-kernels"):
        text += "; 'posttrain[hopper]' would make it faster"
    return finding("gpu", text, fix)


def threads() -> Finding:
    cores, asked = machine.cores(), os.environ.get("OMP_NUM_THREADS", "")
    text = many(cores, "core") + (f", OMP_NUM_THREADS={asked}" if asked else "")
    fix = f"OMP_NUM_THREADS is above the {cores} cores this process may use: unset it"
    return finding("threads", text, fix if machine.requested_threads() > cores else "")


def memory() -> Finding:
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free, total = (int(rows[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError):
        return finding("memory", "not known on this system")
    text = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    fix = "close something: training needs about 2 GiB"
    return finding("memory", text, fix if free < MIN_MEMORY else "")


def disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    text = f"{free / 2**30:.1f} GiB free in {folder}"
    fix = "checkpoints of all but a tiny model will not fit: free some space, or set out= elsewhere"
    return finding("disk", text, fix if free < MIN_DISK else "")


def writing(folder: Path) -> Finding:
    """Check that files can be locked, renamed over each other and synced, as a run directory needs."""
    from posttrain.runs.lock import Lock
    from posttrain.system.files import atomic_write

    try:
        with tempfile.TemporaryDirectory(prefix=".posttrain-doctor-", dir=folder) as made:
            Lock(Path(made) / "lock").release()
            atomic_write(Path(made) / "file", "text")
    except (OSError, UserError) as error:
        text = f"cannot write runs in {folder}: {getattr(error, 'strerror', None) or error}"
        return finding("writing", text, "go to a directory you may write to, or set out=", BROKEN)
    return finding("writing", "files can be written, locked and replaced here")


def sandbox() -> Finding:
    try:
        from posttrain.rewards.sandbox.isolation import describe

        return finding("sandbox", describe().removeprefix("code sandbox: "))
    except UserError as error:
        return finding("sandbox", "none: rewards that run programs are refused", str(error))
    except (ImportError, OSError) as error:
        fix = "rewards that run programs need Linux and a sandbox"
        return finding("sandbox", f"cannot be tried: {error}", fix)


def extras() -> Finding:
    versions = {name: installed(name) for name in EXTRAS}
    there = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    absent = ", ".join(f"{name} ({EXTRAS[name]})" for name, found in versions.items() if not found)
    return finding("extras", (there or "none") + (f"; absent: {absent}" if absent else ""))


def hub() -> Finding:
    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    place = next((p for p in (home, *home.parents) if p.exists()), home)
    text = f"models are kept in {home}; {'offline (HF_HUB_OFFLINE)' if offline else 'the network was not tried'}"
    fix = f"{place} cannot be written: set HF_HOME to a directory of yours"
    return finding("hub", text, "" if os.access(place, os.W_OK) else fix)
