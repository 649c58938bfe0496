"""G10: every wait in the package has a limit. A wedge raises nothing, so only a deadline can catch it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "posttrain"
METHODS = {"wait", "communicate", "result", "join", "get", "acquire", "recv"}  # without any argument they wait for ever
FUNCTIONS = {
    "subprocess.run",
    "subprocess.call",
    "subprocess.check_call",
    "subprocess.check_output",
    "urlopen",
    "urllib.request.urlopen",
}
# Waits without a limit of their own, and what ends them.
BOUNDED = {
    "engine/forked.py: os.waitpid(self.pid, 0)": "its process was killed, or has closed its pipe and exits",
    "scoring.py: os.waitpid(worker.pid, 0)": "after SIGKILL",
    "untrusted.py: os.waitpid(pid, 0)": "after SIGKILL",
    "rewards/sandbox/pool.py: self._orders.get()": "a thread that serves until it is told to end",
    "rewards/sandbox/mechanisms.py: self.process.wait()": "after SIGKILL",
    "runs/console.py: capture.get()": "text that is there already",
}


def endless(source: str) -> list[str]:
    """Calls that may wait for ever, as they are written."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, given = ast.unparse(node.func), len(node.args) + len(node.keywords)
        limited = any(k.arg in ("timeout", "timeout_seconds") for k in node.keywords)
        method = isinstance(node.func, ast.Attribute) and node.func.attr in METHODS and given == 0
        function = name in FUNCTIONS and not limited
        descriptors = name == "select.select" and given < 4
        child = name == "os.waitpid" and "WNOHANG" not in ast.unparse(node)
        if method or function or descriptors or child:
            found.append(ast.unparse(node))
    return found


def test_every_wait_has_a_limit() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {call}" for path in sorted(PACKAGE.rglob("*.py")) for call in endless(path.read_text())
    }
    assert not found - set(BOUNDED), "give these a timeout, or say above what ends them"
    assert not set(BOUNDED) - found, "these are gone; take them out above"


@pytest.mark.parametrize(
    "source",
    ["thread.join()", "queue.get()", "process.wait()", "event.wait()", "process.communicate()", "future.result()", "lock.acquire()",
     "subprocess.run(['x'])", "select.select([a], [], [])", "os.waitpid(1, 0)", "urlopen('x')"],
)  # fmt: skip
def test_the_check_can_fail(source: str) -> None:
    assert endless(source) == [source]


@pytest.mark.parametrize(
    "source",
    ["thread.join(5)", "', '.join(words)", "queue.get(timeout=1)", "table.get(key)", "process.wait(timeout=3)",
     "subprocess.run(['x'], timeout=5)", "os.waitpid(1, os.WNOHANG)", "select.select([], [], [], 1)"],
)  # fmt: skip
def test_what_has_a_limit_passes(source: str) -> None:
    assert endless(source) == []
