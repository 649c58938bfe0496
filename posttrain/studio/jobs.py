"""Starts `posttrain` in other processes: runs that the page starts, stops and resumes, and model servers.

A run gets its own session and writes its output to a file, so that it continues when the studio ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path

from posttrain import catalogue
from posttrain.errors import UserError, refuse_unknown, require
from posttrain.runs import layout
from posttrain.runs.index import FOLDER
from posttrain.runs.lock import live_owner
from posttrain.system.processes import PYTHON
from posttrain.types import JSON

# the first lines of a program that must end when its parent does: only the parent holds the other end of its standard input
WATCH = """import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
"""
SETTING = re.compile(r"[a-z0-9_.]{1,80}=[^\0\n]{0,400}", re.IGNORECASE)
MAX_PROCESSES = 8  # running at once
# settings that name a path, a program or an address: a page may not set them
REFUSED = ("out", "checkpoint_hook", "again", "trackers")
START_SECONDS, RECIPE_SECONDS, END_SECONDS = 60.0, 60.0, 10.0
# trains in about three minutes on a CPU
DEMO = "run instructgpt pretrain.steps=400 compared=1000 reward.steps=100 steps=25 prompts=64 problems=200"


@dataclass(slots=True)
class Jobs:
    """The processes that this studio has started, by run directory."""

    root: Path
    started: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, recipe: str, settings: list[str]) -> Path:
        """Start a run of a shipped recipe in a new directory, and return the directory."""
        refuse_unknown("recipe", [recipe], catalogue.names("recipe"))
        for text in settings:
            require(SETTING.fullmatch(text) is not None, f"{text[:80]!r} is not key=value")
            key, _, value = text.partition("=")
            named = key in REFUSED or ".py" in value or "://" in value or _names_file(value)
            where = f"{key}: the page cannot name files, programs or addresses"
            require(not named, f"{where}; use the command line")
        # made at once: a run makes its own only after seconds, in which another may be started
        for directory in (self.root / f"{recipe}-{number}" for number in count(1)):
            with suppress(FileExistsError):
                directory.mkdir(parents=True)
                break
        try:
            return self._open(directory, "run", recipe, f"out={directory}", *settings)
        except UserError:
            with suppress(OSError):  # it is not empty
                directory.rmdir()
            raise

    def resume(self, directory: Path) -> Path:
        """Resume a run, if no process writes to it."""
        require(live_owner(directory / layout.LOCK) is None, f"{directory.name} is running")
        return self._open(directory, "resume", str(directory))

    def stop(self, directory: Path) -> None:
        """Ask the process of a run to stop after its current step. It writes a checkpoint."""
        process = live_owner(directory / layout.LOCK)
        if not process:
            raise UserError(f"{directory.name} is not running on this machine")
        # a second signal would end it at once, without a checkpoint. A file, because another studio may have sent the first
        claim = directory / f"{layout.LOCK}.holder"
        asked = directory / FOLDER / f"stop-{hashlib.sha256(claim.read_bytes()).hexdigest()[:12]}"
        asked.parent.mkdir(exist_ok=True)
        try:
            asked.touch(exist_ok=False)
        except FileExistsError:
            raise UserError(f"{directory.name} stops after its current step") from None
        try:
            os.kill(process, signal.SIGINT)
        except OSError:
            asked.unlink()
            raise

    def replay(self, words: list[str], result: Path) -> None:
        """Recompute a step with `posttrain replay`, which writes the file `result`. If that is already running, do nothing."""
        directory = Path(words[0])
        running = f"{directory.name} is running; replay it when it has ended or was stopped"
        require(live_owner(directory / layout.LOCK) is None, running)
        self._make_room()
        if result not in self.started:
            for old in (result, _log(result)):
                old.unlink(missing_ok=True)
            self.started[result] = _run_apart(["replay", *words, f"--save={result}"], _log(result))

    def replay_state(self, result: Path) -> tuple[str, str]:
        """The state of a replay (none, running, done or failed), and the last line of its output."""
        job, log = self.started.get(result), _log(result)
        if job is not None and job.poll() is None:
            return "running", _last_line(log) if log.stat().st_size else "starting"
        if result.is_file():
            return "done", ""
        return ("failed", _last_line(log)) if log.is_file() else ("none", "")

    def stop_replay(self, result: Path) -> None:
        """Stop a replay that was started here."""
        job = self.started.get(result)
        if job is None or job.poll() is not None:
            raise UserError("no such replay is running")
        job.terminate()
        with _log(result).open("a") as log:
            log.write("stopped from the page\n")

    def _make_room(self) -> None:
        """Forget processes that have ended. Refuse if too many are running."""
        for path in [path for path, job in [*self.started.items()] if job.poll() is not None]:
            self.started.pop(path, None)
        many = f"{MAX_PROCESSES} processes were started from this page; wait for one"
        require(len(self.started) < MAX_PROCESSES, many)

    def _open(self, directory: Path, *words: str) -> Path:
        self._make_room()
        log = self.root / FOLDER / f"{directory.name}.log"
        job = _run_apart(list(words), log)
        self.started[directory] = job
        end = time.monotonic() + START_SECONDS
        while job.poll() is None and time.monotonic() < end:
            if live_owner(directory / layout.LOCK):
                return directory
            time.sleep(0.1)
        require(job.poll() in (None, 0), f"it did not start: {_last_line(log)}")
        return directory


def _names_file(value: str) -> bool:
    """Whether a setting may name a file: one that exists, or any absolute path. An escape may hide one."""
    words = re.split(r"[\s,:\[\]{}'\"]+", value)
    away, there = ("/", "~", "./", "../"), os.path.exists if "/" in value else os.path.isfile
    return "\\" in value or any(w.startswith(away) or "/.." in w or there(w) for w in words)


def start_demo(root: Path) -> None:
    """Start training a small run if there is no run yet."""
    if not (root / "demo").exists():
        _run_apart([*DEMO.split(), f"out={root / 'demo'}"], root / "demo.log")


def start_serving(directory: Path) -> subprocess.Popen[str]:
    """Start `posttrain serve RUN` at a free port. It prints its address, and ends when this process ends, even if that is
    killed."""
    program = f"{WATCH}from posttrain import cli\nsys.exit(cli.main(sys.argv[1:]))"
    words = [*PYTHON, "-c", program, "serve", str(directory), "--port", "0"]
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(words, text=True, stdin=pipe, stdout=pipe, stderr=both)


def end(process: subprocess.Popen[str]) -> None:
    """Stop a process that was started here."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    process.kill()


@cache
def recipe_settings(name: str) -> dict[str, JSON]:
    """Resolve the default settings of a shipped recipe, in another process because building stages imports torch."""
    program = "import json, sys; from posttrain import config; print(json.dumps(config.to_config(config.parse(sys.argv[1], []))))"
    line = [*PYTHON, "-c", program, name]
    done = subprocess.run(line, capture_output=True, text=True, timeout=RECIPE_SECONDS, check=False)
    require(not done.returncode, f"recipe {name} cannot be resolved: {done.stderr.strip()[-300:]}")
    return dict(json.loads(done.stdout))


def _run_apart(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a `posttrain` process that outlives this one."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        command = [*PYTHON, "-m", "posttrain", *words]
        none = subprocess.DEVNULL
        return subprocess.Popen(command, stdin=none, stdout=out, stderr=out, start_new_session=True)


def _log(result: Path) -> Path:
    return result.with_suffix(".log")


def _last_line(log: Path) -> str:
    with suppress(OSError):
        lines = log.read_text("utf-8", "replace").strip().splitlines()
        return lines[-1][:500] if lines else "it said nothing"
    raise UserError("it did not start, and wrote no log")
