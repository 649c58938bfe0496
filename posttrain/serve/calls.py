"""Calls of tools in an answer, as the wire has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.data.calls import OPEN, PYTHON_TAG, Format, calls
from posttrain.serve.wire import Call
from posttrain.types import JSON


@dataclass(frozen=True, slots=True)
class CallReader:
    """Reads the calls of tools that a request has, in the format of a chat template.

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
        """What a call begins with; a whole turn of JSON also does in Llama's."""
        tags = tuple(f"<{name}>" for name in self.tools)
        return {"hermes": (OPEN,), "llama3": (PYTHON_TAG,), "tag": tags}.get(self.form, ())

    def read(self, text: str) -> tuple[str, tuple[Call, ...]]:
        """What comes before the calls, and the calls. Where one of them cannot be read, all is text."""
        found = calls(self.form, text, self.tools)
        if not found or any(call.problem for call in found):
            return text, ()
        made = [Call(call.name, self._arguments(call.name, call.arguments)) for call in found]
        return self.visible(text).rstrip(), tuple(made)

    def visible(self, text: str) -> str:
        """As much of a text as cannot be the beginning of a call."""
        if self.form == "llama3" and text.lstrip()[:1] == "{":
            return ""
        ends = [len(text), *(end for o in self.openings if (end := text.find(o)) >= 0)]
        cuts = [(o, n) for o in self.openings for n in range(1, len(o))]
        ends += [len(text) - n for o, n in cuts if text.endswith(o[:n])]
        return text[: min(ends)]

    def _arguments(self, name: str, given: Mapping[str, JSON] | str) -> str:
        """As JSON; a text is that of the tool's first parameter."""
        if not isinstance(given, str):
            return json.dumps(given)
        known = (self.tools.get(name) or {}).get("parameters", {}).get("properties", {})
        return json.dumps({next(iter(known), "input"): given})
