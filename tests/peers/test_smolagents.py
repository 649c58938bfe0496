"""An agent framework of the package index, unchanged, against the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sampler_for_tests import completion
from serving_for_tests import TOOL_TEMPLATE, Scripted, Served, make_policy, serve

pytestmark = pytest.mark.peers

REPLIES = (
    '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>',
    '<tool_call>{"name": "final_answer", "arguments": {"answer": "7"}}</tool_call>',
)


class InTurns(Scripted):
    """A call, then the final answer."""

    def __init__(self, policy: Any, *_: Any, **__: Any):
        super().__init__(policy)
        ids = [[*policy.tokenizer(text)["input_ids"], policy.tokenizer.eos_token_id] for text in REPLIES]
        self.reply = lambda request: completion(ids[min(self.requests.index(request), 1)])


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr("posttrain.serve.models.Engine", InTurns)
    policy = make_policy()
    policy.tokenizer.chat_template = TOOL_TEMPLATE
    policy.model.config.max_position_embeddings = 1 << 16  # its system prompt is long, and a character a token
    yield from serve(policy)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_of_smolagents_calls_a_tool_and_answers(served: Served, stream: bool) -> None:
    smolagents = pytest.importorskip("smolagents")

    @smolagents.tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one
            b: the other
        """
        return a + b

    model = smolagents.OpenAIServerModel("tiny", api_base=f"{served.url}/v1", api_key="none")
    agent = smolagents.ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=0, stream_outputs=stream)
    assert agent.run("What is 3+4?") == "7"
    step = agent.memory.steps[1]
    assert step.tool_calls[0].arguments == {"a": 3, "b": 4} and "7" in step.observations
    assert step.token_usage.input_tokens > 1000 and step.token_usage.output_tokens == len(REPLIES[0]) + 1
