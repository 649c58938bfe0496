"""The code of a Ray actor on a node: it starts one process of posttrain there, forwards messages, and reports how the process
ended."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from posttrain.cluster import placement
from posttrain.cluster.launch import COMMAND
from posttrain.errors import require
from posttrain.system import processes
from posttrain.system.processes import PYTHON, write_all

SIOCGIFADDR = 0x8915


def interface(address: str) -> dict[str, str]:
    """Variables that make gloo and NCCL listen on the network interface with this address; none if no interface has it.

    >>> interface("127.0.0.1")
    {'GLOO_SOCKET_IFNAME': 'lo', 'NCCL_SOCKET_IFNAME': 'lo'}
    """
    import fcntl  # not on Windows, where this file is imported too

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {}


class Host:
    """Runs in an actor on a node. Holds the one process that it started there, and the pipes to it."""

    process: subprocess.Popen[bytes] | None = None

    def __init__(self) -> None:
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the actor

    def about(self) -> tuple[str, dict[str, str]]:
        """The address of the node, and its versions."""
        import ray

        return str(ray.util.get_node_ip_address()), placement.versions()

    def visible(self) -> str | None:
        """The GPUs that Ray assigned to the actor."""
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def run(self, words: Sequence[str], environment: dict[str, str], folder: str) -> int:
        """Start `posttrain WORDS` as one process of several. Returns its process id."""
        absent = f"node {self.about()[0]} has no folder {folder}: start the run in one that all nodes share"
        require(os.path.isdir(folder), absent)
        given, said = self._environment() | environment, {"stdout": self.said, "stderr": self.said}
        self.process = processes.start([*COMMAND, *words], given, cwd=folder, **said)
        return self.process.pid

    def _environment(self) -> dict[str, str]:
        return os.environ | interface(self.about()[0])

    def sample(self, settings: Mapping[str, Any], size: int) -> int:
        """Start a sampling process (cluster/worker.py). Returns its process id."""
        from posttrain.cluster.publish import Buckets
        from posttrain.system.wire import to_line

        self.buckets = Buckets(size)
        command, said = [*PYTHON, "-m", "posttrain.cluster.worker"], self.said
        self.process, self.into, self.out = processes.start_piped(
            command, self._environment(), self.buckets.handles, stdout=said, stderr=said
        )
        self.put(to_line((settings, self.buckets.describe())))
        return self.process.pid

    def put(self, line: bytes) -> None:
        """Forward a message to the process."""
        with suppress(OSError):  # the process has ended; `take` reports that
            write_all(self.into, line)

    def fill(self, which: int, data: Any) -> None:
        """Write these bytes to a bucket."""
        self.buckets.memory[which].numpy()[:] = data

    def take(self, seconds: float) -> bytes | None:
        """The process's output; b"" if there is none within `seconds`, None after it has ended."""
        if not select.select([self.out], [], [], seconds)[0]:
            return b""
        return os.read(self.out, 1 << 20) or None

    def ended(self) -> tuple[int | None, str]:
        """How the process ended, and its other output."""
        assert self.process is not None
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.said.seek(0)
        return self.process.returncode, self.said.read().decode(errors="replace")

    def wait(self) -> tuple[int | None, str]:
        """Wait until the process has ended, then return the same as `ended`."""
        assert self.process is not None
        while self.process.poll() is None:
            time.sleep(0.02)
        return self.ended()

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


def host_class(ray: Any) -> type:
    """`Host` as an actor class, with separate concurrency groups for the methods that may run at the same time."""

    class Placed(Host):
        wait = ray.method(concurrency_group="out")(Host.wait)
        take = ray.method(concurrency_group="out")(Host.take)
        put = ray.method(concurrency_group="in")(Host.put)
        fill = ray.method(concurrency_group="in")(Host.fill)

    return Placed
