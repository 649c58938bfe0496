"""The tools of one episode: reads the calls of a turn, makes them, and returns the results.

Nothing that a model writes or a tool does ends the episode: errors become observations, and are counted.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Callable, Sequence
from inspect import isawaitable
from typing import Any

from posttrain.data.calls import Call, Format, calls, explained, format_of, observation, shows_tools
from posttrain.errors import STOPS, named, require
from posttrain.rewards._loop import step_ends
from posttrain.system.threads import in_thread
from posttrain.tasks.base import FAULTS, Generate
from posttrain.tasks.tools.base import Malformed, Signature, Tool, ToolError, ToolFailure
from posttrain.tasks.tools.function import give
from posttrain.types import JSON, Message

MAX_OUTPUT = 2000  # characters of a result that the model reads
MAX_CALLS = 16  # calls in one turn


class Toolbox:
    """Tools of one episode, called in the form of the policy's chat template, or in that of `form`.

    counts  tool/calls, and of these tool/malformed, tool/unknown, tool/error, tool/timeout, tool/cut (longer than `max_output`)
    """

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any]],
        generate: Generate,
        form: Format | None = None,
        max_output: int = MAX_OUTPUT,
    ):
        self.generate, self.max_output = generate, max_output
        self.form: Format = form or format_of(generate.template)
        own = [tool if isinstance(tool, Tool) else give(tool) for tool in tools]
        begun = [tool.begin() for tool in own]
        self.signatures = {one.name: one for one in map(Signature.of, begun)}
        require(len(self.signatures) == len(own), "tools need different names")
        self.functions = dict(zip(self.signatures, zip(own, begun, strict=True), strict=True))
        self.final: str | None = None  # the final answer, once it is given

    @property
    def schemas(self) -> list[JSON] | None:
        """Return the schemas that the chat template shows; None if it does not show them."""
        return [one.schema for one in self.signatures.values()] if shows_tools(self.form) else None

    def prompt(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages, with a description of the tools if the template does not show one."""
        return explained(self.form, messages, list(self.signatures.values()))

    async def answer(self, text: str) -> list[Message]:
        """Return the tools' answers to a turn, in the order of its calls; empty if it has none or gives the final answer."""
        found = calls(self.form, text, self.functions)
        said = [await self.call(call) for call in found[:MAX_CALLS]]
        if self.final is not None:
            return []
        if len(found) > MAX_CALLS:
            said[-1] += f"\n(the other {len(found) - MAX_CALLS} calls of this turn were not made)"
        return [observation(self.form, one) for one in said]

    async def call(self, call: Call) -> str:
        """Return the result of a call, in at most `max_output` characters."""
        self.generate.count("tool/calls")
        try:
            if call.problem:
                raise Malformed(call.problem)
            if call.name not in self.functions:
                self.generate.count("tool/unknown")
                known = ", ".join(self.functions)
                return f"error: there is no tool {call.name[:40]}; there are {known}"
            tool, function = self.functions[call.name]
            arguments = self.signatures[call.name].bind(call.arguments)
        except Malformed as problem:
            self.generate.count("tool/malformed")
            return f"error: {problem}"
        text = await self.result(tool, function, arguments)
        if len(text) <= self.max_output:
            return text
        self.generate.count("tool/cut")
        left = len(text) - self.max_output
        return f"{text[: self.max_output]}\n... ({left:,} more characters were left out)"

    async def result(self, tool: Tool, function: Callable[..., Any], arguments: JSON) -> str:
        try:
            async with asyncio.timeout(tool.seconds) as limit:
                found = _in_thread(function, arguments) if tool.blocks else function(**arguments)
                text = _as_text(await found if isawaitable(found) else found)
                self.final = text if tool.ends else self.final
                return text
        except (*STOPS, ToolFailure):
            raise
        except FAULTS as error:  # a tool may be user code
            if step_ends(error):
                raise
            if isinstance(error, TimeoutError) and limit.expired():
                self.generate.count("tool/timeout")
                return f"error: no result within {tool.seconds:g} s"
            self.generate.count("tool/error")
            return f"error: {error if isinstance(error, ToolError) else named(error)}"


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


async def _in_thread(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function in a thread of its own."""
    context = contextvars.copy_context()

    def work() -> Any:
        try:
            return context.run(function, **arguments)
        except BaseException as raised:
            if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
                raise
            # a future of asyncio cannot hold other kinds of errors
            raise ToolError(type(raised).__name__) from raised

    found = await asyncio.wrap_future(in_thread(work, "tool"))
    return await found if isawaitable(found) else found
