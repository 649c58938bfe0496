"""The studio's side of a model server: what it asks, what it makes of answers, and servers that fail."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from runs_for_tests import make_run
from studio_for_tests import Studio

from posttrain.errors import UserError
from posttrain.studio import jobs, models
from posttrain.studio.library import path_id
from posttrain.studio.models import Models, Server

ANSWER = {
    "choices": [
        {
            "message": {"content": "<b>4</b>"},
            "finish_reason": "stop",
            "token_ids": [7, 8],
            "logprobs": {"content": [{"token": "<b>4", "logprob": -0.5}, {"token": "</b>", "logprob": -1.5}]},
        }
    ],
    "prompt_token_ids": [5, 6],
}
CARDS = [{"id": n, "kind": "policy"} for n in ("sft", "rl")] + [
    {"id": "reward", "kind": "reward_model"},
    {"id": "rl/reward", "kind": "stage"},
]


def score(sent: dict[str, Any]) -> object:
    """A reward of 2 by the model, of 3 by the stage, and a KL of 0.5 from the first model."""
    if sent["model"] == "rl/reward" and sent["items"][0]["gold"] == "4":
        return {"error": {"message": "the reward broke"}}
    found = {
        "reward": 2.0 if sent["model"] == "reward" else 3.0,
        "parts": {"task": 1.0},
        "kl": 0.5 if sent["against"] else None,
    }
    return {"data": [{"index": n, **found} for n, _ in enumerate(sent["items"])]}


class Handler(BaseHTTPRequestHandler):
    """Two models, of which one refuses."""

    asked: list[dict[str, object]] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.answer({"data": CARDS if self.path.endswith("/score") else [{"id": "sft"}, {"id": "rl"}]})

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path.endswith("/score"):
            self.answer(score(sent))
            return
        self.asked.append(sent)
        refused = {"error": {"message": "the prompt is too long"}}
        self.answer(refused if sent["messages"][0]["content"] == "long" else ANSWER)

    def answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_every_stage_is_asked_the_same_question_with_the_same_seed(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run", 10)
    started: list[Path] = []
    monkeypatch.setattr(models, "_start", lambda directory: started.append(directory) or Server(address))
    studio, run = Studio(tmp_path), f"/api/runs/{path_id(tmp_path / 'run')}"
    Handler.asked.clear()
    for _ in range(2):
        found = studio.post(f"{run}/ask", prompt="2+2=")["answers"]
    assert [(a["stage"], a["text"], a["tokens"], a["logprob"]) for a in found] == [
        (n, "<b>4</b>", 2, -1.0) for n in ("sft", "rl")
    ]
    assert started == [tmp_path / "run"]  # once
    assert len({json.dumps({**sent, "model": ""}, sort_keys=True) for sent in Handler.asked}) == 1
    assert "too long" in studio.post(f"{run}/ask", 400, prompt="long")["error"]
    studio.post(f"{run}/ask", 400, prompt="  ")
    chat = {"messages": [{"role": "user", "content": "2+2="}], "temperature": 0.5}
    answer = studio.post("/api/chat", model=f"{path_id(tmp_path / 'run')}/rl", **chat)
    assert [t["token"] for t in answer["tokens"]] == ["<b>4", "</b>"] and Handler.asked[-1]["temperature"] == 0.5


def test_every_answer_has_the_rewards_and_the_kl_that_the_server_computes(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run", 10)
    monkeypatch.setattr(models, "_start", lambda directory: Server(address))
    studio, run = Studio(tmp_path), f"/api/runs/{path_id(tmp_path / 'run')}"
    sft, rl = studio.post(f"{run}/ask", prompt="2+2=")["answers"]
    assert (sft["kl"], sft["base"], rl["kl"], rl["base"]) == (None, None, 0.5, "sft")
    assert [(r["name"], r["kind"], r["value"], r["parts"]["task"]) for r in rl["rewards"]] == [
        ("reward", "reward_model", 2.0, 1.0),
        ("rl", "stage", 3.0, 1.0),
    ]
    assert "ids" not in rl
    failed = studio.post(f"{run}/ask", prompt="2+2=", gold="4")["answers"][1]["rewards"][1]
    assert failed["value"] is None and "the reward broke" in failed["failure"]  # and the answer is there
    studio.post(f"{run}/ask", 400, prompt="2+2=", gold="4" * 5000)
    chat = {"messages": [{"role": "user", "content": "2+2="}]}
    answer = studio.post("/api/chat", model=f"{path_id(tmp_path / 'run')}/rl", **chat)
    assert answer["kl"] == 0.5 and len(answer["rewards"]) == 2


def test_a_server_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UserError, match="did not answer"):
        Server("http://127.0.0.1:9/v1").names()
    with pytest.raises(UserError, match="no model server"):
        Models().named()


def test_a_server_ends_with_the_studio_that_started_it() -> None:
    child = f"{jobs.WATCH}print(os.getpid(), flush=True)\nimport time\ntime.sleep(60)"
    parent = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdin=subprocess.PIPE).wait(60)"
    with subprocess.Popen([sys.executable, "-c", parent, child], stdout=subprocess.PIPE, text=True) as studio:
        assert studio.stdout
        pid = int(studio.stdout.readline())
        studio.kill()
        began = time.monotonic()
        assert studio.stdout.read() == ""  # until the child, who holds it too, is gone
        assert time.monotonic() - began < 30  # it would sleep for 60
    assert not Path(f"/proc/{pid}/cmdline").is_file() or not Path(f"/proc/{pid}/cmdline").read_bytes()


def test_only_a_few_servers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(models, "_start", lambda directory: Server(str(directory)))
    monkeypatch.setattr(Server, "end", lambda self: ended.append(self.address))
    kept = Models()
    for name in ("a", "b", "a", "c"):
        kept.of_run(Path(name))
    assert ended == ["b"]


def test_a_server_is_started_anew_when_the_run_has_made_another_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[Path] = []
    monkeypatch.setattr(models, "_start", lambda directory: started.append(directory) or Server("x"))
    kept = Models()
    (tmp_path / "stages" / "sft" / "model").mkdir(parents=True)
    for _ in range(2):
        kept.of_run(tmp_path)
    assert len(started) == 1
    (tmp_path / "stages" / "rl" / "model").mkdir(parents=True)
    kept.of_run(tmp_path)
    assert len(started) == 2
