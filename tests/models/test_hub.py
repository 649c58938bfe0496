"""A model by its hub name, from a small server that speaks the hub's protocol: what is fetched, cached and refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from posttrain.models.save import save
from posttrain.models.tiny import character_tokenizer, tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(__file__).parents[2]


class Hub(BaseHTTPRequestHandler):
    """Two repositories: org/tiny, a folder, and org/closed, which is gated."""

    folder: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        self.asked.append(self.path)
        files = sorted(self.folder.iterdir())
        if parts[:5] == ["api", "models", "org", "tiny", "tree"]:
            tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": COMMIT} for f in files]
            self.reply(json.dumps(tree).encode(), body)
        elif parts[:4] == ["api", "models", "org", "tiny"]:
            names = [{"rfilename": f.name} for f in files]
            self.reply(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": names}).encode(), body)
        elif parts[:3] == ["org", "tiny", "resolve"] and (self.folder / parts[-1]).is_file():
            self.reply((self.folder / parts[-1]).read_bytes(), body)
        else:
            gated = "closed" in parts
            self.send_response(403 if gated else 404)
            self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def reply(self, data: bytes, body: bool) -> None:
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    folder, asked = tmp_path / "repository", list[str]()
    tokenizer = character_tokenizer("0123456789+= ")
    save(tiny_model(tokenizer, "nano", 0), tokenizer, folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle that must stay where it is")
    (folder / "modeling.py").write_text("raise SystemExit('code of the hub ran')")
    handler = type("Serving", (Hub,), {"folder": folder, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join(10)


def run(endpoint: str, cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    given = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "posttrain", *words]
    return subprocess.run(
        command, env=plain | given, cwd=cache.parent, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_hub_name_is_fetched_once_and_without_pickles_or_code(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    words = ("sample", "org/tiny", "1+1=", "max_new_tokens=4")
    first = run(endpoint, tmp_path / "cache", *words)
    assert first.returncode == 0, first.stderr
    fetched = {path.rsplit("/", 1)[-1] for path in asked if "/resolve/" in path}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= fetched
    assert not {name for name in fetched if name.endswith((".bin", ".py"))}
    again = run("http://127.0.0.1:9", tmp_path / "cache", *words)  # nobody answers there
    assert again.returncode == 0 and again.stdout == first.stdout, again.stderr


@pytest.mark.parametrize(
    ("name", "words"), [("org/closed", "is gated"), ("org/typo", "nor a model on the hub; check the spelling")]
)
def test_what_the_hub_refuses_is_one_line(hub: tuple[str, list[str]], tmp_path: Path, name: str, words: str) -> None:
    found = run(hub[0], tmp_path / "cache", "sample", name, "1+1=")
    assert found.returncode == 2 and words in found.stderr, (found.stdout, found.stderr)
    assert len(found.stderr.strip().splitlines()) == 1
