"""Another operating system, as far as it can be had on Linux: its name, and without the modules, functions and files that it lacks.

`python tests/platforms_for_tests.py NAME PROGRAM [WORDS]` runs PROGRAM under it, and so does every Python process that it starts. The
packages below posttrain are imported before: they have builds of their own for each system, which are not tested here. What this
cannot show: paths and line ends of Windows, its file locks and renames, processes that are spawned there, and Apple's GPUs.
"""

from __future__ import annotations

import builtins
import faulthandler
import importlib.abc
import io
import os
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

BELOW = ("torch", "transformers", "safetensors.torch", "numpy", "rich.live", "yaml", "pydantic", "filelock", "regex")
BELOW += ("matplotlib.pyplot", "huggingface_hub", "asyncio", "tempfile", "shutil", "platform", "torch._dynamo", "http.client")
BELOW += (
    "transformers.models.llama.modeling_llama",
    "transformers.utils.chat_template_utils",
    "mpmath",
    "sqlite3",
    "multiprocessing",
)

# what Python's documentation says is not there
LACKS: dict[str, dict[str, tuple[str, ...]]] = {
    "darwin": {
        "os": ("sched_getaffinity", "sched_setaffinity", "memfd_create", "eventfd", "pidfd_open", "O_PATH", "unshare", "setns"),
        "select": ("epoll",),
        "signal": ("sigtimedwait", "sigwaitinfo"),
        "modules": (),
    },
    "win32": {
        "os": (
            "fork", "forkpty", "getuid", "geteuid", "getgid", "getegid", "getpgid", "setpgid", "setsid", "killpg", "kill_group", "wait",
            "wait3", "wait4", "WNOHANG", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY", "O_PATH", "chown", "fchown", "fchmod",
            "mkfifo", "nice", "uname", "statvfs", "sched_getaffinity", "sched_setaffinity", "memfd_create", "eventfd", "pidfd_open",
            "set_blocking", "sysconf", "getloadavg", "posix_spawn", "setuid", "setgid", "pipe2", "sync", "setrlimit", "unshare",
        ),
        "select": ("epoll", "poll"),
        "signal": ("SIGKILL", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGPROF", "SIGCHLD", "SIGHUP", "SIGSTOP", "SIGCONT", "setitimer",
                   "pthread_kill", "pthread_sigmask", "sigwait", "ITIMER_PROF", "ITIMER_REAL", "alarm", "pause", "siginterrupt"),
        "socket": ("AF_UNIX", "socketpair_unix", "CMSG_LEN", "recv_fds", "send_fds", "SO_PEERCRED", "SO_REUSEPORT"),
        "faulthandler": ("register", "unregister"),
        "modules": ("fcntl", "resource", "pwd", "grp", "termios", "pty", "tty", "posix_ipc", "syslog", "crypt"),
    },
}  # fmt: skip


class Missing(importlib.abc.MetaPathFinder):
    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, *_: object) -> None:
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def no_proc(function: Callable[..., Any]) -> Callable[..., Any]:
    def opened(path: Any, *words: Any, **more: Any) -> Any:
        if isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(("/proc/", "/dev/shm")):
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
        return function(path, *words, **more)

    return opened


def become(name: str) -> None:
    """Import what is below posttrain, then let this process look like one of the system `name`."""
    for module in BELOW:
        __import__(module)
    lacks, modules = LACKS[name], {"os": os, "select": select, "signal": signal, "socket": socket, "faulthandler": faulthandler}
    start = subprocess.Popen.__init__

    def python_too(self: Any, command: Any, *words: Any, **more: Any) -> None:
        """A Python process that is started is of the same system."""
        if isinstance(command, list) and command[:1] == [sys.executable]:
            options = [word for word in command[1:2] if word.startswith("-") and word not in ("-c", "-m")]
            command = [sys.executable, *options, __file__, name, *command[1 + len(options) :]]
        assert name != "win32" or not more.get("pass_fds"), "pass_fds not supported on Windows."
        start(self, command, *words, **more)

    subprocess.Popen.__init__ = python_too  # type: ignore[method-assign]
    # the packages below keep the modules that they have imported; posttrain finds copies without what is not there
    for module, names in lacks.items():
        if module != "modules":
            copy = types.ModuleType(module)
            copy.__dict__.update({key: value for key, value in vars(modules[module]).items() if key not in names})
            sys.modules[module] = copy
    for module in lacks["modules"]:
        sys.modules.pop(module, None)
    sys.meta_path.insert(0, Missing(lacks["modules"]))
    sys.platform = name
    if name == "win32":
        sys.modules["signal"].SIGBREAK = signal.SIGTERM  # type: ignore[attr-defined]
    builtins.open = io.open = no_proc(open)  # type: ignore[assignment]
    sys.modules["os"].open = no_proc(os.open)  # type: ignore[attr-defined]


def main() -> NoReturn:
    name, program, *words = sys.argv[1:]
    become(name)
    import runpy

    if program == "-m":
        program, *words = words
        sys.argv = [program, *words]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif program == "-c":
        program, *words = words
        sys.argv = ["-c", *words]
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})  # noqa: S102
    else:
        sys.argv = [program, *words]
        runpy.run_path(program, run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    main()
