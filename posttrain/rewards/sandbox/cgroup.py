"""A fresh control group for one run, where this process may make one: memory and tasks in total, whatever the program forks."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from posttrain.rewards.sandbox.limits import Limits

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The folders of one run: one for each controller (version 1), or a single one (version 2)."""

    memory: Path
    tasks: Path
    version: int

    def limit(self, limits: Limits) -> None:
        (self.tasks / "pids.max").write_text(str(limits.tasks + 8))  # with those of the sandbox itself
        if self.version == 2:
            (self.memory / "memory.max").write_text(str(limits.memory))
            with suppress(OSError):  # no swap accounting: then there is none to limit
                (self.memory / "memory.swap.max").write_text("0")
        else:
            (self.memory / "memory.limit_in_bytes").write_text(str(limits.memory))

    def add(self, pid: int) -> None:
        """Move a process and all below it. It only waits for its job at this time, so none can appear meanwhile."""
        for member in (pid, *_below(pid)):
            for folder in {self.memory, self.tasks}:
                (folder / "cgroup.procs").write_text(str(member))

    def killed(self) -> bool:
        """Whether the kernel ended a process for want of memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        fields = dict(line.split() for line in (self.memory / name).read_text().splitlines())
        return int(fields.get("oom_kill", 0)) > 0

    def remove(self, patience: float = 1.0) -> None:
        """The processes are dead by now or about to be; the folder goes when the last of them has gone."""
        end = time.monotonic() + patience
        for folder in {self.memory, self.tasks}:
            while True:
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    if time.monotonic() > end:
                        raise
                    for pid in (folder / "cgroup.procs").read_text().split():
                        with suppress(ProcessLookupError):
                            os.kill(int(pid), 9)
                    time.sleep(0.005)


def _below(pid: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*children, *(grandchild for child in children for grandchild in _below(child))]


def make(limits: Limits) -> ControlGroup:
    """A new group below this process's own. OSError where that is not allowed."""
    memory, tasks, version = _parents()
    name = f"posttrain-{os.getpid()}-{next(_numbers)}"
    group = ControlGroup(memory / name, tasks / name, version)
    try:
        for folder in {group.memory, group.tasks}:
            folder.mkdir()
        group.limit(limits)
    except OSError:
        for folder in {group.memory, group.tasks}:
            with suppress(OSError):
                folder.rmdir()
        raise
    return group


def _parents() -> tuple[Path, Path, int]:
    """Where this process's groups are mounted, from /proc/self/cgroup: `number:controllers:path`."""
    root = Path("/sys/fs/cgroup")
    paths = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path.lstrip("/")
    if "memory" in paths and "pids" in paths:
        return root / "memory" / paths["memory"], root / "pids" / paths["pids"], 1
    parent = root / paths.get("", "")
    return parent, parent, 2


def available(limits: Limits) -> bool:
    """Whether a group can be made, limited and removed. Groups of processes that were killed go now."""
    try:
        make(limits).remove()
        for folder in {*_parents()[:2]}:
            for left in folder.glob("posttrain-*-*"):
                if not Path("/proc", left.name.split("-")[1]).exists():
                    with suppress(OSError):
                        left.rmdir()
    except (OSError, ValueError):
        return False
    return True
