"""The only writer of a run directory. It appends whole lines, replaces whole files, and only one process writes at a time.

If the process is killed at any moment, the run can still be read, and the next attempt resumes it:

    with RunWriter.create(directory, config) as writer:     # a new run; refuses a directory that holds one
        writer.event("stage", {"stage": "rl"})
        row = writer.metrics("rl", step, {"reward": 0.5})
    with RunWriter.resume(directory) as writer:             # the same run, attempt + 1
        writer.resumed("rl", 120)                           # steps up to 120 count; later ones are superseded
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shlex
import shutil
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from posttrain.errors import require
from posttrain.events import Event, Events
from posttrain.runs import layout
from posttrain.runs.layout import AnswerRow, Row, TokenArrays
from posttrain.runs.lock import Lock
from posttrain.system.files import atomic_write, check_tree, explained, how_to_continue, open_file
from posttrain.system.processes import write_all
from posttrain.types import JSON, Rollout

# steps whose per-token arrays are kept: the last written, and every 50th
KEEP_LAST, KEEP_EVERY = 10, 50
# what is not expected where a run begins: a model, and folders that the run would replace
FOREIGN = ("config.json", "checkpoints", "export", "stages")


class RunWriter(AbstractContextManager["RunWriter"]):
    """Appends to a run. Use `create` or `resume`; the constructor opens any directory, new or old."""

    def __init__(self, directory: Path, config: Mapping[str, JSON] | None = None) -> None:
        self.directory = directory = Path(directory)
        self._place = directory.absolute()  # also where a reward has gone to another folder
        # stage -> steps with arrays, in the order in which they were written
        self._kept: dict[str, list[int]] = {}
        self._mutex = threading.Lock()
        self.events = Events()  # the run's messages; all of them are appended to events.jsonl
        self.events.subscribe(self.record)
        self._fds: dict[str, int] = {}
        self._lock: Lock | None = None
        made: tuple[str, ...] = ()
        try:
            with explained(directory):
                directory.mkdir(parents=True, exist_ok=True)
                check_tree(directory)
                self._lock = Lock(directory / layout.LOCK)
                if config is not None:
                    _refuse_used(directory)  # under the lock, so that two creators cannot both pass
                    made = (layout.CONFIG, layout.METRICS, layout.EVENTS)
                    self.configure(config)
                self._open_files()
        except BaseException:
            for name in made:  # a part of a run could neither be resumed nor started again
                with suppress(OSError):
                    (directory / name).unlink()
            self.close()
            raise

    def _open_files(self) -> None:
        _put_back(self.directory)
        repairs = {name: _repair(self.directory / name) for name in (layout.METRICS, layout.EVENTS)}
        rows = layout.json_lines(self.directory / layout.EVENTS)
        attempts = [row["attempt"] for row in rows if row and isinstance(row.get("attempt"), int)]
        self.attempt = 1 + max(attempts, default=0)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        for name in (layout.METRICS, layout.EVENTS):
            with open_file(self.directory / name, flags) as file:
                self._fds[name] = os.dup(file.fileno())
        self.event("open")
        for name, lost in repairs.items():
            if lost:
                self.event("repair", {"file": name, "bytes": lost})

    @classmethod
    def create(cls, directory: Path, config: Mapping[str, JSON]) -> RunWriter:
        """Start a new run and write its configuration. Raises an error if the directory holds a run."""
        with explained(Path(directory)):
            # before the lock: "already holds a run" is clearer than "is being written"
            _refuse_used(Path(directory))
        return cls(directory, config)

    @staticmethod
    def check_place(directory: Path) -> None:
        """Raise an error, without writing, for a directory that `create` would refuse, as far as that can be seen."""
        with explained(directory):
            _refuse_used(directory)
            above = (directory, *directory.absolute().parents)
            there = next(path for path in above if path.exists())
            code = 0 if os.access(there, os.W_OK | os.X_OK) else errno.EACCES
            if not there.is_dir():
                code = errno.EEXIST if there == directory else errno.ENOTDIR
            if code:
                raise OSError(code, os.strerror(code))

    @classmethod
    def resume(cls, directory: Path) -> RunWriter:
        """Open an existing run, as its next attempt."""
        layout.require_run(directory)
        return cls(directory)

    def configure(self, config: Mapping[str, JSON]) -> None:
        """Replace the configuration: the run continues with changed settings of a harmless kind."""
        text = yaml.safe_dump(layout.encode(config), sort_keys=False, allow_unicode=True, width=120)
        with explained(self.directory):
            atomic_write(self.directory / layout.CONFIG, text)

    def metrics(self, stage: str, step: int, figures: Mapping[str, float]) -> Row:
        """Append the metrics of a step, and return the row for trackers and the console."""
        _check_names("figures", figures, layout.ROW_KEYS)
        require(layout.plain_name(stage), f"stage {stage!r} is not a plain name")
        numbers = {name: float(value) for name, value in figures.items()}
        row = Row(stage, int(step), self.attempt, _now(), numbers)
        keys = {key: getattr(row, key) for key in layout.ROW_KEYS}
        self._append(layout.METRICS, layout.dump_line(keys | numbers))
        return row

    def event(self, kind: str, details: Mapping[str, JSON] | None = None) -> None:
        """Append an event: kind, time, attempt and its details."""
        details = details or {}
        _check_names("details", details, layout.EVENT_KEYS)
        record = {"kind": kind, "time": _now(), "attempt": self.attempt, **details}
        self._append(layout.EVENTS, layout.dump_line(record))

    def record(self, event: Event) -> None:
        """Append an event of the channel, with its place, text and data, if it has them."""
        place = {"stage": event.stage} if event.stage else {}
        step = {} if event.step is None else {"step": event.step}
        said = {"text": event.text, "level": event.level} if event.text else {}
        self.event(event.kind, {**place, **step, **said, **event.data})

    def resumed(self, stage: str, step: int) -> None:
        """Record that this attempt continues after `step` of `stage`: readers drop later steps of earlier attempts. Says so if rows of
        the steps up to there were lost."""
        self.event("resume", {"stage": stage, "step": int(step)})
        rows = layout.json_lines(self.directory / layout.METRICS)
        known = {row.get("step") for row in rows if row and row.get("stage") == stage}
        if lost := {*range(1, step + 1)} - known:
            what = f"{self.directory / layout.METRICS} has lost {len(lost)} of the {step} steps up to here"
            self.events.emit("damaged", f"{what}; the model has not", "warning", stage=stage)

    def rollouts(
        self,
        stage: str,
        step: int,
        rollouts: Sequence[Rollout],
        advantages: Sequence[float | None] | None = None,
        arrays: TokenArrays | None = None,
    ) -> None:
        """Write a step's rollouts, one per line, and with `arrays` their per-token values; sequence n belongs to rollout n. A
        rollout without arrays has an empty sequence; one without an advantage has None."""
        if advantages is not None and len(advantages) != len(rollouts):
            raise ValueError(f"{len(advantages)} advantages for {len(rollouts)} rollouts")
        if arrays is not None and arrays.sequences != len(rollouts):
            raise ValueError(f"arrays of {arrays.sequences} sequences for {len(rollouts)} rollouts")
        path = layout.rollout_file(self.directory, stage, step)
        rows = map(self._row, rollouts, advantages or [None] * len(rollouts))
        lines = b"".join(map(layout.dump_line, rows))
        with explained(self.directory):
            atomic_write(path, lines, durable=False, folder=True)
            if arrays is not None:
                self._write_arrays(stage, step, arrays)

    def tokenizer(self, stage: str, tokenizer: Any) -> None:
        """Write what spells the tokens of a stage's rollouts while it has saved no model. Tokenizers in Python alone have no such
        file."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            return
        path = layout.rollout_file(self.directory, stage, 0).with_name("tokenizer.json")
        with explained(self.directory):
            atomic_write(path, backend.to_str(), durable=False, folder=True)

    def _row(self, rollout: Rollout, advantage: float | None) -> dict[str, JSON]:
        """Return the fields of a `layout.RolloutRow`, or of an `EpisodeRow`."""
        problem, score = rollout.problem, rollout.score
        versions = [s.versions for s in rollout.segments if s.versions is not None]
        row = {
            "problem": problem.id,
            "level": problem.level,
            "question": problem.question,
            "answer": problem.answer,
            "sample": rollout.sample,
            "response": rollout.response,
            "reward": score.value,
            "parts": score.parts,
            "outcome": score.outcome,
            "failure": score.failure,
            "finish": rollout.finish,
            "length": rollout.length,
            "version": int(min((v.min() for v in versions if len(v)), default=-1)),
            "attempt": self.attempt,
            "advantage": advantage,
        }
        if rollout.role or rollout.turns > 1:
            parts = [["sampled" if s.sampled else "given", s.text] for s in rollout.segments]
            row |= {"role": rollout.role, "conversation": parts}
            paid = [s.reward for s in rollout.segments if s.sampled]
            row |= {"paid": paid} if any(paid) else {}
            row |= {"counts": dict(rollout.counts)} if rollout.counts else {}
        return row

    def _write_arrays(self, stage: str, step: int, arrays: TokenArrays) -> None:
        path = layout.rollout_file(self.directory, stage, step, ".safetensors")
        _save_arrays(path, {"starts": arrays.starts.astype(np.int64), **arrays.arrays})
        if stage not in self._kept:
            self._kept[stage] = self._written_order(stage)
        kept = self._kept[stage]
        if step in kept:
            kept.remove(step)
        kept.append(step)
        # "last" counts by the time of writing, not by the step: after a resume at an earlier step, the superseded arrays with
        # higher numbers must be removed first
        for old in [s for s in kept[:-KEEP_LAST] if s % KEEP_EVERY]:
            kept.remove(old)
            superseded = layout.rollout_file(self.directory, stage, old, ".safetensors")
            with suppress(OSError):  # a file that cannot be removed only takes space
                superseded.unlink(missing_ok=True)

    def _written_order(self, stage: str) -> list[int]:
        """Return the steps of a stage that have arrays, oldest first: by attempt, then by step. A copy of a run has the times of its
        files no more."""
        files = (self.directory / layout.ROLLOUTS / stage).glob("step-*.safetensors")
        steps = [step for path in files if (step := layout.step_of(path)) is not None]
        return sorted(steps, key=lambda n: (layout.attempt_of(self.directory, stage, n), n))

    def answers(self, rows: Sequence[AnswerRow]) -> None:
        """Write the stages' answers to the same prompts, replacing an earlier file."""
        with explained(self.directory):
            lines = b"".join(layout.dump_line(asdict(row)) for row in rows)
            atomic_write(self.directory / layout.ANSWERS, lines)

    def summary(self, summary: Mapping[str, JSON]) -> None:
        """Write the summary, replacing an earlier one. Non-finite numbers become strings, as in all files of a run."""
        text = json.dumps(layout.encode(summary), allow_nan=False, indent=2)
        with explained(self.directory):
            atomic_write(self.directory / layout.SUMMARY, text + "\n")

    def attachment(self, name: str, arrays: Mapping[str, np.ndarray]) -> Path:
        """Write the arrays of an alarm as alarms/NAME.safetensors, and return the path."""
        require(layout.plain_name(name), f"{name!r} is not a plain name")
        path = self.directory / layout.ALARMS / f"{name}.safetensors"
        with explained(self.directory):
            _save_arrays(path, arrays)
        return path

    def _append(self, name: str, line: bytes) -> None:
        """Append one line in one write; if the disk fills up during it, the partial line is removed."""
        taken = self._lock.lost if self._lock is not None else ""
        require(not taken, f"{self.directory}: {taken}")
        with self._mutex, explained(self.directory):
            fd, path = self._fds[name], self._place / name
            before = os.fstat(fd)
            # lines would go to a file that nobody finds, and checkpoints to a second directory of the old name
            same = path.exists() and os.path.samestat(before, path.stat())
            gone = "was moved or removed while the run was being written; put it back, then resume"
            require(same, f"{path} {gone}")
            try:
                write_all(fd, line)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(fd, before.st_size)
                raise

    def close(self) -> None:
        """Release the run for other writers. A second call changes nothing."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            with suppress(Exception):  # the original error matters more
                self.event("ended", {"error": kind.__name__})
        self.close()


def _check_names(kind: str, names: Collection[str], reserved: Collection[str]) -> None:
    if clash := sorted(set(names) & set(reserved)):
        raise ValueError(f"{kind} may not be called {', '.join(clash)}")


def _save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    from safetensors.numpy import save

    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    atomic_write(path, save(contiguous), durable=False, folder=True)


def _refuse_used(directory: Path) -> None:
    names = (layout.CONFIG, layout.METRICS, layout.EVENTS, layout.ROLLOUTS)
    used = ", ".join(name for name in names if (directory / name).exists())
    resume = f"continue with: {how_to_continue(directory)}"
    if (directory / layout.SUMMARY).exists():
        shown = shlex.quote(str(directory))
        resume = f"it is complete: see 'posttrain show {shown}', or do what has changed again by again=true"
    resume += ", or choose another directory"
    require(not used, f"{directory} already holds a run ({used}); {resume}")
    found = [directory / name for name in FOREIGN if (directory / name).exists()]
    # an empty folder may be there for the run, such as a mounted disk
    other = ", ".join(one.name for one in found if one.is_file() or any(one.iterdir()))
    lost = f"{directory} is no run and holds {other}, in place of which a run writes its own"
    require(not other, f"{lost}; choose another directory")


def _now() -> float:
    return round(time.time(), 3)


def _put_back(directory: Path) -> None:
    """Undo what a process began to set aside (`Context.set_aside`) and did not end: those folders have names with a dot."""
    for begun in (directory / "replaced").glob(".*"):
        for folder in begun.glob("*/*"):
            if not (home := directory / folder.relative_to(begun)).exists():
                shutil.move(folder, home)
        if any(begun.glob("*/*")):  # copies on another disk, whose originals are there
            begun.rename(begun.with_name(begun.name[1:]))
        else:
            shutil.rmtree(begun)


def _repair(path: Path) -> int:
    """Make a JSONL file end at a line's end, which a killed writer may have missed. Returns how many bytes were dropped.

    A tail that is a complete object only lacks its newline and is kept; any other tail is cut off.
    """
    if not path.exists() or path.stat().st_size == 0:
        return 0
    with open_file(path, os.O_RDWR) as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:  # it may be large
            tail = text[text.rfind(b"\n") + 1 :]
        whole = layout.parse_object(tail) is not None
        end = file.seek(0, os.SEEK_END)
        if whole:
            file.write(b"\n")
        else:
            file.truncate(end - len(tail))
    return 0 if whole else len(tail)
