"""The API of the table of runs and of the page of a run: figures, stages, alarms, settings; start, stop and resume."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from posttrain import catalogue
from posttrain.errors import require
from posttrain.runs.index import Index
from posttrain.runs.resume_policy import flatten
from posttrain.runs.status import alarms, status, verdict
from posttrain.studio.jobs import recipe_settings
from posttrain.studio.library import path_id, stage_seconds, stages
from posttrain.studio.replies import Missing, number, reply, routes_of, text_of, whole, word
from posttrain.types import JSON

if TYPE_CHECKING:
    from posttrain.studio.app import Studio

BUCKETS, FIGURES = 2000, 60  # of one response
PAGE, ROW_SECONDS = 100, 0.7  # rows of one response, and the time to make new ones
ROUTINE = ("out", "next_command", "trackers", "format")


def routes(studio: Studio) -> list[Any]:
    return routes_of(
        studio,
        ("/api/runs", _runs),
        ("/api/runs", _start, "POST"),
        ("/api/recipes", _recipes),
        ("/api/runs/{run}", _run),
        ("/api/runs/{run}/series", _series),
        ("/api/runs/{run}/settings", _settings),
        *((f"/api/runs/{{run}}/{verb}", _act, "POST") for verb in ("stop", "resume", "tags")),
    )


def _runs(studio: Studio, request: Request) -> Response:
    """Rows of the table of runs whose path or tags contain the text and whose status matches. A row of a new run takes a moment
    to make: after a time limit the response has the rows made so far, and `left` is the number of runs without a row."""
    text, kind = word(request, "text").lower(), word(request, "status")
    skip, limit = whole(request, "skip", 0, 10**6), whole(request, "limit", PAGE, PAGE)
    ids, tags = studio.library.runs(), studio.tags()
    said = {n: " ".join((studio.library.place(p), *tags.get(n, []))) for n, p in ids.items()}
    named = [n for n, words in said.items() if text in words.lower()]
    rows: list[JSON] = []
    looked, left = studio.library.looked, len(named)
    for name in named:
        left -= 1
        with suppress(Missing):
            row = studio.library.row(name)
            if not kind or row["status"]["kind"] == kind:
                rows.append(row | {"tags": tags.get(name, [])})
        if len(rows) == skip + limit or studio.library.looked - looked > ROW_SECONDS:
            break
    left = left if len(rows) < skip + limit else 0
    total = len(rows) + left if kind else len(named)
    return reply({"runs": rows[skip:], "total": total, "left": left})


def _recipes(studio: Studio, request: Request) -> Response:
    return reply([asdict(entry) for entry in catalogue.describe("recipe")])


def _run(studio: Studio, request: Request) -> Response:
    """Everything on the page of a run except its curves."""
    name = request.path_params["run"]
    index = studio.library.index(name)
    index.read_metrics(seconds=0.5)
    run, events = index.run, index.events()
    now = status(run, events)
    row = studio.library.row(name)
    return reply(
        row
        | {
            "status": asdict(now),
            "verdict": asdict(verdict(index)),
            "stages": _stages(index, now.kind, row["began"] + row["seconds"]),
            "alarms": [{"time": e.time, **e.details} for e in alarms(events)],
            "figures": index.figures(),
            "summary": _summary(run.summary, run.config),
            "indexing": index.behind(),
            "tags": studio.tags().get(name, []),
        }
    )


def _summary(found: Mapping[str, JSON] | None, config: Mapping[str, JSON]) -> JSON:
    """The summary of a finished run. `percent`: its scores before and after are shares, not rewards."""
    kept = ("before", "after", "seconds", "versions", "seed")
    results = (found or {}).get("stages") or {}
    shares = (results.get(config.get(k), {}).get("verifiable", True) for k in ("before", "after"))
    return {**{key: found.get(key) for key in kept}, "percent": all(shares)} if found else None


def _stages(index: Index, kind: str, ended: float) -> list[JSON]:
    """The stages of the recipe in order: kind, start model, time, results, and whether each is done."""
    spans = {name: (begun, ended, step) for name, begun, ended, step in index.stage_spans()}
    took = stage_seconds(index.events(), ended)
    rows = []
    for settings in stages(index.run.config):
        name = str(settings["name"])
        result = index.run.stage_rows(name, "result.json")
        state = "todo" if name not in took else "live" if kind == "live" else "begun"
        chosen = settings.get("algorithm")
        rows.append(
            {
                "name": name,
                "kind": settings.get("stage", ""),
                "model": settings.get("model", ""),
                "against": settings.get("against", ""),
                "algorithm": chosen.get("name", "") if isinstance(chosen, dict) else "",
                "steps": settings.get("steps"),
                "state": "done" if result else state,
                "seconds": took.get(name, 0.0),
                "span": spans.get(name),
                "result": _short(result[0]) if result else {},
            }
        )
    return rows


def _short(result: Mapping[str, JSON]) -> JSON:
    """The numbers in a stage's result, with their intervals if they have them."""
    lists = {key: v if isinstance(v, list) and len(v) == 3 else [v] for key, v in result.items()}
    return {k: result[k] for k, vs in lists.items() if all(isinstance(v, int | float) for v in vs)}


def _series(studio: Studio, request: Request) -> Response:
    """Figures of one run. `figure` may be given several times; they are of one stage, or of all stages that recorded them."""
    index = studio.index(request)
    index.read_metrics(seconds=0.5)
    stage, asked = word(request, "stage"), request.query_params.getlist("figure")[:FIGURES]
    buckets = max(1, whole(request, "buckets", 600, BUCKETS))
    span = number(request, "first", int, 0), number(request, "last", int, 2**52)
    known = index.figures(stage)
    recorded = [(name, figure) for figure in asked for name in known.get(figure, [])]
    found = [index.series(name, figure, buckets, *span) for name, figure in recorded]
    return reply({"series": found, "indexing": index.behind()})


def _settings(studio: Studio, request: Request) -> Response:
    """The resolved settings, and those that differ from the recipe's defaults or from another run."""
    index = studio.index(request)
    ours = flatten(index.run.config)
    other, name = word(request, "against"), str(index.run.config.get("name", ""))
    if other:
        theirs = flatten(studio.library.index(other).run.config)
    elif name in catalogue.names("recipe"):
        theirs = flatten(recipe_settings(name))
    else:
        return reply({"settings": ours, "differences": None, "against": ""})
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if ours.get(key) != theirs.get(key)]
    changed = {k: [ours.get(k), theirs.get(k)] for k in keys if k not in ROUTINE}
    return reply({"settings": ours, "differences": changed, "against": other or name})


def _start(studio: Studio, request: Request, sent: dict[str, JSON]) -> Response:
    listed = sent.get("settings", [])
    fine = isinstance(listed, list) and all(isinstance(text, str) for text in listed)
    require(fine, "settings must be a list of key=value")
    directory = studio.jobs.start(text_of(sent, "recipe", 100), listed)
    return reply({"run": path_id(directory)}, 201)


def _tags_of(sent: JSON) -> list[str]:
    fine = isinstance(sent, list) and all(isinstance(t, str) and 0 < len(t) <= 40 for t in sent)
    require(fine and len(sent) <= 20, "tags are at most 20 texts of at most 40 characters")
    return [*sent]


def _act(studio: Studio, request: Request, sent: dict[str, JSON]) -> Response:
    """Stop, resume or tag a run."""
    name, verb = request.path_params["run"], request.url.path.rpartition("/")[2]
    directory = studio.library.index(name).run.directory
    if verb == "stop":
        studio.jobs.stop(directory)
    elif verb == "resume":
        studio.jobs.resume(directory)
    else:
        tags, seen = (_tags_of(sent.get(key, [])) for key in ("tags", "seen"))
        studio.set_tags(name, tags, seen)
    return reply({"done": verb})
