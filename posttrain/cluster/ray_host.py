"""What runs in an actor of Ray on a node: it starts one process of posttrain there, passes messages on, and says how it ended."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from posttrain.cluster import placement
from posttrain.cluster.launch import COMMAND
from posttrain.errors import require
from posttrain.system.processes import STARTED, write_all

SIOCGIFADDR = 0x8915


def interface(address: str) -> dict[str, str]:
    """What tells gloo and NCCL to listen on the network interface that has an address; nothing where none has.

    >>> interface("127.0.0.1")
    {'GLOO_SOCKET_IFNAME': 'lo', 'NCCL_SOCKET_IFNAME': 'lo'}
    """
    import fcntl  # not on Windows, where this file is imported too

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                found = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {}


class Host:
    """In an actor on a node: the one process that it has started there, and pipes to it."""

    process: subprocess.Popen[bytes] | None = None

    def __init__(self) -> None:
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the actor

    def about(self) -> tuple[str, dict[str, str]]:
        """The address of the node, and its versions."""
        import ray

        return str(ray.util.get_node_ip_address()), placement.versions()

    def visible(self) -> str | None:
        """The GPUs that Ray gave to it."""
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def run(self, words: Sequence[str], environment: dict[str, str], folder: str) -> int:
        """Start `posttrain WORDS` as one process of several; its process id."""
        require(
            os.path.isdir(folder),
            f"node {self.about()[0]} has no folder {folder}: start the run in one that all nodes share",
        )
        return self._start([*COMMAND, *words], environment, folder)

    def _start(
        self,
        command: Sequence[str],
        more: dict[str, str],
        folder: str | None = None,
        handles: Sequence[int] = (),
    ) -> int:
        self.process = subprocess.Popen(
            command,
            env=os.environ | interface(self.about()[0]) | more | {STARTED: str(os.getpid())},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self.said,
            stderr=self.said,
            pass_fds=handles,
            process_group=0,
        )
        return self.process.pid

    def sample(self, settings: Mapping[str, Any], size: int) -> int:
        """Start a process that samples, see cluster/worker.py; its process id."""
        from posttrain.cluster.publish import Buckets
        from posttrain.system.wire import to_line

        self.buckets = Buckets(size)
        theirs, self.into = os.pipe()
        self.out, ours = os.pipe()
        command = [sys.executable, "-m", "posttrain.cluster.worker", str(theirs), str(ours)]
        pid = self._start(command, {}, None, [theirs, ours, *self.buckets.handles])
        os.close(theirs)
        os.close(ours)
        self.put(to_line((settings, self.buckets.describe())))
        return pid

    def put(self, line: bytes) -> None:
        """Pass a message on."""
        with suppress(OSError):  # it has ended, which `take` says
            write_all(self.into, line)

    def fill(self, which: int, data: Any) -> None:
        """Have these bytes in a bucket."""
        self.buckets.memory[which].numpy()[:] = data

    def take(self, seconds: float) -> bytes | None:
        """What the process has said; b"" where it says nothing for so long, None when it has ended."""
        if not select.select([self.out], [], [], seconds)[0]:
            return b""
        return os.read(self.out, 1 << 20) or None

    def ended(self) -> tuple[int | None, str]:
        """How the process ended, and what it wrote besides."""
        assert self.process is not None
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.said.seek(0)
        return self.process.returncode, self.said.read().decode(errors="replace")

    def wait(self) -> tuple[int | None, str]:
        """The same, not before it has."""
        assert self.process is not None
        while self.process.poll() is None:
            time.sleep(0.02)
        return self.ended()

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


def host_class(ray: Any) -> type:
    """`Host` with the methods that may run beside each other in groups of their own."""

    class Placed(Host):
        wait = ray.method(concurrency_group="out")(Host.wait)
        take = ray.method(concurrency_group="out")(Host.take)
        put = ray.method(concurrency_group="in")(Host.put)
        fill = ray.method(concurrency_group="in")(Host.fill)

    return Placed
