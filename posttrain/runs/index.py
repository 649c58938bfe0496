"""An index of a run in its directory, for readers that query often: SQLite, updated from the lines appended since the last read.

    index = Index(Run("runs/quickstart"))
    index.read_metrics()                              # new lines of metrics.jsonl and events.jsonl
    index.series("rl", "reward", buckets=600)         # means, minima and maxima, however long the run is
    index.read_rollouts(seconds=1.0)                  # some of the rollout files; returns how many are left

It holds nothing that is not in the run's files. It is rebuilt if it is damaged or of another version, and after the run has
resumed, because other rows count then. Text stays in the run's files; the index knows the position of each rollout and its
words.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from posttrain.errors import UserError, require
from posttrain.runs import layout
from posttrain.runs.layout import EpisodeRow, EventRow, RolloutRow
from posttrain.runs.read import History, Run, parse_event, parse_rollout, parse_row
from posttrain.system.files import open_file
from posttrain.system.sqlite import transaction
from posttrain.types import JSON

FOLDER, FILE, VERSION = ".studio", "index.sqlite", 3
CHUNK = 1 << 20  # bytes of metrics.jsonl that are read in one transaction
WORDS = 100_000  # characters of a question or an answer that are indexed for search
QUESTION = 600  # characters of a question by which its rollouts are found
WAIT = 10.0  # seconds to wait for another process that writes the same index
REBUILD = {"resume", "kept"}  # events after which other rows count
SCHEMA = Path(__file__).with_suffix(".sql").read_text("utf-8")
SORTS = ("step", "reward", "length", "advantage", "number", "problem")


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one stage in buckets: the position of each, its mean, and the extremes, which a mean would hide. None is
    not a number."""

    stage: str
    figure: str
    step: list[float]
    time: list[float]
    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions on rollouts; an empty or None field is no condition."""

    stage: str = ""
    problem: str = ""
    outcome: str = ""
    finish: str = ""
    role: str = ""
    question: str = ""  # up to the length that the index keeps
    number: int | None = None
    step_from: int | None = None
    step_to: int | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    length_from: int | None = None
    length_to: int | None = None
    part: str = ""
    part_from: float | None = None
    part_to: float | None = None
    text: str = ""
    failed: bool | None = None

    def sql(self) -> tuple[str, list[Any]]:
        """Return the conditions and their values."""
        require('"' not in self.part, "a part of a reward has no quotation mark in its name")
        equal = ("stage", "problem", "outcome", "finish", "role", "question", "number")
        given = ((name, getattr(self, name)) for name in equal)
        found = [(f"{name} = ?", [value]) for name, value in given if value not in ("", None)]
        columns: dict[str, tuple[str, list[Any]]]
        columns = {n: (n, []) for n in ("step", "reward", "length")}
        if self.part:
            columns["part"] = "json_extract(parts, ?)", [f'$."{self.part}"']
        for name, (column, more) in columns.items():
            for end, sign in (("from", ">="), ("to", "<=")):
                if (value := getattr(self, f"{name}_{end}")) is not None:
                    found.append((f"{column} {sign} ?", [*more, value]))
        if self.failed is not None:
            found.append((f"failure IS {'NOT ' if self.failed else ''}NULL", []))
        if match := _match(self.text):
            found.append(("id IN (SELECT rowid FROM words WHERE words MATCH ?)", [match]))
        values = [value for _, of in found for value in of]
        return " AND ".join(said for said, _ in found) or "1", values


@dataclass(frozen=True, slots=True)
class Found:
    """A rollout in the index: its position, and the values that it can be sorted by."""

    stage: str
    step: int
    number: int
    problem: str
    level: int
    sample: int
    role: str
    reward: float | None
    parts: Mapping[str, float]
    outcome: str
    failure: str | None
    finish: str
    length: int
    turns: int
    advantage: float | None


COLUMNS = [one.name for one in fields(Found)]


def _temporary() -> Path:
    """A temporary folder of this user alone, the same for every process unless another user has taken its name."""
    # on Windows temporary files are in a folder of the user's
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"posttrain-index-{user}"
    with suppress(FileExistsError):  # it may be another user's link or file
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    own = found.st_uid == user and stat.S_ISDIR(found.st_mode)
    return folder if own else Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))


@dataclass(slots=True)
class Index:
    """The index of one run. Several threads may use it; each has its own connection."""

    run: Run
    path: Path = field(init=False)
    _local: threading.local = field(default_factory=threading.local, init=False)
    _writing: threading.Lock = field(default_factory=threading.Lock, init=False)
    # the sizes up to which files hold no further complete line
    _half: dict[str, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.path = self.run.directory / FOLDER / FILE
        try:
            self.path.parent.mkdir(exist_ok=True)
            if not os.access(self.path.parent, os.W_OK):
                raise PermissionError
        except OSError:  # if another user owns the run, the index is a temporary file
            name = hashlib.sha256(str(self.run.directory.resolve()).encode()).hexdigest()[:24]
            self.path = _temporary() / name / FILE
            self.path.parent.mkdir(exist_ok=True)
        try:
            if self._get("PRAGMA user_version")[0][0] != VERSION:
                self._remake()
        except sqlite3.DatabaseError:
            self._remake()

    def _connection(self) -> sqlite3.Connection:
        held: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if held is None or self._local.of != self._inode():
            held = sqlite3.connect(self.path, timeout=WAIT, isolation_level=None)
            held.execute("PRAGMA synchronous=OFF")  # it can be rebuilt
            held.execute("PRAGMA journal_mode=WAL")
            held.execute("PRAGMA cache_size=-32000")
            self._local.connection, self._local.of = held, self._inode()
        return held

    def _inode(self) -> int:
        return self.path.stat().st_ino if self.path.exists() else 0

    def _get(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        return self._connection().execute(sql, values).fetchall()

    def _remake(self) -> None:
        """Replace the index by an empty one."""
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        with closing(sqlite3.connect(self.path, timeout=WAIT)) as made:
            made.execute("PRAGMA synchronous=OFF")
            made.executescript(f"BEGIN; {SCHEMA} COMMIT; PRAGMA user_version={VERSION};")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._writing, transaction(self._connection()) as connection:
            yield connection

    def _state(self, name: str) -> int:
        return int(next(iter(self._get("SELECT value FROM state WHERE name = ?", [name])), (0,))[0])

    # ---- metrics and events

    def read_metrics(self, seconds: float = 60.0) -> bool:
        """Read appended lines, for at most about this long. Returns whether there were any; `behind` tells whether more are
        left."""
        directory, new = self.run.directory, False
        files = [directory / layout.EVENTS, directory / layout.METRICS]
        if any(_size(path) < self._state(path.name) for path in files):
            self._remake()  # another run took its place
        end = time.monotonic() + seconds
        while self.behind(*files):
            before = {path.name: (_size(path), self._state(path.name)) for path in files}
            with self._transaction() as connection:
                events = _tail(connection, files[0])
                connection.executemany("INSERT INTO events(record) VALUES(?)", _dumped(events))
                resumed = any(event.get("kind") in REBUILD for event in events)
            if resumed and self._state(layout.METRICS):
                self._forget_rows()
            with self._transaction() as connection:
                self._add_rows(connection, _tail(connection, files[1]))
            # a process that was killed leaves half a line, which nothing will end
            half = {name: size for name, (size, at) in before.items() if self._state(name) == at}
            self._half |= {} if resumed else half
            new = new or len(half) < len(files)
            if time.monotonic() > end:
                break
        return new

    def behind(self, *files: Path) -> bool:
        """Whether a file has grown since it was read."""
        names = (layout.EVENTS, layout.METRICS)
        files = files or tuple(self.run.directory / name for name in names)
        seen = [max(self._state(path.name), self._half.get(path.name, 0)) for path in files]
        return any(_size(path) > size for path, size in zip(files, seen, strict=True))

    def _forget_rows(self) -> None:
        """Other rows count now: keep the events, and read the rest again."""
        with self._transaction() as connection:
            for table in ("stages", "series", "points", "files", "rollouts"):
                connection.execute(f"DELETE FROM {table}")
            connection.execute("INSERT INTO words(words) VALUES('delete-all')")
            connection.execute("DELETE FROM state WHERE name = ?", [layout.METRICS])

    def _history(self) -> History:
        """Return which rows count, as far as stages are known."""
        return History.of(self.events(), self.stage_names())

    def _add_rows(self, connection: sqlite3.Connection, records: Sequence[dict[str, JSON]]) -> None:
        ids = {(s, f): n for n, s, f in connection.execute("SELECT id, stage, figure FROM series")}
        history, known = self._history(), set(self.stage_names())
        points: list[tuple[Any, ...]] = []
        reached: dict[str, tuple[float, int]] = {}
        for row in filter(None, map(parse_row, records)):
            if row.stage not in known:
                made = "INSERT INTO stages(name, first) VALUES(?, ?)"
                connection.execute(made, [row.stage, row.time])
                known.add(row.stage)
                history = self._history()
            if history.superseded(row.stage, row.step, row.attempt):
                continue
            reached[row.stage] = row.time, row.step
            for figure, value in row.figures.items():
                if (row.stage, figure) not in ids:
                    made = "INSERT INTO series(stage, figure) VALUES(?, ?)"
                    ids[row.stage, figure] = connection.execute(made, [row.stage, figure]).lastrowid
                points.append((ids[row.stage, figure], row.step, row.attempt, row.time, value))
        seen = [(*place, stage) for stage, place in reached.items()]
        connection.executemany("UPDATE stages SET last = ?, step = ? WHERE name = ?", seen)
        connection.executemany(
            "INSERT INTO points VALUES(?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET attempt = excluded.attempt, "
            "time = excluded.time, value = excluded.value WHERE excluded.attempt >= attempt",
            points,
        )

    def events(self) -> list[EventRow]:
        """Return all events, in the order in which they were written."""
        found = self._get("SELECT record FROM events ORDER BY id")
        events = (parse_event(json.loads(text)) for (text,) in found)
        return [event for event in events if event is not None]

    def stage_names(self) -> list[str]:
        """Return the stages that have metrics, in the order in which they ran."""
        return [name for (name,) in self._get("SELECT name FROM stages ORDER BY id")]

    def stage_spans(self) -> list[tuple[str, float, float, int]]:
        """Return the name, the time of the first and of the last metrics, and the last step of each stage."""
        columns = "name, first, coalesce(last, first), coalesce(step, 0)"
        return self._get(f"SELECT {columns} FROM stages ORDER BY id")

    def figures(self, stage: str = "") -> dict[str, list[str]]:
        """Return the stages that recorded each metric."""
        asked = "SELECT figure, stage FROM series WHERE ? IN ('', stage) ORDER BY id"
        found: dict[str, list[str]] = {}
        for figure, name in self._get(asked, [stage]):
            found.setdefault(figure, []).append(name)
        return found

    def series(
        self, stage: str, figure: str, buckets: int = 600, first: int = 0, last: int = 2**62
    ) -> Series:
        """Return a metric from step `first` to `last`, in at most this many buckets of equally many steps."""
        asked: dict[str, Any] = {"stage": stage, "figure": figure, "first": first, "last": last}
        place = "series = (SELECT id FROM series WHERE stage = :stage AND figure = :figure)"
        inside = f"FROM points WHERE {place} AND step BETWEEN :first AND :last"
        [(low, high)] = self._get(f"SELECT min(step), max(step) {inside}", asked)
        if low is None:
            return Series(stage, figure, [], [], [], [], [])
        asked |= {"low": low, "width": max(1, -(-(high - low + 1) // max(1, buckets)))}
        figures = "avg(step), avg(time), avg(value), min(value), max(value)"
        rows = self._get(f"SELECT {figures} {inside} GROUP BY (step - :low) / :width", asked)
        return Series(stage, figure, *(list(column) for column in zip(*rows, strict=True)))

    def points(self, stage: str, figure: str, last: int = 0) -> list[tuple[int, float | None]]:
        """Return steps and values; with `last`, only that many last ones."""
        place = "series = (SELECT id FROM series WHERE stage = ? AND figure = ?)"
        newest = f"SELECT step, value FROM points WHERE {place} ORDER BY step DESC LIMIT ?"
        return self._get(newest, [stage, figure, last or -1])[::-1]

    # ---- rollouts

    def read_rollouts(self, seconds: float = 1.0, first: tuple[str, int] | None = None) -> int:
        """Read new or changed rollout files, for at most about this long. Returns how many are left. The step `first` is read
        first, and in any case."""
        self.read_metrics()
        known = {(s, n): (t, b) for s, n, t, b in self._get("SELECT * FROM files")}
        found = _rollout_files(self.run.directory)
        new = (place for place, (_, mark) in found.items() if known.get(place) != mark)
        due = [(place, *found[place]) for place in new]
        if not due:
            return 0
        due.sort(key=lambda one: one[0] != first)
        history, end = self._history(), time.monotonic() + seconds
        with self._transaction() as connection:
            for number, (place, path, mark) in enumerate(due):
                if time.monotonic() > end and place != first:
                    return len(due) - number
                connection.execute("DELETE FROM rollouts WHERE stage = ? AND step = ?", place)
                connection.execute("REPLACE INTO files VALUES(?, ?, ?, ?)", [*place, *mark])
                for row, *at in _rollout_lines(path):
                    if not history.superseded(*place, row.attempt):
                        _add_rollout(connection, row, *place, *at)
        return 0

    def count(self, wanted: Filter) -> int:
        said, values = wanted.sql()
        return int(self._get(f"SELECT count(*) FROM rollouts WHERE {said}", values)[0][0])

    def find(
        self, wanted: Filter, sort: str = "step", down: bool = False, limit: int = 50, skip: int = 0
    ) -> list[Found]:
        """Return rollouts in order, starting at position `skip`."""
        require(sort in SORTS, f"rollouts are sorted by {', '.join(SORTS)}, not {sort!r}")
        said, values = wanted.sql()
        way = "DESC" if down else "ASC"
        rows = self._get(
            f"SELECT {', '.join(COLUMNS)} FROM rollouts WHERE {said} "
            f"ORDER BY {sort} {way} NULLS LAST, stage, step, number LIMIT ? OFFSET ?",
            [*values, limit, skip],
        )
        named = (dict(zip(COLUMNS, row, strict=True)) for row in rows)
        return [Found(**row | {"parts": json.loads(row["parts"])}) for row in named]

    def text(self, found: Iterable[Found]) -> list[RolloutRow]:
        """Return the rollouts themselves, from their files."""
        rows = []
        for one in found:
            place = "SELECT start, bytes FROM rollouts WHERE stage = ? AND step = ? AND number = ?"
            [(start, size)] = self._get(place, [one.stage, one.step, one.number])
            with open_file(layout.rollout_file(self.run.directory, one.stage, one.step)) as file:
                file.seek(start)
                record = layout.parse_object(file.read(size))
            row = None if record is None else parse_rollout(record)
            if row is None:
                raise UserError(f"{one.stage}/{one.step}/{one.number} cannot be read")
            rows.append(row)
        return rows

    def choices(self) -> dict[str, list[Any]]:
        """Return the values that a filter may have."""
        found = {}
        for name in ("stage", "outcome", "finish", "role"):
            values = self._get(f"SELECT DISTINCT {name} FROM rollouts LIMIT 50")
            found[name] = [value for (value,) in values]
        some = "(SELECT parts FROM rollouts LIMIT 2000), json_each(parts)"
        parts = self._get(f"SELECT DISTINCT key FROM {some} LIMIT 50")
        return {**found, "part": [name for (name,) in parts]}

    def questions(self, text: str = "") -> list[str]:
        """Return the questions that contain the text, those with the most steps first."""
        has = "instr(lower(question), ?)" if text else "? = ''"
        order = "GROUP BY question ORDER BY count(DISTINCT step) DESC, question LIMIT 200"
        asked = f"SELECT question FROM rollouts WHERE {has} {order}"
        return [str(question) for (question,) in self._get(asked, [text.lower()])]

    def rollout_steps(self, stage: str) -> list[tuple[int, int, float | None, float | None]]:
        """Return the step, the number of rollouts, the mean reward and the mean length of each step that has rollouts."""
        asked = "SELECT step, count(*), avg(reward), avg(length) FROM rollouts WHERE stage = ? GROUP BY step"
        return self._get(asked, [stage])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _dumped(records: Iterable[Mapping[str, JSON]]) -> Iterator[tuple[str]]:
    """Return events without the configuration that some contain: config.yaml has it."""
    for record in (record for record in records if "kind" in record):
        yield (json.dumps({key: v for key, v in record.items() if key != "config"}),)


def _tail(connection: sqlite3.Connection, path: Path) -> list[dict[str, JSON]]:
    """Return the objects of the complete lines that were appended since the last call, up to CHUNK bytes."""
    held = connection.execute("SELECT value FROM state WHERE name = ?", [path.name]).fetchone()
    start = held[0] if held else 0
    if not path.exists():
        return []
    with open_file(path) as file:
        file.seek(start)
        text = file.read(CHUNK)
        text += b"" if len(text) < CHUNK else file.readline(1 << 28)
    end = text.rfind(b"\n") + 1
    connection.execute("REPLACE INTO state VALUES(?, ?)", [path.name, start + end])
    records = map(layout.parse_object, text[:end].splitlines())
    return [record for record in records if record is not None]


def _rollout_files(directory: Path) -> dict[tuple[str, int], tuple[Path, tuple[int, int]]]:
    """Return the rollout files of a run by stage and step, with their modification times and sizes."""
    found = {}
    root = directory / layout.ROLLOUTS
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.is_dir() and not folder.is_symlink() and layout.plain_name(folder.name):
            for entry in os.scandir(folder):
                path = Path(entry.path)
                step = layout.step_of(path) if path.suffix == ".jsonl" else None
                if step is not None and entry.is_file(follow_symlinks=False):
                    stat = entry.stat()
                    found[folder.name, step] = path, (stat.st_mtime_ns, stat.st_size)
    return dict(sorted(found.items()))


def _rollout_lines(path: Path) -> Iterator[tuple[RolloutRow, int, int, int]]:
    """Yield the rollout of each valid line, its number, its offset, and its bytes."""
    number = start = 0
    with open_file(path) as file:
        for line in file:
            record = layout.parse_object(line)
            row = None if record is None else parse_rollout(record)
            if row is not None:
                yield row, number, start, len(line)
                number += 1
            start += len(line)


_ROW_FIELDS = {one.name for one in fields(RolloutRow)} & set(COLUMNS)


def _add_rollout(connection: sqlite3.Connection, rollout: RolloutRow, *place: Any) -> None:
    """Add a rollout; `place` is its stage and step, and what `_rollout_lines` says of it."""
    said = {name: getattr(rollout, name) for name in _ROW_FIELDS}
    turns_of = rollout.conversation if isinstance(rollout, EpisodeRow) else ()
    turns = sum(kind == "sampled" for kind, _ in turns_of) if turns_of else 1
    said |= zip(("stage", "step", "number", "start", "bytes"), place, strict=True)
    said |= {"parts": json.dumps(rollout.parts), "role": getattr(rollout, "role", "")}
    said |= {"turns": turns, "attempt": rollout.attempt, "question": rollout.question[:QUESTION]}
    marks = ", ".join("?" * len(said))
    sql = f"INSERT INTO rollouts({', '.join(said)}) VALUES({marks})"
    made = connection.execute(sql, list(said.values())).lastrowid
    more = " ".join(text for _, text in turns_of)
    words = f"{rollout.question[:WORDS]}\n{rollout.response[:WORDS]}\n{more[:WORDS]}"
    connection.execute("INSERT INTO words(rowid, text) VALUES(?, ?)", [made, words])


def _match(text: str) -> str:
    """Return typed text as an FTS5 query: all words must occur, each as a prefix.

    >>> _match('Wait, "let me" check#12')
    '"Wait"* AND "let"* AND "me"* AND "check"* AND "12"*'
    >>> _match(" -- ")
    ''
    """
    return " AND ".join(f'"{word}"*' for word in re.findall(r"[^\W_]+", text[:1000])[:20])
