"""The API of labelling: files of comparisons, one item at a time, blind; votes, undo, agreement, and what comes of it for training."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from posttrain.data.labels import Labels, Order, annotator_name
from posttrain.data.preferences import spoken
from posttrain.errors import UserError, require
from posttrain.runs.index import Filter
from posttrain.runs.status import WAITING, status
from posttrain.studio.library import require_stage, run_id
from posttrain.studio.replies import Handler, Missing, body, reply, route, text_of, word
from posttrain.system.files import atomic_write
from posttrain.types import JSON

if TYPE_CHECKING:
    from posttrain.studio.app import Studio

FOLDER = "labels"  # of files of comparisons
PAIRS = 2000  # that are made of one run
GUIDELINES = "guidelines.txt"


@dataclass(frozen=True, slots=True)
class Source:
    """A file of comparisons, the name it is shown under, and the run that waits for it."""

    id: str
    name: str
    file: Path
    run: str = ""


@dataclass(slots=True)
class Desk:
    """The files of comparisons below the studio's folders, each read once."""

    studio: Studio
    _read: dict[str, tuple[float, Labels]] = field(default_factory=dict)

    def sources(self) -> dict[str, Source]:
        """Files of comparisons in the folders `labels`, of the studio's own and of each run."""
        runs = self.studio.library.runs().values()
        found = []
        for owner in (*self.studio.library.roots, *runs):
            folder = owner / FOLDER
            of_run = owner in runs
            for file in sorted(folder.glob("*.jsonl")) if folder.is_dir() else ():
                if not file.name.endswith(".labels.jsonl") and not file.is_symlink():
                    name = f"{owner.name}: {file.stem}" if of_run else file.stem
                    found.append(Source(_id(file), name, file, run_id(owner) if of_run else ""))
        return {source.id: source for source in found}

    def labels(self, name: str) -> tuple[Source, Labels]:
        source = self.sources().get(name)
        if source is None:
            raise Missing("no such file of comparisons")
        changed = source.file.stat().st_mtime
        held = self._read.get(name)
        if held is None or held[0] != changed:
            self._read[name] = held = changed, Labels.read(source.file)
        return source, held[1]


def _id(file: Path) -> str:
    return hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]


def routes(studio: Studio) -> list[Any]:
    desk = Desk(studio)

    def on(handler: Any) -> Handler:
        return partial(handler, desk)

    return [
        route("/api/label", on(_list)),
        route("/api/label", on(_create), "POST"),
        route("/api/label/{file}/next", on(_next)),
        route("/api/label/{file}/report", on(_report)),
        route("/api/label/{file}/vote", on(_vote), "POST"),
        route("/api/label/{file}/undo", on(_undo), "POST"),
        route("/api/label/{file}/labels.jsonl", on(_download)),
    ]


def _list(desk: Desk, request: Request) -> Response:
    rows = []
    for source in desk.sources().values():
        try:
            report = desk.labels(source.id)[1].report()
            rows.append({"id": source.id, "name": source.name, "run": source.run, "report": report})
        except (UserError, OSError) as error:
            rows.append(
                {"id": source.id, "name": source.name, "run": source.run, "error": str(error)}
            )
    return reply(rows)


def _next(desk: Desk, request: Request) -> Response:
    """The next item of an annotator, with sides shuffled and no word of who wrote what."""
    source, labels = desk.labels(request.path_params["file"])
    who = annotator_name(word(request, "annotator"))
    order: Order = "disagreement" if word(request, "order") == "disagreement" else "random"
    item = labels.next(who, order)
    mine = sum(vote.annotator == who for vote in labels.votes())
    shown: JSON = None
    if item is not None:
        sides = [spoken(item.responses[n]) for n in item.order(who)]
        shown = {"id": item.id, "prompt": spoken(item.prompt), "responses": sides}
    file = source.file.with_name(GUIDELINES)
    guidelines = (
        file.read_text("utf-8", "replace")[:20_000]
        if file.is_file() and not file.is_symlink()
        else ""
    )
    return reply(
        {
            "name": source.name,
            "item": shown,
            "done": mine,
            "items": len(labels.items),
            "guidelines": guidelines,
        }
    )


async def _vote(desk: Desk, request: Request) -> Response:
    source, labels = desk.labels(request.path_params["file"])
    sent = await body(request)
    choice, seconds = sent.get("choice", ""), sent.get("seconds", 0)
    require(isinstance(choice, str | list), "choice must be a list of sides, or a word")
    require(isinstance(seconds, int | float) and 0 <= seconds < 10**6, "seconds must be a number")
    who, item = text_of(sent, "annotator", 100), text_of(sent, "item", 40)
    comment, nonce = text_of(sent, "comment", 4000, ""), text_of(sent, "nonce", 80, "")
    labels.vote(who, item, choice, comment, float(seconds), nonce)
    due = _waits_no_longer(desk, source, labels)
    task = BackgroundTask(desk.studio.jobs.resume, due) if due else None
    done = sum(vote.annotator == who for vote in labels.votes())
    return reply({"done": done, "resumed": due is not None}, 201, task)


def _waits_no_longer(desk: Desk, source: Source, labels: Labels) -> Path | None:
    """The run that waited for these labels and has enough of them now."""
    if not source.run:
        return None
    run = desk.studio.library.index(source.run).run
    events = run.events()
    asked = [e for e in events if e.kind == WAITING and e.details.get("file") == source.file.name]
    if not asked or status(run, events).kind != "waiting":
        return None
    return run.directory if labels.report().labelled >= asked[-1].details.get("needed", 0) else None


async def _undo(desk: Desk, request: Request) -> Response:
    _, labels = desk.labels(request.path_params["file"])
    item = labels.undo(text_of(await body(request), "annotator", 100))
    return reply({"undone": item.id if item else None})


def _report(desk: Desk, request: Request) -> Response:
    source, labels = desk.labels(request.path_params["file"])
    written = labels.write()
    return reply(
        {"report": labels.report(), "rows": written, "run": source.run, "file": labels.out.name}
    )


def _download(desk: Desk, request: Request) -> Response:
    """What the annotators prefer, as a reward_model or preference stage reads it."""
    _, labels = desk.labels(request.path_params["file"])
    text = "".join(json.dumps(row) + "\n" for row in labels.rows())
    headers = {"content-disposition": 'attachment; filename="labels.jsonl"'}
    return Response(text, media_type="application/x-ndjson", headers=headers)


async def _create(desk: Desk, request: Request) -> Response:
    """Make a file of comparisons out of a run's rollouts: two different answers to each prompt, of the last steps first."""
    sent = await body(request)
    name, count = text_of(sent, "name", 60), sent.get("count", 200)
    require(
        re.fullmatch(r"[A-Za-z0-9_-]{1,60}", name) is not None,
        "a name has letters, digits, - and _",
    )
    require(isinstance(count, int) and 0 < count <= PAIRS, f"count must be a number up to {PAIRS}")
    index = desk.studio.library.index(text_of(sent, "run", 40))
    stage = require_stage(index, text_of(sent, "stage", 100))
    while index.read_rollouts(2.0):
        pass
    rows: list[JSON] = []
    for step, *_ in reversed(index.rollout_steps(stage)):
        found = index.find(
            Filter(stage=stage, step_from=step, step_to=step), "number", limit=100_000
        )
        groups: dict[str, dict[str, str]] = {}
        for row in index.text(found):
            groups.setdefault(row.question, {}).setdefault(row.response, row.response)
        pairs = [(question, [*texts][:2]) for question, texts in groups.items() if len(texts) > 1]
        rows += [{"prompt": question, "responses": two} for question, two in pairs]
        if len(rows) >= count:
            break
    require(bool(rows), "no two answers to one prompt differ in this stage's rollouts")
    file = desk.studio.home / FOLDER / f"{name}.jsonl"
    require(not file.exists(), f"there is a file {name} already")
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, "".join(json.dumps(row) + "\n" for row in rows[:count]))
    return reply({"id": _id(file), "rows": len(rows[:count])}, 201)
