"""A studio in a process of its own, and a real browser. `make test-studio` installs what they need; without it these are skipped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from runs_for_tests import make_run

from posttrain.studio.library import path_id

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")


@dataclass
class Server:
    """`posttrain studio` on a folder; it can be ended and started again at the same address."""

    root: Path
    more: tuple[str, ...] = ()
    port: int = 0
    address: str = ""
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "posttrain", "studio", str(self.root), "--port", str(self.port), *self.more]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("studio: "):
                self.address = line.split()[1].rstrip("/")
                self.port = int(self.address.rsplit(":", 1)[1].split("/")[0])
                return
        pytest.fail("the studio did not start")

    def stop(self, number: int = signal.SIGKILL) -> None:
        if self.process:
            self.process.send_signal(number)
            self.process.wait(20)
            self.process = None


@dataclass
class Visitor:
    """A page, and whatever it did that it should not: errors, dialogs, requests to others."""

    page: Any
    server: Server
    wrong: list[str] = field(default_factory=list)

    def watch(self) -> None:
        def asked(request: Any) -> None:
            if not request.url.startswith((self.server.address, "data:", "blob:")):
                self.wrong.append(f"asked {request.url}")

        def dialog(found: Any) -> None:
            self.wrong.append(f"dialog {found.message}")
            found.dismiss()

        def said(message: Any) -> None:
            if message.type == "error" and "Failed to load resource" not in message.text:
                self.wrong.append(f"console {message.text}")

        self.page.on("request", asked)
        self.page.on("dialog", dialog)
        self.page.on("console", said)
        self.page.on("pageerror", lambda error: self.wrong.append(f"error {error}"))

    def go(self, path: str) -> Any:
        self.page.goto(self.server.address + path)
        self.until("document.querySelector('main h1, main h2, main .error') && !document.querySelector('.loading')")
        return self.page

    def until(self, true: str, seconds: float = 30.0) -> None:
        """Wait for an expression. The policy refuses to evaluate text within the page, so that it is asked from outside."""
        end = time.monotonic() + seconds
        while not self.page.evaluate(f"() => Boolean({true})"):
            assert time.monotonic() < end, f"not within {seconds} s: {true}"
            self.page.wait_for_timeout(30)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, and pairs to label."""
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "one")
    make_run(root / "two", name="other")
    (root / "labels").mkdir()
    rows = [{"prompt": f"prompt {n}", "chosen": f"better {n}", "rejected": f"worse {n}"} for n in range(50)]
    (root / "labels" / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture(scope="session")
def paths(root: Path) -> list[str]:
    """The address of every page."""
    one, two = path_id(root / "one"), path_id(root / "two")
    pages = ["", "/pipeline", "/rollouts", "/rollouts/rl/40/0", "/replay", "/review", "/hacking", "/settings"]
    return ["/", f"/compare?runs={one},{two}", "/label", "/play", *(f"/run/{one}{page}" for page in pages)]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Closed with the file that uses it: while it is open, an event loop runs in this thread, which other tests could not start."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-studio")
    if not CHROMIUM:
        pytest.skip("needs Debian's chromium: apt-get install chromium")
    with playwright.sync_playwright() as started:
        try:
            browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except playwright.Error as error:  # of this machine, not of the studio
            pytest.skip(f"{CHROMIUM} does not start here: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any) -> Iterator[Any]:
    contexts = []

    def opened(server: Server, **options: Any) -> Visitor:
        context = chromium.new_context(viewport={"width": 1360, "height": 900}, **options)
        context.set_default_timeout(30_000)
        contexts.append(context)
        visitor = Visitor(context.new_page(), server)
        visitor.watch()
        return visitor

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[Server] = []

    def opened(root: Path, *more: str) -> Server:
        server = Server(root, more)
        server.start()
        servers.append(server)
        return server

    yield opened
    for server in servers:
        server.stop()
