"""Trains an existing agent: a program that talks with the policy through OpenAI's interface, unchanged.

    task = Outside("python agent.py", Prompts("questions.jsonl", reward="math"))

Each episode starts the command, without a shell, with OPENAI_BASE_URL and OPENAI_API_KEY in its environment and the problem as
one line of JSON on its input. The policy samples every turn that the program asks for; training uses the sampled ids.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from posttrain.errors import Count, Positive, UserError, require
from posttrain.tasks._nested import Nested
from posttrain.tasks.base import Generate, Task
from posttrain.types import JSON, Problem, Rollout, Score

KEPT = 1 << 16  # the last bytes of a program's output that are kept
CLOSE_SECONDS = 1.0  # to read what a program has printed, if others hold its pipes open


class AgentFailed(Exception):
    """The program failed: the episode is not scored."""


@dataclass(frozen=True)
class Outside(Nested):
    """Problems are those of `task`. `reward` is that task's score of the last answer (`task`), or the number in the last line
    that the program prints (`printed`; the program then gets the answer too). If a program fails, is late (`max_seconds`) or
    sends no request, the episode has no score and is counted. If it sends more than `max_calls` requests, further ones are
    refused, and the episode is scored."""

    command: str
    task: Task
    # the task's own score of the last answer, or the number that the program prints last
    reward: Literal["task", "printed"] = "task"
    max_calls: Count = 64
    max_seconds: Positive = 300.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(bool(self.words), "give a command, such as 'python agent.py'")

    @property
    def words(self) -> list[str]:
        try:
            return shlex.split(self.command)
        except ValueError as error:
            raise UserError(f"outside: {self.command!r} is not a command line ({error})") from None

    def ready(self) -> tuple[str, ...]:
        needs = "the task outside needs the server's packages: pip install 'posttrain[serve]'"
        require(all(map(find_spec, ("starlette", "uvicorn"))), needs)
        program = self.words[0]
        self.check(shutil.which(program) is not None, f"there is no program {program!r}")
        return self.task.ready()

    def observation_roles(self, template: str) -> tuple[str, ...]:
        # its requests are not known in advance; a conversation that the template cannot continue begins anew
        return ()

    @property
    def scores(self) -> bool:
        return self.reward == "printed" or self.task.scores

    async def run(self, problem: Problem, generate: Generate) -> Sequence[Rollout]:
        from posttrain.tasks._served import ServedEpisode, episode_server

        episode, failure, line = ServedEpisode(generate, self.max_calls), "", ""
        with episode_server().serving(episode) as (url, key):
            given = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
            try:
                line = await self._run(self._problem(problem), os.environ | given)
            except AgentFailed as error:
                failure = str(error)
            finally:
                await episode.close()
        generate.count("agent/calls", episode.calls)
        if not episode.turns:
            unanswered = f"none of the agent's {episode.calls} calls could be answered"
            never = "the agent never called the model"
            raise AgentFailed(failure or (unanswered if episode.calls else never))
        score = Score.failed(failure, "agent failed") if failure and not episode.ended else None
        if score is None and self.reward == "printed":
            score = _printed(line, episode.ended)
        return episode.rollouts(generate.rollout(score, episode.ended, episode.final))

    def _problem(self, problem: Problem) -> bytes:
        tree: dict[str, JSON] = {"id": problem.id, "question": problem.question}
        tree["messages"] = [message.row() for message in self.task.prompt(problem)]
        if self.reward == "printed":
            tree |= {"answer": problem.answer, "facts": problem.facts}
        return json.dumps(tree).encode() + b"\n"

    async def _run(self, given: bytes, environment: dict[str, str]) -> str:
        """Run the program until it exits, and return the last line that it printed. Processes that it left in its group are
        ended."""
        try:
            transport, program = await asyncio.get_running_loop().subprocess_exec(
                _Program, *self.words, env=environment, start_new_session=True
            )
        except OSError as error:
            raise AgentFailed(f"the agent could not be started: {error}") from None
        try:
            stdin: Any = transport.get_pipe_transport(0)
            stdin.write(given)  # it may not read it
            stdin.close()
            done, _ = await asyncio.wait([program.exited], timeout=self.max_seconds)
            if not done:
                raise AgentFailed(f"the agent was not done within {self.max_seconds:g} s")
        finally:
            pid = transport.get_pid()
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL) if hasattr(os, "killpg") else transport.kill()
            await asyncio.wait([program.closed], timeout=CLOSE_SECONDS)
            transport.close()
        if code := transport.get_returncode():
            complaint = program.last_line(2) or "it wrote no error"
            raise AgentFailed(f"the agent ended with {code}: {complaint}")
        return program.last_line(1)


class _Program(asyncio.SubprocessProtocol):
    """Keeps the end of what a program prints. asyncio's `wait` would wait for its pipes too, which a process that the program
    leaves behind holds open."""

    def __init__(self) -> None:
        loop, self.kept = asyncio.get_running_loop(), {1: b"", 2: b""}
        self.exited, self.closed = loop.create_future(), loop.create_future()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.kept[fd] = (self.kept[fd] + data)[-KEPT:]

    def process_exited(self) -> None:
        self.exited.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set_result(None)

    def last_line(self, fd: int) -> str:
        """Return the last non-empty line."""
        lines = self.kept[fd].decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _printed(line: str, outcome: str) -> Score:
    with suppress(ValueError):
        if math.isfinite(value := float(line)):
            return Score(value, outcome=outcome)
    return Score.failed(f"the agent's last line is no number: {line[:100]!r}", "no reward")
