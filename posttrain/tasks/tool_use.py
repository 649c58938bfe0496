"""Any single-turn task with tools: the policy calls them as often as it wants, then answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from posttrain.data.calls import CLOSE, OPEN, Format, explained, format_of, observation, shows_tools
from posttrain.errors import Count, NotNegative, Whole
from posttrain.tasks._nested import Nested
from posttrain.tasks.base import EpisodeEnd, Generate, Limits, Task
from posttrain.tasks.tools.base import Signature, Tool
from posttrain.tasks.tools.python import Python
from posttrain.tasks.tools.toolbox import MAX_OUTPUT, Toolbox
from posttrain.types import JSON, Message, Problem, Rollout


@dataclass(frozen=True)
class ToolUse(Nested):
    """Problems, prompts and scores are those of `task`. The final answer is scored: the argument of the tool `answer`, else the
    first turn without a call. An episode that ends at a limit after a call has no answer. `format` is how calls are written;
    with auto, as in the chat template (data/calls.py)."""

    task: Task
    tools: tuple[Tool, ...]
    format: Literal["auto", "hermes", "llama3", "tag", "call"] = "auto"
    instruction: str = ""  # a last paragraph of the prompt: how to use the tools
    reminder: str = ""  # a user message after the tool results of a turn
    max_turns: Count = 8
    max_tokens: Whole = 0  # sampled tokens in all turns of an episode; 0: as many as fit
    max_thinking: Whole = 0  # sampled tokens in reasoning blocks; 0: no limit
    max_seconds: NotNegative = 0.0  # the time limit of an episode; 0: none
    max_output: Count = MAX_OUTPUT  # characters of a result that the model reads

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(bool(self.tools), "give at least one tool, such as calculator")

    async def run(self, problem: Problem, generate: Generate) -> Rollout:
        form: Format | None = None if self.format == "auto" else self.format
        box = Toolbox(self.tools, generate, form, self.max_output)
        after = [Message("user", self.reminder)] if self.reminder else []
        reply = await generate(box.prompt(self.prompt(problem)), tools=box.schemas)
        try:
            while said := await box.answer(reply.text):
                reply = await generate([*said, *after])
        # otherwise the text before the limit would be rewarded, and not count as solved
        except EpisodeEnd as end:
            return generate.rollout(outcome=end.outcome, answer="")
        return generate.rollout(answer=reply.text if box.final is None else box.final)

    def prompt(self, problem: Problem) -> tuple[Message, ...]:
        *before, last = self.task.prompt(problem)
        more = f"\n\n{self.instruction}" if self.instruction else ""
        return (*before, replace(last, content=f"{last.content}{more}"))

    def conversation(self, problem: Problem) -> tuple[Message, ...]:
        """If the task has a program for the problem and there is the tool python: a call of it, its output, and the answer.
        Problems without a program have no demonstration."""
        interpreter = any(isinstance(tool, Python) for tool in self.tools)
        known = type(self.task).program is not Task.program and interpreter
        if not known or self.format == "call":
            return super().conversation(problem)
        if (found := self.task.program(problem)) is None:
            return ()
        code, printed = found
        prompt, call = self.prompt(problem), Message("assistant", f"<python>\n{code}\n</python>")
        form: Format = "tag" if self.format == "tag" else "hermes"
        if form == "tag":
            prompt = tuple(explained(form, prompt, [*map(_signature, self.tools)]))
        else:  # as the chat template writes it
            function = {"name": "python", "arguments": {"code": code}}
            more: JSON = {"tool_calls": [{"type": "function", "function": function}]}
            call = Message("assistant", "", more)
        after = [Message("user", self.reminder)] if self.reminder else []
        said = Message("assistant", f"\\boxed{{{problem.answer}}}")
        return (*prompt, call, observation(form, f"{printed}\n"), *after, said)

    def _form(self, template: str) -> Format:
        return format_of(template) if self.format == "auto" else self.format

    def shown_tools(self, template: str) -> list[JSON] | None:
        every = [_signature(tool).schema for tool in self.tools]
        return every if shows_tools(self._form(template)) else None

    def limits(self, problem: Problem) -> Limits:
        return Limits(self.max_turns, self.max_tokens, self.max_thinking, self.max_seconds)

    def observation_roles(self, template: str) -> tuple[str, ...]:
        result = "tool" if shows_tools(self._form(template)) else "user"
        return (result, "user") if self.reminder and result != "user" else (result,)

    def tags(self, template: str) -> tuple[str, ...]:
        return (OPEN, CLOSE) if self._form(template) == "hermes" else ()

    def ready(self) -> tuple[str, ...]:
        lines = (*super().ready(), *(line for tool in self.tools for line in tool.ready()))
        names = [_signature(tool).name for tool in self.tools]
        self.check(len({*names}) == len(names), f"tools need other names than {', '.join(names)}")
        return lines


def _signature(tool: Tool) -> Signature:
    return Signature.of(tool.begin())
