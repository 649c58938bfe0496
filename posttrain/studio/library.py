"""The runs below some folders: found by their files, named by ids, summed up in a row each. A browser never names a file."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

from posttrain.errors import UserError
from posttrain.runs import layout
from posttrain.runs.index import Index
from posttrain.runs.layout import EventRow
from posttrain.runs.metrics import SCORES
from posttrain.runs.read import Run
from posttrain.runs.status import Status, alarms, status, verdict
from posttrain.studio.replies import Missing
from posttrain.system.files import MAX_JSON, read_bytes
from posttrain.types import JSON

DEPTH = 4  # folders below a root in which runs are looked for
RESCAN = 2.0  # seconds between two searches for runs
OPEN = 64  # indexes that are kept open
LISTED = 50  # runs whose models are listed
HEAD = b"ForSequenceClassification"  # in the configuration of a reward model
SPARK = 40  # points of a row's curve
FILES = (layout.CONFIG, layout.METRICS, layout.EVENTS, layout.SUMMARY, layout.ROLLOUTS)


@dataclass(slots=True)
class Library:
    """Runs by id. The id of a run is a hash of its place, so that a link to it stays good when the server is started again."""

    roots: Sequence[Path]
    _found: dict[str, Path] = field(default_factory=dict)
    _scanned: float = -RESCAN
    _open: OrderedDict[str, Index] = field(default_factory=OrderedDict)
    _rows: dict[str, tuple[JSON, JSON]] = field(default_factory=dict)
    _mutex: threading.RLock = field(default_factory=threading.RLock)

    def runs(self, age: float = RESCAN) -> dict[str, Path]:
        """All runs, those that changed last first, as of so many seconds ago."""
        with self._mutex:
            if time.monotonic() - self._scanned > age:
                found = [path for root in self.roots for path in _walk(root, DEPTH)]
                found.sort(key=_changed, reverse=True)
                self._found = {run_id(path): path for path in found}
                self._scanned = time.monotonic()
            return self._found

    def index(self, name: str) -> Index:
        """The index of the run with this id."""
        path = self.runs().get(name) or self.runs(age=0.0).get(name)
        if path is None:
            raise Missing("no such run")
        with self._mutex:
            held = self._open.pop(name, None)
            if held is None or not held.path.exists():
                held = Index(Run(path))
            self._open[name] = held
            while len(self._open) > OPEN:
                self._open.popitem(last=False)
            return held

    def row(self, name: str) -> JSON:
        """One line of the table of runs; computed again only where files have changed, or while the run is live."""
        path = self.runs()[name]
        mark = [_stamp(path / file) for file in (*FILES[:4], f"{layout.LOCK}.holder")]
        held = self._rows.get(name)
        if held is None or held[0] != mark or held[1]["status"]["kind"] == "live":
            self._rows[name] = held = mark, self._row(name, path)
        return held[1]

    def _row(self, name: str, path: Path) -> JSON:
        shown = {"id": name, "name": path.name, "folder": self.place(path)}
        try:
            index = self.index(name)
            index.read_metrics(seconds=0.5)
            events, config = index.events(), index.run.config
            state = status(index.run, events)
            stage = (index.stage_names() or [""])[-1]
            times = [event.time for event in events]
            began, ended = (
                min(times, default=0.0),
                max([*times, *(s[2] for s in index.stage_spans())], default=0.0),
            )
            return shown | {
                "recipe": str(config.get("name", "")),
                "status": asdict(state),
                "stage": stage,
                "progress": _progress(index, config, stage),
                "verdict": asdict(verdict(index)),
                "score": _score(index, stage),
                "spark": _spark(index, stage),
                "began": began,
                "seconds": round((time.time() if state.kind == "live" else ended) - began, 1)
                if began
                else 0.0,
                "alarms": len(alarms(events)),
            }
        except (UserError, OSError, ValueError) as error:
            broken = Status("crashed", f"cannot be read: {error}")
            return shown | {
                "recipe": "",
                "status": asdict(broken),
                "stage": "",
                "seconds": 0.0,
                "began": 0.0,
                "alarms": 0,
            }

    def models(self, answering: bool = True) -> list[tuple[str, str]]:
        """Run and stage of the models of the runs that changed last: those that answer, or the reward models."""
        found = []
        for name, path in islice(self.runs().items(), LISTED):
            for file in sorted(path.glob("stages/*/model/config.json")):
                if (HEAD not in read_bytes(file, MAX_JSON)) == answering:
                    found.append((name, file.parts[-3]))
        return found

    def place(self, path: Path) -> str:
        """Where a run is, from the folder that the studio was started on."""
        for root in self.roots:
            with suppress(ValueError):
                return str(path.resolve().relative_to(root.resolve()))
        return path.name


def run_id(path: Path) -> str:
    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]


def _walk(folder: Path, depth: int) -> list[Path]:
    """Run directories below a folder, without those within a run, those in hidden folders, and those with files that lie elsewhere."""
    if (folder / layout.CONFIG).is_file():
        links = [name for name in FILES if (folder / name).is_symlink()]
        return [] if links or not (folder / layout.EVENTS).is_file() else [folder]
    if depth == 0:
        return []
    with suppress(OSError):
        inner = [
            e
            for e in os.scandir(folder)
            if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")
        ]
        return [run for entry in inner for run in _walk(Path(entry.path), depth - 1)]
    return []


def _changed(path: Path) -> float:
    with suppress(OSError):
        return max((path / layout.EVENTS).stat().st_mtime, _stamp(path / layout.METRICS)[0] / 1e9)
    return 0.0


def _stamp(path: Path) -> tuple[int, int]:
    with suppress(OSError):
        stat = path.stat()
        return stat.st_mtime_ns, stat.st_size
    return 0, 0


def _progress(index: Index, config: Mapping[str, JSON], stage: str) -> JSON:
    """The step of a stage, and of how many; None where it has no fixed length."""
    settings = next((s for s in stages(config) if s["name"] == stage), {})
    spans = {name: step for name, _, _, step in index.stage_spans()}
    total = settings.get("steps")
    return {"step": spans.get(stage, 0), "steps": total if isinstance(total, int) else None}


def stages(config: Mapping[str, JSON]) -> list[dict[str, JSON]]:
    """The stages of a configuration that have a name which is safe in a path."""
    found = config.get("stages", [])
    named = [s for s in found if isinstance(s, dict)] if isinstance(found, list) else []
    return [s for s in named if layout.plain_name(str(s.get("name", "")))]


def _score(index: Index, stage: str) -> JSON:
    """The last held-out score with its interval: value, low, high, name."""
    figures = index.figures(stage)
    name = next((score for score in SCORES if score in figures), "")
    if not name:
        return None
    ends = [index.points(stage, f"{name}{end}", 1) for end in ("", "_low", "_high")]
    return [end[0][1] if end else None for end in ends] + [name]


def _spark(index: Index, stage: str) -> list[float | None]:
    """A short curve of what should rise: reward, else margin, else the loss."""
    figures = index.figures(stage)
    name = next((n for n in ("reward", "margin", "nll", "loss") if n in figures), "")
    return index.series(stage, name, SPARK).mean if name else []


def timeline(events: Sequence[EventRow]) -> list[JSON]:
    """What is marked on the time line: stages, alarms, resumes, levels that open."""
    kinds = ("stage", "alarm", "resume", "curriculum", "ended", "waiting", "damaged", "warning")
    return [
        {"kind": e.kind, "time": e.time, "attempt": e.attempt, **e.details}
        for e in events
        if e.kind in kinds
    ][-500:]


def require_stage(index: Index, stage: str) -> str:
    """A stage of this run, and nothing else."""
    known = {str(s["name"]) for s in stages(index.run.config)} | set(index.stage_names())
    if stage not in known:
        raise Missing("no such stage in this run")
    return stage
