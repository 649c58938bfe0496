"""Environments of the package verifiers (v1 interface), by the id of their taskset (`verifiers:gsm8k-v1`).

    task = Verifiers("textarena", {"taskset": {"game": "Hangman-v0"}})

Needs the package: pip install 'posttrain[verifiers]'. Environment, agents, stop conditions and rewards run unchanged, in a
thread with its own event loop, so blocking code there delays no sampler. The program of an agent is a chat loop there: the
policy answers its requests, which are kept as ids.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from types import ModuleType
from typing import Any, ClassVar

from posttrain.errors import STOPS, Count, Positive, UserError
from posttrain.tasks._packaged import packaged
from posttrain.tasks._procedural import TEST_BUCKETS, require_split
from posttrain.tasks.base import Generate, Task
from posttrain.trust import active
from posttrain.types import JSON, Problem, Rollout, Score

HARNESS = "posttrain_chat"
MANY = 4  # requests per turn that an agent may have; requests beyond its limit are refused
# for a turn, which waits for the turns of others; the episode has its own limit
TURN_SECONDS = 86_400.0
OUTCOMES = {"max_turns": "turn limit"}


class EnvironmentFailed(Exception):
    """The environment failed: the episode is not scored."""


@dataclass(frozen=True)
class Verifiers(Task):
    """`taskset` is an id as `eval ID` takes it, `config` the block `[env]` of its configuration. Problems are the first `tasks`
    tasks; every fifth is held out. Every agent is a role with its own rollouts, scored by the reward of its trace; agents that
    the environment does not train (a judge) are left out. An agent with a `client` in `config` is another model."""

    shorthand: ClassVar[str] = "taskset"
    verifiable = False

    taskset: str
    config: Mapping[str, JSON] = field(default_factory=dict)  # the block [env] of its configuration
    max_turns: Count = 16  # turns of an agent in an episode
    max_seconds: Positive = 300.0  # of an episode
    tasks: Count = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(bool(self.taskset), "give a taskset, such as verifiers:gsm8k-v1")

    def problems(self, split: str, level: int | None = None) -> list[Problem]:
        require_split(split)
        active().require_package(self.taskset)
        found = [
            Problem(f"{self.taskset}/{n}", _text(task.data.prompt), facts={"index": n})
            for n, task in enumerate(_tasks(self.taskset, self._settings, self.tasks))
            if (n % TEST_BUCKETS == 0) == (split == "test")
        ]
        self.check(bool(found), f"{self.taskset} has no task for {split}")
        return found

    @property
    def _settings(self) -> str:
        return json.dumps(dict(self.config), sort_keys=True)

    def ready(self) -> tuple[str, ...]:
        packaged("uvicorn", "verifiers")
        self.problems("test")
        return ()

    def observation_roles(self, template: str) -> tuple[str, ...]:
        return ()  # a conversation that the template cannot continue begins anew

    def score(self, problem: Problem, response: str) -> Score:
        return Score(0.0)

    def demonstration(self, problem: Problem) -> str:
        raise UserError("verifiers has no worked episodes; it can be trained by reward only")

    async def run(self, problem: Problem, generate: Generate) -> list[Rollout]:
        from posttrain.tasks._served import ServedEpisode, episode_server

        names = agents(self.taskset, self._settings)
        alone = len(names) == 1
        sessions = {n: generate if alone else generate.session(n) for n in names}
        served = {n: ServedEpisode(own, MANY * self.max_turns) for n, own in sessions.items()}
        task = _tasks(self.taskset, self._settings, self.tasks)[int(problem.facts["index"])]
        try:
            with ExitStack() as stack:
                server = episode_server()
                urls = {n: stack.enter_context(server.serving(s))[0] for n, s in served.items()}
                playing = _play(task, self.seats(urls))
                there = asyncio.run_coroutine_threadsafe(playing, _loop(os.getpid()))
                async with asyncio.timeout(self.max_seconds):
                    episode = await asyncio.wrap_future(there)
        finally:
            for one in served.values():
                await one.close()
        rollouts = [r for name, one in served.items() for r in _rollouts(episode, name, one)]
        if not rollouts:
            said = _errors([e for one in (episode, *episode.traces) for e in one.errors])
            raise EnvironmentFailed(said or "no agent that is trained was asked")
        return rollouts

    def seats(self, urls: Mapping[str, str]) -> JSON:
        """Return the environment's configuration with the policy in all seats that have no model of their own."""
        tree = _tree(self.taskset, self._settings)
        for name, url in urls.items():
            seat = {"max_turns": self.max_turns, **tree.get(name, {})}
            seat.setdefault("runtime", {"type": "subprocess"})
            seat.setdefault("harness", {"id": HARNESS})
            client = {"type": "eval", "base_url": url, "api_key_var": "POSTTRAIN_NO_KEY"}
            tree[name] = seat | {"client": client, "model": "policy"}
        return tree


def _tree(taskset: str, settings: str) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(settings)
    return tree | {"taskset": {"id": taskset, **tree.get("taskset", {})}}


@lru_cache(maxsize=8)
def _tasks(taskset: str, settings: str, count: int) -> list[Any]:
    loaders = _loaders()
    try:
        config = loaders.resolve_env_config(_tree(taskset, settings))
        return list(islice(iter(loaders.load_taskset(config.taskset)), count))
    except STOPS:
        raise
    except Exception as error:  # its own check of the configuration, or an error in its code
        raise UserError(f"verifiers: {taskset} cannot be loaded: {str(error)[:300]}") from None


@lru_cache(maxsize=8)
def agents(taskset: str, settings: str) -> tuple[str, ...]:
    """Return the seats that the policy takes."""
    _tasks(taskset, settings, 1)
    config = _loaders().resolve_env_config(_tree(taskset, settings))
    fields = packaged("verifiers.v1.configs.agent", "verifiers").agent_config_fields(config)
    return tuple(name for name, seat in fields.items() if seat.client is None)


@lru_cache(maxsize=1)
def _loaders() -> Any:
    """Return the loaders that find tasksets and environments by id, after registering this package's harness."""
    packaged("verifiers.v1", "verifiers")
    sys.modules[HARNESS] = _harness()
    return packaged("verifiers.v1.utils.loaders", "verifiers")


@lru_cache(maxsize=1)
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the loop in which episodes run: one thread for all, as verifiers expects; it ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="verifiers").start()
    return loop


async def _play(task: Any, settings: JSON) -> Any:
    """Run one episode."""
    vf, loaders = packaged("verifiers.v1", "verifiers"), _loaders()
    env = loaders.load_environment(loaders.resolve_env_config(settings))
    async with env.serving():
        return await env.run_episode(task, vf.ModelContext("policy", vf.EvalClientConfig()))


def _rollouts(episode: Any, name: str, served: Any) -> list[Rollout]:
    """Return the rollouts of an agent. Its runs come one after the other, and so do their conversations."""
    traces = [trace for trace in episode.traces if trace.agent.name == name]
    if not served.turns or (traces and not traces[0].agent.trainable):
        return []
    made: list[Rollout] = served.rollouts(served.generate.rollout(Score(0.0)))
    if not traces or (episode.errors and not served.ended):
        lost = Score.failed(_errors(episode.errors) or "no trace", "env failed")
        return [replace(rollout, score=lost) for rollout in made]
    if len(traces) > 1 and len(traces) != len(made):
        raise EnvironmentFailed(f"{len(made)} conversations of {len(traces)} runs of {name}")
    each = traces if len(traces) > 1 else traces * len(made)
    scores = [_score(trace, served.ended) for trace in each]
    return [replace(rollout, score=score) for rollout, score in zip(made, scores, strict=True)]


def _score(trace: Any, ended: str) -> Score:
    outcome = ended or OUTCOMES.get(trace.stop_condition, "")
    if not trace.ok and not ended:
        return Score.failed(_errors(trace.errors), "env failed")
    parts = {key: float(one.value) for key, one in trace.rewards.items() if one is not None}
    value = float(trace.reward)
    if not math.isfinite(value):
        return Score.failed(f"a reward of {value}")
    return Score(value, parts if len(parts) > 1 else {}, outcome=outcome)


def _errors(errors: Any) -> str:
    return "; ".join(f"{error.type}: {error.message}" for error in errors)[:500]


def _text(prompt: Any) -> str:
    if prompt is None or isinstance(prompt, str):
        return prompt or "(the environment speaks first)"
    return "\n".join(str(message.content) for message in prompt)


def _harness() -> ModuleType:
    """Return a module with the program of an agent, in the form that verifiers loads: a chat loop in this process, with the
    task's MCP tools."""
    vf = packaged("verifiers.v1", "verifiers")
    wire = packaged("verifiers.v1.dialects.chat", "verifiers").message_to_wire
    mcp = packaged("verifiers.v1.harnesses.utils.mcp", "verifiers")
    openai = packaged("openai", "verifiers")

    class Chat(vf.Harness[vf.HarnessConfig]):  # type: ignore[name-defined, misc]
        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            urls: Any,
            data: Any,
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            said: list[JSON] = [{"role": "system", "content": system}] if system else []
            text = isinstance(prompt, str)
            said += [{"role": "user", "content": prompt}] if text else map(wire, prompt or ())
            async with AsyncExitStack() as stack:
                made = openai.AsyncOpenAI(
                    base_url=endpoint, api_key=secret, max_retries=0, timeout=TURN_SECONDS
                )
                client = await stack.enter_async_context(made)
                limit = self.config.tool_timeout
                named = {name: {"url": url, "timeout": limit} for name, url in urls.items()}
                tools, known, servers = await mcp.connect_mcp({"mcpServers": named}, stack)
                while True:
                    more = {"tools": tools} if tools else {}
                    ask = client.chat.completions.create
                    found = await ask(model=ctx.model, messages=said, **more)
                    reply = found.choices[0].message
                    said.append(reply.model_dump(exclude_none=True))
                    if not reply.tool_calls:
                        return vf.ProgramResult(exit_code=0, stdout=reply.content or "", stderr="")
                    for call in reply.tool_calls:
                        content = await _called(mcp, servers, known, call.function)
                        said.append({"role": "tool", "tool_call_id": call.id, "content": content})

    module = ModuleType(HARNESS)
    module.__dict__.update(Chat=Chat, __all__=["Chat"])
    return module


async def _called(mcp: Any, servers: Any, known: Any, function: Any) -> Any:
    """Return the result of a tool, or what was wrong with the call, for the model to read."""
    try:
        arguments = json.loads(function.arguments or "{}")
        return await mcp.call_mcp(servers, known, function.name, arguments)
    except KeyError:
        return f"error: there is no tool {function.name}; there are {', '.join(known)}"
    except Exception as error:
        return f"error: {error}"[:500]
