"""The API of the labelling page: comparison files, one blind item at a time, votes, undo, agreement, and export for training."""

from __future__ import annotations

import json
import re
import time
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
from posttrain.evals.agreement import report
from posttrain.runs.index import Index
from posttrain.runs.status import WAITING, status
from posttrain.studio.library import LABELS, path_id, require_stage
from posttrain.studio.pages_rollouts import at_step, prompts_of
from posttrain.studio.pairs import Background, Sampled
from posttrain.studio.replies import Missing, reply, routes_of, text_of, word
from posttrain.system.files import atomic_write
from posttrain.types import JSON

if TYPE_CHECKING:
    from posttrain.studio.app import Studio

PAIRS = 2000  # made from one run
WAIT_SECONDS = 3.0  # a request waits this long; the work continues in the background
GUIDELINES = "guidelines.txt"


@dataclass(frozen=True, slots=True)
class Source:
    """A comparison file, its displayed name, and the run that waits for it."""

    id: str
    name: str
    file: Path
    run: str = ""


@dataclass(slots=True)
class Desk:
    """The comparison files below the studio's folders. Each is read once."""

    studio: Studio
    background: Background = field(default_factory=Background)
    _read: dict[str, tuple[float, Labels]] = field(default_factory=dict)

    def sources(self) -> dict[str, Source]:
        """Comparison files in the studio's own `labels` folder and in that of each run."""
        runs = self.studio.library.with_labels()
        found = []
        for owner in (*self.studio.library.roots, *runs):
            folder = owner / LABELS
            of_run = owner in runs
            for file in sorted(folder.glob("*.jsonl")) if folder.is_dir() else ():
                if not file.name.endswith(".labels.jsonl") and not file.is_symlink():
                    name = f"{owner.name}: {file.stem}" if of_run else file.stem
                    run = path_id(owner) if of_run else ""
                    found.append(Source(path_id(file), name, file, run))
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


def routes(studio: Studio) -> list[Any]:
    return routes_of(
        Desk(studio),
        ("/api/label", _list),
        ("/api/label", _create, "POST"),
        ("/api/label/scorers", _scorers),
        ("/api/label/{file}/next", _next),
        ("/api/label/{file}/vote", _vote, "POST"),
        ("/api/label/{file}/undo", _undo, "POST"),
        ("/api/label/{file}/labels.jsonl", _download),
    )


def _list(desk: Desk, request: Request) -> Response:
    rows = []
    for source in desk.sources().values():
        row: dict[str, Any] = {"id": source.id, "name": source.name, "run": source.run}
        try:
            row["report"] = report(desk.labels(source.id)[1])
        except (UserError, OSError) as error:
            row["error"] = str(error)
        rows.append(row)
    return reply(rows)


def _next(desk: Desk, request: Request) -> Response:
    """The next item for an annotator, with shuffled sides and without the names of the models. It is drawn at random, or by the
    disagreement of reward models: that recorded in the file, or that of the reward models of a named run."""
    source, labels = desk.labels(request.path_params["file"])
    who, run = annotator_name(word(request, "annotator")), word(request, "run")
    order: Order = "disagreement" if word(request, "order") == "disagreement" else "random"
    scored, known = None, None
    if order == "disagreement" and run:
        items = [*labels.items.values()]
        server = partial(desk.studio.models.of_run, desk.studio.library.index(run).run.directory)
        scored, known = desk.background.score((source.id, run), server, items, WAIT_SECONDS)
        require(not scored.error, f"the pairs cannot be scored: {scored.error}")
    item = labels.next(who, order, known and {**known})
    mine = sum(vote.annotator == who for vote in labels.votes())
    shown: JSON = None
    if item is not None:
        sides = [spoken(item.responses[n]) for n in item.order(who)]
        shown = {"id": item.id, "prompt": spoken(item.prompt), "responses": sides}
    sampled = desk.background.sampled.get(source.id)
    return reply(
        {
            "name": source.name,
            "item": shown,
            "done": mine,
            "items": len(labels.items),
            "guidelines": _guidelines(source),
            "sampled": sampled and sampled.tree(),
            "scored": scored and scored.tree(),
        }
    )


def _guidelines(source: Source) -> str:
    file = source.file.with_name(GUIDELINES)
    plain = file.is_file() and not file.is_symlink()
    return file.read_text("utf-8", "replace")[:20_000] if plain else ""


def _scorers(desk: Desk, request: Request) -> Response:
    """Runs that have reward models."""
    runs = {run: place for run, place, _ in desk.studio.library.models(answering=False)}
    return reply([{"id": run, "name": place} for run, place in runs.items()])


def _vote(desk: Desk, request: Request, sent: dict[str, JSON]) -> Response:
    source, labels = desk.labels(request.path_params["file"])
    choice, seconds = sent.get("choice", ""), sent.get("seconds", 0)
    require(isinstance(choice, str | list), "choice must be a list of sides, or a word")
    require(isinstance(seconds, int | float) and 0 <= seconds < 10**6, "seconds must be a number")
    who, item = annotator_name(text_of(sent, "annotator", 100)), text_of(sent, "item", 40)
    comment, nonce = text_of(sent, "comment", 4000, ""), text_of(sent, "nonce", 80, "")
    labels.vote(who, item, choice, comment, float(seconds), nonce)
    due = _waits_no_longer(desk, source, labels)
    task = BackgroundTask(desk.studio.jobs.resume, due) if due else None
    done = sum(vote.annotator == who for vote in labels.votes())
    return reply({"done": done, "resumed": due is not None}, 201, task)


def _waits_no_longer(desk: Desk, source: Source, labels: Labels) -> Path | None:
    """The run that waits for these labels, if it now has enough of them."""
    if not source.run:
        return None
    run = desk.studio.library.index(source.run).run
    events = run.events()
    asked = [e for e in events if e.kind == WAITING and e.details.get("file") == source.file.name]
    if not asked or status(run, events).kind != "waiting":
        return None
    return run.directory if labels.labelled() >= asked[-1].details.get("needed", 0) else None


def _undo(desk: Desk, request: Request, sent: dict[str, JSON]) -> Response:
    _, labels = desk.labels(request.path_params["file"])
    item = labels.undo(text_of(sent, "annotator", 100))
    return reply({"undone": item.id if item else None})


def _download(desk: Desk, request: Request) -> Response:
    """The annotators' preferences, in the format that a reward_model or preference stage reads."""
    _, labels = desk.labels(request.path_params["file"])
    text = "".join(json.dumps(row) + "\n" for row in labels.rows())
    headers = {"content-disposition": 'attachment; filename="labels.jsonl"'}
    return Response(text, media_type="application/x-ndjson", headers=headers)


def _create(desk: Desk, request: Request, sent: dict[str, JSON]) -> Response:
    """Make a comparison file from a run's rollouts, or, if a model is named, from answers that it samples now."""
    name, count = text_of(sent, "name", 60), sent.get("count", 200)
    fine = re.fullmatch(r"[A-Za-z0-9_-]{1,60}", name) is not None
    require(fine, "a name has letters, digits, - and _")
    require(isinstance(count, int) and 0 < count <= PAIRS, f"count must be a number up to {PAIRS}")
    file = desk.studio.home / LABELS / f"{name}.jsonl"
    require(not file.exists(), f"there is a file {name} already")
    if "model" in sent:
        return _sample(desk, sent, file, int(count))
    index = desk.studio.library.index(text_of(sent, "run", 40))
    rows = _drawn(index, require_stage(index, text_of(sent, "stage", 100)), int(count))
    with desk.studio.mutex:
        require(not file.exists(), f"there is a file {name} already")
        atomic_write(file, "".join(json.dumps(row) + "\n" for row in rows), folder=True)
    return reply({"id": path_id(file), "rows": len(rows)}, 201)


def _drawn(index: Index, stage: str, count: int) -> list[JSON]:
    """Two different answers to each prompt of a step of a stage's rollouts, last steps first. An answer that has no other in its
    step is paired with one of an earlier step."""
    while index.read_rollouts(2.0):
        pass
    rows: list[JSON] = []
    alone: dict[str, str] = {}
    for step, *_ in reversed(index.rollout_steps(stage)):
        groups: dict[str, dict[str, None]] = {}
        for row in index.text(index.find(at_step(stage, step), "number", limit=100_000)):
            groups.setdefault(row.question, {})[row.response] = None
        for question, texts in groups.items():
            two = (
                [*texts][:2] if len(texts) > 1 else [*{alone.pop(question, *texts): None, **texts}]
            )
            if len(two) > 1:
                rows.append({"prompt": question, "responses": two})
            else:
                alone[question] = two[0]
        if len(rows) >= count:
            break
    require(rows, "no two answers to one prompt differ in this stage's rollouts")
    return rows[:count]


def _sample(desk: Desk, sent: dict[str, JSON], file: Path, count: int) -> Response:
    """Sample two answers of a model to each prompt that the user typed, or that its run has. The first pairs are returned; the
    rest is sampled in the background."""
    model, temperature = text_of(sent, "model", 400), sent.get("temperature", 1.0)
    fine = isinstance(temperature, int | float) and 0 < temperature <= 10
    require(fine, "temperature must be above 0, and at most 10")
    typed = sent.get("prompts", [])
    few = isinstance(typed, list) and len(typed) <= PAIRS
    require(few, f"prompts must be a list of at most {PAIRS}")
    prompts = [text_of({"prompt": one}, "prompt", 4000) for one in typed if one]
    if not prompts and model.partition("/")[0] in desk.studio.library.runs():
        prompts = prompts_of(desk.studio.library.index(model.partition("/")[0]))
    require(prompts, "type the prompts: there is no run of this model that knows some")
    server, stage = desk.studio.server(model)
    require(stage in server.names(), f"no model {stage[:100]!r} is served")
    work = Sampled(server, stage, prompts, count, float(temperature))
    progress = desk.background.sample(path_id(file), file, work, WAIT_SECONDS)
    while progress.running and not progress.done:
        time.sleep(0.1)
    require(progress.done > 0, f"nothing was sampled: {progress.error}")
    return reply({"id": path_id(file), "rows": progress.done}, 201)
