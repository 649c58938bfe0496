"""Asynchronous checkpointing: a step copies its tensors to host memory, and a thread writes them to disk.

One write is under way at a time; the next save waits for it. What goes wrong in the thread is raised by the next `check`, `save` or
`finish`, so that a run never goes on for long believing in a checkpoint that is not there. A process that dies while it writes has the
checkpoint before, untouched.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from posttrain.errors import Checked, Positive, Several, UserError, require
from posttrain.events import Events
from posttrain.system.files import MAX_FILE, read_json
from posttrain.train import checkpoint
from posttrain.train.checkpoint import Checkpoint
from posttrain.types import JSON

LONGEST_WRITE = 1800.0  # seconds: a disk that has not taken a checkpoint by then is not going to


@dataclass(frozen=True, kw_only=True)
class Saving(Checked):
    """Settings of checkpoints. `hook` is a program with arguments that runs without a shell after each checkpoint, for at most
    `hook_seconds`, for example to copy it elsewhere. The checkpoint's directory replaces `{}`, or is the last argument. If it
    fails, there is a warning. Only the end of the stage waits for it, and the checkpoint that it is copying is not removed."""

    where = "checkpoints: "

    keep: Several = 2
    # write before the step goes on: for hosts without memory for a second copy
    synchronous: bool = False
    hook: tuple[str, ...] = ()
    hook_seconds: Positive = 600.0


class Store(AbstractContextManager["Store"]):
    """The checkpoints of one stage. The writing thread emits an event for each published checkpoint."""

    def __init__(
        self, directory: Path, saving: Saving | None = None, events: Events | None = None
    ) -> None:
        # absolute: the thread writes while a reward may have gone elsewhere
        self.directory, self.saving = directory.absolute(), saving or Saving()
        self.events = events or Events()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._hooking: threading.Thread | None = None
        self._mutex = threading.Lock()
        self._copying: list[Path] = []  # the checkpoint that the hook copies, and the next one
        self.hook_failures = 0
        self._written_once = False

    def save(self, made: Checkpoint) -> None:
        """Copy everything, then write it in the background."""
        began = time.perf_counter()
        self._written()
        state = checkpoint.with_arrays(*checkpoint.without_arrays(made.state))  # a copy
        model, optimizer = _copies(made.model), _copies(made.optimizer)
        copied = replace(made, model=model, optimizer=optimizer, state=state)
        waited = time.perf_counter() - began
        if self.saving.synchronous:
            self._write(copied, waited)
            self.check()
            return
        given, name = (copied, waited), "checkpoint"
        self._thread = threading.Thread(target=self._write, args=given, name=name, daemon=True)
        self._thread.start()

    def keep(self, made: Checkpoint) -> None:
        """Write the best step so far, apart from the checkpoints and before the next step. The previous best is removed, unless a
        checkpoint refers to it, because a run resumed there needs it."""
        named = []
        for path in self.published():
            with suppress(OSError, UserError, KeyError, TypeError):  # a damaged one names none
                named.append(self.best(read_json(path / "state.json", MAX_FILE)["best"]["step"]))
        checkpoint.save(self.directory / "best", made, 1, named)

    def best(self, step: int) -> Path:
        """The directory in which `keep` writes a step."""
        return self.directory / "best" / f"step-{step}"

    def check(self) -> None:
        """Raise an error that occurred in the background since the last call."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait until nothing is being written or copied."""
        self._written()
        if self._hooking is not None:
            # one hook may run and one wait; each ends at its limit
            self._hooking.join(2 * self.saving.hook_seconds + 30)
            self._hooking = None
        self.check()

    def _written(self) -> None:
        if self._thread is not None:
            self._thread.join(LONGEST_WRITE)
            slow = f"{self.directory}: a checkpoint has been written for {LONGEST_WRITE:.0f} s and is not done"
            look = "look at the disk or the network it is on, then resume"
            require(not self._thread.is_alive(), f"{slow}; {look}")
            self._thread = None
        self.check()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Finish the write in progress, however the stage ended. An error of the write does not hide the one that ended the stage."""
        try:
            self.finish()
        except Exception as second:
            if error is None:
                raise
            error.add_note(str(second))

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest intact checkpoint, and what is wrong with newer ones. Removes leftovers of an interrupted save."""
        self.finish()
        found = checkpoint.newest(self.directory)
        checkpoint.sweep(self.directory, parts=True)
        return found

    def published(self) -> list[Path]:
        """All checkpoints, newest first, including the one being written; `check` reports if that fails."""
        if self._thread is not None:
            self._thread.join(LONGEST_WRITE)
        return checkpoint.steps(self.directory)

    def _write(self, made: Checkpoint, waited: float) -> None:
        """The writing thread. It imports nothing: a reward worker may be forked meanwhile and would inherit the import lock."""
        try:
            began = time.perf_counter()
            path = checkpoint.save(self.directory, made, self.saving.keep, tuple(self._copying))
            if made.rank:  # the first process says it
                return
            size, seconds = checkpoint.size(path), time.perf_counter() - began
            cost = f"{size / 1e6:,.1f} MB in {seconds:.2f} s; the step waited {waited:.3f} s"
            text = "" if self._written_once else f"checkpoint at step {made.step}: {cost}"
            data = {"bytes": size, "seconds": round(seconds, 3), "waited": round(waited, 3)}
            stage = made.state.get("stage", "")
            self.events.emit("checkpoint", text, stage=stage, step=made.step, data=data)
            self._written_once = True  # the time of a checkpoint is reported once
            if self.saving.hook:
                self._follow(path)
        except BaseException as error:  # raised again where somebody looks
            self._error = error

    def _follow(self, path: Path) -> None:
        """Run the hook for a checkpoint, now or after its current run. If it cannot keep up, it gets only the newest."""
        with self._mutex:
            busy = bool(self._copying)
            self._copying = [*self._copying[:1], path]
        if not busy:
            self._hooking = threading.Thread(target=self._copy, name="checkpoint hook", daemon=True)
            self._hooking.start()

    def _copy(self) -> None:
        try:
            while True:
                self._run_hook(self._copying[0])
                with self._mutex:  # to end is decided here, so that nobody adds one in between
                    self._copying = self._copying[1:]
                    if not self._copying:
                        return
        except BaseException as error:  # raised again where somebody looks
            self._error, self._copying = error, []

    def _run_hook(self, path: Path) -> None:
        began = time.perf_counter()
        place, hook = str(path.absolute()), self.saving.hook
        command = tuple(word.replace("{}", place) for word in hook)
        if command == hook:
            command = (*hook, place)
        problem = run_hook(command, self.saving.hook_seconds)
        seconds = round(time.perf_counter() - began, 3)
        data: dict[str, JSON] = {"checkpoint": str(path), "seconds": seconds}
        if problem is None:
            self.events.emit("checkpoint_hook", data=data)
            return
        self.hook_failures += 1
        text = f"checkpoint_hook failed for {path.name} ({self.hook_failures} so far): {problem}"
        data["failures"] = self.hook_failures
        self.events.emit("warning", text, "warning", data=data)


def run_hook(command: tuple[str, ...], seconds: float) -> str | None:
    """Run a program without a shell and without input, for at most `seconds`. Returns an error message or None. Processes that it
    started end with it."""
    none = subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            command, stdin=none, stdout=none, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        process.wait(10)
        assert process.stderr is not None
        process.stderr.close()
        return f"{command[0]} took more than {seconds:g} s and was ended"
    if process.returncode == 0:
        return None
    last = said.decode(errors="replace").strip().splitlines()[-1:] or [""]
    return f"{command[0]} exited with {process.returncode}: {last[0][:200]}".rstrip(": ")


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory that nothing else uses: training continues with the originals while these are written."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
