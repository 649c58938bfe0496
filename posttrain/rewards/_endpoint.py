"""An OpenAI-compatible chat endpoint: asked in parallel, with retries, a rate limit, a disk cache and a count of what it cost."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from posttrain.errors import UserError, require
from posttrain.types import JSON

RETRY = {408, 409, 425, 429, 500, 502, 503, 504}
LONGEST_WAIT = 30.0  # seconds between two attempts, whatever the server asks for
LONGEST_REPLY = 1 << 20  # bytes

Messages = Sequence[JSON]  # {"role": ..., "content": text or a list of parts}


class Unanswered(Exception):
    """No usable reply after all attempts: a failure of ours, never a verdict."""


class Asking(Protocol):
    """Whoever answers chat messages: an endpoint, or a local model."""

    def ask(self, conversations: Sequence[Messages]) -> list[str | None]:
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


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where to ask. The key is read from an environment variable and appears nowhere else; prices are per million tokens."""

    url: str
    model: str
    key_variable: str = "OPENAI_API_KEY"
    temperature: float = 0.0
    max_tokens: int = 512
    seconds: float = 60.0  # of one attempt
    attempts: int = 4
    parallel: int = 16
    per_minute: int = 0  # requests; 0: no limit
    cache: str = ""  # a folder; "": no cache
    prompt_price: float = 0.0
    completion_price: float = 0.0
    usage: Usage = field(default_factory=Usage, compare=False, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        require(parts.scheme in ("http", "https") and bool(parts.netloc), f"judge: {self.url!r} is no http address")
        require(
            not parts.username and not parts.password, "judge: put the key into an environment variable, not into the address"
        )
        require(self.attempts >= 1 and self.parallel >= 1, "judge: attempts and parallel must be at least 1")

    def ask(self, conversations: Sequence[Messages]) -> list[str | None]:
        return asyncio.run(self._ask_all(conversations))

    async def _ask_all(self, conversations: Sequence[Messages]) -> list[str | None]:
        httpx = _httpx()
        key = os.environ.get(self.key_variable, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        gate, pace = asyncio.Semaphore(self.parallel), _Pace(self.per_minute)
        async with httpx.AsyncClient(timeout=self.seconds, headers=headers, follow_redirects=False) as client:

            async def one(messages: Messages) -> str | None:
                async with gate:
                    try:
                        return await self._ask_one(client, messages, pace)
                    except Unanswered:
                        self.usage.failures += 1
                        return None

            return list(await asyncio.gather(*(one(messages) for messages in conversations)))

    def body(self, messages: Messages) -> dict[str, JSON]:
        return {
            "model": self.model,
            "messages": list(messages),
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }

    async def _ask_one(self, client: Any, messages: Messages, pace: _Pace) -> str:
        body = self.body(messages)
        known = self._recall(body)
        if known is not None:
            self.usage.cached += 1
            return known
        httpx = _httpx()
        last = "no attempt"
        for attempt in range(self.attempts):
            if attempt:
                self.usage.retries += 1
            await pace.turn()
            wait = min(LONGEST_WAIT, 0.25 * 2**attempt)
            try:
                self.usage.requests += 1
                reply = await client.post(self.url.rstrip("/") + "/chat/completions", json=body)
                if reply.status_code == 200:
                    text = self._read(reply.content)
                    self._remember(body, text)
                    return text
                last = f"status {reply.status_code}"
                if reply.status_code not in RETRY:
                    break
                wait = min(LONGEST_WAIT, _seconds(reply.headers.get("retry-after"), wait))
            except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError) as error:
                last = f"{type(error).__name__}: {error}"
            if attempt + 1 < self.attempts:
                await asyncio.sleep(wait)
        raise Unanswered(last)

    def _read(self, content: bytes) -> str:
        """The text of a reply; its tokens are counted. Anything else raises, and is tried again."""
        if len(content) > LONGEST_REPLY:
            raise ValueError("the reply is too long")
        reply = json.loads(content)
        text = reply["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise TypeError("the reply has no text")
        used = reply.get("usage") or {}
        prompt, completion = int(used.get("prompt_tokens", 0)), int(used.get("completion_tokens", 0))
        self.usage.prompt_tokens += prompt
        self.usage.completion_tokens += completion
        self.usage.cost += (prompt * self.prompt_price + completion * self.completion_price) / 1e6
        return text

    def _place(self, body: JSON) -> Path:
        name = hashlib.sha256(json.dumps([self.url, body], sort_keys=True).encode()).hexdigest()
        return Path(self.cache) / name[:2] / f"{name}.json"

    def _recall(self, body: JSON) -> str | None:
        if not self.cache:
            return None
        try:
            text = json.loads(self._place(body).read_text("utf-8"))["text"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return text if isinstance(text, str) else None

    def _remember(self, body: JSON, text: str) -> None:
        """Written beside its place and renamed: another process never reads half of it."""
        if not self.cache:
            return
        place = self._place(body)
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps({"text": text}), "utf-8")
        partial.replace(place)


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
        raise UserError("a judge behind an address needs httpx: pip install 'posttrain[judge]'") from error
    return httpx
