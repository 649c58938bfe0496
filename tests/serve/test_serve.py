"""The server as clients see it: the `openai` package, and HTTP as curl sends it."""

from __future__ import annotations

import json
import re
import runpy
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from serving_for_tests import HI, TOOL_TEMPLATE, TOOLS, Scripted, Served, make_policy, serve
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from posttrain.data.chat import render_prompt
from posttrain.data.text import BYTE_ALPHABET, Decoder
from posttrain.engine.engine import Engine
from posttrain.models.attention import LAYOUT, Packed
from posttrain.models.policy import Policy
from posttrain.ops.logprobs import head_logits
from posttrain.serve import server as server_module
from posttrain.serve.app import Limits, application, permitted
from posttrain.serve.conversations import Choice
from posttrain.serve.models import Models
from posttrain.serve.server import Address, make_server
from posttrain.types import Message, Request, Sampling


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy()


@pytest.fixture(scope="module")
def served(policy: Policy) -> Iterator[Served]:
    yield from serve(policy)


def fresh_logprobs(policy: Policy, prompt: Sequence[int], reply: Sequence[int]) -> np.ndarray:
    """Log-probs of a reply by one forward pass over everything."""
    ids = torch.tensor([[*prompt, *reply]])
    with torch.no_grad():
        position = torch.arange(ids.shape[1])[None]
        hidden_TH = policy.hidden(ids, position, **{LAYOUT: Packed((0, ids.shape[1]), ids.device)})[0]
        logprob_TV = head_logits(hidden_TH, policy.head).log_softmax(-1)
    return np.array([float(logprob_TV[len(prompt) + n - 1, i]) for n, i in enumerate(reply)])


def test_the_openai_client_gets_text_ids_and_exact_logprobs(served: Served, policy: Policy) -> None:
    client = served.client()
    [model] = client.models.list().data
    assert model.id == "tiny" and model.max_model_len == 2048  # type: ignore[attr-defined]
    extra = {"return_token_ids": True}
    answer = client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=12, n=3, seed=5, logprobs=True, extra_body=extra
    )  # type: ignore[call-overload]
    prompt = answer.prompt_token_ids
    assert prompt == list(render_prompt(policy.tokenizer, [Message("user", "hi")]))
    assert len({c.message.content for c in answer.choices}) == 3 and [c.index for c in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert policy.tokenizer.decode(choice.token_ids, skip_special_tokens=True) == choice.message.content
        assert choice.finish_reason == ("stop" if choice.token_ids[-1] in policy.stop_ids else "length")
        found = [entry.logprob for entry in choice.logprobs.content]
        np.testing.assert_allclose(found, fresh_logprobs(policy, prompt, choice.token_ids), atol=1e-4)
    tokens = sum(len(c.token_ids) for c in answer.choices)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), tokens)


def test_the_page_asks_the_server_in_python_and_with_curl(served: Served, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    body = json.loads(re.findall(r"^curl .* -d '(.*)'$", page, re.MULTILINE)[0])
    asked = program.replace("http://127.0.0.1:8000", served.url).replace('"rl"', '"tiny"')
    (tmp_path / "page.py").write_text(asked.replace("seed=1", "seed=1, max_tokens=4"))
    runpy.run_path(str(tmp_path / "page.py"))
    status, answer = served.post({**body, "model": "tiny", "max_tokens": 4})
    assert status == 200 and answer["choices"][0]["message"]["role"] == "assistant"


def test_a_stream_has_what_the_whole_answer_has(served: Served) -> None:
    client = served.client()
    settings = {"model": "tiny", "messages": HI, "max_tokens": 20, "seed": 3, "logprobs": True}
    whole = client.chat.completions.create(**settings)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) > 5
    said = [c.choices[0] for c in chunks if c.choices]
    assert "".join(c.delta.content or "" for c in said) == whole.choices[0].message.content
    found = [entry.logprob for c in said if c.logprobs for entry in c.logprobs.content]
    np.testing.assert_allclose(found, [entry.logprob for entry in whole.choices[0].logprobs.content], atol=1e-5)
    assert [c.finish_reason for c in said if c.finish_reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []


def test_completions_take_text_and_ids_and_several_prompts(served: Served, policy: Policy) -> None:
    client, ids = served.client(), policy.tokenizer("1+2=")["input_ids"]
    ask = client.completions.create
    by_text = ask(model="tiny", prompt="1+2=", seed=1, max_tokens=9, logprobs=0)
    by_ids = ask(model="tiny", prompt=ids, seed=1, max_tokens=9, extra_body={"return_token_ids": True})
    [choice] = by_ids.choices
    assert by_text.choices[0].text == choice.text and choice.prompt_token_ids == ids  # type: ignore[attr-defined]
    logprobs = by_text.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.text_offset is not None
    np.testing.assert_allclose(logprobs.token_logprobs, fresh_logprobs(policy, ids, choice.token_ids), atol=1e-4)  # type: ignore[attr-defined]
    several = ask(model="tiny", prompt=[ids, ids], n=2, max_tokens=3)
    assert [c.index for c in several.choices] == [0, 1, 2, 3]


def test_curl_gets_json_and_server_sent_events(served: Served) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": true}'
    kind = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "*/*"}  # as curl -d sends it
    response = served.send("POST", "/v1/chat/completions", body, **kind)
    assert response.status == 200 and response.getheader("content-type", "").startswith("text/event-stream")
    events = [line for line in response.read().decode().split("\n\n") if line]
    assert events[-1] == "data: [DONE]" and all(event.startswith("data: {") for event in events[:-1])


def test_a_later_turn_continues_the_ids_that_were_sampled(served: Served, policy: Policy) -> None:
    """A character tokenizer drops control tokens from text, so that a random model's turns could not be encoded again."""
    model = next(iter(served.models.ready.values()))
    messages, extra = [{"role": "user", "content": "one"}], {"return_token_ids": True, "max_tokens": 40}
    history: list[int] = []
    for turn in range(4):
        before = model.engine.statistics
        status, answer = served.post({"messages": messages, "seed": turn, "logprobs": True, **extra})
        [choice], prompt = answer["choices"], answer["prompt_token_ids"]
        assert status == 200 and prompt[: len(history)] == history
        expected = fresh_logprobs(policy, prompt, choice["token_ids"])
        np.testing.assert_allclose([e["logprob"] for e in choice["logprobs"]["content"]], expected, atol=1e-4)
        if turn:  # the history is in the cache: only what is new is prefilled
            assert model.engine.statistics.prefilled - before.prefilled <= len(prompt) - len(history) + 1
        history = [*prompt, *choice["token_ids"]]
        messages += [choice["message"], {"role": "user", "content": f"more {turn}"}]
    # a changed history begins anew, and the earlier one can still be continued, from its ids
    changed = [{"role": "user", "content": "other"}, *messages[1:]]
    _, answer = served.post({"messages": changed, **extra})
    assert answer["prompt_token_ids"][: len(history)] != history
    for _ in range(2):  # again: the session has gone on
        assert served.post({"messages": messages, **extra})[1]["prompt_token_ids"][: len(history)] == history


def test_requests_that_arrive_together_are_decoded_together(served: Served) -> None:
    model = next(iter(served.models.ready.values()))
    rows: list[int] = []
    poll = model.engine.poll

    def counted(timeout: float | None = None) -> Any:
        found = poll(timeout)
        rows.append(model.engine.scheduler.rows.count)  # type: ignore[union-attr]
        return found

    body = {"messages": HI, "max_tokens": 60, "min_tokens": 60, "seed": 1}
    model.engine.poll = counted  # type: ignore[method-assign]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: served.post(body), range(8)))
    del model.engine.poll  # type: ignore[method-assign]
    assert max(rows) >= 4 and {status for status, _ in answers} == {200}
    # what is drawn depends on the request alone
    assert len({answer["choices"][0]["message"]["content"] for _, answer in answers}) == 1


def test_the_first_token_comes_within_50_ms_of_the_engine(served: Served, policy: Policy) -> None:
    ids = render_prompt(policy.tokenizer, [Message("user", "hi")])
    engine, bare, first = Engine(policy, processes=1, bursts=1), [], []
    connection = HTTPConnection(served.url.removeprefix("http://"), timeout=30)
    for n in range(15):
        began = time.perf_counter()
        engine.submit([Request(ids, n, Sampling(8), n)])
        while not engine.written([n]):
            engine.poll()
        bare.append(time.perf_counter() - began)
        engine.cancel([n])
        began = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps({"messages": HI, "max_tokens": 8, "stream": True}))
        response, text = connection.getresponse(), b""
        while text.count(b"data:") < 2:  # the role, then the token
            text += response.read1(4096)
        first.append(time.perf_counter() - began)
        response.read()
    assert sorted(first)[5] - sorted(bare)[5] < 0.05
    seconds = []
    for _ in range(8):  # head and body are sent at once: where they are not, the body waits 40 ms for an acknowledgement
        began = time.perf_counter()
        connection.request("GET", "/v1/models")
        connection.getresponse().read()
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.03


# --- stop texts, tools and streams, with answers that a test writes ---------------------------------------------------


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Served]]:
    running: list[Iterator[Served]] = []

    def start(text: str) -> Served:
        monkeypatch.setattr("posttrain.serve.models.Engine", type("Writes", (Scripted,), {"text": text}))
        policy = make_policy()
        policy.tokenizer.chat_template = TOOL_TEMPLATE
        running.append(serve(policy))
        return next(running[-1])

    yield start
    for one in running:
        next(one, None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_before_it_and_ends_decoding(scripted: Callable[[str], Served], stream: bool) -> None:
    served = scripted("one two STOP three" + "." * 200)
    body = {"model": "tiny", "messages": HI, "stop": ["xx", "STOP"], "max_tokens": 1000}
    found: Any = served.client().chat.completions.create(**body, stream=stream, extra_body={"return_token_ids": True})  # type: ignore[call-overload]
    choices = [c.choices[0] for c in found] if stream else found.choices
    text = "".join((c.delta.content or "") if stream else c.message.content for c in choices)
    assert text == "one two " and choices[-1].finish_reason == "stop"
    # the ids are those that were sampled, up to the token that completes the stop text
    assert sum(len(c.token_ids) for c in choices) == len("one two STOP")
    engine = next(iter(served.models.ready.values())).engine
    until = time.monotonic() + 30  # the client has its answer before the engine's thread has ended the rest
    while not engine.cancelled and time.monotonic() < until:  # type: ignore[attr-defined]
        time.sleep(0.01)
    assert served.idle() and engine.cancelled == [engine.requests[0].session]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("stops", "said"), [((), "é👩日 \ufffd, ok"), (("日 ",), "é👩"), (("\ufffd",), "é👩日 ")])
def test_a_character_of_several_tokens_is_sent_and_spelled_once(stops: tuple[str, ...], said: str) -> None:
    backend = Tokenizer(BPE(vocab={character: n for n, character in enumerate(BYTE_ALPHABET)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)  # a token for each byte
    ids = tokenizer("é👩日 \ufffd, ok")["input_ids"]
    for size in (1, 2, 3, len(ids)):
        choice = Choice(Decoder(tokenizer), stops=stops)
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            choice.feed(part, [0.0] * len(part), "length" if start + size >= len(ids) else "")
            if choice.ended:
                break
        assert choice.whole.text == said, size
        assert stops or "".join(choice.whole.tokens) == said


CALL = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_come_with_an_index_each_and_their_results_continue_the_ids(
    scripted: Callable[[str], Served], stream: bool
) -> None:
    served = scripted(f"Let me add.{CALL % 1}{CALL % 2}")
    ask: Any = served.client().chat.completions.create
    body = {"model": "tiny", "messages": HI, "tools": TOOLS, "max_tokens": 500}
    if stream:
        choices = [chunk.choices[0] for chunk in ask(**body, stream=True)]
        assert "".join(c.delta.content or "" for c in choices) == "Let me add."
        parts = [call for c in choices for call in c.delta.tool_calls or ()]
        assert [part.index for part in parts] == [0, 0, 1, 1] and parts[0].function.name == "add"
        arguments = ["".join(p.function.arguments for p in parts if p.index == n) for n in range(2)]
        assert choices[-1].finish_reason == "tool_calls"
    else:
        answer = ask(**body)
        message = answer.choices[0].message
        arguments = [call.function.arguments for call in message.tool_calls]
        assert message.content == "Let me add." and answer.choices[0].finish_reason == "tool_calls"
        results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls]
        later = ask(**{**body, "messages": [*HI, message, *results]}, extra_body={"return_token_ids": True})
        first = next(iter(served.models.ready.values())).conversations.turns
        assert tuple(later.prompt_token_ids)[: len(next(iter(first.values())).ids)] == next(iter(first.values())).ids
    assert [json.loads(text) for text in arguments] == [{"a": 1}, {"a": 2}]


def test_what_only_looks_like_a_call_stays_text(scripted: Callable[[str], Served]) -> None:
    served = scripted("<tool_call>{broken</tool_call>")
    status, answer = served.post({"messages": HI, "tools": TOOLS, "max_tokens": 100})
    [choice] = answer["choices"]
    assert status == 200 and choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == "<tool_call>{broken</tool_call>"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_what_is_decoded_for_it(served: Served, stream: bool) -> None:
    served.client().chat.completions.create(model="tiny", messages=HI, max_tokens=1)  # loads the model
    before = next(iter(served.models.ready.values())).engine.statistics.sampled
    body = json.dumps({"messages": HI, "max_tokens": 2000, "min_tokens": 2000, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        if stream:
            connection.recv(1000)
        else:
            time.sleep(0.1)
    assert served.idle()
    assert next(iter(served.models.ready.values())).engine.statistics.sampled - before < 1900


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_before_its_turn_leaves_the_queue(policy: Policy, stream: bool) -> None:
    body = {"messages": HI, "max_tokens": 2000, "min_tokens": 2000, "stream": stream}
    for served in serve(policy, rows=1):
        served.post({"messages": HI, "max_tokens": 1})
        model = next(iter(served.models.ready.values()))
        connections = [HTTPConnection(served.url.removeprefix("http://")) for _ in range(4)]
        for number, connection in enumerate(connections, 1):
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            while len(model.tickets) < number:
                time.sleep(0.001)
        first = next(iter(model.tickets))
        for connection in connections[1:]:
            connection.close()
        until = time.monotonic() + 30
        while len(model.tickets) > 1 and time.monotonic() < until:
            time.sleep(0.001)
        assert [*model.tickets] == [first], "it still has the only row"
        connections[0].close()
        assert served.idle()


# --- bad input --------------------------------------------------------------------------------------------------------

NESTED = b'{"a":' * 700 + b"1" + b"}" * 700

BAD = [
    (b"{", 400, "no JSON"),
    (b"[" * 100_000, 400, "no JSON"),
    (rb'{"model": "m", "messages": [{"role": "user", "content": "\ud83d"}]}', 400, "surrogates not allowed"),
    (b"[]", 400, "must be an object"),
    ({"model": "tiny"}, 400, "messages: Field required"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "hi"}, 400, "messages"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, 400, "role 'robot'"),
    ({"messages": [{"role": "user"}]}, 400, "no content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, 400, "parts of text"),
    ({"messages": [{"role": "user", "content": "<|end|>"}]}, 400, "control token"),
    ({"messages": [{"role": "tool", "content": "3"}]}, 400, "not tool"),
    ({"messages": HI, "temperature": -1}, 400, "temperature"),
    (b'{"messages": [{"role": "user", "content": "hi", "weird": ' + NESTED + b"}]}", 400, "nested too deeply"),
    ({"messages": HI, "temperature": "hot"}, 400, "temperature"),
    ({"messages": HI, "stop": ["."] * 65}, 400, "stop: Input should be a valid string; or: List should have at most 64 items"),
    ({"messages": HI, "stop": [1]}, 400, "stop: Input should be a valid string"),
    ({"messages": HI, "temperature": 1e-40}, 400, "temperature must be 0 (the most likely token) or from 1e-6"),
    ({"messages": HI, "temperature": 1e300}, 400, "temperature must be 0 (the most likely token) or from 1e-6"),
    ({"messages": HI, "top_p": 0}, 400, "top_p"),
    ({"messages": HI, "n": 100_000}, 400, "n: "),
    ({"messages": HI, "max_tokens": 0}, 400, "max_tokens"),
    ({"messages": HI, "max_tokens": 1 << 40}, 400, "more than the context of 2048"),
    ({"messages": [{"role": "user", "content": "a" * 3000}]}, 400, "more than the context of 2048"),
    ({"messages": HI, "presence_penalty": 1}, 400, "presence_penalty is not supported"),
    ({"messages": HI, "top_logprobs": 3, "logprobs": True}, 400, "top_logprobs is not supported"),
    ({"messages": HI, "temprature": 1}, 400, "temprature"),
    ({"messages": HI, "stream_options": {"include_usages": True}}, 400, "include_usages: Extra inputs"),
    ({"messages": HI, "tools": TOOLS}, 400, "does not show the tools"),
    ({"messages": HI, "tools": TOOLS, "tool_choice": {"type": "function"}}, 400, "tool_choice"),
    ({"messages": HI, "model": "gpt"}, 404, "no model 'gpt'; there are tiny"),
]


@pytest.mark.parametrize(("body", "status", "text"), BAD, ids=[f"{n}: {case[2]}" for n, case in enumerate(BAD)])
def test_a_malformed_body_is_refused_by_name(served: Served, body: Any, status: int, text: str) -> None:
    found, answer = served.post(body)
    assert found == status and text in answer["error"]["message"], answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_prompts_of_ids_are_checked(served: Served) -> None:
    for prompt in ([], [99_999], [-1], [[1], []]):
        status, answer = served.post({"prompt": prompt}, "/v1/completions")
        assert status == 400 and "prompt" in answer["error"]["message"]


def test_one_request_cannot_ask_for_any_number_of_answers(served: Served) -> None:
    for prompts, n in ((4097, 1), (33, 128)):
        status, answer = served.post({"prompt": ["a"] * prompts, "n": n, "max_tokens": 1}, "/v1/completions")
        assert status == 400 and "at most 4,096 answers" in answer["error"]["message"]
    assert served.post({"prompt": ["a"] * 300, "max_tokens": 1}, "/v1/completions")[0] == 200


def test_what_the_engine_raises_is_an_error_of_this_request_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = next(iter(served.models.ready.values())).engine
    with monkeypatch.context() as patch:
        patch.setattr(engine, "poll", lambda timeout: 1 / 0)
        status, answer = served.post({"messages": HI})
    assert status == 500 and answer["error"]["type"] == "server_error" and "division" not in answer["error"]["message"]
    assert served.post({"messages": HI, "max_tokens": 2})[0] == 200
    with pytest.raises(openai.BadRequestError, match="context"):
        served.client().chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a" * 3000}])


# --- who may ask, how much, how slowly --------------------------------------------------------------------------------


def test_other_hosts_and_sites_are_refused_and_unknown_paths_are_named(served: Served) -> None:
    port = served.url.rpartition(":")[2]
    for headers, status in (
        ({"Host": "evil.example"}, 403),
        ({"Host": f"evil.example:{port}"}, 403),
        ({"Host": "localhost", "Origin": "http://evil.example"}, 403),
        ({"Host": "localhost", "Origin": "null"}, 403),
        ({"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}, 200),
        ({"Host": f"127.0.0.1:{port}"}, 200),
    ):
        assert served.send("GET", "/v1/models", **headers).status == status, headers
    assert permitted("[::1]:80", ()) and permitted("mine", ("mine",)) and not permitted("127.0.0.1.evil.example", ())
    response = served.send("GET", "/v1/other")
    assert response.status == 404 and b"GET /v1/models" in response.read()
    assert served.send("GET", "/v1/chat/completions").status == 405


def test_beyond_this_machine_a_token_is_needed(policy: Policy) -> None:
    assert Address("127.0.0.1").secured().token == "" and len(Address("0.0.0.0").secured().token) > 20
    for served in serve(policy, token="secret"):
        assert served.client().models.list().data
        for given in ("", "Bearer", "Bearer wrong", "secret2", "Bearer sécret"):
            response = served.send("GET", "/v1/models", Authorization=given.encode().decode("latin-1"))
            assert response.status == 401 and b"secret" not in response.read()


def test_more_requests_than_wait_are_refused_and_the_others_answered(policy: Policy) -> None:
    body = {"messages": HI, "max_tokens": 30, "min_tokens": 30}
    for served in serve(policy, Limits(requests=8)):
        assert served.post(body)[0] == 200
        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(served.post, [body] * 120))
        codes = [status for status, _ in answers]
        assert set(codes) == {200, 429} and codes.count(200) >= 8
        assert all(answer["error"]["code"] == "queue_full" for status, answer in answers if status == 429)
        assert served.idle() and served.post(body)[0] == 200


def test_large_and_slow_requests_are_ended(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEADER_SECONDS", 0.3)
    for served in serve(policy, Limits(body_bytes=1000, read_seconds=0.3)):
        assert served.post({"messages": [{"role": "user", "content": "a" * 2000}]})[0] == 413
        place, began = ("127.0.0.1", int(served.url.rpartition(":")[2])), time.monotonic()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        chunked = head + b"Transfer-Encoding: chunked\r\n\r\n" + b"400\r\n" + b"a" * 1024 + b"\r\n"
        cases = {b"": b"", b"GET / HT": b"", head: b"", head + b"Content-Length: 50\r\n\r\n{": b"408", chunked: b"413"}
        connections = {sent: socket.create_connection(place) for sent in cases}
        for sent, connection in connections.items():
            connection.sendall(sent)
        for sent, connection in connections.items():
            connection.settimeout(10)
            answer = connection.recv(4096)
            assert (cases[sent] in answer.split(b"\r\n")[0]) if cases[sent] else not answer, (sent, answer)
            connection.close()
        assert time.monotonic() - began < 8


def test_models_are_loaded_when_asked_for_and_make_room_for_others() -> None:
    made: list[str] = []

    def load(name: str) -> Policy:
        made.append(name)
        return make_policy(len(made))

    models = Models({"base": None, "rl": None}, load, "rl", loaded=1)
    with make_server(application(lambda _: models, Limits()), Address(port=0), Limits()).in_thread() as url:
        served = Served(url, models)
        for name in ("base", "rl", "rl", "base"):
            status, answer = served.post({"model": name, "messages": HI, "max_tokens": 2})
            assert (status, answer["model"]) == (200, name)
        assert made == ["base", "rl", "base"] and len(models.thread.models) <= 2
        card = json.loads(served.send("GET", "/v1/models").read())["data"]
        assert [(c["id"], c["max_model_len"]) for c in card] == [("base", 2048), ("rl", 2048)]
        busy = threading.Thread(
            target=served.post, args=({"model": "base", "messages": HI, "max_tokens": 400, "min_tokens": 400},)
        )
        busy.start()
        while not any(model.requests for model in models.ready.values()):
            time.sleep(0.005)
        status, answer = served.post({"model": "rl", "messages": HI})
        assert status == 503 and answer["error"]["code"] == "models_busy"
        busy.join(60)
    models.close()


def test_a_model_that_was_just_loaded_for_a_request_is_not_unloaded_for_the_next() -> None:
    loading = threading.Event()

    def load(name: str) -> Policy:
        loading.set()
        time.sleep(0.3)
        return make_policy()

    models = Models({"base": None, "rl": None}, load, "rl", loaded=1)
    with make_server(application(lambda _: models, Limits()), Address(port=0), Limits()).in_thread() as url:
        served, body = Served(url, models), {"messages": HI, "max_tokens": 100, "min_tokens": 100}
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(served.post, {**body, "model": "base"})
            assert loading.wait(30)
            second = pool.submit(served.post, {**body, "model": "rl"})  # it waits until the first model is loaded
            assert first.result(60)[0] == 200
            assert second.result(60)[1]["error"]["code"] == "models_busy"
        assert served.post({**body, "model": "rl"})[0] == 200  # nothing is in progress any more
    models.close()
