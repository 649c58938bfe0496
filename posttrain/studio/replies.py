"""Reads and checks the values of requests, and writes JSON responses."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from posttrain.errors import UserError, require
from posttrain.types import JSON

Number = TypeVar("Number", int, float)
LONGEST = 10_000  # characters of a value in an address


class Missing(UserError):
    """The requested thing does not exist."""


def reply(value: Any, status: int = 200, background: Any = None) -> Response:
    """A JSON response in which NaN and infinity are null, because JSON cannot express them."""
    try:
        text = json.dumps(value, allow_nan=False, default=_plain)
    except ValueError:
        text = json.dumps(_finite(json.loads(json.dumps(value, default=_plain))))
    return Response(text, status, media_type="application/json", background=background)


def _plain(value: Any) -> JSON:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")


def _finite(value: JSON) -> JSON:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def word(request: Request, name: str, default: str = "") -> str:
    """A query parameter as text."""
    value = str(request.query_params.get(name, default))
    require(len(value) <= LONGEST, f"{name} is too long")
    return value


def number(request: Request, name: str, kind: type[Number], default: Number) -> Number:
    """A query parameter as a number; the default if it is missing."""
    said = word(request, name)
    if not said:
        return default
    try:
        value = kind(said)
    except ValueError:
        raise UserError(f"{name} must be a number, not {said[:40]!r}") from None
    require(math.isfinite(value) and abs(value) < 2**53, f"{name} is out of range")
    return value


def whole(request: Request, name: str, default: int, maximum: int) -> int:
    """A query parameter as a whole number from 0 to `maximum`."""
    return min(max(0, number(request, name, int, default)), maximum)


async def body(request: Request) -> dict[str, JSON]:
    """The JSON object in the body of a request."""
    try:
        value = json.loads(await request.body())
        json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except (ValueError, RecursionError):
        raise UserError("send a JSON object of valid text") from None
    require(isinstance(value, dict), "send a JSON object")
    return dict(value)


def text_of(
    sent: Mapping[str, JSON], name: str, maximum: int = LONGEST, default: str | None = None
) -> str:
    """A text in the object that was sent."""
    value = sent.get(name, default)
    fine = isinstance(value, str) and len(value) <= maximum and "\0" not in value
    require(fine, f"{name} must be a text of at most {maximum} characters, none of them NUL")
    return str(value)


def whole_of(sent: Mapping[str, JSON], name: str) -> int:
    """A whole number, 0 or more, in the object that was sent."""
    value = sent.get(name)
    fine = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
    require(fine, f"{name} must be a whole number")
    return int(value or 0)


def routes_of(owner: Any, *table: tuple[str, Any] | tuple[str, Any, str]) -> list[Route]:
    """Make routes from rows of (path, handler, method); without a method, GET. A handler gets the owner, the request and, of a
    POST, the object that was sent. It runs in a thread, because it may wait for a file or a model."""
    every = ((path, partial(handler, owner), method) for path, handler, *method in table)
    made = ((path, partial(_posted, call) if way else call, way) for path, call, way in every)
    return [Route(path, call, methods=method or ["GET"]) for path, call, method in made]


async def _posted(handler: Any, request: Request) -> Response:
    done: Response = await run_in_threadpool(handler, request, await body(request))
    return done


async def refused(request: Request, error: Exception) -> Response:
    """Answer bad input with one line."""
    return JSONResponse({"error": str(error)}, 404 if isinstance(error, Missing) else 400)


async def unwritten(request: Request, error: Exception) -> Response:
    """Answer a full disk, or a file that cannot be read or written, with one line."""
    text = f"a file cannot be read or written: {error}; check space and rights there"
    return JSONResponse({"error": text}, 500)
