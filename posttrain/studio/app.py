"""The web application: pages, their API, and the event stream that reports changes."""

from __future__ import annotations

import asyncio
import json
import secrets
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from posttrain.errors import UserError, require
from posttrain.runs import layout
from posttrain.runs.index import FOLDER, Index
from posttrain.studio import pages_label, pages_replay, pages_review, pages_rollouts, pages_runs
from posttrain.studio.guard import LOOPBACK, Guard
from posttrain.studio.jobs import Jobs
from posttrain.studio.library import Library, stamp
from posttrain.studio.models import Models, Server
from posttrain.studio.replies import refused, unwritten, word
from posttrain.system.files import atomic_write, read_json

STATIC = Path(__file__).parent / "static"
PAGES = ("/", "/run/{rest:path}", "/compare", "/label", "/label/{rest:path}", "/play")
POLL, PING = 1.0, 15.0  # seconds between checks of a run, and between keep-alive messages
TAGS, ROWS = "tags.json", "rows.sqlite"
TAGS_SECONDS = 5.0  # to wait for another writer of tags
STREAMS = 64  # open at once


@dataclass(slots=True)
class Studio:
    """State that all pages share: the runs, the processes started here, and the model servers."""

    library: Library
    jobs: Jobs
    models: Models
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    streams: int = 0
    mutex: threading.Lock = field(default_factory=threading.Lock)

    def tags(self) -> dict[str, list[str]]:
        """Users' tags of runs, by run id. Those of a damaged file are not shown."""
        with suppress(OSError, UserError):
            return self._tags()
        return {}

    def _tags(self) -> dict[str, list[str]]:
        file = self.home / FOLDER / TAGS
        found = read_json(file) if file.exists() else {}
        lists = all(isinstance(t, list) and {*map(type, t)} <= {str} for t in found.values())
        require(lists, f"{file} is damaged: it holds something other than lists of texts")
        return found

    def set_tags(self, run: str, tags: list[str], seen: list[str]) -> None:
        """Change the tags that a page has `seen` to `tags`. Those that another page has added since stay."""
        folder = self.home / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "tags.lock", timeout=TAGS_SECONDS):  # there may be another studio
            every = self._tags()
            added = [tag for tag in every.get(run, []) if tag not in {*seen, *tags}]
            atomic_write(folder / TAGS, json.dumps(every | {run: [*tags, *added]}))

    def server(self, model: str) -> tuple[Server, str]:
        """The server of a model, and the model's name there. A model is RUN/STAGE, or one of the server that the user named."""
        run, _, stage = model.partition("/")
        if stage and run in self.library.runs():
            return self.models.of_run(self.library.index(run).run.directory), stage
        return self.models.named(), model

    def index(self, request: Request) -> Index:
        """The index of the run that the address of a request names."""
        return self.library.index(request.path_params["run"])

    @property
    def home(self) -> Path:
        """The folder for new runs and label files."""
        return home_of(self.library.roots[0])


def home_of(root: Path) -> Path:
    """The folder that the user named; if that is a run, its parent folder."""
    return root.parent if (root / layout.CONFIG).is_file() else root


def make_app(
    roots: Sequence[Path],
    token: str = "",
    hosts: frozenset[str] = LOOPBACK,
    local: bool = True,
    serve: str = "",
) -> Guard:
    """Make the application for the runs below `roots`."""
    home = home_of(Path(roots[0]))
    library = Library([Path(root) for root in roots], home / FOLDER / ROWS)
    studio = Studio(library, Jobs(home), Models(serve))
    studio.token = token or studio.token
    routes: list[Any] = [Route(path, partial(_page, studio)) for path in PAGES]
    for part in (pages_runs, pages_rollouts, pages_replay, pages_label, pages_review):
        routes += part.routes(studio)
    routes.append(Route("/api/events", partial(_events, studio)))
    routes.append(Mount("/static", StaticFiles(directory=STATIC)))
    failures = {UserError: refused, sqlite3.Error: unwritten, OSError: unwritten}
    return Guard(Starlette(routes=routes, exception_handlers=failures), studio.token, hosts, local)


async def _page(studio: Studio, request: Request) -> Response:
    """Serve the page. Every page is the same file; its script reads the address. It contains the token for changes, which other
    sites cannot read."""
    text = (STATIC / "index.html").read_text("utf-8")
    return Response(text.replace("STUDIO_TOKEN", studio.token), media_type="text/html")


async def _events(studio: Studio, request: Request) -> Response:
    """Send server-sent events: `changed` when the files of a run have grown; without a run, when those of any run have."""
    require(studio.streams < STREAMS, "too many pages are open")
    name = word(request, "run")
    if name:
        studio.library.index(name)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    changes = _changes(studio, name)
    return StreamingResponse(changes, media_type="text/event-stream", headers=headers)


async def _changes(studio: Studio, name: str) -> AsyncIterator[str]:
    studio.streams += 1
    seen, said = None, time.monotonic()
    try:
        yield "retry: 2000\n\n"
        while True:
            now = await asyncio.to_thread(_signature, studio, name)
            if now != seen and seen is not None:
                yield f"event: changed\ndata: {json.dumps({'run': name})}\n\n"
                said = time.monotonic()
            elif time.monotonic() - said > PING:
                yield ": still here\n\n"
                said = time.monotonic()
            seen = now
            await asyncio.sleep(POLL)
    finally:
        studio.streams -= 1


def _signature(studio: Studio, name: str) -> Any:
    """A value that changes when there is something new."""
    runs = studio.library.runs()
    wanted = [runs[name]] if name in runs else [*runs.values()][:50]
    files = (layout.METRICS, layout.EVENTS, layout.SUMMARY, f"{layout.LOCK}.holder")
    return [*runs][:50], [stamp(f"{path}/{file}")[1] for path in wanted for file in files]
