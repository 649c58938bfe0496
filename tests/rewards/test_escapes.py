"""Ways out of the sandbox, tried for real as root and as an ordinary user, and judged by their effect: nothing arrives at a socket of
the host, no other process is changed, and nothing is left of a grader that was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from posttrain.errors import UserError
from posttrain.rewards.sandbox import isolation
from tests.rewards import escapes

ROOT = Path(__file__).parent.parent.parent
UID = escapes.USERS[os.getpid() % len(escapes.USERS)]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sandboxes are for Linux")

# Becomes an ordinary user, and then the program of its arguments. Folders that only root may enter (the interpreter may live in one)
# are covered, in a mount namespace of its own, by an open one that holds no more than what is needed.
BECOME = """
import ctypes, os, sys
library = ctypes.CDLL(None, use_errno=True)
def check(failed):
    if failed: sys.exit(f"cannot: {os.strerror(ctypes.get_errno())}")
user, *line = sys.argv[1:]
needed = {os.path.realpath(p) for p in (sys.prefix, sys.base_prefix, os.getcwd())}
closed = dict()
for path in needed:
    above = [p for p in reversed([path] + [path.rsplit('/', n)[0] for n in range(1, path.count('/'))]) if not os.stat(p).st_mode & 1]
    if above: closed.setdefault(above[0], []).append(path)
if closed:
    check(library.unshare(0x20000))
    check(library.mount(None, b"/", None, 0x44000, None))
for folder, inside in closed.items():
    inside = [(path, os.open(path, os.O_PATH)) for path in inside]
    check(library.mount(b"none", folder.encode(), b"tmpfs", 0, b"mode=755"))
    for path, descriptor in inside:
        os.makedirs(path, exist_ok=True)
        check(library.mount(f"/proc/self/fd/{descriptor}".encode(), path.encode(), None, 0x1000, None))
os.setgroups([]); os.setresgid(int(user), int(user), int(user)); os.setresuid(int(user), int(user), int(user))
os.chdir(os.getcwd())
os.execv(line[0], line)
"""


def command(user: str, module: str, *arguments: str) -> list[str]:
    own = [sys.executable, "-m", module, *arguments]
    return [sys.executable, "-c", BECOME, str(UID), *own] if user == "user" and os.getuid() == 0 else own


def grader(user: str, *arguments: str, module: str = "tests.rewards.escapes") -> subprocess.Popen[str]:
    keep = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": "/tmp", "HOME": "/tmp"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command(user, module, *arguments), cwd=ROOT, env=keep, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


@cache
def lacking(user: str, name: str) -> str:
    """Why this mechanism cannot be tried as this user, or ''."""
    if user == "root" and os.getuid() != 0:
        return "needs root"
    try:
        if name not in ("bare", "unsafe"):
            isolation.choose("landlock")
    except UserError as error:
        return str(error)
    if user == "user" and os.getuid() == 0:
        done = subprocess.run(
            [sys.executable, "-c", BECOME, str(UID), sys.executable, "-c", ""], capture_output=True, text=True, cwd=ROOT
        )
        return f"no ordinary user can be had here: {done.stderr.strip()[-200:]}" if done.returncode else ""
    return ""


KINDS = [("root", "landlock"), ("root", "shared"), ("user", "landlock"), ("user", "shared"), ("user", "unsafe")]
every_kind = pytest.mark.parametrize(("user", "name"), KINDS)


def attacked(user: str, name: str) -> dict[str, list[str]]:
    if reason := lacking(user, name):
        pytest.skip(reason)
    said, errors = grader(user, name, "attack").communicate(timeout=60)
    assert said, errors
    found: dict[str, list[str]] = json.loads(said)
    assert {*found, *escapes.WIDE} == {*escapes.NETWORK, *escapes.PROCESS}, "each was tried"
    return found


def test_each_attack_has_an_effect_without_the_filter() -> None:
    """So that the tests below can fail."""
    without = {name for name, effects in attacked("user", "bare").items() if not effects}
    few = {"sched_setaffinity", "sched_setaffinity of another"} if len(os.sched_getaffinity(0)) == 1 else set()
    assert without <= few | {"MPTCP", "fast open of MPTCP", "fast open", "fast open by sendmsg"} - (kernel_has() or set())


def kernel_has() -> set[str]:
    """Of what a kernel may lack, what this one has: mptcp.enabled, and the first bit of tcp_fastopen."""
    paths = {"mptcp/enabled": {"MPTCP"}, "ipv4/tcp_fastopen": {"fast open", "fast open by sendmsg"}}
    return {
        n
        for path, names in paths.items()
        if (p := Path("/proc/sys/net", path)).exists() and int(p.read_text()) & 1
        for n in names
    }


@every_kind
def test_no_attack_has_an_effect(user: str, name: str) -> None:
    found = {attack: effects for attack, effects in attacked(user, name).items() if effects}
    if name == "unsafe":  # which keeps nobody from files
        found.pop("the out-of-memory score", None)
    assert found == {}


def processes() -> dict[int, tuple[int, str]]:
    """pid: (parent, when it began), of all that are not dead."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            found[int(entry.name)] = (int(fields[1]), fields[19])
    return found


def below(pid: int) -> set[tuple[int, str]]:
    alive, found = processes(), {pid}
    while more := {child for child, (parent, _) in alive.items() if parent in found} - found:
        found |= more
    return {(child, alive[child][1]) for child in found - {pid} if child in alive}


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def end(left: set[tuple[int, str]]) -> None:
    """What a failing test has found."""
    for pid, _ in left:
        os.kill(pid, 9)


@every_kind
def test_nothing_outlives_a_killed_grader(user: str, name: str) -> None:
    if reason := lacking(user, name):
        pytest.skip(reason)
    with grader(user, name, "outlive") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "up\n", process.stderr.read()
        family = below(process.pid)
        assert len(family) > len(escapes.OUTLIVE) / 2, "most of them are there"
        process.kill()
        process.wait(5)
    left: set[tuple[int, str]] = set()

    def gone() -> bool:
        left.clear()
        left.update(family & {(pid, begin) for pid, (_, begin) in processes().items()})
        return not left

    dead = wait_for(gone, 2.0)
    end(left)
    assert dead, f"{len(left)} of {len(family)} go on"


def test_some_outlive_a_killed_grader_without_the_filter() -> None:
    """So that the test above can fail."""
    if reason := lacking("user", "bare") or ("" if os.getuid() == 0 else "needs a user without other processes"):
        pytest.skip(reason)
    with grader("user", "bare", "outlive") as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.kill()
        process.wait(5)
    time.sleep(0.5)
    left = {(pid, begin) for pid, (_, begin) in processes().items() if owner(pid) == UID}
    end(left)
    assert len(left) >= 3


def owner(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


@pytest.mark.parametrize(("user", "name"), [KINDS[0], *KINDS[2:]])
def test_a_grader_killed_while_it_starts_leaves_nothing(user: str, name: str) -> None:
    """At any moment between the fork of an interpreter and the moment when it has asked to die with its parent."""
    if reason := lacking(user, name):
        pytest.skip(reason)
    families: set[tuple[int, str]] = set()
    for delay in (0.005, 0.03):
        with grader(user, name, "start") as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(delay)
            families |= below(process.pid)
            process.kill()
            process.wait(5)
    left: set[tuple[int, str]] = set()

    def gone() -> bool:
        left.clear()
        left.update(families & {(pid, begin) for pid, (_, begin) in processes().items()})
        return not left

    dead = wait_for(gone, 2.0)
    end(left)
    assert dead
