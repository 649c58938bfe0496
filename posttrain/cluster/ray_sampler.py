"""The sampler of `cluster/remote.py` with its processes on the nodes of a Ray cluster.

The messages are the same. They pass through the actor that started the process. A bucket of weights passes through the object store:
it is put there once, and each node reads it once. A failed actor is replaced like a failed process. If no node has room for a new
one, the sampler continues with the remaining processes, or the run ends, as `on_failed_node` says.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from posttrain.cluster import remote
from posttrain.cluster.launch import NODE_FAILED
from posttrain.cluster.ray_cluster import ANSWER, Cluster, load_ray, one_line
from posttrain.engine.fp8 import AS_TRAINED, Precision
from posttrain.errors import UserError
from posttrain.events import Events
from posttrain.models.policy import Policy
from posttrain.system.wire import to_line
from posttrain.types import JSON

TAKE = 5.0  # seconds that an actor waits for a message to forward


@dataclass(eq=False, kw_only=True)
class RayWorker(remote.WorkerProcess):
    """A process on a node, and the actor that started it."""

    host: Any
    process: Any = None  # the actor has the process and its pipes
    said: Any = None
    filled: int = 0  # buckets of this publish that were sent to it

    @property
    def name(self) -> str:
        return f"the sampler's process {self.number} (pid {self.pid} on its node)"

    def reason(self) -> str:
        ray: Any = load_ray()
        try:
            code, text = ray.get(self.host.ended.remote(), timeout=ANSWER)
        except ray.exceptions.RayError:
            return NODE_FAILED
        return remote.how_it_ended(code, text)

    def exit_code(self) -> None:
        """Unknown until `reason` asks the actor for it."""

    def end(self) -> None:
        self.close_pipes()
        ray: Any = load_ray()
        if ray.is_initialized():  # otherwise all actors have ended with the connection
            ray.kill(self.host)

    def hangs(self) -> bool:
        """Whether it hangs. Ray notices the end of an actor; a silent one that is alive gets the longest time limit."""
        return self.quiet() > remote.HUNG


class RaySampler(remote.RemoteSampler):
    """A `Sampler` with `count` processes at places of a cluster."""

    def __init__(
        self,
        policy: Policy,
        rows: int,
        processes: int,
        count: int,
        cluster: Cluster,
        precision: Precision = AS_TRAINED,
    ):
        self.cluster, self.events = cluster, policy.events or Events()
        self.put: tuple[int, Any] = (-1, None)  # the last bucket in the object store
        device = "cuda" if cluster.settings.sampler.gpus else "cpu"
        settings = remote.worker_settings(policy, -(-rows // count), processes, **asdict(precision))
        try:
            super().__init__(policy, replace(settings, device=device), count)
        except TimeoutError as error:
            raise UserError(str(error)) from None

    def _start(self, number: int) -> remote.WorkerProcess:
        ray: Any = load_ray()
        try:
            host = self.cluster.place(self.cluster.settings.sampler)
            asked = host.sample.remote(asdict(self.settings), self.buckets.size)
            pid = ray.get(asked, timeout=ANSWER)
        except ray.exceptions.RayError as error:
            text = f"the sampler's process {number} could not be started: {one_line(error)[-200:]}"
            raise UserError(text) from None
        out, ours = os.pipe()
        threading.Thread(target=_relay, args=(host, ours), name="ray sampler", daemon=True).start()
        return RayWorker(pid=pid, into=-1, out=out, number=number, host=host)

    def _write(self, worker: remote.WorkerProcess, message: JSON) -> None:
        assert isinstance(worker, RayWorker)
        host = worker.host
        worker.last_reply = time.monotonic()
        if message[0] == "publish":
            worker.filled, self.put = 0, (-1, None)
        elif message[0] == "bucket":
            host.fill.remote(worker.filled % len(self.buckets.memory), self._stored(worker.filled))
            worker.filled += 1
        host.put.remote(to_line(message))

    def _stored(self, number: int) -> Any:
        """Put a bucket into the object store for all readers, and release the one before."""
        ray: Any = load_ray()
        if self.put[0] != number:
            self.put = (-1, None)
            try:
                memory = self.buckets.memory[number % len(self.buckets.memory)]
                self.put = (number, ray.put(memory.cpu().numpy()))
            except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
                size = f"{self.buckets.size >> 20} MiB of weights"
                advice = "give it more (ray start --object-store-memory), or end what fills it, and resume"
                full = f"the object store of the cluster has no room for {size} ({one_line(error)[:160]})"
                raise UserError(f"{full}; {advice}") from None
        return self.put[1]

    def _replace(self, worker: remote.WorkerProcess) -> None:
        try:
            super()._replace(worker)
        except TimeoutError as error:
            if self.cluster.settings.on_failed_node == "stop" or len(self.workers) == 1:
                advice = "resume when there is room again, or use on_failed_node=shrink"
                raise UserError(f"{worker.name} was lost; {error}; {advice}") from None
            self.workers.remove(worker)
            self.capacity -= self.settings.rows
            left = f"{len(self.workers)} sampler process(es) go on"
            lost = f"{worker.name} was lost and has no new place"
            self.events.emit("message", f"{lost}; {left}", "warning")


def _relay(host: Any, ours: int) -> None:
    """Forward what a process writes, until it or its actor has ended."""
    ray: Any = load_ray()
    try:
        while True:
            said = ray.get(host.take.remote(TAKE), timeout=remote.HUNG)
            if said is None:
                return
            while said:
                said = said[os.write(ours, said) :]
    except (ray.exceptions.RayError, OSError, ConnectionError, RuntimeError):
        pass  # the actor has ended, or this end was closed
    finally:
        os.close(ours)
