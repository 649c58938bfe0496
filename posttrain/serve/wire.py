"""The wire format of an OpenAI-compatible server: checked request bodies, and responses in one piece or in chunks.

Additions to OpenAI's format, spelled as in vLLM: `top_k`, `min_tokens`, prompts of ids, and `return_token_ids`. A setting that
the engine does not support is refused by name. Only settings that cannot change an answer (`user`, `metadata`, ...) are ignored.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from posttrain.errors import UserError
from posttrain.types import JSON, Sampling

IGNORED = frozenset({"user", "metadata", "store", "parallel_tool_calls", "service_tier"})
IGNORED |= {"safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
# settings with the one value that has no effect; null has no effect either
NEUTRAL: dict[str, JSON] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs", "min_p"), 0),
    **{"repetition_penalty": 1, "best_of": 1, "echo": False, "ignore_eos": False},
    **{"logit_bias": {}, "suffix": "", "modalities": ["text"], "response_format": {"type": "text"}},
}
MAX_CHOICES, MAX_ITEMS, MAX_STOPS, MAX_ANSWERS = 128, 256, 64, 4096
MISSING = -9999.0  # stands for a log-prob of minus infinity, which JSON cannot express
TEXT_TOKENS = 16  # default limit of /v1/completions, as OpenAI's


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, text: str, code: str = "", param: str | None = None):
        super().__init__(text)
        self.status, self.code, self.param = status, code, param

    def body(self) -> JSON:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        kinds[429] = "rate_limit_error"
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = kinds.get(self.status, other)
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code or None}
        return {"error": error}


class Strict(BaseModel):
    """Refuses unknown keys and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False  # OpenAI's padding of chunks; there is none here


class Body(Strict):
    """Settings that both kinds of completion have."""

    model: str = ""  # "": the default model of the server
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # 0 and -1: no limit
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(s for s in ([self.stop] if isinstance(self.stop, str) else self.stop) if s)

    @property
    def limit(self) -> int | None:
        """The token limit of an answer; None if the request states none."""
        return self.max_tokens

    def tokens(self, prompt: int, context: int, default: int) -> int:
        """How many tokens an answer to a prompt of this length may have."""
        room = context - prompt
        tokens = self.limit or min(default, max(room, 1))
        if tokens > room:
            text = f"the prompt has {prompt} tokens and the answer may have {tokens}: more than the context of {context}"
            raise Refused(400, text, "context_length_exceeded", "messages")
        return tokens

    def sampling(self, tokens: int) -> Sampling:
        fewest = min(self.min_tokens, tokens)
        return Sampling(tokens, self.temperature, max(self.top_k, 0), self.top_p, fewest)


class ChatBody(Body):
    """/v1/chat/completions."""

    messages: list[Any] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    tools: list[Any] | None = None
    # frameworks send `required`; a call cannot be forced here, so it means `auto`
    tool_choice: Literal["auto", "none", "required"] = "auto"

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class TextBody(Body):
    """/v1/completions. A prompt is text or ids; a request may have several."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=0)  # 0: those of the sampled tokens

    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        if several and len(given) * self.n > MAX_ANSWERS:
            text = f"prompt: a request has at most {MAX_ANSWERS:,} answers, not {len(given) * self.n:,}"
            raise Refused(400, f"{text} ({len(given):,} prompts, n={self.n})", "too_many", "prompt")
        return given if several else [given]

    @property
    def limit(self) -> int | None:
        return self.max_tokens or TEXT_TOKENS


Id = Annotated[int, Field(ge=0, lt=1 << 31)]


class ScoreItem(Strict):
    """A prompt (messages, text or ids) and an answer to it (text or ids)."""

    messages: list[Any] = []
    prompt: str | list[Id] = ""
    answer: str | list[Id]
    gold: str = ""  # the right answer, if a task's reward needs it


class ScoreBody(Strict):
    """/v1/score."""

    model: str = ""
    against: str = ""  # estimate the KL from this model
    items: list[ScoreItem] = Field(min_length=1, max_length=MAX_ITEMS)


Kind = TypeVar("Kind", bound=BaseModel)


def read_body(data: bytes, kind: type[Kind]) -> Kind:
    """Parse the body of a request. A refusal names what is wrong in it."""
    try:
        tree = json.loads(data)
        if b"\\u" in data:  # an escape may be half a surrogate pair, which no tokenizer reads
            json.dumps(tree, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}", "invalid_json") from None
    if not isinstance(tree, dict):
        raise Refused(400, f"the body must be an object, not {type(tree).__name__}", "invalid_json")
    kept = {}
    for key, value in tree.items():
        if key in NEUTRAL and value not in (None, NEUTRAL[key]):
            text = f"{key} is not supported by this engine; leave it out"
            raise Refused(400, text, "unsupported_parameter", key)
        if value is not None and key not in IGNORED and key not in NEUTRAL:
            kept[key] = value
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        place, said = found[0]["loc"], [found[0]["msg"]]
        same = [one["msg"] for one in found if one["loc"][0] == place[0]]
        if len(place) == 2 and len(same) > 1 and isinstance(place[1], str):  # one of each type
            place, said = place[:1], same
        at, text = ".".join(map(str, place)), "; or: ".join(dict.fromkeys(said))
        raise Refused(400, f"{at}: {text}", found[0]["type"], at) from None


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call; `arguments` is JSON as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def tree(self) -> dict[str, JSON]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class Delta:
    """The new part of a choice: text, tokens, calls, and how it ended."""

    index: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)  # the text of each token
    start: int = 0  # where the first of these tokens begins in the choice's text
    calls: tuple[Call, ...] = ()
    finish: str = ""  # stop | length | tool_calls

    def add(self, more: Delta) -> None:
        self.text += more.text
        self.ids += more.ids
        self.logprobs += more.logprobs
        self.tokens += more.tokens
        self.calls, self.finish = more.calls or self.calls, more.finish or self.finish


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The answer to a request: the prompts as the model reads them, and the choices piece by piece."""

    model: str
    prompts: Sequence[Sequence[int]]
    deltas: AsyncIterator[Delta]


class Form:
    """Writes the response to one request, in chat or text format."""

    def __init__(self, body: Body, answer: Answer):
        self.body, self.prompts = body, answer.prompts
        self.chat = isinstance(body, ChatBody)
        asked = getattr(body, "logprobs", None)
        self.logprobs = asked is not None and asked is not False
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.head = {"id": name, "created": int(time.time()), "model": answer.model}

    def usage(self, tokens: int) -> JSON:
        prompt = sum(map(len, self.prompts))
        counts = {"prompt_tokens": prompt, "completion_tokens": tokens}
        return {**counts, "total_tokens": prompt + tokens}

    def whole(self, answers: Sequence[Delta]) -> JSON:
        """The response in one piece."""
        choices = []
        for one in answers:
            choice = self._choice(one, self._message(one) if self.chat else one.text)
            if self.body.return_token_ids and not self.chat:
                choice["prompt_token_ids"] = list(self.prompts[one.index // self.body.n])
            choices.append(choice)
        tree = {**self.head, "object": "chat.completion" if self.chat else "text_completion"}
        tree |= {"choices": choices, "usage": self.usage(sum(len(one.ids) for one in answers))}
        if self.body.return_token_ids and self.chat:
            tree["prompt_token_ids"] = list(self.prompts[0])
        return tree

    def chunks(self, delta: Delta, first: bool) -> Iterator[JSON]:
        """Chunks for the new part of a choice. `first`: nothing of this choice was sent before."""
        if not self.chat:
            yield self._chunk([self._choice(delta, delta.text)])
            return
        start: dict[str, JSON] = {"role": "assistant", "content": ""} if first else {}
        text = {"content": delta.text} if delta.text else {}
        ended = Delta(delta.index, finish=delta.finish)
        opening = self._chunk([self._choice(Delta(delta.index), start)])
        if first and self.body.return_token_ids:
            opening["prompt_token_ids"] = list(self.prompts[0])
        if first:
            yield opening
        if delta.ids or text:
            delta.finish = ""
            yield self._chunk([self._choice(delta, text)])
        for place, call in enumerate(delta.calls):
            whole = {"index": place, **call.tree()}
            function = {"index": place, "function": {"arguments": call.arguments}}
            whole["function"] = {"name": call.name, "arguments": ""}
            for part in (whole, function):
                yield self._chunk([self._choice(Delta(delta.index), {"tool_calls": [part]})])
        if ended.finish:
            yield self._chunk([self._choice(ended, {})])

    def last(self, tokens: int) -> Iterator[JSON]:
        if self.body.stream_options.include_usage:
            yield {**self._chunk([]), "usage": self.usage(tokens)}

    def _chunk(self, choices: list[JSON]) -> dict[str, JSON]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        usage = {"usage": None} if self.body.stream_options.include_usage else {}
        return {**self.head, "object": kind, "choices": choices, **usage}

    def _message(self, one: Delta) -> JSON:
        calls = [call.tree() for call in one.calls]
        content = one.text if one.text or not calls else None
        message = {"role": "assistant", "content": content, "refusal": None}
        return {**message, "tool_calls": calls} if calls else message

    def _choice(self, one: Delta, said: JSON) -> dict[str, JSON]:
        chunk = "delta" if self.body.stream else "message"
        choice: dict[str, JSON] = {"index": one.index, (chunk if self.chat else "text"): said}
        choice["logprobs"] = self._logprobs(one) if self.logprobs and one.ids else None
        choice["finish_reason"] = one.finish or None
        if self.body.return_token_ids:
            choice["token_ids"] = list(one.ids)
        return choice

    def _logprobs(self, one: Delta) -> JSON:
        values = [max(value, MISSING) for value in one.logprobs]
        if self.chat:
            content = [
                {"token": t, "logprob": v, "bytes": list(t.encode()), "top_logprobs": []}
                for t, v in zip(one.tokens, values, strict=True)
            ]
            return {"content": content, "refusal": None}
        starts = list(accumulate(map(len, one.tokens), initial=one.start))[:-1]
        tree = {"tokens": one.tokens, "token_logprobs": values, "text_offset": starts}
        return {**tree, "top_logprobs": None}


def refusal(error: Exception) -> Refused:
    """Turn any error into a response. The client sees no details of an error that it did not cause."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, UserError):
        return Refused(400, str(error), "invalid_request")
    if isinstance(error, RecursionError):
        return Refused(400, "the request is nested too deeply", "invalid_request")
    return Refused(500, f"the server failed: {type(error).__name__}; its log says more")
