"""Ways to put an interpreter into a sandbox. Each starts `child.py` in a fresh process and can end all that came of it.

sandlock    Landlock and seccomp, from a package; no root, no namespaces
bubblewrap  namespaces and an empty file system
unsafe      nothing that keeps a program from your files: for programs that you wrote yourself

docker,     a container runtime, where the user names it: it is never chosen by itself, and is self-tested like the others. The image
podman      must be there already and hold `env` and `python3`, as python:3.12-slim does

In each of them the child sets limits and our filter of system calls (seccomp.py) for itself before it is given a program.
"""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from posttrain.rewards.sandbox import seccomp
from posttrain.rewards.sandbox.limits import Limits

SOURCE = Path(__file__).with_name("child.py").read_text()
ENVIRONMENT = {"PATH": "/nonexistent", "HOME": "/", "USER": "nobody", "TERM": "dumb"}
ENVIRONMENT |= {"LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1"}
NO_FILTER = "there is no filter of system calls for this machine's architecture"
NOBODY = 65534
# a user of its own for each run under root: nobody else's processes count against its limit
USERS, FIRST_USER = (4000, 61_200)
OUT_OF_MEMORY = 77  # exit codes of child.py where a program has the streams for itself
SYNTAX = 78
PATIENCE = 5.0  # seconds for a process to end once all below it is killed
RUNTIMES = ("docker", "podman")
IMAGE = "python:3.12-slim"
LONGEST = 3600  # seconds that any container may live, waiting included
GRACE = 0.25  # seconds for an interpreter to see that its input has ended, before its container is killed
REAPER = "import os, sys; os.read(0, 1); os.execv(sys.argv[1], sys.argv[1:])"  # its input ends with the grader
RUNTIME_PATIENCE = 10.0  # seconds for the runtime to do so
LOG = logging.getLogger(__name__)
MARK = f"posttrain-{secrets.token_hex(8)}"  # on the command line of every child of this process
_numbers = itertools.count()
_alive: set[Any] = set()


class Infrastructure(Exception):
    """Our own failure, not the program's: nothing can be said about the program."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended by itself, or that it had to be ended."""

    code: int = 0
    signal: int = 0
    ended: bool = False  # it was still running


class Child:
    """One interpreter in a sandbox. The descriptors are the grader's ends of its pipes."""

    def __init__(self, process: Any) -> None:
        self.process, self.pid = process, process.pid
        self.streams = (process.stdin, process.stdout, process.stderr)
        self.stdin, self.stdout, self.stderr = (stream.fileno() for stream in self.streams)
        self._exit: Exit | None = None
        _alive.add(self)

    def close_input(self) -> None:
        self.streams[0].close()

    def close_pipes(self) -> None:
        close_all(self.streams)

    def kill(self) -> None:
        """End it without waiting; another thread may be talking to it."""
        self.process.kill()

    def finish(self, patience: float) -> Exit:
        """Wait so long for it to end, then end it and everything it started; close the pipes. A second call changes nothing."""
        if self._exit is None:
            _alive.discard(self)
            self._exit = self._end(patience)
        return self._exit

    def _end(self, patience: float) -> Exit:
        raise NotImplementedError


class Mechanism(Protocol):
    """A way to start children. `start` must be called from a thread that lives as long as they do: they die with it."""

    @property
    def name(self) -> str: ...

    def start(self, limits: Limits) -> Child: ...


def interpreter() -> str:
    """The interpreter itself, not the link to it in a virtual environment."""
    return os.path.realpath(sys.executable)


def readable() -> list[str]:
    """What an interpreter must be able to read: itself, its standard library, and shared libraries."""
    paths = {interpreter(), "/lib", "/lib64", "/usr/lib", "/usr/lib64"}
    paths.add(sysconfig.get_path("stdlib"))
    paths.add(sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix}))
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        folder, name = map(sysconfig.get_config_var, ("LIBDIR", "INSTSONAME"))
        paths.add(os.path.join(str(folder), str(name)))
    # all of the base installation, nothing of a virtual environment; a link is followed to where Landlock sees it
    return sorted({os.path.realpath(path) for path in paths if os.path.exists(path)})


def open_to_all(path: str) -> bool:
    """Whether every user may pass through all folders above `path` and read it."""
    passable = all(os.stat(folder).st_mode & 0o001 for folder in Path(path).parents)
    return passable and bool(os.stat(path).st_mode & 0o004)


def command(
    limits: Limits,
    user: int,
    count_tasks: bool,
    read_search: bool = False,
    program: str = "",
    parent: int = 0,
    longest: int = 0,
) -> list[str]:
    """The interpreter's command line. It holds no secret: the job comes through a pipe. `parent` is who must be alive for the child to
    begin, where they share their process numbers; `longest`, the seconds that it may live where it is the first process."""
    limited = {
        "CORE": 1,  # the kernel starts no crash handler of the host, which it does where it is 0, and a dump of a byte is none
        "FSIZE": 0,
        "MSGQUEUE": 0,
        "MEMLOCK": 0,
        "SIGPENDING": limits.threads,
        "NOFILE": limits.open_files,
        "CPU": limits.cpu_seconds,
        "AS": limits.memory,
    }
    if count_tasks:
        limited["NPROC"] = limits.threads
    settings = {
        "limits": limited,
        "user": user,
        "read_search": read_search,
        "result": limits.result,
        "mark": MARK,
        "parent": parent,
        "longest": longest,
        "rules": seccomp.program().hex() if seccomp.supported() else "",
    }
    flags = ("-I", "-S", "-B", "-X", "utf8")
    return [program or interpreter(), *flags, "-c", SOURCE, json.dumps(settings)]


def next_user() -> int:
    return FIRST_USER + (os.getpid() * 61 + next(_numbers)) % USERS


def alive() -> set[Any]:
    """Children that have not been finished yet, waiting ones among them."""
    return _alive.copy()


def disown() -> None:
    """After a fork: those children are the parent's. Our copies of their pipes are closed: they are to end with the parent's."""
    for child in _alive:
        child.close_pipes()
    _alive.clear()


def close_all(streams: Iterable[IO[bytes] | None]) -> None:
    for stream in streams:
        if stream is not None:
            with suppress(OSError):
                stream.close()


class SandlockChild(Child):
    def _end(self, patience: float) -> Exit:
        if patience <= 0:
            self.process.kill()
        result = self.process.wait(max(patience, 0.001))
        self.close_pipes()
        reason, ended = result.reason.name, patience <= 0
        number = signal.SIGKILL if reason == "KILLED" and not ended else max(result.signal, 0)
        return Exit(max(result.exit_code, 0), number, ended=ended or reason == "TIMEOUT")


@dataclass(frozen=True, slots=True)
class Sandlock:
    """`own_namespace`: a user namespace of its own, in which the kernel counts this run's tasks alone."""

    own_namespace: bool = False
    name: str = "sandlock"

    def start(self, limits: Limits) -> Child:
        sandlock = importlib.import_module("sandlock")
        root = os.getuid() == 0
        mapped = NOBODY if self.own_namespace and not root else None
        paths = readable()
        sandbox = sandlock.Sandbox(
            fs_readable=[*paths, "/dev/null", "/dev/urandom"],
            fs_writable=["/dev/null"],
            clean_env=True,
            env=ENVIRONMENT,
            max_processes=1,
            max_open_files=limits.open_files,
            uid=mapped,
            gid=mapped,
            cwd="/",
            name=f"sandbox-{secrets.token_hex(8)}",  # no two may bear the same at one time; it says nothing of this process
        )
        line = command(
            limits,
            user=next_user() if root else 0,
            count_tasks=root or self.own_namespace,
            read_search=root and not all(open_to_all(path) for path in paths),
            parent=os.getpid(),
        )
        pipe = sandlock.StdioMode.PIPED
        # it does have an effect, by way of the user: the child's group is mapped
        warnings.filterwarnings(
            "ignore", message="Policy field 'gid' is set but not wired", category=UserWarning
        )
        try:
            process = sandbox.popen(line, stdin=pipe, stdout=pipe, stderr=pipe)
        except Exception as error:  # whatever the package raises, the program has not been started
            raise Infrastructure(f"sandlock: {error}") from error
        return SandlockChild(process)


def spawn(
    line: Sequence[str], name: str, env: Mapping[str, str] | None = None, apart: bool = False
) -> subprocess.Popen[bytes]:
    """A process with pipes to us for its three streams. `apart`: in the root folder, and in a group of its own."""
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


class PopenChild(Child):
    def __init__(self, process: subprocess.Popen[bytes], whole_group: bool = False) -> None:
        self.whole_group = whole_group
        super().__init__(process)

    def _end(self, patience: float) -> Exit:
        ended = False
        try:
            code = self.process.wait(max(patience, 0))
        except subprocess.TimeoutExpired:
            ended = True
            with suppress(OSError):
                self.close_input()
            self.kill()
            try:
                code = self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                code = self.process.wait()
        if self.whole_group:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        close_all(self.streams)
        # bubblewrap reports a signal as a shell does
        number = -code if code < 0 else max(0, code - 128)
        return Exit(max(code, 0), number, ended)


class BubblewrapChild(PopenChild):
    """bwrap, and below it the first process of the new namespace, with which all others end. That one waits for bwrap before it asks to
    die with it: were bwrap killed in this moment, it would wait for ever. So it is killed, and bwrap ends by itself; before it exists,
    bwrap goes on, and the interpreter ends because its input has ended."""

    def kill(self) -> None:
        try:
            for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        except OSError:  # it has just ended, or this kernel has no such file
            self.process.kill()


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """`privileged`: namespaces made by root itself, which then becomes an ordinary user; else a user namespace."""

    privileged: bool = False
    name: str = "bubblewrap"

    def start(self, limits: Limits) -> Child:
        program = shutil.which("bwrap")
        if program is None:
            raise Infrastructure("bubblewrap: no bwrap on PATH")
        user = next_user() if self.privileged else 0
        line = [program, *self.arguments(), "--", *command(limits, user, count_tasks=True)]
        return BubblewrapChild(spawn(line, "bubblewrap", env={}))

    def arguments(self) -> list[str]:
        """What bubblewrap is asked for."""
        spaces = "--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try"
        if self.privileged:
            user = "--cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID"
        else:
            user = f"--unshare-user --disable-userns --uid {NOBODY} --gid {NOBODY} --cap-drop ALL"
        rest = "--die-with-parent --new-session --clearenv --hostname sandbox"
        line = f"{spaces} {user} {rest}".split()
        for name, value in ENVIRONMENT.items():
            line += ["--setenv", name, value]
        paths = readable()
        folders = {str(parent) for path in paths for parent in Path(path).parents}
        for folder in sorted(folders | {"/dev"}):
            # else closed to others where the host's own is: /root
            line += ["--perms", "0755", "--dir", folder]
        for path in paths:
            line += ["--ro-bind", path, path]
        for link in ("/lib", "/lib64"):  # the loader is named by them in every program
            if os.path.islink(link):
                line += ["--symlink", os.readlink(link), link]
        for device in ("/dev/null", "/dev/urandom"):
            line += ["--dev-bind", device, device]
        return [*line, "--remount-ro", "/", "--chdir", "/"]


@dataclass(frozen=True, slots=True)
class Unsafe:
    """An ordinary process that reads your files and variables as you do. It has limits and, on Linux, the filter: no sockets, no other
    processes, and it ends with the grader."""

    name: str = "unsafe"

    def start(self, limits: Limits) -> Child:
        line = command(limits, user=0, count_tasks=False, parent=os.getpid())
        process = spawn(line, "no process could be started", env=ENVIRONMENT, apart=True)
        return PopenChild(process, whole_group=True)


class ContainerChild(PopenChild):
    """The runtime's client is our process, the container is not: ending the client would leave it running. So a small process outside
    the container, which ends when the grader does however that happens, has the runtime kill it. Inside, PID 1 is an interpreter that
    only waits, which a program cannot reach: should the runtime fail, no container outlives its hour."""

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
                # nobody reads any more, and a client that still has something to say would not end
                close_all(self.streams)
                self._stop()
        found = super()._end(0.0)
        self._end_reaper()
        return Exit(found.code, found.signal, ended=running)

    def _end_reaper(self) -> None:
        stdin = self.reaper.stdin
        if stdin is not None and not stdin.closed:
            self.reaper.kill()  # there is nothing to end
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
        """Why it cannot be tried here, or ''."""
        if not seccomp.supported():
            return NO_FILTER
        return "" if shutil.which(self.name) else f"{self.name} is not on PATH"

    def start(self, limits: Limits) -> Child:
        program = shutil.which(self.name)
        if program is None:
            raise Infrastructure(f"{self.name} is not on PATH")
        title = f"posttrain-{secrets.token_hex(8)}"
        line = [program, *self.arguments(limits, title), self.image, *self.inside(limits)]
        process = spawn(line, self.name)
        return ContainerChild(process, program, title)

    def arguments(self, limits: Limits, title: str) -> list[str]:
        """What the runtime is asked for. Output goes to us and into no log on disk; an image is never fetched."""
        line = f"run --rm --interactive --name {title} --pull never --log-driver none --network none --ipc none --read-only"
        line += f" --memory {limits.memory}b --memory-swap {limits.memory}b --pids-limit {limits.threads + 1} --cpus 1"
        line += f" --ulimit core=1:1 --ulimit nofile={limits.open_files}:{limits.open_files}"
        line += f" --user {NOBODY}:{NOBODY} --cap-drop ALL --security-opt no-new-privileges --hostname sandbox --workdir /"
        line += " --tmpfs /tmp:rw,noexec,nosuid,nodev,size=1m --entrypoint env"
        # it would hand the host's variables in
        proxies = ["--http-proxy=false"] if self.name == "podman" else []
        return [*line.split(), *proxies]

    def inside(self, limits: Limits) -> list[str]:
        """An empty environment but for ours, then the interpreter."""
        environment = {**ENVIRONMENT, "PATH": "/usr/local/bin:/usr/bin:/bin"}
        child = command(limits, user=0, count_tasks=False, program="python3", longest=LONGEST)
        return ["-i", *(f"{k}={v}" for k, v in environment.items()), *child]


def container_named(name: str) -> Container | None:
    """The container that a sandbox's name stands for: `docker`, `podman`, or either with `:IMAGE`; None where it is neither.

    >>> container_named("docker:python:3.13-slim"), container_named("bubblewrap")
    (Container(name='docker', image='python:3.13-slim'), None)
    """
    runtime, _, image = name.partition(":")
    return Container(runtime, image or IMAGE) if runtime in RUNTIMES else None


def candidates() -> list[tuple[Mechanism, str]]:
    """What could be tried here, best first, each with what it needs and lacks ('' where nothing is known to be lacking)."""
    if not sys.platform.startswith("linux"):
        return []
    root = os.getuid() == 0
    found: list[tuple[Mechanism, str]] = []
    no_filter = "" if seccomp.supported() else NO_FILTER
    try:
        importlib.import_module("sandlock")
        lacking = no_filter
    except Exception as error:  # its native library may refuse in many ways
        lacking = f"not importable ({type(error).__name__}: {error})"
    found.append((Sandlock(own_namespace=not root), lacking))
    if not root:
        found.append((Sandlock(own_namespace=False), lacking))
    lacking = no_filter if shutil.which("bwrap") else "bwrap is not on PATH"
    if root:
        found.append((Bubblewrap(privileged=True), lacking))
    found.append((Bubblewrap(privileged=False), lacking))
    return found
