"""The API of the pages for review (does a person agree with the reward?), reward hacking, the playground and the export."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from posttrain.data.stream import permutation
from posttrain.errors import require
from posttrain.evals.statistics import share_interval
from posttrain.runs.index import FOLDER, Filter, Found, Index
from posttrain.runs.metrics import GOLD
from posttrain.runs.status import alarms
from posttrain.studio import report
from posttrain.studio.library import path_id, require_stage
from posttrain.studio.pages_rollouts import INDEX_SECONDS, LONGEST, at_step, numbered, shown
from posttrain.studio.replies import Missing, reply, routes_of, text_of, whole_of, word
from posttrain.types import JSON

if TYPE_CHECKING:
    from posttrain.studio.app import Studio

FILE = "reviews.sqlite"
SCHEMA = """CREATE TABLE IF NOT EXISTS reviews(id INTEGER PRIMARY KEY, stage TEXT, step INTEGER, number INTEGER, agrees INTEGER,
flagged INTEGER, note TEXT, reviewer TEXT, reward REAL, parts TEXT, time REAL, response TEXT)"""
HIGH = 0.5  # a part of at least this value counts as yes
QUEUE = 500  # rollouts that are looked at together
BUCKETS = 300  # points of a curve
DRIFTS = "length repetition distinct entropy keyword agreement disagreement reward_spread"


def routes(studio: Studio) -> list[Any]:
    return routes_of(
        studio,
        ("/api/runs/{run}/review", _next),
        ("/api/runs/{run}/review", _judge, "POST"),
        ("/api/runs/{run}/review/report", _report),
        ("/api/runs/{run}/flagged.jsonl", _flagged),
        ("/api/runs/{run}/hacking", _hacking),
        ("/api/runs/{run}/report.html", _export),
        ("/api/models", _models),
        ("/api/chat", _chat, "POST"),
    )


def _store(studio: Studio, index: Index) -> sqlite3.Connection:
    """Reviews, in a separate file: unlike the index, they cannot be computed again. Of a run that cannot be written to, the index is
    temporary, and the reviews are in the studio's folder."""
    own, directory = index.path.with_name(FILE), index.run.directory
    there = own.parent == directory / FOLDER
    place = own if there else studio.home / FOLDER / f"reviews-{path_id(directory)}.sqlite"
    place.parent.mkdir(parents=True, exist_ok=True)
    made = sqlite3.connect(place, timeout=30.0, isolation_level=None)
    made.execute("PRAGMA journal_mode=WAL")
    made.execute(SCHEMA)
    if "response" not in [row[1] for row in made.execute("PRAGMA table_info(reviews)")]:
        made.execute("ALTER TABLE reviews ADD COLUMN response TEXT")  # of an earlier version
    return made


def _reviews(studio: Studio, index: Index) -> list[tuple[Any, ...]]:
    """The last review of each rollout."""
    last = "SELECT max(id) FROM reviews GROUP BY stage, step, number"
    with closing(_store(studio, index)) as store:
        return store.execute(f"SELECT * FROM reviews WHERE id IN ({last}) ORDER BY id").fetchall()


def _reviewed(studio: Studio, index: Index) -> Iterator[tuple[tuple[Any, ...], Found]]:
    """The last review of each rollout that the run still has: a resumed run drops what came after its checkpoint, and may write
    other responses in its place."""
    index.read_rollouts(INDEX_SECONDS)
    for row in _reviews(studio, index):
        with suppress(Missing, FileNotFoundError):
            found = _find(index, *row[1:4])
            if row[11] in (None, _digest(index, found)):  # None: of an earlier version
                yield row, found


def _digest(index: Index, found: Found) -> str:
    [row] = index.text([found])
    return hashlib.sha256(row.response.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _next(studio: Studio, request: Request) -> Response:
    """The next rollout to review: the highest reward, the newest, or a random one. One that says the same to the same problem, for
    the same reward, as one that was reviewed is left out."""
    index = studio.index(request)
    order, stage = word(request, "order", "highest"), word(request, "stage")
    sort = {"highest": "reward", "newest": "step"}.get(order, "number")
    reviewed = [*_reviewed(studio, index)]
    said = {(one.problem, one.reward, row[11] or _digest(index, one)) for row, one in reviewed}
    known = {
        key[:2] for key in said
    }  # a response is read only if one like it may have been reviewed
    every, down = Filter(stage=stage, failed=False), order in ("highest", "newest")
    skip, item = 0, None
    while item is None and (found := index.find(every, sort, down, QUEUE, skip)):
        skip += len(found)
        if order == "random":
            found = [found[n] for n in permutation(len(found), "review", len(reviewed))]
        keys = ((one, (one.problem, one.reward)) for one in found)
        left = (o for o, key in keys if key not in known or (*key, _digest(index, o)) not in said)
        item = next((shown(one, index.text([one])[0], LONGEST) for one in left), None)
    return reply({"rollout": item, "done": len(reviewed)})


def _judge(studio: Studio, request: Request, sent: dict[str, JSON]) -> Response:
    index = studio.index(request)
    stage = require_stage(index, text_of(sent, "stage", 100))
    place = [whole_of(sent, "step"), whole_of(sent, "number")]
    agrees, flagged = sent.get("agrees"), sent.get("flagged", False)
    require(isinstance(agrees, bool) and isinstance(flagged, bool), "agrees must be true or false")
    found = _find(index, stage, *place)
    note, who = text_of(sent, "note", 4000, ""), text_of(sent, "reviewer", 60, "")
    values = [stage, *place, agrees, flagged, note, who]
    values += [found.reward, json.dumps(found.parts), time.time(), _digest(index, found)]
    with closing(_store(studio, index)) as store:
        store.execute(f"INSERT INTO reviews VALUES(NULL{', ?' * len(values)})", values)
    return reply({"done": True}, 201)


def _find(index: Index, stage: str, step: int, place: int) -> Found:
    return numbered(index.find(replace(at_step(stage, step), number=place)), place)


def _report(studio: Studio, request: Request) -> Response:
    """Among the rollouts that the reward (or a part of it) accepts, the share that a person accepts, with an interval over
    problems."""
    rows = [*_reviewed(studio, studio.index(request))]
    said: dict[str, list[tuple[float, str]]] = {}
    for row, reviewed in rows:
        parts, problem = {"reward": row[8], **json.loads(row[9])}, reviewed.problem
        for name, value in parts.items():
            if value is not None and value >= HIGH:
                said.setdefault(name, []).append((float(row[4]), problem))
    found: dict[str, JSON] = {}
    for name, marks in said.items():
        agreed, problems = zip(*marks, strict=True)
        found[name] = {**asdict(share_interval(agreed, problems)), "count": len(marks)}
    flagged = sum(bool(row[5]) for row, _ in rows)
    return reply({"precision": found, "reviewed": len(rows), "flagged": flagged})


def _flagged(studio: Studio, request: Request) -> Response:
    """Flagged rollouts as test cases of a reward: problem, response, reward, and the person's verdict."""
    index = studio.index(request)
    lines = []
    for (*_, agrees, flagged, note, who, _, _, _, _), found in _reviewed(studio, index):
        if flagged:
            [row] = index.text([found])
            kept = ("problem", "question", "answer", "response", "reward", "parts")
            case: dict[str, JSON] = {name: getattr(row, name) for name in kept}
            case |= {"agrees": bool(agrees), "note": note, "reviewer": who}
            lines.append(json.dumps(case) + "\n")
    headers = {"content-disposition": 'attachment; filename="flagged.jsonl"'}
    return Response("".join(lines), media_type="application/x-ndjson", headers=headers)


def _hacking(studio: Studio, request: Request) -> Response:
    """Signs of reward hacking: the reward against the gold reward, both against KL, drifts, and the rollouts behind each
    alarm."""
    index = studio.index(request)
    index.read_metrics()
    rewarded = [s for s in index.stage_names() if "reward" in index.figures(s)]
    stage = word(request, "stage") or (rewarded or [""])[-1]
    figures = index.figures(stage) if stage else {}
    gold = next((name for name in GOLD if name in figures), "")
    names = ["reward", gold, "kl", "accuracy/test", "reward/test", *DRIFTS.split()]
    series = {name: index.series(stage, name, BUCKETS) for name in names if name in figures}
    raised = [{"time": e.time, **e.details} for e in alarms(index.events())]
    kept = [step for step, *_ in index.rollout_steps(stage)] if stage else []
    for alarm in raised:
        at = alarm.get("step")
        alarm["rollouts"] = max((s for s in kept if isinstance(at, int) and s <= at), default=None)
    return reply({"stage": stage, "gold": gold, "series": series, "alarms": raised})


def _export(studio: Studio, request: Request) -> Response:
    """The run as one HTML file, without scripts and without external resources."""
    index = studio.index(request)
    index.read_metrics()
    while index.read_rollouts(2.0):
        pass
    name = f"{request.path_params['run']}.html"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    headers["content-security-policy"] = report.POLICY
    return Response(report.render(index), media_type="text/html", headers=headers)


def _models(studio: Studio, request: Request) -> Response:
    """The models to talk to: those of the server that the user named, and the stages of runs, as RUN/STAGE."""
    named = studio.models.named().names() if studio.models.address else []
    found = [{"id": name, "name": name} for name in named]
    for run, place, stage in studio.library.models():
        found.append({"id": f"{run}/{stage}", "name": f"{place}: {stage}"})
    return reply({"models": found})


def _chat(studio: Studio, request: Request, sent: dict[str, JSON]) -> Response:
    messages = sent.get("messages", [])
    listed = isinstance(messages, list) and 0 < len(messages) <= 200
    fine = listed and all(isinstance(m, dict) for m in messages)
    require(fine, "messages must be a list of at most 200")
    limits = {"role": 20, "content": 100_000}
    turns = [{key: text_of(m, key, limit) for key, limit in limits.items()} for m in messages]
    options: dict[str, JSON] = {}
    bounds = {"temperature": (0.0, 10.0), "max_tokens": (1, 32_768), "seed": (0, 2**53)}
    for key, (low, high) in bounds.items():
        value = sent.get(key)
        if value is not None:
            fine = isinstance(value, int | float) and low <= value <= high
            require(fine, f"{key} must be from {low} to {high}")
            options[key] = value
    server, stage = studio.server(text_of(sent, "model", 400))
    answer = {"stage": stage, **server.answers(stage, turns, options)[0]}
    server.judge([answer])
    return reply(answer)
