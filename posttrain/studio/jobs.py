"""Runs that are started, stopped and resumed from the page: processes of `posttrain`, whose output goes to a file.

They are sessions of their own: the server may end, and they go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from posttrain import catalogue
from posttrain.errors import UserError, require, unknown
from posttrain.runs import layout
from posttrain.runs.lock import live_owner

SETTING = re.compile(r"[a-z0-9_.]{1,80}=.{0,400}", re.IGNORECASE)
MAX_PROCESSES = 8  # processes at once
# settings that name a place, a program or an address: a page may not
REFUSED = ("out", "checkpoint_hook", "again", "trackers")
START_SECONDS = 60.0


@dataclass(slots=True)
class Jobs:
    """The processes that this server has started, by the folder of their run."""

    root: Path
    started: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, recipe: str, settings: list[str]) -> Path:
        """Begin a run of a shipped recipe in a new folder, and return that."""
        known = catalogue.names("recipe")
        if recipe not in known:
            raise unknown("recipe", recipe, known)
        for text in settings:
            require(SETTING.fullmatch(text) is not None, f"{text[:80]!r} is not key=value")
            key, _, value = text.partition("=")
            named = key in REFUSED or ".py" in value or "://" in value
            require(
                not named,
                f"{key}: the page cannot name files, programs or addresses; use the command line",
            )
        numbers = (n for n in range(1, 10_000) if not (self.root / f"{recipe}-{n}").exists())
        directory = self.root / f"{recipe}-{next(numbers)}"
        return self._open(directory, "run", recipe, f"out={directory}", *settings)

    def resume(self, directory: Path) -> Path:
        """Continue a run that nobody writes."""
        require(live_owner(directory / layout.LOCK) is None, f"{directory.name} is running")
        return self._open(directory, "resume", str(directory))

    def stop(self, directory: Path) -> None:
        """Ask the process of a run to stop after its step; it writes a checkpoint."""
        process = live_owner(directory / layout.LOCK)
        require(bool(process), f"{directory.name} is not running on this machine")
        if process:
            os.kill(process, signal.SIGINT)

    def _open(self, directory: Path, *words: str) -> Path:
        self.started = {path: job for path, job in self.started.items() if job.poll() is None}
        require(
            len(self.started) < MAX_PROCESSES,
            f"{MAX_PROCESSES} runs were started from this page; wait for one",
        )
        logs = self.root / ".studio"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{directory.name}.log"
        with log.open("ab") as out:
            command = [sys.executable, "-m", "posttrain", *words]
            job = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self.started[directory] = job
        end = time.monotonic() + START_SECONDS
        while job.poll() is None and time.monotonic() < end:
            if live_owner(directory / layout.LOCK):
                return directory
            time.sleep(0.1)
        require(job.poll() in (None, 0), f"it did not start: {_last_line(log)}")
        return directory


def _last_line(log: Path) -> str:
    with suppress(OSError):
        lines = log.read_text("utf-8", "replace").strip().splitlines()
        return lines[-1][:500] if lines else "it said nothing"
    raise UserError("it did not start, and left no word")
