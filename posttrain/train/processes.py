"""Several processes on one or more machines, as started by torchrun or `processes=N`: how they connect, agree and exchange data."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.errors import PeerFailed, UserError, require
from posttrain.system.world import ALONE, World, current, using
from posttrain.types import JSON

# a process that has not come to a common point by then is not going to: seconds
LONGEST_WAIT = float(os.environ.get("POSTTRAIN_WAIT", 1800))
SERVER_SOCKET = "POSTTRAIN_SOCKET"  # the socket on which the first process of `processes=N` listens
WAITS = 60.0  # seconds after which a waiting process looks whether the first one is still there
# what gloo, NCCL and the store report when another process is gone
GONE = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Broken pipe", "socket")
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Processes(World):
    """This process among `size`. Messages go through host memory; gradients use the device's own backend."""

    def __init__(self, rank: int, size: int, sharding: str, store: Any, tensor: int = 1):
        self.rank, self.size, self.sharding, self.store = rank, size, sharding, store
        self.tensor = tensor
        self.works = 0  # how many were begun

    def same(self, value: JSON) -> JSON:
        data = encode(value) if self.first else b""
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0)
        bytes_K = _bytes(data) if self.first else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(bytes_K, 0)
        return value if self.first else decode(bytes_K.numpy().tobytes())

    def gather(self, value: JSON) -> list[JSON]:
        own = _bytes(encode(value))
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(own)]))
        padded = torch.cat([own, own.new_zeros(int(max(lengths)) - len(own))])
        found = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded)
        pairs = zip(found, lengths, strict=True)
        return [decode(data[: int(length)].numpy().tobytes()) for data, length in pairs]

    def any(self, flag: bool) -> bool:
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)

    def begin(self, work: str, together: bool) -> str:
        self.works += 1
        work, together = self.same([work, together])
        if work and not together:
            self._wait_for_first(f"work-{self.works}")
        return work if together or self.first else "wait"

    def _wait_for_first(self, key: str) -> None:
        """Wait as long as the first process works alone. Its end is noticed, because it holds the store."""
        self._alone = key
        while not self.first:
            with suppress(dist.DistStoreError):  # not yet
                self.store.wait([key], timedelta(seconds=WAITS))
                return

    def end(self) -> None:
        if self.first and (key := getattr(self, "_alone", "")):
            self.store.set(key, "done")
            self._alone = ""
        self.same(None)


def _bytes(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def encode(value: JSON) -> bytes:
    r"""Encode JSON with NumPy arrays: a line of JSON, then the bytes of the arrays.

    >>> decode(encode({"ids": np.arange(2), "text": "a\n"}))
    {'ids': array([0, 1]), 'text': 'a\n'}
    """
    arrays: list[bytes] = []

    def replaced(one: Any) -> JSON:
        if isinstance(one, np.ndarray):
            arrays.append(np.ascontiguousarray(one).tobytes())
            return {"@array": [one.dtype.str, list(one.shape), len(arrays[-1])]}
        if isinstance(one, np.generic):
            return one.item()
        raise TypeError(f"{type(one).__name__} cannot be exchanged between processes")

    line = json.dumps(value, default=replaced, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return b"".join([line, b"\n", *arrays])


def decode(data: bytes) -> JSON:
    line, _, rest = data.partition(b"\n")
    place = 0

    def restored(found: dict[str, JSON]) -> JSON:
        nonlocal place
        if [*found] != ["@array"]:
            return found
        kind, shape, size = found["@array"]
        place += size
        return np.frombuffer(rest[place - size : place], np.dtype(kind)).reshape(shape).copy()

    return json.loads(line.decode("utf-8", "surrogatepass"), object_hook=restored)


def rank() -> int:
    """The rank of this process, which torchrun or `processes=N` sets in the environment; default 0."""
    return _number("RANK", 0)


def size() -> int:
    """The number of processes that were started together; default 1."""
    return _number("WORLD_SIZE", 1)


def _number(name: str, usual: int) -> int:
    text = os.environ.get(name, "") if "RANK" in os.environ and "WORLD_SIZE" in os.environ else ""
    require(text.isdecimal() or not text, f"{name}={text} in the environment is not a number")
    return int(text) if text else usual


def local_device(device: str) -> str:
    """The device of this process: with several CUDA devices, the one of its rank on the machine."""
    if size() == 1 or not device.startswith("cuda"):
        return device
    local = _number("LOCAL_RANK", rank())
    text = f"device={device} names one device for {size()} processes; use device=cuda, which gives each its own"
    require(device == "cuda", text)
    check_devices(_number("LOCAL_WORLD_SIZE", size()))
    torch.cuda.set_device(local)
    return f"cuda:{local}"


def check_devices(count: int) -> None:
    """Raise an error for more processes on this machine than CUDA devices."""
    here = torch.cuda.device_count()
    few = f"processes={count}: torch sees {here} CUDA device(s) here"
    advice = f"use processes={max(1, here)}, or device=cpu"
    require(here >= count, f"{few}, and each process needs its own; {advice}")


@contextmanager
def joined(
    device: str, sharding: str, identity: Mapping[str, str], tensor: int = 1
) -> Iterator[World]:
    """Work with the processes that were started together until the block ends. An error if their `identity` (versions, settings)
    differs."""
    if size() == 1 and (sharding != "always" or "WORLD_SIZE" not in os.environ):
        with using(ALONE) as world:
            yield world
        return
    rank()  # raises an error if it is not a number
    missing = [name for name in VARIABLES if name not in os.environ]
    text = f"{', '.join(missing)} is not in the environment; start the processes by torchrun or processes=N"
    require(not missing, text)
    world = _connect(device, sharding, tensor)
    try:
        with _explained(), using(world):
            _check_same(world, identity)
            yield world
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _connect(device: str, sharding: str, tensor: int) -> Processes:
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    wait = timedelta(seconds=LONGEST_WAIT)
    common: dict[str, Any] = {"timeout": wait, "rank": rank(), "world_size": size()}
    require(port.isdecimal(), f"MASTER_PORT={port} in the environment is not a number")
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    socket_number = os.environ.get(SERVER_SOCKET)
    try:
        if socket_number is None:  # torchrun: by the store of its agent
            dist.init_process_group(backend, **common)
        else:
            served = int(socket_number) if rank() == 0 else None
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            given = (address, int(port), size(), rank() == 0, wait)
            store = TCPStore(*given, master_listen_fd=served, use_libuv=False)
            dist.init_process_group(backend, store=store, **common)
    except (RuntimeError, ValueError) as error:  # dist.DistError is a RuntimeError
        said = " ".join(str(error).split())
        text = f"process {rank()} of {size()} did not reach the others at {address}:{port}: {said[:200]}"
        if "EADDRINUSE" in said or "address already in use" in said:
            text = f"port {port} of {address} (MASTER_PORT) is in use; choose another"
        raise UserError(text) from None
    return Processes(rank(), size(), sharding, dist.distributed_c10d._get_default_store(), tensor)


def _check_same(world: Processes, identity: Mapping[str, str]) -> None:
    found = world.gather(dict(identity))
    for number, other in enumerate(found):
        for name, value in other.items():
            where = f"process {number} has {name} {value} and process 0 has {name} {found[0][name]}"
            require(value == found[0][name], f"{where}; start all processes with the same")


@contextmanager
def _explained() -> Iterator[None]:
    """Turn an error that the loss of another process caused into `PeerFailed`."""
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in GONE):
            raise
        said = " ".join(str(error).split())[:160]
        text = f"process {current().rank} lost another process of the run ({said})"
        raise PeerFailed(text) from error
