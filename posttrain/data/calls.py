"""How a call is written, as the chat template of a model teaches it, and how its result is read.

hermes  <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>  Qwen and others; the template shows the tools. Some of them, such
        as Qwen2.5-Coder, write the JSON in a fenced block or alone: read too, where the turn has no tag and a tool has that name
llama3  {"name": "add", "parameters": {"a": 1}}                        the whole turn; the template shows the tools
tag     <add>1</add>                                                   any model; the prompt explains it
call    add(1)=                                                        tiny models: the end of a turn, and nothing is explained
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.types import JSON, THINK, THINK_END, Message

Format = Literal["hermes", "llama3", "tag", "call"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
HERMES = re.compile(rf"{OPEN}(.*?)({CLOSE}|\Z)", re.DOTALL)
# a second opening line is read as the end of the first, so this is linear in the text
FENCED = re.compile(r"^```(?:json)?[ \t]*\n(.*?)\n```", re.DOTALL | re.MULTILINE)
PYTHON_TAG = "<|python_tag|>"
EXPLAINED = """You can use tools. To call one, end your turn with its argument between its tags, such as <{0}>...</{0}>; what it
returns follows. The tools:
{1}"""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that a turn holds; `problem` says why it cannot be read."""

    name: str = ""
    arguments: Mapping[str, JSON] | str = ""
    problem: str = ""


def format_of(template: str) -> Format:
    """The format that a chat template teaches; `tag` where it teaches none."""
    if OPEN in template:
        return "hermes"
    return "llama3" if "ipython" in template and "parameters" in template else "tag"


def shows_tools(form: Format) -> bool:
    """Whether the chat template itself tells the model of its tools, and has a role for what they return."""
    return form in ("hermes", "llama3")


def explained(form: Format, prompt: Sequence[Message], tools: Sequence[Any]) -> list[Message]:
    """The prompt with what the model must know to call tools, in front of its last message. A tool has a name, and its text describes
    it."""
    if form != "tag" or not tools:
        return list(prompt)
    text = EXPLAINED.format(tools[0].name, "\n".join(f"- {tool}" for tool in tools))
    *before, last = prompt
    return [*before, Message(last.role, f"{text}\n\n{last.content}", last.more)]


def observation(form: Format, text: str) -> Message:
    """What a tool returned, as the model reads it."""
    if shows_tools(form):
        return Message("tool", text)
    return Message("user", f"<output>\n{text}\n</output>" if form == "tag" else text)


def calls(form: Format, text: str, names: Collection[str]) -> list[Call]:
    """The calls that a turn makes after its reasoning, in their order."""
    said = text.rpartition(THINK_END)[2]
    if THINK in said:  # still thinking
        return []
    return {"hermes": _hermes, "llama3": _llama3, "tag": _tag, "call": _call}[form](said, names)


def _hermes(text: str, names: Collection[str]) -> list[Call]:
    if OPEN not in text:
        alone = text.strip()
        bodies = [alone] if alone.startswith("{") else FENCED.findall(text)
        called = [b for b in bodies if re.search(r'"name"\s*:', b) and '"arguments"' in b]
        read = [_json(body, "arguments") for body in called]
        return [call for call in read if call.problem or call.name in names]
    return [
        _json(body, "arguments") if end else Call(problem=f"{OPEN} is not closed with {CLOSE}")
        for body, end in HERMES.findall(text)
    ]


def _llama3(text: str, names: Collection[str]) -> list[Call]:
    said = text.strip().removeprefix(PYTHON_TAG).strip()
    return [_json(said, "parameters")] if said.startswith("{") else []


def _json(body: str, key: str) -> Call:
    """{"name": ..., "arguments": {...}}; arguments may be JSON within a string, as OpenAI's interface has them. A line break in a
    string need not be escaped."""
    try:
        tree = json.loads(body, strict=False)
        arguments = tree.get(key, tree.get("arguments", tree.get("parameters", {})))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(tree["name"], str) and isinstance(arguments, dict):
            return Call(tree["name"], arguments)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        pass
    return Call(problem=f'a call is {{"name": "...", "{key}": {{...}}}} in JSON')


def _tag(text: str, names: Collection[str]) -> list[Call]:
    known = "|".join(map(re.escape, names))
    found = [
        Call(name, _object(body.strip())) if end else Call(problem=f"<{name}> is not closed")
        for name, body, end in re.findall(rf"<({known})>(.*?)(</\1>|\Z)", text, re.DOTALL)
    ]
    end = text.rstrip()
    name = end[end.rfind("</") + 2 : -1] if end.endswith(">") else ""
    other = name.isidentifier() and name not in names and f"<{name}>" in end
    return found or ([Call(name)] if other else [])


def _object(text: str) -> Mapping[str, JSON] | str:
    """Arguments by name where they are written as a JSON object, else the text itself."""
    try:
        tree = json.loads(text) if text.startswith("{") else text
    except (ValueError, RecursionError):
        return text
    return tree if isinstance(tree, dict) else text


def _call(text: str, names: Collection[str]) -> list[Call]:
    end = text.rstrip()
    if not end.endswith("="):
        return []
    depth = place = 0
    for place in range(len(end) - 2, -1, -1):
        depth += {")": 1, "(": -1}.get(end[place], 0)
        if depth <= 0:
            break
    first = place
    while first and (end[first - 1].isalnum() or end[first - 1] == "_"):
        first -= 1
    if end[place : place + 1] != "(" or depth or first == place or not end.endswith(")="):
        return [Call(problem="a call is name(argument)=")] if "(" in end else []
    return [Call(end[first:place], end[place + 1 : -2])]
