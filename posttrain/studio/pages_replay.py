"""The API of the page that shows what changed the policy in a step. It runs `posttrain replay` in the background and keeps its
results with the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from posttrain.errors import require
from posttrain.runs.index import FOLDER
from posttrain.studio.library import require_stage
from posttrain.studio.replies import reply, routes_of, text_of, whole, whole_of, word
from posttrain.system.files import MAX_FILE, read_json
from posttrain.types import JSON

if TYPE_CHECKING:
    from posttrain.studio.app import Studio

ITEMS, LONGEST_TEXT = 100, 2000  # of one response


def routes(studio: Studio) -> list[Any]:
    place = "/api/runs/{run}/replay"
    table = (place, _show), (place, _start, "POST"), (f"{place}/stop", _stop, "POST")
    return routes_of(studio, *table)


def _words(studio: Studio, request: Request, asked: Mapping[str, JSON]) -> tuple[list[str], Path]:
    """Arguments of `posttrain replay` for a request, and the file of its result."""
    index = studio.index(request)
    stage = require_stage(index, str(asked["stage"]))
    require(not stage.startswith("-"), "the page cannot name this stage; use the command line")
    words = [str(index.run.directory), f"{stage}/{asked['step']}", f"--update={asked['update']}"]
    words += [] if asked["without"] == "" else [f"--without={asked['without']}"]
    words += [f"--{name}={asked[name]}" for name in ("prompt", "answer") if asked[name]]
    key = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:24]
    return words, studio.home / FOLDER / "replays" / f"{key}.json"


def _show(studio: Studio, request: Request) -> Response:
    """The progress of a replay, or its result."""
    asked: dict[str, JSON] = {name: whole(request, name, 1, 2**52) for name in ("step", "update")}
    asked |= {name: word(request, name) for name in ("stage", "without", "prompt", "answer")}
    require(asked["without"] == "" or asked["without"].isdigit(), "without must be a whole number")
    _, result = _words(studio, request, asked)
    state, said = studio.jobs.replay_state(result)
    found = _short(read_json(result, MAX_FILE)) if state == "done" else None
    return reply({"state": state, "said": said, "found": found})


def _asked(sent: dict[str, JSON]) -> dict[str, JSON]:
    sent = {"update": 1, **sent}
    asked: dict[str, JSON] = {name: whole_of(sent, name) for name in ("step", "update")}
    asked |= {name: text_of(sent, name, default="") for name in ("stage", "prompt", "answer")}
    return asked | {"without": "" if sent.get("without", "") == "" else whole_of(sent, "without")}


def _start(studio: Studio, request: Request, sent: dict[str, JSON]) -> Response:
    words, result = _words(studio, request, _asked(sent))
    with studio.mutex:
        studio.jobs.replay(words, result)
    return reply({"state": "running"}, 201)


def _stop(studio: Studio, request: Request, sent: dict[str, JSON]) -> Response:
    _, result = _words(studio, request, _asked(sent))
    studio.jobs.stop_replay(result)
    return reply({"done": "stop"})


def _short(tree: dict[str, JSON]) -> JSON:
    """Shorten a result for display: the first items, and the beginning of long texts."""
    found = tree["found"]
    found["left"] = max(0, len(found["items"]) - ITEMS)
    found["items"] = found["items"][:ITEMS]
    for member in (member for item in found["items"] for member in item["members"]):
        for name in ("prompt", "text"):
            member[name] = member[name][:LONGEST_TEXT]
    return tree
