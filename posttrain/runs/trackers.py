"""Sends metrics to other services. Optional: the run directory is always written, and never depends on these."""

from __future__ import annotations

import importlib
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from posttrain.errors import UserError, refuse_unknown
from posttrain.events import Event
from posttrain.runs.layout import METRICS, Row, json_lines
from posttrain.runs.write import RunWriter
from posttrain.system.files import atomic_write, read_json
from posttrain.system.threads import Result, in_thread
from posttrain.types import JSON

OPENING_SECONDS, LOGGING_SECONDS = 120.0, 30.0
# in the run directory: a service's name of this run, with which the next attempt continues
RECORD = "trackers.json"
PROJECT = "posttrain"  # if the user's own settings name none


class Tracker(Protocol):
    """Receives every row of metrics."""

    def log(self, row: Row) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """The trackers of a run. A tracker that raises an error or does not answer in time is dropped with an event; training
    continues without it. A stage that resumes from a checkpoint repeats steps that an earlier attempt has sent: those are not
    sent again."""

    def __init__(self, trackers: Mapping[str, Tracker], writer: RunWriter) -> None:
        self.active = dict(trackers)
        self._writer = writer
        writer.events.subscribe(self.record)
        self._sent: dict[str, list[int]] = {}  # stage -> the steps of earlier attempts
        for row in json_lines(writer.directory / METRICS) if writer.attempt > 1 else ():
            if row and isinstance(row.get("step"), int):
                self._sent.setdefault(str(row.get("stage")), []).append(row["step"])
        # stage -> whether this attempt began after its first step
        self._goes_on: dict[str, bool] = {}

    @classmethod
    def open(cls, names: Sequence[str], writer: RunWriter, config: Mapping[str, JSON]) -> Trackers:
        """Start trackers by name. An unknown or missing one is an error now, before training."""
        for name in names:
            refuse_unknown("tracker", [name], KINDS)
            _require_installed(name)
        opened = cls({}, writer)
        for name in names:
            make = partial(KINDS[name], writer.directory, config)
            made = opened._call(name, make, OPENING_SECONDS)
            opened.active |= {name: made} if made is not None else {}
        return opened

    def log(self, row: Row) -> None:
        sent = self._sent.get(row.stage, [])
        goes_on = self._goes_on.setdefault(row.stage, bool(sent) and row.step > min(sent))
        if goes_on and row.step <= max(sent):
            return
        for name, tracker in list(self.active.items()):
            self._call(name, partial(tracker.log, row), LOGGING_SECONDS)

    def record(self, event: Event) -> None:
        """Mark an alarm of a step in the charts, as a metric `alarm/RULE` of 1."""
        if event.kind == "alarm" and event.step is not None:
            figures = {f"alarm/{event.data.get('rule', '')}": 1.0}
            self.log(Row(event.stage, event.step, self._writer.attempt, time.time(), figures))

    def close(self) -> None:
        for name, tracker in list(self.active.items()):
            self._call(name, tracker.close, OPENING_SECONDS)
        self.active.clear()

    def _call(self, name: str, call: Callable[[], Result], seconds: float) -> Result | None:
        """Call a tracker and return its result. A tracker that fails (no network, no login, a full disk elsewhere) is
        dropped. One that does not answer delays a run this long, once: its thread is then abandoned."""
        try:
            future = in_thread(call, "tracker")
            if not wait([future], seconds).done:
                raise TimeoutError(f"no answer within {seconds:g} s")
            return future.result(0)
        except Exception as error:  # an error of another package
            self.active.pop(name, None)
            message = f"tracker {name} failed and is off for the rest of the run: {type(error).__name__}: {error}"
            self._writer.events.emit("warning", message, "warning", data={"tracker": name})
            return None


class TensorBoard:
    """Event files under `tensorboard/` in the run directory, one tag for each stage and figure."""

    def __init__(self, directory: Path, config: Mapping[str, JSON]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory / "tensorboard"))

    def log(self, row: Row) -> None:
        for tag, value in _prefixed(row).items():
            self._writer.add_scalar(tag, value, row.step, walltime=row.time)

    def close(self) -> None:
        self._writer.close()


class Service:
    """A service with the calls of W&B. All attempts of a run are one run there, by a name that the run directory keeps."""

    _run: Any

    def log(self, row: Row) -> None:
        self._run.log({f"{row.stage}/step": row.step, **_prefixed(row)})

    def close(self) -> None:
        self._run.finish()


class WandB(Service):
    """Weights & Biases. Each stage has its own step axis, because stages count from 0. The user's settings name the project:
    the run directory may come from another person."""

    def __init__(self, directory: Path, config: Mapping[str, JSON]) -> None:
        wandb = importlib.import_module("wandb")
        key = recorded(directory, "wandb") or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex
        record(directory, "wandb", key)
        project = {} if _project_is_set() else {"project": PROJECT}
        self._run = wandb.init(
            **project,
            id=key,
            resume="allow",
            name=directory.resolve().name,
            dir=str(directory),
            config=dict(config),
            allow_val_change=True,  # a changed number of threads is still the same run
        )
        self._stages: set[str] = set()

    def log(self, row: Row) -> None:
        if row.stage not in self._stages:
            self._stages.add(row.stage)
            self._run.define_metric(f"{row.stage}/*", step_metric=f"{row.stage}/step")
        super().log(row)


class Trackio(Service):
    """Trackio: the same calls, stored on the user's own disk. Another directory of the same name is another run."""

    def __init__(self, directory: Path, config: Mapping[str, JSON]) -> None:
        trackio = importlib.import_module("trackio")
        before = recorded(directory, "trackio")
        name, resume = before or directory.resolve().name, "allow" if before else "never"
        self._run = trackio.init(project=PROJECT, name=name, config=dict(config), resume=resume)
        record(directory, "trackio", str(getattr(self._run, "name", name)))


Make = Callable[[Path, Mapping[str, JSON]], Tracker]
KINDS: Mapping[str, Make] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}


def recorded(directory: Path, tracker: str) -> str:
    """Return a service's earlier name of this run; "" if there is none, or if it is not a valid name."""
    try:
        name = read_json(directory / RECORD).get(tracker)
    except (OSError, UserError):
        return ""
    text = name if isinstance(name, str) and name.isprintable() else ""
    return text if re.fullmatch(r"[^/\\#?%:]{1,200}", text) else ""


def record(directory: Path, tracker: str, name: str) -> None:
    known = {kind: found for kind in KINDS if (found := recorded(directory, kind))}
    atomic_write(directory / RECORD, json.dumps(known | {tracker: name}))


def _project_is_set() -> bool:
    """Whether the user has named a W&B project: in the environment, or with `wandb init`, for this folder or for the
    account."""
    own = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    files = [file for folder in (Path("wandb"), own) if (file := folder / "settings").is_file()]
    texts = (file.read_text("utf-8", "replace") for file in files)
    named = any(re.search(r"(?m)^\s*project\s*=\s*\S", text) for text in texts)
    return bool(os.environ.get("WANDB_PROJECT")) or named


def _prefixed(row: Row) -> dict[str, float]:
    return {f"{row.stage}/{name}": value for name, value in row.figures.items()}


def _require_installed(name: str) -> None:
    try:
        found = getattr(importlib.import_module(name), "__spec__", None)
        if found is not None and found.origin is None:
            raise ImportError(f"./{name} is a folder of files, not the package")
    except ImportError as error:
        needs = f"tracker {name!r} needs a package that is not installed ({error})"
        raise UserError(f"{needs}; pip install 'posttrain[{name}]'") from None
