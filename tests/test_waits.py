"""Every wait in the package has a limit: a process that hangs raises nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "posttrain"
METHODS = {"wait", "communicate", "result", "join", "get", "acquire", "recv", "accept", "readline"}  # without any argument
FUNCTIONS = {
    "subprocess.run",
    "subprocess.call",
    "subprocess.check_call",
    "subprocess.check_output",
    "urlopen",
    "urllib.request.urlopen",
    "socket.create_connection",
    "http.client.HTTPConnection",
    "http.client.HTTPSConnection",
    "httpx.get",
    "httpx.post",
    "httpx.Client",
    "httpx.AsyncClient",
    "openai.AsyncOpenAI",
    "openai.DefaultAsyncHttpxClient",
    "requests.get",
    "requests.post",
    "asyncio.run",
    "asyncio.gather",
    "asyncio.wait",
    "input",
}
DESCRIPTORS = {"os.read", "os.readv", "os.write", "os.writev"}  # a pipe may be empty, or full, for ever
# Waits without a limit of their own, and what ends them.
BOUNDED = {
    "commands/export.py: subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True)": "a person "
    "waits at the terminal for a converter, as long as a large model takes",
    "cli/chat.py: input(prompt if sys.stdin.isatty() else '')": "a person at the terminal, who ends it with Ctrl-C or Ctrl-D",
    "api/run.py: self._go.acquire()": "a thread that stands still between two steps, and ends with the process",
    "cluster/ray_host.py: os.read(self.out, 1 << 20)": "after select",
    "cluster/ray_sampler.py: os.write(ours, said)": "a thread that ends when the other end of its pipe is closed",
    "system/processes.py: os.waitpid(pid, 0)": "after SIGKILL",
    "system/processes.py: os.write(handle, view)": "the parent's end does not block, and has a deadline; a child ends with its parent",
    "system/wire.py: os.read(self.requests, 1 << 20)": "of a worker, which ends with its parent",
    "cluster/remote.py: os.read(worker.out, 1 << 20)": "after select",
    "engine/forked.py: os.read(self.out, 1 << 20)": "after select",
    "system/wire.py: os.write(self.into, view)": "after select",
    "rewards/_loop.py: asyncio.run(run())": "isolated scores have a limit; a task that scores or runs here is quick by contract",
    "cluster/asynchronous.py: self.submitted.wait()": "a thread that generates until it is told to end",
    "cluster/asynchronous.py: task.result()": "of one that is done",
    "cluster/asynchronous.py: left.wait()": "a thread that stands still while the model learns, and ends with the process",
    "cluster/asynchronous.py: asyncio.gather(*self.tasks.values(), return_exceptions=True)": "of tasks that are cancelled",
    "episodes.py: asyncio.gather(*(self.draw(n) for n in range(len(self.problems))))": "the same",
    "episodes.py: asyncio.gather(*(self.episode(draw, n) for n in range(len(self.samples))))": "the same",
    "episodes.py: asyncio.gather(*(self.score(problem, r) for r in members))": "the same",
    "episodes.py: asyncio.gather(*(self.score(problem, r) for r in rollouts))": "the same",
    "turns.py: self.changed.wait()": "the same",
    "system/workers.py: os.read(worker.out, 1 << 16)": "after select",
    "system/workers.py: lines.readline()": "of a worker, which ends with its parent",
    "system/workers.py: os.waitpid(ended, 0)": "after SIGKILL",
    "data/safe_readers.py: process.stdout.readline()": "a timer ends the process",
    "rewards/_asking.py: asyncio.gather(*(one(messages) for messages in conversations))": "each of `attempts` has `seconds`, "
    "after MAX_WAIT",
    "rewards/sandbox/pool.py: self._orders.get()": "a thread that serves until it is told to end",
    "rewards/sandbox/mechanisms.py: self.process.wait()": "after SIGKILL",
    "rewards/sandbox/session.py: os.write(self.child.stdin, self.outgoing[:CHUNK])": "after select",
    "rewards/sandbox/session.py: os.read(self.child.stdout, CHUNK)": "after select",
    "rewards/sandbox/session.py: os.read(self.child.stderr, CHUNK)": "after select",
    "rewards/sandbox/child.py: os.waitpid(pid, 0)": "in a container, whose first process has an alarm",
    "rewards/sandbox/child.py: os.read(descriptor, min(count, 1 << 20))": "inside of the sandbox, which is ended from outside",
    "rewards/sandbox/child.py: os.write(descriptor, data)": "the same",
    "rewards/sandbox/child.py: os.write(2, ascii(name).encode()[:200] + b'\\n')": "the same",
    "rewards/sandbox/child.py: os.write(1, b'ready\\n')": "the same",
    "rewards/sandbox/child.py: os.write(1, b'began\\n')": "the same",
    "commands/serve.py: asyncio.run(self.workers.score(self.task, found, response))": "isolated tasks have a limit, others "
    "are rules; code of a run is refused",
    "serve/models.py: self.updates.get()": "the engine ends every answer or fails, and a client that hangs up cancels it",
    "serve/app.py: asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)": "the same",
    "serve/server.py: asyncio.run(answer([self.socket]))": "a thread that serves until it is told to end",
    "rewards/_loop.py: asyncio.gather(*left, return_exceptions=True)": "of tasks that are cancelled",
    "tasks/_served.py: asyncio.gather(*work, return_exceptions=True)": "of tasks that are cancelled",
    "runs/console.py: capture.get()": "text that is there already",
    "catalogue.py: reading.get()": "a context variable",
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
        function = (name in FUNCTIONS and not limited) or name in DESCRIPTORS
        descriptors = name == "select.select" and given < 4
        child = name == "os.waitpid" and "WNOHANG" not in ast.unparse(node)
        locked = name in ("fcntl.flock", "fcntl.lockf") and not any(w in ast.unparse(node) for w in ("LOCK_NB", "LOCK_UN"))
        if method or function or descriptors or child or locked:
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
     "subprocess.run(['x'])", "pipe.readline()", "server.accept()", "os.read(1, 5)", "fcntl.flock(fd, fcntl.LOCK_EX)",
     "asyncio.run(x)",
     "http.client.HTTPConnection('x')", "httpx.AsyncClient(verify=True)", "openai.AsyncOpenAI(base_url='x')",
     "select.select([a], [], [])", "os.waitpid(1, 0)", "urlopen('x')"],
)  # fmt: skip
def test_the_check_can_fail(source: str) -> None:
    assert endless(source) == [source]


@pytest.mark.parametrize(
    "source",
    ["thread.join(5)", "', '.join(words)", "queue.get(timeout=1)", "table.get(key)", "process.wait(timeout=3)",
     "subprocess.run(['x'], timeout=5)",
     "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)", "httpx.AsyncClient(timeout=3)",
     "os.waitpid(1, os.WNOHANG)", "select.select([], [], [], 1)"],
)  # fmt: skip
def test_what_has_a_limit_passes(source: str) -> None:
    assert endless(source) == []
