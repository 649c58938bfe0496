"""What a run asks of a cluster, and whether its nodes have it: addresses, resources, versions. Nothing here needs Ray."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from posttrain import __version__ as VERSION
from posttrain.errors import require

LOCAL = "ray"  # as an address: a cluster of this machine alone, which starts and ends with the run
OnFailedNode = Literal["stop", "shrink"]


@dataclass(frozen=True, slots=True)
class Resources:
    """What one process of a run takes."""

    cpus: float = 1.0
    gpus: float = 0.0

    def __str__(self) -> str:
        text = f"{self.cpus:g} CPU(s)"
        return f"{text} and {self.gpus:g} GPU(s)" if self.gpus else text


@dataclass(frozen=True, slots=True)
class Placement:
    """A cluster's address, and how the processes of a run lie on it. Ranks train, samplers sample."""

    address: str
    ranks: int = 1
    samplers: int = 0
    rank: Resources = Resources()
    sampler: Resources = Resources()
    spread: bool = False
    on_failed_node: OnFailedNode = "stop"

    @property
    def bundles(self) -> list[Resources]:
        """Of every process that has a place of its own: a run with one rank trains in the process that was started by hand."""
        return [self.rank] * (self.ranks if self.ranks > 1 else 0) + [self.sampler] * self.samplers


def check_address(address: str) -> tuple[str, int] | None:
    """The host and port of a cluster that runs already; None for one of this machine.

    >>> check_address("ray"), check_address("10.0.0.5:6379")
    (None, ('10.0.0.5', 6379))
    """
    if address == LOCAL:
        return None
    advice = f"use {LOCAL}, or HOST:PORT as 'ray start' prints it"
    there = f"cluster={address}: a run is started on a node of its cluster, because it writes files and trains there"
    send = "and send the command with 'ray job submit' from elsewhere"
    require(not address.startswith("ray://"), f"{there}; {advice}, {send}")
    found = re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})", address)
    require(found is not None, f"cluster={address} is no address of a cluster: {advice}")
    assert found is not None
    host, port = found[1].strip("[]"), int(found[2])
    require(0 < port < 2**16, f"cluster={address} has no port of 1 to 65535")
    return host, port


def shortage(nodes: Sequence[Resources], asked: Sequence[Resources]) -> str:
    """Why the processes do not find a place each, in words; "" where they do. The largest are placed first, each on the node with the
    least room that is enough.

    >>> shortage([Resources(4, 1), Resources(4, 1)], [Resources(1, 1)] * 2)
    ''
    >>> shortage([Resources(4, 1)], [Resources(1, 1)] * 2)
    'the run needs 2 GPU(s) and the 1 node(s) of the cluster have 1'
    """
    for name in ("gpus", "cpus"):
        need, have = (sum(getattr(one, name) for one in many) for many in (asked, nodes))
        if need > have + 1e-9:
            what = f"{name[:-1].upper()}(s)"
            return f"the run needs {need:g} {what} and the {len(nodes)} node(s) of the cluster have {have:g}"
    free = [[node.gpus, node.cpus] for node in nodes]
    for one in sorted(asked, key=lambda one: (-one.gpus, -one.cpus)):
        fits = [room for room in free if room[0] >= one.gpus - 1e-9 and room[1] >= one.cpus - 1e-9]
        if not fits:
            largest = max(nodes, key=lambda node: (node.gpus, node.cpus))
            return f"no node has room for a process with {one} next to the others; the largest has {largest}"
        room = min(fits)
        room[0], room[1] = room[0] - one.gpus, room[1] - one.cpus
    return ""


def versions() -> dict[str, str]:
    """Of what must be the same in all processes of a run; Ray looks after its own."""
    torch = metadata.version("torch")  # without loading it
    return {"posttrain": VERSION, "torch": torch, "python": platform.python_version()}


def check_versions(own: Mapping[str, str], found: Mapping[str, str], node: str) -> None:
    """Refuse a node with other versions than this one.

    >>> check_versions({"torch": "2.13.0"}, {"torch": "2.12.1"}, "10.0.0.5")
    Traceback (most recent call last):
    posttrain.errors.UserError: node 10.0.0.5 has torch 2.12.1, and this one has 2.13.0; install the same on all nodes
    """
    for name, version in own.items():
        other = found.get(name, "none")
        same = f"node {node} has {name} {other}, and this one has {version}"
        require(other == version, f"{same}; install the same on all nodes")
