"""The runs below some folders: found by their files, named by ids, summed up in a row each. A browser never names a file."""

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
from posttrain.runs.metrics import SCORES
from posttrain.runs.read import Run
from posttrain.runs.status import Status, alarms, status, verdict
from posttrain.studio.replies import Missing
from posttrain.system.files import MAX_JSON, read_bytes
from posttrain.types import JSON

DEPTH = 4  # folders below a root in which runs are looked for
RESCAN = 2.0  # seconds between two searches for runs
QUICK = 0.2  # seconds of a search that a request waits for
MANY = 1000  # runs, from which on a row that was right a moment ago is not checked again
SAVE_SECONDS = 2.0  # between two times that rows of the table are kept
LABELS = "labels"  # a folder of files of comparisons
VERSION = 1  # of the rows that are kept
OPEN = 16  # indexes that are kept open: each has three files in every thread that reads it
LISTED = 50  # runs whose models are listed
HEAD = b"ForSequenceClassification"  # in the configuration of a reward model
SPARK = 40  # points of a row's curve
FILES = (layout.CONFIG, layout.METRICS, layout.EVENTS, layout.SUMMARY, layout.ROLLOUTS)


@dataclass(frozen=True, slots=True)
class Place:
    """A run directory as a search has found it."""

    id: str
    path: Path
    shown: str  # from the folder that the studio was started on
    changed: float
    labels: bool  # whether it has a folder of comparisons


@dataclass(slots=True)
class Library:
    """Runs by id. The id of a run is a hash of its place, so that a link to it stays good when the server is started again. Where there
    are so many that a search takes long, it is done in a thread, and answers are given from the last one."""

    roots: Sequence[Path]
    kept: Path | None = None  # a file for the rows of the table
    looked: float = 0.0  # seconds that were spent on rows which were made anew
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
        """All runs, those that changed last first, as of so many seconds ago."""
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
        """The runs that have a folder of comparisons."""
        runs = self.runs()
        labelled = {place.path for place in self._places.values() if place.labels}
        return [path for path in runs.values() if path in labelled]

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
        held = self._rows.recent(name) if len(self._found) > MANY else None
        if held is not None:
            return held
        mark = [*(_stamp(f"{path}/{file}") for file in (*FILES[:4], f"{layout.LOCK}.holder"))]
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
            ended = time.time() if state.kind == "live" else ended
            return shown | {
                "recipe": str(config.get("name", "")),
                "status": asdict(state),
                "stage": stage,
                "progress": _progress(index, config, stage),
                "verdict": asdict(verdict(index)),
                "score": _score(index, stage),
                "spark": _spark(index, stage),
                "began": began,
                "seconds": round(ended - began, 1) if began else 0.0,
                "alarms": len(alarms(events)),
            }
        except (UserError, OSError, ValueError) as error:
            broken = Status("crashed", f"cannot be read: {error}")
            none = {"recipe": "", "stage": "", "seconds": 0.0, "began": 0.0, "alarms": 0}
            return shown | none | {"status": asdict(broken)}

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
        held = self._places.get(path)
        return held.shown if held else path.name


@dataclass(slots=True)
class Rows:
    """Rows of the table of runs, with what the files were like when each was made; kept in a file, where there is a place for one, so
    that a server which is started again need not look into every run."""

    file: Path | None
    # a row is text until it is asked for
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
        """A row that was found to be good a moment ago, of a run that is not live."""
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
        with suppress(sqlite3.Error, OSError):  # a folder that others own, a full disk
            self._execute("INSERT OR REPLACE INTO rows VALUES(?, ?, ?)", rows)
        self._new.clear()
        self._saved = time.monotonic()

    def _execute(self, sql: str, rows: Sequence[Sequence[str]] = ()) -> list[tuple[str, ...]]:
        if self.file is None:
            return []
        self.file.parent.mkdir(exist_ok=True)
        with closing(sqlite3.connect(self.file, timeout=5)) as connection, connection:
            connection.execute("PRAGMA synchronous=OFF")  # it can be made anew
            if connection.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                connection.execute("DROP TABLE IF EXISTS rows")
                connection.execute("CREATE TABLE rows(id TEXT PRIMARY KEY, mark TEXT, row TEXT)")
                connection.execute(f"PRAGMA user_version={VERSION}")
            done = connection.executemany(sql, rows) if rows else connection.execute(sql)
            return done.fetchall()


def path_id(path: Path | str) -> str:
    """The id of a run's directory, or of a file of comparisons; a text is a path that is resolved already."""
    resolved = path if isinstance(path, str) else str(path.resolve())
    return hashlib.sha256(resolved.encode()).hexdigest()[:12]


def _walk(folder: str, resolved: str, shown: str, depth: int) -> list[Place]:
    """Run directories below a folder, without those within a run, those in hidden folders, and those with files that lie elsewhere.
    Links to folders are not followed, so that a folder is where its name says."""
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
        files = [entry for entry in (events, entries.get(layout.METRICS)) if entry is not None]
        changed = max(map(_modified, files))
        return [Place(path_id(resolved), Path(folder), shown or ".", changed, LABELS in entries)]
    if depth == 0:
        return []
    return [
        place
        for name, entry in entries.items()
        if not name.startswith(".") and entry.is_dir(follow_symlinks=False)
        for place in _walk(join(folder, name), join(resolved, name), join(shown, name), depth - 1)
    ]


def _modified(entry: os.DirEntry[str]) -> float:
    with suppress(OSError):
        return entry.stat().st_mtime
    return 0.0


def _stamp(path: str) -> tuple[int, int]:
    with suppress(OSError):
        stat = os.stat(path)
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
    marked = [e for e in events if e.kind in kinds][-500:]
    return [{"kind": e.kind, "time": e.time, "attempt": e.attempt, **e.details} for e in marked]


def require_stage(index: Index, stage: str) -> str:
    """A stage of this run, and nothing else."""
    known = {str(s["name"]) for s in stages(index.run.config)} | set(index.stage_names())
    if stage not in known:
        raise Missing("no such stage in this run")
    return stage
