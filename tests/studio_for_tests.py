"""The studio over a folder, asked as its pages ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from posttrain.studio.app import make_app

HERE = "http://127.0.0.1:7860"


class Studio:
    """A studio over a folder, asked as the page asks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.client = TestClient(make_app([root], token="secret"), base_url=HERE, raise_server_exceptions=False)

    def get(self, path: str, code: int = 200, **query: Any) -> Any:
        answer = self.client.get(path, params=query)
        assert answer.status_code == code, answer.text
        return answer.json() if answer.headers["content-type"].startswith("application/json") else answer.text

    def post(self, path: str, code: int = 200, **sent: Any) -> Any:
        answer = self.client.post(path, json=sent, headers={"x-studio-token": "secret"})
        assert answer.status_code == code, answer.text
        return answer.json()
