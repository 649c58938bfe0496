"""Calls of tools in what a model wrote: Hermes and Qwen (`<tool_call>{...}</tool_call>`), and Llama 3 (a turn that is one object)."""

from __future__ import annotations

import json
import re

from posttrain.serve.wire import Call

TAG = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
OPENINGS = ("<tool_call>", "<|python_tag|>")


def parse_calls(text: str) -> tuple[str, tuple[Call, ...]]:
    """The text apart from its calls, and the calls. What cannot be read as one stays text.

    >>> said, calls = parse_calls('Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    >>> said, calls[0].name, calls[0].arguments
    ('Let me see.', 'add', '{"a": 1}')
    >>> parse_calls("<tool_call>{</tool_call>")
    ('<tool_call>{</tool_call>', ())
    """
    calls, rest, place = [], "", 0
    for found in TAG.finditer(text):
        call = _call(found[1])
        if call is not None:
            calls.append(call)
            rest, place = rest + text[place : found.start()], found.end()
    if calls:
        return (rest + text[place:]).rstrip(), tuple(calls)
    whole = _call(text.strip().removeprefix("<|python_tag|>"))
    return ("", (whole,)) if whole is not None else (text, ())


def visible(text: str) -> str:
    """As much of an unfinished text as cannot be the beginning of a call.

    >>> visible("Sure. <tool_"), visible(' {"name"'), visible("a < b")
    ('Sure. ', '', 'a < b')
    """
    if text.lstrip()[:1] == "{":
        return ""
    ends = [text.find(opening) for opening in OPENINGS]
    for opening in OPENINGS:
        starts = (len(text) - n for n in range(len(opening) - 1, 0, -1) if n <= len(text))
        ends += [at for at in starts if opening.startswith(text[at:])]
    return text[: min((end for end in ends if end >= 0), default=len(text))]


def _call(text: str) -> Call | None:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(tree, dict) or not isinstance(tree.get("name"), str):
        return None
    given = tree.get("arguments", tree.get("parameters", {}))
    return Call(tree["name"], given if isinstance(given, str) else json.dumps(given))
