"""A server in a thread with a tiny model, or with answers that a test writes."""

from __future__ import annotations

import json
import string
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import openai
from sampler_for_tests import ScriptedSampler, completion

from posttrain.models.policy import Policy, wrap_model
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.serve.app import Limits, application
from posttrain.serve.models import Models
from posttrain.serve.server import Address, make_server
from posttrain.types import Completion, Request

CHARACTERS = string.printable[:95] + "\n"
LIMITS = Limits()
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
# like the one of tiny models, with tools, calls and their results
TOOL_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_policy(seed: int = 0) -> Policy:
    tokenizer = character_tokenizer(CHARACTERS)
    return wrap_model(tiny_model(tokenizer, "nano", seed), tokenizer, (tokenizer.eos_token_id,))


@dataclass
class Served:
    """A running server, and ways to ask it."""

    url: str
    models: Models
    token: str = ""

    def client(self, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.token or "none", **more)

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> HTTPResponse:
        connection = HTTPConnection(self.url.removeprefix("http://"), timeout=30)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, headers)
        return connection.getresponse()

    def post(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any]:
        response = self.send("POST", path, body, **headers)
        return response.status, json.loads(response.read())

    def idle(self) -> bool:
        """Whether nothing is decoded any more, soon."""
        for _ in range(250):
            if not any(model.tickets for model in self.models.thread.models):
                return True
            time.sleep(0.02)
        return False


def serve(policy: Policy, limits: Limits = LIMITS, token: str = "", **more: Any) -> Iterator[Served]:
    models = Models({"tiny": 2048}, lambda name: policy, "tiny", **more)
    with make_server(application(lambda _: models, limits), Address(port=0, token=token), limits).in_thread() as url:
        yield Served(url, models, token)
    models.close()


class Scripted(ScriptedSampler):
    """Writes a text, one token a poll."""

    text = ""

    def __init__(self, policy: Policy, *_: Any, **__: Any):
        ids = [*policy.tokenizer(self.text)["input_ids"], policy.tokenizer.eos_token_id]
        super().__init__(lambda request: completion(ids))
        self.count: dict[int, int] = {}
        self.sessions: dict[int, None] = {}
        self.cancelled: list[int] = []

    def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
        for request in self.waiting:
            self.count[request.session] = self.count.get(request.session, 0) + 1
        done = [r for r in self.waiting if self.count[r.session] >= len(self.reply(r).ids)]
        self.waiting = [r for r in self.waiting if r not in done]
        return [(request, self.reply(request)) for request in done]

    def written(self, sessions: Collection[int]) -> dict[int, Completion]:
        rows = [r for r in self.waiting if r.session in sessions]
        return {r.session: completion(self.reply(r).ids[: self.count[r.session]], finish="") for r in rows}

    def cancel(self, sessions: Collection[int]) -> None:
        self.cancelled += sessions
        super().cancel(sessions)
