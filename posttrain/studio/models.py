"""The studio's side of `serve`: models answer over HTTP, at an OpenAI-compatible endpoint; none is loaded in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.errors import UserError, require
from posttrain.types import JSON

SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Models:
    """A server of models. `address` is its base URL, as in http://127.0.0.1:8000/v1; "" where there is none."""

    address: str = ""
    key: str = ""

    def names(self) -> list[str]:
        """Models that can be asked; none where no server is named."""
        if not self.address:
            return []
        found = self._call("GET", "/models")
        return [str(one.get("id", "")) for one in found.get("data", []) if isinstance(one, dict)]

    def ask(
        self, model: str, messages: Sequence[Mapping[str, str]], options: Mapping[str, JSON]
    ) -> JSON:
        """The answer to a conversation: its text, tokens with their log-probs where the server gives them, and why it ended."""
        sent = {
            "model": model,
            "messages": list(messages),
            "logprobs": True,
            "top_logprobs": 5,
            **options,
        }
        choice = (self._call("POST", "/chat/completions", sent).get("choices") or [{}])[0]
        tokens = (choice.get("logprobs") or {}).get("content") or []
        text = str((choice.get("message") or {}).get("content") or "")
        return {"text": text, "finish": str(choice.get("finish_reason", "")), "tokens": tokens}

    def _call(self, method: str, path: str, sent: JSON = None) -> dict[str, Any]:
        import httpx

        require(
            bool(self.address),
            "no model server: start 'posttrain serve MODEL' and give its address with --serve",
        )
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            with httpx.Client(timeout=SECONDS, trust_env=False) as client:
                answer = client.request(method, f"{self.address}{path}", json=sent, headers=headers)
                answer.raise_for_status()
                found = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise UserError(f"the model server at {self.address} did not answer: {error}") from None
        return dict(found) if isinstance(found, dict) else {}
