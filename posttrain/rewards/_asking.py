"""Requests to a judge: the form of its replies, their cache, and an OpenAI-compatible endpoint.

The endpoint is asked in parallel with the `openai` client, within a rate limit, and counts the cost.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

from posttrain.errors import Checked, NotNegative, Positive, Several, UserError, Whole, require
from posttrain.rewards._loop import run_to_end
from posttrain.trust import HOSTS_VARIABLE, KEY_VARIABLE, Address, active
from posttrain.types import JSON

# statuses of servers that refuse a request because of a field they do not know
UNKNOWN_FIELD = {400, 404, 415, 422, 501}
MAX_WAIT = 120.0  # the longest Retry-After in seconds; the client gives up on a longer one
MAX_REPLY = 1 << 20  # characters
MAX_BODY = 1 << 24  # bytes of a server's response, decompressed
MAX_QUOTED = 200  # characters of a server's or a judge's text quoted in a message
OBJECT = re.compile(r"\{[^{}]*\}")
# Headers that a server needs to read a request. The client adds others, some from environment variables.
HEADERS = "host accept accept-encoding connection content-type content-length user-agent"
# headers of a response that no longer hold after it was decompressed
UNPACKED = ("content-encoding", "content-length", "transfer-encoding")
Messages = Sequence[JSON]  # {"role": ..., "content": text or a list of parts}


class Unanswered(Exception):
    """Why there is no usable reply, and what to do. It is a failure, never a verdict."""


Reply = str | Unanswered


@dataclass(frozen=True, slots=True)
class Form:
    """The only accepted replies: a JSON object of one field that holds one of `options`, or a list of `count` of them.

    >>> Form("verdict", ("A", "B")).places()
    [['{"verdict": "A"}', '{"verdict": "B"}']]
    >>> Form("scores", (1, 10), count=2).places()
    [['{"scores": [1,', '{"scores": [10,'], [' 1]}', ' 10]}']]
    """

    field: str
    options: tuple[JSON, ...]
    count: int = 0  # 0: a single option, not a list

    def places(self) -> list[list[str]]:
        """Return the reply position by position, each with the texts it may hold. Within a position no text is a prefix of
        another, so their probabilities belong to different replies."""
        opening = json.dumps({self.field: 0})[:-2]
        texts = [json.dumps(option) for option in self.options]
        if not self.count:
            return [[f"{opening}{text}}}" for text in texts]]
        starts = [f"{opening}[", *[" "] * (self.count - 1)]
        ends = [*[","] * (self.count - 1), "]}"]
        return [[a + text + b for text in texts] for a, b in zip(starts, ends, strict=True)]

    def read(self, reply: Reply) -> JSON:
        """Return the value in the field of the reply's last JSON object. None if there is no such object, if two objects
        disagree, or if the value is not an option; numbers between the options are accepted too.

        >>> Form("score", (1, 10)).read('I think {"score": 7}'), Form("verdict", ("A", "B")).read('{"verdict": "C"}')
        (7, None)
        """
        found = []
        for text in OBJECT.findall(reply) if isinstance(reply, str) else ():
            try:
                value = json.loads(text)
            except ValueError:
                continue
            if isinstance(value, dict) and self.field in value:
                found.append(value[self.field])
        agreed = bool(found) and all(value == found[0] for value in found)
        return found[-1] if agreed and self.allows(found[-1]) else None

    def allows(self, value: JSON) -> bool:
        if not self.count:
            return self._allows_one(value)
        full = isinstance(value, list) and len(value) == self.count
        return full and all(map(self._allows_one, value))

    def _allows_one(self, value: JSON) -> bool:
        if isinstance(self.options[0], str):
            return value in self.options
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and min(self.options) <= value <= max(self.options)

    def schema(self) -> JSON:
        """Return the form as a JSON schema, for servers that can constrain a model to one."""
        field: JSON = {"enum": list(self.options)}
        if self.count:
            size = {"minItems": self.count, "maxItems": self.count}
            field = {"type": "array", "items": field, **size}
        parts = {"properties": {self.field: field}, "required": [self.field]}
        return {"type": "object", **parts, "additionalProperties": False}


class Asking(Protocol):
    """Answers chat messages: an endpoint, or a model in this process."""

    def ask(self, conversations: Sequence[Messages], form: Form) -> Sequence[Reply]:
        """Return the reply to each conversation, in order, or why there is none."""


@dataclass(slots=True)
class Usage:
    """Requests, tokens and cost, summed over a process."""

    requests: int = 0
    cached: int = 0
    retries: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def row(self) -> dict[str, JSON]:
        """Return the counts that are not 0, for a stage's result."""
        return {key: value for key, value in asdict(self).items() if value}


@dataclass(frozen=True, slots=True)
class Replies:
    """Replies on disk, one file each, named by a hash of everything that decides them. "": none are stored."""

    folder: str

    def place(self, key: JSON) -> Path:
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return Path(self.folder) / name[:2] / f"{name}.json"

    def recall(self, key: JSON) -> str | None:
        try:
            text = json.loads(self.place(key).read_text("utf-8"))["text"] if self.folder else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return text if isinstance(text, str) else None

    def remember(self, key: JSON, text: str) -> None:
        """Write to a temporary file and rename it, so that another process never reads a partial reply."""
        if not self.folder:
            return
        place = self.place(key)
        partial = place.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"text": text}), "utf-8")
            partial.replace(place)
        except OSError as error:
            advice = f"({error.strerror}); name another folder, or leave it out"
            raise UserError(f"judge.cache: {self.folder} cannot be written {advice}") from None


@dataclass(frozen=True, kw_only=True)
class EndpointSettings(Checked):
    """How to ask a model behind an OpenAI-compatible address. The key is read from an environment variable and is stored
    nowhere else; trust.py decides which addresses may receive it. Prices are per million tokens."""

    model: str
    url: str = ""
    key_variable: str = KEY_VARIABLE  # "": no key
    temperature: NotNegative | None = 0.0  # sampling temperature; None: the server's default
    max_tokens: Whole = 512  # tokens of a reply; 0: only the server's limit
    seconds: Positive = 60.0  # time limit of one attempt
    attempts: Several = 4
    parallel: Several = 16  # requests at the same time
    per_minute: Whole = 0  # requests a minute; 0: only the server's limit
    cache: str = ""  # a folder that stores the replies; "": none
    prompt_price: NotNegative = 0.0
    completion_price: NotNegative = 0.0
    constrain: bool = True  # ask the server to constrain the reply to the form of the verdict


@lru_cache(maxsize=1)
def _certificates() -> Any:
    """Return the certificates of the authorities that the client knows, cached: reading them takes longer than a request."""
    import httpx

    return httpx.create_ssl_context()


@lru_cache(maxsize=1)
def _client() -> Any:
    """Make an HTTP client whose attempts end. httpx limits only the wait for the next bytes, and a server may send them one by
    one without end."""
    import httpx
    import openai

    class Client(openai.DefaultAsyncHttpxClient):  # type: ignore[misc]
        endpoint: Endpoint

        async def send(self, request: Any, **options: Any) -> Any:
            await self.endpoint.before(request)
            options["stream"], body = True, bytearray()
            try:
                async with asyncio.timeout(self.endpoint.seconds):
                    response = await super().send(request, **options)
                    try:
                        async for part in response.aiter_bytes():
                            body += part
                            if len(body) > MAX_BODY:
                                text = f"it sent more than {MAX_BODY >> 20} MB"
                                raise httpx.ReadError(text, request=request)
                    finally:
                        await response.aclose()
            except TimeoutError:
                raise httpx.ReadTimeout("the reply is not complete", request=request) from None
            self.endpoint.after(response)
            about = [(k, v) for k, v in response.headers.multi_items() if k not in UNPACKED]
            return httpx.Response(
                response.status_code, headers=about, content=bytes(body), request=request
            )

    return Client


@dataclass(frozen=True, kw_only=True)
class Endpoint(EndpointSettings):
    """Sends requests to the address. It asks the server to constrain the model to the form of the verdict (`response_format`);
    if the server refuses that, it asks without it, then and later. The client retries temporary failures (429, 5xx, no
    connection, no reply in time), after the time that the server asks for."""

    where: ClassVar[str] = "judge: "

    usage: Usage = field(default_factory=Usage, compare=False, repr=False)
    pace: Pace = field(default_factory=lambda: Pace(), init=False, compare=False, repr=False)
    # statuses with which the server refused a form
    refused: list[int] = field(default_factory=list, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        active().require_address(self.url)
        active().require_variable(self.key_variable)
        # raise an error now rather than at the first question
        active().key(self.url, self.key_variable)
        there = find_spec("openai") is not None
        require(there, "a judge behind an address needs openai: pip install 'posttrain[judge]'")

    def ask(self, conversations: Sequence[Messages], form: Form) -> list[Reply]:
        return run_to_end(self._ask_all(conversations, form))

    async def _ask_all(self, conversations: Sequence[Messages], form: Form) -> list[Reply]:
        import openai

        gate = asyncio.Semaphore(self.parallel)
        connection = _client()(
            timeout=self.seconds,
            follow_redirects=False,
            verify=_certificates(),
            trust_env=not Address.of(self.url).loopback,  # no proxy to this machine
        )
        connection.endpoint = self
        async with openai.AsyncOpenAI(
            base_url=self.url,
            api_key="set in before",
            timeout=self.seconds,
            max_retries=self.attempts - 1,
            http_client=connection,
        ) as client:

            async def one(messages: Messages) -> Reply:
                async with gate:
                    try:
                        return await self._ask_one(client, messages, form)
                    except openai.OpenAIError as error:
                        found = Unanswered(self._explained(error))
                    except Unanswered as error:
                        found = error
                self.usage.failures += 1
                return found

            return list(await asyncio.gather(*(one(messages) for messages in conversations)))

    async def before(self, request: Any) -> None:
        """Wait until an attempt may be sent, the first one or a retry of the client, and remove all headers but those that the
        server needs and the key that trust.py permits."""
        self.usage.retries += request.headers.get("x-stainless-retry-count", "0") != "0"
        for name in [name for name in request.headers if name.lower() not in HEADERS.split()]:
            del request.headers[name]
        if key := active().key(self.url, self.key_variable):
            request.headers["authorization"] = f"Bearer {key}"
        await self.pace.turn(self.per_minute)
        self.usage.requests += 1

    def after(self, response: Any) -> None:
        """A server that gets too many requests says when to go on; that holds for all requests."""
        if response.status_code == 429:
            self.pace.hold(response.headers.get("retry-after"))

    def body(self, messages: Messages, form: Form | None = None) -> dict[str, JSON]:
        body: dict[str, JSON] = {"model": self.model, "messages": list(messages)}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.max_tokens:
            body["max_tokens"] = self.max_tokens
        if form is not None:
            schema = {"name": form.field, "strict": True, "schema": form.schema()}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body

    async def _ask_one(self, client: Any, messages: Messages, form: Form) -> str:
        """Return a usable reply and store it in the cache; an unusable one raises an error and is not stored."""
        key, replies = [self.url, self.body(messages)], Replies(self.cache)
        known = replies.recall(key)
        if known is not None and form.read(known) is not None:
            self.usage.cached += 1
            return known
        # an unusable reply may be usable on the next attempt
        for left in reversed(range(min(self.attempts, 2))):
            try:
                text, ended = self._read(await self._post(client, messages, form))
                break
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                what = f"unreadable reply ({type(error).__name__}: {error}); is {self.url} the address of an OpenAI-compatible server?"
                if not left:
                    raise Unanswered(what) from None
            self.usage.retries += 1
        if form.read(text) is None:
            raise Unanswered(self._unusable(text, ended, form))
        replies.remember(key, text)
        return text

    async def _post(self, client: Any, messages: Messages, form: Form) -> Any:
        """Send one request. If the server refuses the form, ask again without it; if that works, never send a form again."""
        from openai import APIStatusError

        create, refusal = client.chat.completions.create, 0
        if self.constrain and not self.refused:
            try:
                return await create(**self.body(messages, form))
            except APIStatusError as error:
                refusal = error.status_code
                if refusal not in UNKNOWN_FIELD:
                    raise
        reply = await create(**self.body(messages))
        if refusal:
            self.refused.append(refusal)
        return reply

    def _read(self, reply: Any) -> tuple[str, str]:
        """Return the text of a reply and why it ended, and count its tokens. The client checks nothing, so a malformed reply
        raises an error here."""
        choice, used = reply.choices[0], reply.usage
        text = choice.message.content or ""
        if len(text) > MAX_REPLY:
            raise ValueError("the reply is too long")
        prompt = int(getattr(used, "prompt_tokens", 0) or 0)  # some servers report no counts
        completion = int(getattr(used, "completion_tokens", 0) or 0)
        self.usage.prompt_tokens += prompt
        self.usage.completion_tokens += completion
        self.usage.cost += (prompt * self.prompt_price + completion * self.completion_price) / 1e6
        return str(text), str(choice.finish_reason)

    def _unusable(self, text: str, ended: str, form: Form) -> str:
        wanted = f"no {form.field} that is one of {form.options[0]} to {form.options[-1]}"
        said = f"unusable reply, {wanted}: {text[:MAX_QUOTED]!r}"
        if ended == "length":
            return f"{said}; it was cut: raise max_tokens, which is {self.max_tokens or 'not set'}"
        return f"{said}; use another model, or one whose server knows response_format"

    def _explained(self, error: Exception) -> str:
        """Return an error of the client as one line: what happened, in the server's words, and what to do."""
        import openai

        key = active().key(self.url, self.key_variable)
        if isinstance(error, openai.APITimeoutError):
            return f"timeout: no reply within {self.seconds:g} s in {self.attempts} attempts; raise seconds, or lower parallel"
        if isinstance(error, openai.APIConnectionError):
            return f"no connection to {self.url} ({error.__cause__}); does the server run, and is the url right?"
        if not isinstance(error, openai.APIStatusError):
            return f"{type(error).__name__}: {error}"
        body, status = error.body, error.status_code
        words = str(body.get("message", body)) if isinstance(body, dict) else str(body or "")
        words = words.replace(key, "***") if key else words
        variable = self.key_variable or "that key_variable names"
        no_key = f"no key was sent: set the variable {variable}"
        no_key += f", and {HOSTS_VARIABLE} where a file names the url"
        advice = {
            401: f"put a valid key into the variable {self.key_variable}" if key else no_key,
            403: "the key may not use this model",
            404: f"the server has no model {self.model!r}, or the url is not up to .../v1",
            429: "asked too often: lower parallel, or set per_minute to what the server permits",
        }
        if error.code == "insufficient_quota":
            advice[429] = "the account has no credit left"
        elif wait := error.response.headers.get("retry-after"):
            advice[429] += f" (it asks to wait {wait} s)"
        if 300 <= status < 400:
            advice[status] = "no redirect is followed: give the url that it leads to"
        fails, refuses = "the server fails: try again later", "the server refuses the request"
        otherwise = fails if status >= 500 else refuses
        return f"status {status} {words[:MAX_QUOTED]!r}; {advice.get(status, otherwise)}"


def endpoint(settings: EndpointSettings) -> Endpoint:
    """Make the endpoint from settings, which may have further fields."""
    return Endpoint(**{f.name: getattr(settings, f.name) for f in fields(EndpointSettings)})


@dataclass(slots=True)
class Pace:
    """Decides when the next request may be sent."""

    next: float = 0.0

    async def turn(self, per_minute: int) -> None:
        """Wait until the next request may be sent. Requests are spaced evenly over a minute."""
        now = time.monotonic()
        at = max(now, self.next)
        self.next = at + 60.0 / per_minute if per_minute else self.next
        await asyncio.sleep(at - now)

    def hold(self, retry_after: str | None) -> None:
        """Send nothing for as long as a server asks, in seconds."""
        try:
            seconds = float(retry_after or 0)
        except ValueError:  # a date, for which the client itself waits
            return
        if 0 < seconds <= MAX_WAIT:
            self.next = max(self.next, time.monotonic() + seconds)
