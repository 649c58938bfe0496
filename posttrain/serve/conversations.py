"""Keeps served conversations as token ids. A client sends all its messages with each request. If they begin with a conversation
that was served before, the history is the ids that were read and sampled then; they are never rendered again. A changed history
is rendered from its beginning."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.data.calls import OPEN, PYTHON_TAG, Format, calls, format_of
from posttrain.data.chat import render_prompt, render_turn
from posttrain.data.records import Tools, parse_messages, parse_tools
from posttrain.data.text import REPLACEMENT, Decoder
from posttrain.errors import UserError
from posttrain.serve.wire import Body, Call, ChatBody, Delta, Refused, TextBody
from posttrain.types import JSON, Message, Segment

LINKS = ("id", "tool_call_id")  # ids of tool calls, which templates need not show


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A turn of the assistant: the ids that were added since the turn before, and the ids that were sampled."""

    before: Turn | None
    given: tuple[int, ...]
    reply: Segment

    def path(self) -> list[Turn]:
        """All turns up to this one, first to last."""
        turns, turn = list[Turn](), self.before
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        return [*reversed(turns), self]

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids up to the end of the reply."""
        parts = ((*turn.given, *turn.reply.ids.tolist()) for turn in self.path())
        return tuple(i for part in parts for i in part)


@dataclass(slots=True)
class Prompt:
    """A conversation to answer: the turn that it continues, if any, the ids added since, and the messages."""

    before: Turn | None
    given: tuple[int, ...]
    messages: tuple[Message, ...]
    tools: Tools = None

    @property
    def ids(self) -> tuple[int, ...]:
        return (*(() if self.before is None else self.before.ids), *self.given)


class Conversations:
    """Turns, found by the messages that lead to them. The `limit` most recently used ones are kept."""

    def __init__(self, tokenizer: Any, limit: int):
        self.tokenizer, self.limit = tokenizer, limit
        self.turns: OrderedDict[bytes, Turn] = OrderedDict()

    def prompts(self, body: Body, vocabulary: int) -> Iterator[Prompt]:
        """The prompts of a request, as the policy reads them."""
        if isinstance(body, ChatBody):
            yield self._prompt(body)
        for given in body.prompts() if isinstance(body, TextBody) else ():
            ids = self.tokenizer(given)["input_ids"] if isinstance(given, str) else given
            if not ids or not all(0 <= i < vocabulary for i in ids):
                known = f"at least one id, each from 0 to {vocabulary - 1}"
                raise Refused(400, f"prompt: a prompt needs {known}", "invalid_prompt", "prompt")
            yield Prompt(None, tuple(ids), ())

    def _prompt(self, body: ChatBody) -> Prompt:
        """The prompt of messages. It continues a served conversation if the messages do."""
        messages = parse_messages([message_row(message) for message in body.messages], "messages")
        shown = body.tools if body.tool_choice != "none" else None
        tools = parse_tools(shown, "tools") if shown else None
        digests = _digests(messages, tools)
        for place in reversed(range(1, len(messages))):
            turn = self.turns.get(digests[place - 1])
            if turn is None:
                continue
            self.turns.move_to_end(digests[place - 1])
            since, reply = messages[place:], turn.reply
            stop = int(reply.ids[-1]) if reply.finish == "stop" else None
            try:
                given = render_turn(self.tokenizer, since, stop, "messages")
            except UserError:  # the template cannot continue from this turn
                break
            return Prompt(turn, given, messages, tools)
        ids = render_prompt(self.tokenizer, messages, "messages", tools)
        return Prompt(None, ids, messages, tools)

    def reader(self, tools: Tools) -> CallReader | None:
        """The reader of tool calls for a request that has tools; None for others."""
        schemas = [tool.get("function", tool) for tool in tools or ()]
        form = format_of(str(self.tokenizer.chat_template))
        return CallReader(form, {str(one.get("name")): one for one in schemas}) if tools else None

    def add(self, prompt: Prompt, answer: Delta, reply: Segment) -> Turn:
        """Store a turn under the message that the client received and will send back."""
        turn = Turn(prompt.before, prompt.given, reply)
        calls = [call.tree() for call in answer.calls]
        row = {"role": "assistant", "content": answer.text, "tool_calls": calls}
        said = parse_messages([row], "the answer")
        self.turns[_digests((*prompt.messages, *said), prompt.tools)[-1]] = turn
        while len(self.turns) > self.limit:
            self.turns.popitem(last=False)
        return turn


def message_row(message: JSON) -> JSON:
    """A message in the form that templates know: OpenAI's newer name of the system role becomes `system`."""
    if not isinstance(message, dict):
        return message
    role = "system" if message.get("role") == "developer" else message.get("role")
    rest = {key: value for key, value in message.items() if key not in ("annotations", "refusal")}
    return {**rest, "role": role}


def _digests(messages: Sequence[Message], tools: Tools) -> list[bytes]:
    """A digest of each beginning of a conversation. It does not depend on the order of keys or on the ids of calls."""
    state, found = hashlib.sha256(json.dumps(tools, sort_keys=True).encode()), []
    for message in messages:
        state.update(json.dumps(_without_links(message.row()), sort_keys=True).encode() + b"\n")
        found.append(state.digest())
    return found


def _without_links(value: JSON) -> JSON:
    if isinstance(value, dict):
        return {key: _without_links(inner) for key, inner in value.items() if key not in LINKS}
    return [_without_links(inner) for inner in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class CallReader:
    """Reads calls of a request's tools from text in the format of a chat template.

    >>> reader = CallReader("hermes", {"add": {}})
    >>> said, found = reader.read('Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    >>> said, found[0].name, found[0].arguments
    ('Let me see.', 'add', '{"a": 1}')
    >>> reader.read("<tool_call>{</tool_call>")
    ('<tool_call>{</tool_call>', ())
    >>> reader.visible("Sure. <tool_"), reader.visible("a < b")
    ('Sure. ', 'a < b')
    """

    form: Format
    tools: Mapping[str, JSON]  # schemas by name

    @property
    def openings(self) -> tuple[str, ...]:
        """The texts that begin a call. In Llama's format a call may also be a whole turn of JSON."""
        tags = tuple(f"<{name}>" for name in self.tools)
        return {"hermes": (OPEN,), "llama3": (PYTHON_TAG,), "tag": tags}.get(self.form, ())

    def read(self, text: str) -> tuple[str, tuple[Call, ...]]:
        """Split a text into the part before the calls, and the calls. If one call cannot be read, the whole is text."""
        found = calls(self.form, text, self.tools)
        if not found or any(call.problem for call in found):
            return text, ()
        made = [Call(call.name, self._arguments(call.name, call.arguments)) for call in found]
        return self.visible(text).rstrip(), tuple(made)

    def visible(self, text: str) -> str:
        """The part of a text that cannot be the beginning of a call, and so can be sent."""
        if self.form == "llama3" and text.lstrip()[:1] == "{":
            return ""
        ends = [len(text), *(end for o in self.openings if (end := text.find(o)) >= 0)]
        cuts = [(o, n) for o in self.openings for n in range(1, len(o))]
        ends += [len(text) - n for o, n in cuts if text.endswith(o[:n])]
        return text[: min(ends)]

    def _arguments(self, name: str, given: Mapping[str, JSON] | str) -> str:
        """The arguments as JSON. A plain text becomes the tool's first parameter."""
        if not isinstance(given, str):
            return json.dumps(given)
        known = (self.tools.get(name) or {}).get("parameters", {}).get("properties", {})
        return json.dumps({next(iter(known), "input"): given})


@dataclass(eq=False)
class Choice:
    """One answer while it is decoded: tokens in, text out. It ends when the model stops, at a limit, or when a stop text is
    complete."""

    decoder: Decoder
    index: int = 0
    stops: tuple[str, ...] = ()
    limit: int = 1 << 62  # in tokens
    tools: CallReader | None = None
    ids: list[int] = field(default_factory=list)
    sent: int = 0  # characters sent so far
    spelled: int = 0  # characters that the tokens so far complete
    ended: str = ""  # stop | length | cut: ended before the model did

    def __post_init__(self) -> None:
        self.whole = Delta(self.index)  # everything fed so far

    def feed(self, ids: Sequence[int], logprobs: Sequence[float], finish: str) -> Delta:
        """Add tokens and return what is new. The token that completes a stop text belongs to the answer; the text ends before the
        stop text."""
        first, named, calls = len(self.ids), finish, tuple[Call, ...]()
        self.ids += ids
        if len(self.ids) > self.limit:
            self.ids, named, finish = self.ids[: self.limit], "length", "cut"
        whole, offsets = self.decoder.decode(self.ids)
        if not named:  # marks at the end may yet become a character
            whole = whole.rstrip(REPLACEMENT)
            offsets = np.minimum(offsets, len(whole))
        text = whole
        if (place := self._stop(whole)) is not None:
            count = int(np.searchsorted(offsets, place[1])) + 1
            finish = "cut" if count < len(self.ids) or finish != "stop" else finish
            text, named = whole[: place[0]], "stop"
            self.ids, offsets = self.ids[:count], offsets[:count]
        if self.tools and named:
            text, calls = self.tools.read(text)
        elif not named:
            held = max((len(stop) - 1 for stop in self.stops), default=0)
            text = text[: max(self.sent, len(text) - held)]
            text = self.tools.visible(text) if self.tools else text
        new = self.ids[first:]
        bounds = [self.spelled, *offsets[first:].tolist()]
        delta = Delta(self.index, text[self.sent :], new, list(logprobs)[: len(new)])
        delta.start, delta.tokens = self.spelled, self._tokens(new, whole, bounds)
        self.spelled = bounds[-1]
        delta.calls, delta.finish = calls, "tool_calls" if calls else named
        self.sent, self.ended = max(self.sent, len(text)), finish
        self.whole.add(delta)
        return delta

    def _stop(self, text: str) -> tuple[int, int] | None:
        """Start and end of the first stop text in `text`."""
        at = ((text.find(stop, max(0, self.sent - len(stop))), stop) for stop in self.stops)
        return min(((place, place + len(stop)) for place, stop in at if place >= 0), default=None)

    def _tokens(self, ids: Sequence[int], text: str, bounds: Sequence[int]) -> list[str]:
        """The characters that each token completes. A control token gives its name."""
        tokenizer = self.decoder.tokenizer
        special = set(tokenizer.all_special_ids)
        named = [str(tokenizer.convert_ids_to_tokens(i)) if i in special else "" for i in ids]
        spans = zip(named, bounds[:-1], bounds[1:], strict=True)
        return [name or text[start:end] for name, start, end in spans]

    def segment(self, reply: Segment) -> Segment:
        """Cut the reply at the end of the answer. Tokens that were sampled after it are dropped."""
        if self.ended != "cut":
            return reply
        count = len(self.ids)
        text, offsets = self.decoder.decode(self.ids)
        assert reply.logprobs is not None and reply.versions is not None
        logprobs, versions = reply.logprobs[:count], reply.versions[:count]
        return Segment(reply.ids[:count], text, True, logprobs, offsets, versions, "cut")
