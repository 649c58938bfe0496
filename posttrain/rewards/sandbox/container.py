"""A container runtime as the sandbox: docker or podman, where the user names one. It is never chosen by itself, and is self-tested like
the others. The image must be there already and hold `env` and `python3`, as python:3.12-slim does.

A container is no child of ours, so a small process outside it, which ends when the grader does however that happens, has the runtime
kill it. Inside, PID 1 is an interpreter that only waits, which a program cannot reach: should the runtime fail, no container outlives
its hour.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass

from posttrain.rewards.sandbox import mechanisms, seccomp
from posttrain.rewards.sandbox.limits import Limits
from posttrain.rewards.sandbox.mechanisms import (
    NOBODY,
    Child,
    Exit,
    Infrastructure,
    PopenChild,
    close_all,
)

RUNTIMES = ("docker", "podman")
IMAGE = "python:3.12-slim"
LONGEST = 3600  # seconds that any container may live, waiting included
GRACE = 0.25  # seconds for an interpreter to see that its input has ended, before its container is killed
REAPER = "import os, sys; os.read(0, 1); os.execv(sys.argv[1], sys.argv[1:])"  # its input ends with the grader
PATIENCE = 10.0  # seconds for the runtime to do so
LOG = logging.getLogger(__name__)


class ContainerChild(PopenChild):
    """The runtime's client is our process, the container is not: ending the client would leave it running."""

    def __init__(self, process: subprocess.Popen[bytes], runtime: str, name: str) -> None:
        self.name, quiet = name, subprocess.DEVNULL
        line = [mechanisms.interpreter(), "-I", "-S", "-c", REAPER, runtime, "kill", name]
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
            self.reaper.wait(PATIENCE)

    def _waited(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _stop(self) -> None:
        if self.reaper.stdin is not None:
            self.reaper.stdin.close()
        if not self._waited(PATIENCE):
            LOG.warning(
                "the client of container %s had to be killed; the container ends within %d s",
                self.name,
                LONGEST,
            )


@dataclass(frozen=True, slots=True)
class Container:
    """`name` is the runtime: docker or podman."""

    name: str
    image: str = IMAGE

    def lacking(self) -> str:
        """Why it cannot be tried here, or ''."""
        if not seccomp.supported():
            return "there is no filter of system calls for this machine's architecture"
        return "" if shutil.which(self.name) else f"{self.name} is not on PATH"

    def start(self, limits: Limits) -> Child:
        program = shutil.which(self.name)
        if program is None:
            raise Infrastructure(f"{self.name} is not on PATH")
        title = f"posttrain-{secrets.token_hex(8)}"
        line = [program, *self.arguments(limits, title), self.image, *self.inside(limits)]
        process = mechanisms.spawn(line, self.name)
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
        environment = {**mechanisms.ENVIRONMENT, "PATH": "/usr/local/bin:/usr/bin:/bin"}
        child = mechanisms.command(
            limits, user=0, count_tasks=False, program="python3", longest=LONGEST
        )
        return ["-i", *(f"{k}={v}" for k, v in environment.items()), *child]


def named(name: str) -> Container | None:
    """The container that a sandbox's name stands for: `docker`, `podman`, or either with `:IMAGE`; None where it is neither.

    >>> named("docker:python:3.13-slim"), named("bubblewrap")
    (Container(name='docker', image='python:3.13-slim'), None)
    """
    runtime, _, image = name.partition(":")
    return Container(runtime, image or IMAGE) if runtime in RUNTIMES else None
