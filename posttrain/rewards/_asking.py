"""What a judge is asked, the form in which it must answer, the cache of its answers, and an OpenAI-compatible endpoint that answers:
asked in parallel, with retries, a rate limit and a count of what it cost."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from posttrain.errors import Count, UserError, check_fields
from posttrain.trust import KEY_VARIABLE, Address, active
from posttrain.types import JSON

# how servers refuse a request with something in it that they do not know
UNKNOWN_FIELD = {400, 404, 415, 422, 501}
RETRY = {408, 409, 425, 429, 500, 502, 503, 504}
MAX_WAIT = 30.0  # seconds between two attempts, whatever the server asks for
MAX_REPLY = 1 << 20  # bytes
Messages = Sequence[JSON]  # {"role": ..., "content": text or a list of parts}


@dataclass(frozen=True, slots=True)
class Form:
    """The only replies there are: a JSON object of one field that holds one of `options`, or a list of `count` of them.

    >>> Form("verdict", ("A", "B")).places()
    [['{"verdict": "A"}', '{"verdict": "B"}']]
    >>> Form("scores", (1, 10), count=2).places()
    [['{"scores": [1,', '{"scores": [10,'], [' 1]}', ' 10]}']]
    """

    field: str
    options: tuple[JSON, ...]
    count: int = 0  # 0: the option itself and no list

    def places(self) -> list[list[str]]:
        """The reply place by place, each with the texts it may hold. None of a place begins another, so that their probabilities
        are those of different replies."""
        opening = json.dumps({self.field: 0})[:-2]
        texts = [json.dumps(option) for option in self.options]
        if not self.count:
            return [[f"{opening}{text}}}" for text in texts]]
        starts = [f"{opening}[", *[" "] * (self.count - 1)]
        ends = [*[","] * (self.count - 1), "]}"]
        return [[a + text + b for text in texts] for a, b in zip(starts, ends, strict=True)]

    def schema(self) -> JSON:
        """The same as JSON schema, for servers that can hold a model to one."""
        field: JSON = {"enum": list(self.options)}
        if self.count:
            size = {"minItems": self.count, "maxItems": self.count}
            field = {"type": "array", "items": field, **size}
        parts = {"properties": {self.field: field}, "required": [self.field]}
        return {"type": "object", **parts, "additionalProperties": False}


class Asking(Protocol):
    """Answers chat messages: an endpoint, or a model in this process."""

    def ask(self, conversations: Sequence[Messages], form: Form) -> list[str | None]:
        """The reply to each conversation, in order; None where there is none."""
        ...


@dataclass(slots=True)
class Usage:
    """What was asked and what it cost, summed over a process."""

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
        """As a stage's result keeps it: what is not 0."""
        return {key: value for key, value in asdict(self).items() if value}


@dataclass(frozen=True, slots=True)
class Replies:
    """Replies on disk, one file each, named by a hash of all that decides them. "": none are kept."""

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
        """Written to a temporary file and renamed: another process never reads half of it."""
        if not self.folder:
            return
        place = self.place(key)
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps({"text": text}), "utf-8")
        partial.replace(place)


class Unanswered(Exception):
    """No usable reply after all attempts: a failure of ours, never a verdict."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where to ask. The key is read from an environment variable and appears nowhere else; trust.py says who may be sent it. Prices are
    per million tokens. The server is asked to hold the model to the form of the verdict (`response_format`); one that refuses is asked
    again without, and from then on."""

    url: str
    model: str
    key_variable: str = KEY_VARIABLE  # "": no key
    temperature: float = 0.0
    max_tokens: int = 512
    seconds: float = 60.0  # of one attempt
    attempts: Count = 4
    parallel: Count = 16
    per_minute: int = 0  # requests; 0: no limit
    cache: str = ""  # a folder; "": no cache
    prompt_price: float = 0.0
    completion_price: float = 0.0
    constrain: bool = True  # ask the server to allow nothing but the form of the verdict
    usage: Usage = field(default_factory=Usage, compare=False, repr=False)
    # why the last one was not answered
    trouble: list[str] = field(default_factory=list, init=False, compare=False, repr=False)
    # statuses of refusing a form
    refused: list[int] = field(default_factory=list, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        active().require_address(self.url)
        active().require_variable(self.key_variable)
        active().key(self.url, self.key_variable)  # refused now rather than with the first question
        _httpx()
        check_fields(self, "judge: ")

    def ask(self, conversations: Sequence[Messages], form: Form) -> list[str | None]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._ask_all(conversations, form))
        with ThreadPoolExecutor(1) as thread:  # the caller's event loop is running in this one
            return thread.submit(asyncio.run, self._ask_all(conversations, form)).result()

    async def _ask_all(self, conversations: Sequence[Messages], form: Form) -> list[str | None]:
        key = active().key(self.url, self.key_variable)
        gate, pace = asyncio.Semaphore(self.parallel), _Pace(self.per_minute)
        async with _httpx().AsyncClient(
            timeout=self.seconds,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            follow_redirects=False,
            verify=_certificates(),
            trust_env=not Address.of(self.url).loopback,  # no proxy to this machine
        ) as client:

            async def one(messages: Messages) -> str | None:
                async with gate:
                    try:
                        return await self._ask_one(client, messages, form, pace)
                    except Unanswered as error:
                        self.usage.failures += 1
                        self.trouble[:] = [str(error)]
                        return None

            return list(await asyncio.gather(*(one(messages) for messages in conversations)))

    def body(self, messages: Messages, form: Form | None = None) -> dict[str, JSON]:
        body: dict[str, JSON] = {"model": self.model, "messages": list(messages)}
        body |= {"temperature": self.temperature, "max_tokens": self.max_tokens}
        if form is not None:
            schema = {"name": form.field, "strict": True, "schema": form.schema()}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body

    async def _ask_one(self, client: Any, messages: Messages, form: Form, pace: _Pace) -> str:
        key, replies = [self.url, self.body(messages)], Replies(self.cache)
        known = replies.recall(key)
        if known is not None:
            self.usage.cached += 1
            return known
        last = "no attempt"
        for attempt in range(self.attempts):
            if attempt:
                self.usage.retries += 1
            await pace.turn()
            wait = min(MAX_WAIT, 0.25 * 2**attempt)
            try:
                reply = await self._post(client, messages, form, pace)
                if reply.status_code == 200:
                    text = self._read(reply.content)
                    replies.remember(key, text)
                    return text
                last = f"status {reply.status_code}"
                if reply.status_code not in RETRY:
                    break
                wait = min(MAX_WAIT, _seconds(reply.headers.get("retry-after"), wait))
            except (_httpx().HTTPError, ValueError, KeyError, TypeError, IndexError) as error:
                last = f"{type(error).__name__}: {error}"
            if attempt + 1 < self.attempts:
                await asyncio.sleep(wait)
        raise Unanswered(last)

    async def _post(self, client: Any, messages: Messages, form: Form, pace: _Pace) -> Any:
        """One attempt. A server that refuses the form is asked again without, and where that helped, never with one again."""
        address = self.url.rstrip("/") + "/chat/completions"
        constrained = self.constrain and not self.refused
        self.usage.requests += 1
        reply = await client.post(address, json=self.body(messages, form if constrained else None))
        if not constrained or reply.status_code not in UNKNOWN_FIELD:
            return reply
        await pace.turn()
        self.usage.requests += 1
        plain = await client.post(address, json=self.body(messages))
        if plain.status_code == 200:
            self.refused.append(reply.status_code)
        return plain

    def _read(self, content: bytes) -> str:
        """The text of a reply; its tokens are counted. Anything else raises, and is tried again."""
        if len(content) > MAX_REPLY:
            raise ValueError("the reply is too long")
        reply = json.loads(content)
        text = reply["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise TypeError("the reply has no text")
        used = reply.get("usage") or {}
        prompt, completion = (int(used.get(f"{of}_tokens", 0)) for of in ("prompt", "completion"))
        self.usage.prompt_tokens += prompt
        self.usage.completion_tokens += completion
        self.usage.cost += (prompt * self.prompt_price + completion * self.completion_price) / 1e6
        return text


@dataclass(slots=True)
class _Pace:
    """So many turns a minute, evenly."""

    per_minute: int
    next: float = 0.0

    async def turn(self) -> None:
        if not self.per_minute:
            return
        now = time.monotonic()
        at = max(now, self.next)
        self.next = at + 60.0 / self.per_minute
        await asyncio.sleep(at - now)


def _seconds(text: str | None, otherwise: float) -> float:
    try:
        return max(0.0, float(text)) if text is not None else otherwise
    except ValueError:
        return otherwise


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        needs = "a judge behind an address needs httpx: pip install 'posttrain[judge]'"
        raise UserError(needs) from error
    return httpx


@lru_cache(maxsize=1)
def _certificates() -> Any:
    """Read once: it takes a good part of a second, and a judge is asked for every group."""
    return _httpx().create_ssl_context()
