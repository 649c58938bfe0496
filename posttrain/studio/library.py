"""Finds the runs below some folders, gives each an id, and summarises each in a row. A browser sends ids, never file names."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from os.path import join
from pathlib import Path

from posttrain.errors import UserError
from posttrain.runs import layout
from posttrain.runs.index import Index
from posttrain.runs.layout import EventRow
from posttrain.runs.read import Run
from posttrain.runs.status import Status, alarms, last_score, status, verdict
from posttrain.studio.replies import Missing
from posttrain.system.files import is_reward_model
from posttrain.types import JSON

DEPTH = 4  # depth below a root to which runs are searched for
RESCAN = 2.0  # seconds between two searches for runs
QUICK = 0.2  # seconds that a request waits for a search
MANY = 1000  # with more runs than this, a row that was checked recently is not checked again
SAVE_SECONDS = 2.0  # between two saves of the rows
LABELS = "labels"  # folder of comparison files
VERSION = 1  # of the saved rows
OPEN = 16  # indexes kept open: each has three files open in every thread that reads it
LISTED = 50  # runs whose models are listed
SPARK = 40  # points of the small curve in a row
FILES = (layout.CONFIG, layout.METRICS, layout.EVENTS, layout.SUMMARY, layout.ROLLOUTS)


@dataclass(frozen=True, slots=True)
class Place:
    """A run directory that a search has found."""

    id: str
    path: Path
    shown: str  # path relative to the folder that the studio was started on
    changed: int
    labels: bool  # whether it has a folder of comparison files


@dataclass(slots=True)
class Library:
    """Runs by id. The id is a hash of the run's path, so that a link stays valid after a restart. With so many runs that a search
    is slow, a thread searches, and requests are answered from the last search."""

    roots: Sequence[Path]
    kept: Path | None = None  # a file that saves the rows of the table
    looked: float = 0.0  # seconds spent on making rows
    _found: dict[str, Path] = field(default_factory=dict)
    _places: dict[Path, Place] = field(default_factory=dict)
    _scanned: float = -math.inf
    _took: float = 0.0  # seconds of the last search
    _searching: bool = False
    _open: OrderedDict[str, Index] = field(default_factory=OrderedDict)
    _rows: Rows = field(init=False)
    _mutex: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._rows = Rows(self.kept)

    def runs(self, age: float = RESCAN) -> dict[str, Path]:
        """All runs, most recently changed first. The list is at most `age` seconds old."""
        with self._mutex:
            since = time.monotonic() - self._scanned
            if age == 0 or since == math.inf or (self._took < QUICK and since > age):
                self._search()
            elif since > max(age, 10 * self._took) and not self._searching:
                self._searching = True
                threading.Thread(target=self._search, daemon=True).start()
            return self._found

    def _search(self) -> None:
        began = time.monotonic()
        found = []
        for root in self.roots:
            found += _walk(str(root), str(root.resolve()), "", DEPTH)
        found.sort(key=lambda place: place.changed, reverse=True)
        with self._mutex:
            self._found = {place.id: place.path for place in found}
            self._places = {place.path: place for place in found}
            self._scanned = time.monotonic()
            self._took, self._searching = self._scanned - began, False

    def with_labels(self) -> list[Path]:
        """Runs that have a folder of comparison files."""
        runs = self.runs()
        labelled = {place.path for place in self._places.values() if place.labels}
        return [path for path in runs.values() if path in labelled]

    def index(self, name: str) -> Index:
        """The index of the run with this id."""
        path = self.runs().get(name) or self.runs(age=0.0).get(name)
        if path is None or not (path / layout.CONFIG).is_file():
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
        """One row of the table of runs. It is computed again only if files have changed, or while the run is live."""
        path = self.runs().get(name)
        if path is None:  # deleted since it was listed
            raise Missing("no such run")
        held = self._rows.recent(name) if len(self._found) > MANY else None
        if held is not None:
            return held
        mark = [*(stamp(f"{path}/{file}") for file in (*FILES[:4], f"{layout.LOCK}.holder"))]
        held = self._rows.get(name, mark)
        if held is None or held["status"]["kind"] == "live":
            began = time.monotonic()
            held = self._row(name, path)
            self._rows.put(name, mark, held)
            self.looked += time.monotonic() - began
        return held

    def _row(self, name: str, path: Path) -> JSON:
        shown = {"id": name, "name": path.name, "folder": self.place(path)}
        try:
            index = self.index(name)
            index.read_metrics(seconds=0.5)
            events, config = index.events(), index.run.config
            state = status(index.run, events)
            stage = (index.stage_names() or [""])[-1]
            times = [event.time for event in events]
            began = min(times, default=0.0)
            ended = max([*times, *(s[2] for s in index.stage_spans())], default=0.0)
            ended = max(ended, time.time()) if state.kind == "live" else ended
            return shown | {
                "recipe": str(config.get("name", "")),
                "status": asdict(state),
                "stage": stage,
                "progress": _progress(index, config, stage),
                "verdict": asdict(verdict(index)),
                "score": last_score(index, stage),
                "spark": _spark(index, stage),
                "began": began,
                "seconds": round(ended - began, 1) if began else 0.0,
                "alarms": len(alarms(events)),
            }
        except (UserError, OSError, ValueError) as error:
            broken = Status("crashed", f"cannot be read: {error}")
            none = {"recipe": "", "stage": "", "seconds": 0.0, "began": 0.0, "alarms": 0}
            return shown | none | {"status": asdict(broken)}

    def models(self, answering: bool = True) -> list[tuple[str, str, str]]:
        """Id of the run, its displayed path, and stage of the models in the most recently changed runs: policies, or reward
        models."""
        found = []
        for name, path in islice(self.runs().items(), LISTED):
            for file in sorted(path.glob("stages/*/model/config.json")):
                if is_reward_model(file.parent) != answering:
                    found.append((name, self.place(path), file.parts[-3]))
        return found

    def place(self, path: Path) -> str:
        """The path of a run, relative to the folder that the studio was started on."""
        held = self._places.get(path)
        return held.shown if held else path.name


@dataclass(slots=True)
class Rows:
    """Rows of the table of runs, each with the state of the files that it was made from. If there is a place for one, a file
    saves them, so that a restarted studio need not read every run."""

    file: Path | None
    # a row stays text until it is needed
    _held: dict[str, tuple[str, JSON]] = field(default_factory=dict)
    _new: dict[str, tuple[str, JSON]] = field(default_factory=dict)
    _checked: dict[str, float] = field(default_factory=dict)
    _saved: float = -math.inf
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        with suppress(sqlite3.Error, OSError, ValueError):
            for name, mark, row in self._execute("SELECT id, mark, row FROM rows"):
                self._held[name] = mark, row

    def recent(self, name: str) -> JSON:
        """The row of a run that is not live, if it was checked recently."""
        fresh = time.monotonic() - self._checked.get(name, -math.inf) < RESCAN / 2
        return self._held[name][1] if fresh else None

    def get(self, name: str, mark: JSON) -> JSON:
        held = self._held.get(name)
        if held is None or held[0] != json.dumps(mark):
            return None
        if isinstance(held[1], str):
            held = self._held[name] = held[0], json.loads(held[1])
        if held[1]["status"]["kind"] != "live":
            self._checked[name] = time.monotonic()
        return held[1]

    def put(self, name: str, mark: JSON, row: JSON) -> None:
        with self._mutex:
            self._held[name] = self._new[name] = json.dumps(mark), row
            if time.monotonic() - self._saved > SAVE_SECONDS:
                self._save()

    def _save(self) -> None:
        rows = [(name, mark, json.dumps(row)) for name, (mark, row) in self._new.items()]
        with suppress(sqlite3.Error, OSError):  # a folder of another user, or a full disk
            self._execute("INSERT OR REPLACE INTO rows VALUES(?, ?, ?)", rows)
        self._new.clear()
        self._saved = time.monotonic()

    def _execute(self, sql: str, rows: Sequence[Sequence[str]] = ()) -> list[tuple[str, ...]]:
        if self.file is None:
            return []
        self.file.parent.mkdir(exist_ok=True)
        with closing(sqlite3.connect(self.file, timeout=5)) as connection, connection:
            connection.execute("PRAGMA synchronous=OFF")  # the file can be made again
            if connection.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                connection.execute("DROP TABLE IF EXISTS rows")
                connection.execute("CREATE TABLE rows(id TEXT PRIMARY KEY, mark TEXT, row TEXT)")
                connection.execute(f"PRAGMA user_version={VERSION}")
            done = connection.executemany(sql, rows) if rows else connection.execute(sql)
            return done.fetchall()


def path_id(path: Path | str) -> str:
    """The id of a run directory or of a comparison file. A str must be a resolved path."""
    resolved = path if isinstance(path, str) else str(path.resolve())
    return hashlib.sha256(resolved.encode()).hexdigest()[:12]


def _walk(folder: str, resolved: str, shown: str, depth: int) -> list[Place]:
    """Find run directories below a folder. It skips directories inside a run, hidden folders, and runs whose files lie elsewhere.
    It does not follow links to folders, so that the path of a folder is its real one."""
    try:
        with os.scandir(folder) as listed:
            entries = {entry.name: entry for entry in listed}
    except OSError:
        return []
    config, events = entries.get(layout.CONFIG), entries.get(layout.EVENTS)
    if config is not None and config.is_file():
        links = any(entries[name].is_symlink() for name in FILES if name in entries)
        if links or events is None or not events.is_file():
            return []
        changed = max(stamp(join(folder, name))[0] for name in (layout.EVENTS, layout.METRICS))
        return [Place(path_id(resolved), Path(folder), shown or ".", changed, LABELS in entries)]
    if depth == 0:
        return []
    return [
        place
        for name, entry in entries.items()
        if not name.startswith(".") and entry.is_dir(follow_symlinks=False)
        for place in _walk(join(folder, name), join(resolved, name), join(shown, name), depth - 1)
    ]


def stamp(path: str) -> tuple[int, int]:
    """When a file was changed, and its size; 0 and 0 if there is none."""
    with suppress(OSError):
        stat = os.stat(path)
        return stat.st_mtime_ns, stat.st_size
    return 0, 0


def _progress(index: Index, config: Mapping[str, JSON], stage: str) -> JSON:
    """The current step of a stage and its last one; None if the stage has no fixed length."""
    spans = {name: step for name, _, _, step in index.stage_spans()}
    total = next((s for s in stages(config) if s["name"] == stage), {}).get("steps")
    return {"step": spans.get(stage, 0), "steps": total if isinstance(total, int) else None}


def stages(config: Mapping[str, JSON]) -> list[dict[str, JSON]]:
    """The stages of a configuration whose names are safe in a path."""
    return [s for s in layout.stages_of(config) if layout.plain_name(str(s.get("name", "")))]


def _spark(index: Index, stage: str) -> list[float | None]:
    """A short curve of the reward; without one, of the margin; without that, of the loss."""
    figures = index.figures(stage)
    name = next((n for n in ("reward", "margin", "nll", "loss") if n in figures), "")
    return index.series(stage, name, SPARK).mean if name else []


def stage_seconds(events: Sequence[EventRow], ended: float) -> dict[str, float]:
    """Seconds of each stage over all attempts, without the pauses between attempts. The last stage goes on until `ended`."""
    found: dict[str, float] = {}
    stage, began, attempt = "", 0.0, -1
    for now, before in zip(events, [None, *events], strict=False):
        if now.kind == "stage" or now.attempt != attempt:
            if stage and before:
                found[stage] = (
                    found.get(stage, 0.0) + (now if now.attempt == attempt else before).time - began
                )
            stage = str(now.details.get("stage", "")) if now.kind == "stage" else ""
            began, attempt = now.time, now.attempt
    if stage:
        found[stage] = found.get(stage, 0.0) + ended - began
    return found


def require_stage(index: Index, stage: str) -> str:
    """Refuse a name that is not a stage of this run."""
    known = {str(s["name"]) for s in stages(index.run.config)} | set(index.stage_names())
    if stage not in known:
        raise Missing("no such stage in this run")
    return stage
