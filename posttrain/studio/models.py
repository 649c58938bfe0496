"""The client of `serve` in the studio. Models answer over HTTP, at an OpenAI-compatible endpoint; this process loads none.

The user may name a running server by its address. For the stages of a run, a server is started in another process at the first
request; a few are kept, and they end with the studio.
"""

from __future__ import annotations

import atexit
import re
import select
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.errors import UserError, require
from posttrain.studio.jobs import end, start_serving
from posttrain.types import JSON

ANSWER_SECONDS, START_SECONDS = 120.0, 120.0
SERVERS = 2  # server processes to keep
KINDS = ("policy", "reward_model", "stage")  # of scorers
ITEMS = 128  # to score in one request


@lru_cache(maxsize=1)
def _client() -> Any:
    """One client for all servers and threads: making one takes longer than a request."""
    import httpx

    return httpx.Client(timeout=ANSWER_SECONDS, trust_env=False)


@dataclass(frozen=True, slots=True)
class Server:
    """An endpoint: its base URL, such as http://127.0.0.1:8000/v1, and its process if the studio started it."""

    address: str
    process: Any = None  # started by jobs.py
    made: frozenset[str] = frozenset()  # stages that had a model when the server was started

    def names(self) -> list[str]:
        """Names of the models."""
        found = self._call("GET", "/models").get("data", [])
        return [str(one.get("id", "")) for one in found if isinstance(one, dict)]

    def answers(
        self, model: str, messages: Sequence[Mapping[str, str]], options: Mapping[str, JSON]
    ) -> list[dict[str, JSON]]:
        """Answers to a conversation, as many as the options request: text, tokens with their log-probs, and why it ended."""
        sent = {"model": model, "messages": list(messages), "logprobs": True, **options}
        sent["return_token_ids"] = True
        found = self._call("POST", "/chat/completions", sent)
        prompt = found.get("prompt_token_ids") or []
        return [_answer(choice, prompt) for choice in found.get("choices") or [{}]]

    def scorers(self) -> dict[str, str]:
        """Names of the scorers, each with its kind: policy, reward_model or stage. Only `posttrain serve` has them."""
        try:
            found = self._call("GET", "/score").get("data", [])
        except UserError:
            return {}
        cards = [one for one in found if isinstance(one, dict) and one.get("kind") in KINDS]
        return {str(one.get("id", "")): str(one["kind"]) for one in cards}

    def score(
        self, model: str, items: Sequence[Mapping[str, JSON]], against: str = ""
    ) -> list[dict[str, Any]]:
        """Score answers; the scores are in the same order."""
        found: list[dict[str, Any]] = []
        for start in range(0, len(items), ITEMS):
            sent = {"model": model, "against": against, "items": list(items[start : start + ITEMS])}
            found += self._call("POST", "/score", sent).get("data", [])
        require(len(found) == len(items), "the model server gave another number of scores")
        return found

    def judge(self, answers: Sequence[dict[str, JSON]], gold: str = "") -> None:
        """Add to each answer of the model `stage` its KL from the first model, and every reward that the server has. Removes the
        ids."""
        items = []
        for one in answers:
            prompt, said = one.pop("ids")
            items.append({"prompt": prompt, "answer": said, "gold": gold})
            one |= {"kl": None, "base": None, "rewards": []}
        known = self.scorers()
        base = next((name for name, kind in known.items() if kind == "policy"), "")
        read = [n for n, item in enumerate(items) if item["prompt"] and item["answer"]]
        for n in read:
            name = str(answers[n]["stage"])
            if base != name and known.get(name) == "policy":
                with suppress(UserError):  # for example, a base model with another vocabulary
                    found = self.score(name, [items[n]], base)[0]
                    answers[n] |= {"kl": found.get("kl"), "base": base}
        for name, kind in known.items():
            if kind != "policy" and read:
                self._reward(name, kind, [answers[n] for n in read], [items[n] for n in read])

    def _reward(
        self, name: str, kind: str, answers: Sequence[dict[str, JSON]], items: Sequence[JSON]
    ) -> None:
        try:
            found = self.score(name, items)
        except UserError as error:
            found = [{"failure": str(error)}] * len(items)
        for answer, score in zip(answers, found, strict=True):
            answer["rewards"].append(
                {
                    "name": name.removesuffix("/reward") if kind == "stage" else name,
                    "kind": kind,
                    "value": score.get("reward"),
                    "parts": score.get("parts") or {},
                    "failure": score.get("failure"),
                }
            )

    def _call(self, method: str, path: str, sent: JSON = None) -> dict[str, Any]:
        import httpx

        try:
            found = _client().request(method, f"{self.address}{path}", json=sent).json()
        except (httpx.HTTPError, ValueError) as error:
            raise UserError(f"the model server at {self.address} did not answer: {error}") from None
        refused = found.get("error") if isinstance(found, dict) else {"message": "no object"}
        if refused:
            said = refused.get("message") if isinstance(refused, dict) else refused
            raise UserError(f"the model server: {said}")
        return dict(found)

    @property
    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def end(self) -> None:
        if self.process is not None:
            end(self.process)


def _answer(choice: Mapping[str, Any], prompt: JSON) -> dict[str, JSON]:
    tokens = (choice.get("logprobs") or {}).get("content") or []
    logprobs = [float(token.get("logprob", 0.0)) for token in tokens]
    return {
        "text": str((choice.get("message") or {}).get("content") or ""),
        "finish": str(choice.get("finish_reason", "")),
        "tokens": [
            {"token": str(t.get("token", "")), "logprob": p}
            for t, p in zip(tokens, logprobs, strict=True)
        ],
        "logprob": sum(logprobs) / len(logprobs) if logprobs else None,
        "ids": [prompt, choice.get("token_ids") or []],
    }


@dataclass(slots=True)
class Models:
    """The server that the user named ("" for none), and the servers of runs."""

    address: str = ""
    _runs: OrderedDict[Path, Server] = field(default_factory=OrderedDict)
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def named(self) -> Server:
        none = "no model server: give its address with --serve, or choose a stage of a run"
        require(self.address, none)
        return Server(self.address.rstrip("/"))

    def of_run(self, directory: Path) -> Server:
        """The server of a run's stages. It is started if there is none, and restarted if the run has made more models since."""
        made = frozenset(path.parent.name for path in directory.glob("stages/*/model"))
        with self._mutex:
            held = self._runs.pop(directory, None)
            if held is not None and (held.made != made or held.ended):
                held.end()
                held = None
            if held is None:
                held = replace(_start(directory), made=made)
                atexit.register(held.end)
            self._runs[directory] = held
            while len(self._runs) > SERVERS:
                self._runs.popitem(last=False)[1].end()
            return held


def _start(directory: Path) -> Server:
    process = start_serving(directory)
    assert process.stdout is not None
    said, limit = "", time.monotonic() + START_SECONDS
    while time.monotonic() < limit:
        if select.select([process.stdout], [], [], 0.5)[0]:
            line = process.stdout.readline(10_000)
            if found := re.search(r"^serving .* at (http://127\.0\.0\.1:\d+/v1)$", line.strip()):
                # read what it prints, so that its output pipe never fills
                threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
                return Server(found[1], process)
            said = line.strip() or said
            if not line:
                break
    Server("", process).end()
    why = said[:500] or f"no address within {START_SECONDS:.0f} s"
    raise UserError(f"the models of {directory.name} cannot be served: {why}")
