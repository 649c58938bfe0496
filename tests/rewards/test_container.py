"""A container runtime as the wall: what it is asked for, that it is proven before it is used, and that nothing stays behind.

Where there is no runtime, a stand-in for `docker` records what it is asked for and runs the program: in our own sandbox, or bare.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import UserError
from posttrain.rewards.code import CallTest, StdioTest, grade
from posttrain.rewards.sandbox import isolation, mechanisms, pool, probes
from posttrain.rewards.sandbox.limits import MEGABYTE, Limits
from posttrain.rewards.sandbox.session import Ended
from posttrain.tasks._code_data import fenced

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sandboxes are for Linux")
LIMITS = Limits(wall=0.6, memory=256 * MEGABYTE)
DOUBLE = [CallTest("double", [n], 2 * n) for n in (3, 10, -4)]
STAND_IN = """#!{python}
import json, os, signal, sys
folder, settings = {folder!r}, {settings!r}
with open(folder + "/asked", "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "kill":
    os.kill(int(open(folder + "/" + sys.argv[2]).read()), signal.SIGKILL)
    sys.exit(0)
title = sys.argv[sys.argv.index("--name") + 1]
with open(folder + "/" + title, "w") as file:
    file.write(str(os.getpid()))
inside = sys.argv[sys.argv.index("--entrypoint") + 3:]
inside[inside.index("python3")] = {interpreter!r}
inside[-1] = json.dumps(json.loads(inside[-1]) | settings)
line = ["/usr/bin/env", *inside]
os.execv(line[0], line)
"""


def stand_in(folder: Path, settings: dict[str, Any]) -> None:
    """A `docker` in the folder that starts the program with these settings."""
    file = folder / "docker"
    interpreter = mechanisms.interpreter()
    file.write_text(STAND_IN.format(python=sys.executable, folder=str(folder), settings=settings, interpreter=interpreter))
    file.chmod(0o755)


def isolated() -> dict[str, Any]:
    """What keeps a program of ours from the host's files; root is nobody, as in a container."""
    line = mechanisms.Landlock(private=True).line(LIMITS)
    return {name: json.loads(line[-1])[name] for name in ("readable", "links", "pivot_root", "user")}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """What the stand-in was asked for so far."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(isolation, "_chosen", {})
    own = pool.Pool(spare=0)
    monkeypatch.setattr(pool, "shared", lambda: own)
    return lambda: [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]


def usable() -> str:
    try:
        isolation.choose("landlock")
    except UserError as error:
        return str(error)
    return ""


needs_landlock = pytest.mark.skipif(bool(usable()), reason="the stand-in needs Landlock")


@needs_landlock
def test_a_runtime_that_passes_the_self_test_grades(tmp_path: Path, asked: Callable[[], list[list[str]]]) -> None:
    stand_in(tmp_path, isolated())
    chosen = isolation.choose("docker:python:3.13-slim")
    assert (chosen.name, chosen.mechanism) == ("docker", mechanisms.Container("docker", "python:3.13-slim"))
    assert "docker (a container of python:3.13-slim" in chosen.describe()
    outcomes = [
        grade(fenced(program), DOUBLE, limits=LIMITS, sandbox="docker:python:3.13-slim").outcome
        for program in (
            "def double(n):\n    return 2 * n",
            "import os\nos._exit(0)",
            "while True: pass",
            "x = bytearray(1 << 33)",
            "import os\nos.fork()",
            "import socket\nsocket.socket()",
        )
    ]
    assert outcomes == ["pass", "fail", "timeout", "memory", "crash", "crash"]
    assert grade(fenced("print(2 * int(input()))"), [StdioTest("4", "8")], sandbox="docker:python:3.13-slim").value == 1.0
    runs = [line for line in asked() if line[0] == "run"]
    names = [line[line.index("--name") + 1] for line in runs]
    assert len(set(names)) == len(names) and all(name.startswith("posttrain-") for name in names)
    ended = {line[1] for line in asked() if line[0] == "kill"}
    assert ended and ended <= set(names), "a loop does not end when its input does"
    for name in names:
        assert not Path("/proc", (tmp_path / name).read_text()).exists(), f"{name} is still there"


def test_what_a_runtime_is_asked_for() -> None:
    """Every limit by hand, and nothing of the host."""
    limits = Limits(memory=128 * MEGABYTE, threads=6, open_files=20)
    line = mechanisms.Container("docker").arguments(limits, "t")
    pairs = {a: b for a, b in pairwise(line) if a.startswith("--") and not b.startswith("--")}
    assert pairs == {
        "--name": "t",
        "--pull": "never",
        "--log-driver": "none",
        "--network": "none",
        "--ipc": "none",
        "--memory": f"{128 << 20}b",
        "--memory-swap": f"{128 << 20}b",
        "--pids-limit": "7",  # 6, and the clock
        "--cpus": "1",
        "--ulimit": "nofile=20:20",
        "--user": "65534:65534",
        "--cap-drop": "ALL",
        "--security-opt": "no-new-privileges",
        "--hostname": "sandbox",
        "--workdir": "/",
        "--tmpfs": f"/tmp:rw,noexec,nosuid,nodev,mode=1777,size={16 << 20}",
        "--entrypoint": "env",
    }
    assert {"--rm", "--interactive", "--read-only"} <= set(line) and "core=1:1" in line
    assert not {"--env", "-e", "--env-file", "--volume", "-v", "--mount", "--privileged", "--device", "--gpus"} & set(line)
    assert "--http-proxy=false" in mechanisms.Container("podman").arguments(limits, "t")
    inside = mechanisms.Container("docker").inside(limits)
    settings = json.loads(inside[-1])
    assert inside[0] == "-i" and "python3" in inside and settings["longest"] == 3600
    assert settings["limits"]["AS"] == 128 << 20 and settings["limits"]["CORE"] == 1 and len(settings["rules"]) > 100


def test_a_runtime_that_walls_nothing_is_refused(tmp_path: Path, asked: Any) -> None:
    stand_in(tmp_path, {})
    with pytest.raises(UserError, match="does not stop .*reading host files.*have the image python:3.12-slim") as refused:
        isolation.choose("docker")
    # the filter that the child sets for itself holds even here
    assert not any(way in str(refused.value) for way in ("socket", "memory of a file", "a process by", "locks on host files"))
    assert len([line for line in asked() if line[0] == "run"]) >= 1 + len(probes.ALONE)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("echo 'Cannot connect to the Docker daemon' >&2; exit 125", "Cannot connect to the Docker daemon"),
        ("echo 'No such image: python:3.12-slim' >&2; exit 125", "No such image"),
        ("echo hello", "it said b'hello"),
    ],
)
def test_a_runtime_that_does_not_work_is_refused_in_words(text: str, complaint: str, tmp_path: Path, asked: Any) -> None:
    (tmp_path / "docker").write_text(f"#!/bin/sh\n{text}\n")
    (tmp_path / "docker").chmod(0o755)
    with pytest.raises(UserError, match=complaint):
        isolation.choose("docker")


def test_a_client_that_nobody_listens_to_ends_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its container is gone, and it still has output to hand over, into a pipe that is full."""
    runtime = tmp_path / "docker"
    runtime.write_text(f"#!/bin/sh\necho $* > {tmp_path}/asked\n")
    runtime.chmod(0o755)
    line, pipe = [sys.executable, "-c", "while True: print('x' * 1000)"], subprocess.PIPE
    process = subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
    began = time.monotonic()
    assert mechanisms.ContainerChild(process, str(runtime), "mine").finish(0.5).ended
    assert time.monotonic() - began < mechanisms.RUNTIME_PATIENCE / 2 and not caplog.records
    assert (tmp_path / "asked").read_text() == "kill mine\n"


def test_a_container_ends_after_its_hour(tmp_path: Path, asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should all else fail; a program that ignores its input and every signal cannot prevent it."""
    monkeypatch.setattr(mechanisms, "LONGEST", 1)
    stand_in(tmp_path, {})
    with pool.Pool(spare=0).take(mechanisms.Container("docker"), Limits(wall=50.0)) as session:
        session.begin("stdio", "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\ntime.sleep(50)")
        assert session.child.finish(10.0) == mechanisms.Exit(code=1)


def test_a_container_has_the_exit_code_of_its_program(tmp_path: Path, asked: Any) -> None:
    stand_in(tmp_path, {})
    for text, outcome in (("import os\nos._exit(3)", (3, 0)), ("import os\nos.kill(os.getpid(), 9)", (137, 9)), ("", (0, 0))):
        with pool.Pool(spare=0).take(mechanisms.Container("docker"), Limits(wall=50.0)) as session:
            session.begin("stdio", text)
            session.write(b"", last=True)
            with suppress(Ended):
                session.read_all()
            end = session.child.finish(10.0)
            assert (end.code, end.signal) == outcome


GRADER = """
import os, sys, time
from posttrain.rewards.sandbox import limits, mechanisms, pool
session = pool.Pool(spare=0).take(mechanisms.Container("docker"), limits.Limits(wall=50.0))
session.begin("stdio", "import os, time\\nos.write(1, b'up')\\ntime.sleep(50)")
session.write(b"", last=True)
while b"up" not in session.incoming: session._turn()
forked = os.fork() if "fork" in sys.argv else os.getpid()
if forked: print(session.child.name, forked, flush=True)
time.sleep(50)
"""


@pytest.mark.parametrize("way", ["alone", "fork"])
def test_a_container_does_not_outlive_a_killed_grader(way: str, tmp_path: Path, asked: Any) -> None:
    """Neither the runtime nor its client notices that the grader is gone, and the program reads no input. A process that the grader
    forked, such as one that loads data, lives a little longer."""
    stand_in(tmp_path, {})
    with subprocess.Popen([sys.executable, "-c", GRADER, way], stdout=subprocess.PIPE, text=True) as grader:
        assert grader.stdout is not None
        title, forked = grader.stdout.readline().split()
        first = Path("/proc", (tmp_path / title).read_text())
        inside = Path("/proc", (first / f"task/{first.name}/children").read_text().split()[0])
        assert b"python" in (inside / "cmdline").read_bytes()
        grader.kill()
        grader.wait(5)
    end = time.monotonic() + 2
    while (alive(first) or alive(inside)) and time.monotonic() < end:
        time.sleep(0.02)
    left = [int(process.name) for process in (inside, first) if alive(process)]
    for pid in left if way == "alone" else [*left, int(forked)]:
        os.kill(pid, 9)
    assert not left and asked()[-1] == ["kill", title]


def alive(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_it_is_used_only_where_it_is_named(tmp_path: Path, asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, {})
    assert not any(mechanism.name in mechanisms.RUNTIMES for mechanism, _ in mechanisms.candidates())
    monkeypatch.setattr(mechanisms, "candidates", lambda: [])
    with pytest.raises(UserError, match="no sandbox for code works here"):
        isolation.choose("auto")
    assert not (tmp_path / "asked").exists()
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError, match="podman is not on PATH"):
        isolation.choose("podman")
    with pytest.raises(UserError, match="unknown sandbox"):
        isolation.choose("lxc:image")


def working(runtime: str) -> str:
    """'' where this runtime runs our image, else why not."""
    program = shutil.which(runtime)
    if program is None:
        return f"{runtime} is not installed"
    line = [program, "run", "--rm", "--pull", "never", mechanisms.IMAGE, "true"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    return done.stderr.strip()[:200] if done.returncode else ""


@pytest.mark.parametrize("runtime", mechanisms.RUNTIMES)
def test_a_real_runtime(runtime: str) -> None:
    if reason := working(runtime):
        pytest.skip(reason)
    assert isolation.choose(runtime).name == runtime
    assert grade(fenced("def double(n):\n    return 2 * n"), DOUBLE, sandbox=runtime).outcome == "pass"
    assert grade(fenced("while True: pass"), DOUBLE, limits=LIMITS, sandbox=runtime).outcome == "timeout"
