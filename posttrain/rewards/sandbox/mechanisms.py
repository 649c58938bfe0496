"""Ways to put an interpreter into a sandbox. Each starts `child.py` in a fresh process and can end everything that it started.

landlock  the kernel's Landlock and, if namespaces are available, its own file system; needs neither root nor a package
unsafe    no protection of your files: for programs that you wrote yourself

docker,   a container runtime, if the user names it: it is never chosen by default, and is self-tested like the others. The
podman    image must exist already and contain `env` and `python3`, as python:3.12-slim does

In each of them the child sets its limits and the system call filter (seccomp.py) before it gets a program.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import zoneinfo
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Protocol

from posttrain.rewards.sandbox import seccomp
from posttrain.rewards.sandbox.limits import MEGABYTE, Limits

SOURCE = Path(__file__).with_name("child.py").read_text()
ENVIRONMENT = {"PATH": "/nonexistent", "HOME": "/tmp", "USER": "nobody", "TERM": "dumb"}
ENVIRONMENT |= {"LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1"}
NO_FILTER = "there is no filter of system calls for this machine's architecture"
NOBODY = 65534
# under root each run has its own user: no other process counts against its limit
USERS, FIRST_USER = (4000, 61_200)
STACK = 100 * MEGABYTE  # of the first thread; the kernel leaves room for 128 MB below it
OUT_OF_MEMORY = 77  # exit codes of child.py if a program has the streams for itself
SYNTAX = 78
RUNTIMES = ("docker", "podman")
IMAGE = "python:3.12-slim"
LONGEST = 3600  # seconds that a container may live, including the time it waits
# seconds for an interpreter to notice that its input has ended, before its container is killed
GRACE = 0.25
# its input ends with the grader
REAPER = "import os, sys; os.read(0, 1); os.execv(sys.argv[1], sys.argv[1:])"
RUNTIME_PATIENCE = 10.0  # seconds for the runtime to kill a container
LOG = logging.getLogger(__name__)
MARK = f"posttrain-{secrets.token_hex(8)}"  # on the command line of every child of this process
_numbers = itertools.count()
_alive: set[Any] = set()


class Infrastructure(Exception):
    """A failure of the sandbox, not of the program: it says nothing about the program."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended by itself, or that it had to be killed."""

    code: int = 0
    signal: int = 0
    ended: bool = False  # it was still running and was killed


class Child:
    """One interpreter in a sandbox. The descriptors are the grader's ends of its pipes. `whole_group`: it ends with its process
    group."""

    def __init__(self, process: Any, whole_group: bool = False) -> None:
        self.process, self.pid, self.whole_group = process, process.pid, whole_group
        self.streams = (process.stdin, process.stdout, process.stderr)
        self.stdin, self.stdout, self.stderr = (stream.fileno() for stream in self.streams)
        self._exit: Exit | None = None
        _alive.add(self)

    def close_input(self) -> None:
        self.streams[0].close()

    def close_pipes(self) -> None:
        close_all(self.streams)

    def kill(self) -> None:
        """Kill it without waiting; another thread may be using its pipes."""
        self.process.kill()

    def finish(self, patience: float) -> Exit:
        """Wait that long for it to end, then kill it and everything it started, and close the pipes. A second call changes
        nothing."""
        if self._exit is None:
            _alive.discard(self)
            self._exit = self._end(patience)
        return self._exit

    def _end(self, patience: float) -> Exit:
        ended = False
        try:
            code = self.process.wait(max(patience, 0))
        except subprocess.TimeoutExpired:
            ended = True
            self.kill()
            code = self.process.wait()
        if self.whole_group:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        close_all(self.streams)
        # a container's client reports a signal like a shell
        return Exit(max(code, 0), -code if code < 0 else max(0, code - 128), ended)


class Mechanism(Protocol):
    """A way to start children. Call `start` from a thread that lives as long as they do: they die with it."""

    @property
    def name(self) -> str: ...

    def start(self, limits: Limits) -> Child: ...


def interpreter() -> str:
    """Return the interpreter itself, not the link to it in a virtual environment."""
    return os.path.realpath(sys.executable)


@lru_cache(maxsize=1)
def readable() -> tuple[str, ...]:
    """Return what an interpreter must be able to read: its standard library, shared libraries, time zones, and two devices."""
    paths = {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/dev/null", "/dev/urandom"}
    paths.update(zoneinfo.TZPATH)
    paths.add(sysconfig.get_path("stdlib"))
    paths.add(sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix}))
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        folder, name = map(sysconfig.get_config_var, ("LIBDIR", "INSTSONAME"))
        paths.add(os.path.join(str(folder), str(name)))
    # the whole base installation, nothing of a virtual environment; links are resolved, since Landlock sees their targets
    found = {os.path.realpath(path) for path in paths if os.path.exists(path)}
    outer = (path for path in found if not found & set(map(str, Path(path).parents)))
    return tuple(sorted(outer))


def open_to_all(path: str) -> bool:
    """Whether every user may pass through all folders above `path` and read it."""
    passable = all(os.stat(folder).st_mode & 0o001 for folder in Path(path).parents)
    return passable and bool(os.stat(path).st_mode & 0o004)


def command(
    limits: Limits, tasks: int, private: bool, program: str = "", **settings: Any
) -> list[str]:
    """Return the interpreter's command line. It holds no secret: the job comes through a pipe. `private`: it has its own file
    system. `tasks`: the number of its user's threads at which it can start no further one; 0: no such limit.

    Settings: `parent` is the process that must be alive when the child begins, if they share a pid namespace. `longest` is how
    many seconds it may live if it is the first process. `user` is the user to become, with the right to read everything if
    `read_search` is set. `readable` are the files that Landlock lets it open. `pivot_root` is the number of that call, if it
    makes its own file system.
    """
    limited = {
        # with 0 the kernel would start the host's crash handler; with 1 it does not, and writes no dump
        "CORE": 1,
        "FSIZE": limits.files if private else 0,
        "MSGQUEUE": 0,
        "MEMLOCK": 0,
        "SIGPENDING": limits.threads,
        "NOFILE": limits.open_files,
        "CPU": limits.cpu_seconds,
        "AS": limits.memory,
        "STACK": min(STACK, limits.memory // 4),
    }
    if tasks:
        limited["NPROC"] = tasks
    none: dict[str, Any] = {"user": 0, "read_search": False, "parent": 0, "longest": 0}
    none |= {"readable": [], "links": [], "pivot_root": 0}
    rules = seccomp.program(private).hex() if seccomp.supported() else ""
    fixed = {"limits": limited, "result": limits.result, "mark": MARK, "rules": rules}
    flags = ("-I", "-S", "-B", "-X", "utf8")
    return [program or interpreter(), *flags, "-c", SOURCE, json.dumps(none | fixed | settings)]


def tasks_of_user() -> int:
    """Return how many processes and threads this user has."""
    found, user = 0, os.getuid()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found += len(os.listdir(entry / "task")) if entry.stat().st_uid == user else 0
    return found


def alive() -> set[Any]:
    """Return the children that have not been finished yet, including those that wait for a program."""
    return _alive.copy()


def disown() -> None:
    """Forget the parent's children after a fork. Our copies of their pipes are closed, because the children must end when the
    parent's copies close."""
    for child in _alive:
        child.close_pipes()
    _alive.clear()


def close_all(streams: Iterable[IO[bytes] | None]) -> None:
    for stream in streams:
        if stream is not None:
            with suppress(OSError):
                stream.close()


def spawn(
    line: Sequence[str], name: str, env: Mapping[str, str] | None = None, apart: bool = False
) -> subprocess.Popen[bytes]:
    """Start a process with pipes to us for its three streams. `apart`: in the root folder, and in its own process group."""
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            line,
            bufsize=0,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=env,
            cwd="/" if apart else None,
            start_new_session=apart,
        )
    except OSError as error:
        raise Infrastructure(f"{name}: {error}") from error


@dataclass(frozen=True, slots=True)
class Landlock:
    """The kernel's Landlock. `private`: with its own file system, which an ordinary user makes in a user namespace, and root in
    a mount namespace alone."""

    private: bool = True
    name: str = "landlock"

    def start(self, limits: Limits) -> Child:
        return Child(spawn(self.line(limits), self.name, env=ENVIRONMENT, apart=True))

    def line(self, limits: Limits) -> list[str]:
        root, paths = os.getuid() == 0, readable()
        user = FIRST_USER + (os.getpid() * 61 + next(_numbers)) % USERS if root else 0
        links = [(link, os.readlink(link)) for link in ("/lib", "/lib64") if os.path.islink(link)]
        links.append(("/dev/shm", "/tmp"))  # `multiprocessing` makes its locks there
        # otherwise the user's other processes count too: leave room for some, but not for any number
        alone = root or self.private
        return command(
            limits,
            tasks=limits.threads if alone else tasks_of_user() + 4 * limits.threads,
            private=self.private,
            user=user,
            read_search=root and not self.private and not all(map(open_to_all, paths)),
            parent=os.getpid(),
            readable=paths,
            links=links,
            pivot_root=seccomp.PIVOT_ROOT[platform.machine()] if self.private else 0,
        )


@dataclass(frozen=True, slots=True)
class Unsafe:
    """An ordinary process that reads your files and environment variables as you do. It has limits and, on Linux, the system
    call filter: no sockets, no other processes, and it ends with the grader."""

    name: str = "unsafe"

    def start(self, limits: Limits) -> Child:
        line = command(limits, tasks=0, private=False, parent=os.getpid())
        return Child(spawn(line, self.name, env=ENVIRONMENT, apart=True), whole_group=True)


class ContainerChild(Child):
    """The runtime's client is our process, the container is not: killing the client would leave it running. So a small process
    outside the container, which ends whenever the grader does, makes the runtime kill it. Inside, PID 1 is an interpreter that
    only waits, and that a program cannot reach: if the runtime fails, the container still ends after its time limit."""

    def __init__(self, process: subprocess.Popen[bytes], runtime: str, name: str) -> None:
        self.name, quiet = name, subprocess.DEVNULL
        line = [interpreter(), "-I", "-S", "-c", REAPER, runtime, "kill", name]
        self.reaper = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        )
        super().__init__(process)

    def close_pipes(self) -> None:
        close_all((*self.streams, self.reaper.stdin))

    def kill(self) -> None:
        if self.reaper.stdin is not None:
            self.reaper.stdin.close()
        self.process.kill()

    def _end(self, patience: float) -> Exit:
        running = not self._waited(max(patience, 0.0))
        if running:
            with suppress(OSError):
                self.close_input()
            if not self._waited(GRACE):
                # nothing is read any more, and a client with unwritten output would not end
                close_all(self.streams)
                self._stop()
        found = super()._end(0.0)
        self._end_reaper()
        return Exit(found.code, found.signal, ended=running)

    def _end_reaper(self) -> None:
        stdin = self.reaper.stdin
        if stdin is not None and not stdin.closed:
            self.reaper.kill()  # there is no container to end
            stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.reaper.wait(RUNTIME_PATIENCE)

    def _waited(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _stop(self) -> None:
        if self.reaper.stdin is not None:
            self.reaper.stdin.close()
        if not self._waited(RUNTIME_PATIENCE):
            ends = f"the container ends within {LONGEST} s"
            LOG.warning("the client of container %s had to be killed; %s", self.name, ends)


@dataclass(frozen=True, slots=True)
class Container:
    """`name` is the runtime: docker or podman."""

    name: str
    image: str = IMAGE

    def lacking(self) -> str:
        """Return why it cannot be used here, or ''."""
        if not seccomp.supported():
            return NO_FILTER
        return "" if shutil.which(self.name) else f"{self.name} is not on PATH"

    def start(self, limits: Limits) -> Child:
        program = shutil.which(self.name)
        if program is None:
            raise Infrastructure(f"{self.name} is not on PATH")
        title = f"posttrain-{secrets.token_hex(8)}"
        line = [program, *self.arguments(limits, title), self.image, *self.inside(limits)]
        return ContainerChild(spawn(line, self.name), program, title)

    def arguments(self, limits: Limits, title: str) -> list[str]:
        """Return the runtime's arguments. Output goes to us and into no log on disk; an image is never downloaded."""
        line = f"run --rm --interactive --name {title} --pull never --log-driver none --network none --ipc none --read-only"
        line += f" --memory {limits.memory}b --memory-swap {limits.memory}b --pids-limit {limits.threads + 1} --cpus 1"
        line += f" --ulimit core=1:1 --ulimit nofile={limits.open_files}:{limits.open_files}"
        line += f" --user {NOBODY}:{NOBODY} --cap-drop ALL --security-opt no-new-privileges --hostname sandbox --workdir /"
        line += f" --tmpfs /tmp:rw,noexec,nosuid,nodev,mode=1777,size={limits.files}"
        line += " --entrypoint env"
        # podman would pass the host's proxy variables in
        proxies = ["--http-proxy=false"] if self.name == "podman" else []
        return [*line.split(), *proxies]

    def inside(self, limits: Limits) -> list[str]:
        """Return the command inside the container: an environment of only our variables, then the interpreter."""
        environment = {**ENVIRONMENT, "PATH": "/usr/local/bin:/usr/bin:/bin"}
        child = command(limits, tasks=0, private=True, program="python3", longest=LONGEST)
        return ["-i", *(f"{k}={v}" for k, v in environment.items()), *child]


def container_named(name: str) -> Container | None:
    """Return the container that a sandbox's name stands for: `docker`, `podman`, or either with `:IMAGE`; None if it is
    neither.

    >>> container_named("docker:python:3.13-slim"), container_named("landlock")
    (Container(name='docker', image='python:3.13-slim'), None)
    """
    runtime, _, image = name.partition(":")
    return Container(runtime, image or IMAGE) if runtime in RUNTIMES else None


def candidates() -> list[tuple[Mechanism, str]]:
    """Return the mechanisms that could be used here, best first, each with what is missing ('' if nothing is known to be)."""
    if not sys.platform.startswith("linux"):
        return []
    lacking = "" if seccomp.supported() else NO_FILTER
    return [(Landlock(private=True), lacking), (Landlock(private=False), lacking)]
