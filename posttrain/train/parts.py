"""Shards of a tensor (a DTensor): the part that this process keeps, and the whole. In files, each process writes a block of rows of
the first dimension."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from posttrain.models.policy import Network, Policy
from posttrain.system.world import current
from posttrain.types import Sampler

N = TypeVar("N", bound=Network)


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def own_part(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, in the same memory; a plain tensor is returned as it is."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor.detach()
    return sharded.to_local()  # type: ignore[no-any-return]


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's shard of a whole tensor, sharded like `like`."""
    if not is_sharded(like):
        return tensor
    placed: Any = like
    # a layer is divided first, and FSDP has rows of what is left
    for dimension, placement in reversed([*enumerate(placed.placements)]):
        if not placement.is_replicate():
            mesh: Any = placed.device_mesh
            which = (mesh.size(dimension), mesh.get_local_rank(dimension))
            tensor = _slice(tensor, placement.dim, *which)
    assert tensor.shape == own_part(like).shape
    return tensor


def rows_of(tensor: Tensor, like: Tensor) -> Tensor:
    """The rows of a tensor that this process writes to a checkpoint. All processes must call this."""
    if current().tensor == 1:
        return own_part(tensor)
    return _slice(whole(own_part(tensor), like), 0, current().size, current().rank).clone()


def _slice(tensor: Tensor, dimension: int, count: int, number: int) -> Tensor:
    """The slice `number` of `count` slices, of which the last may be smaller or empty."""
    length = tensor.shape[dimension]
    size = -(-length // count)
    start = min(size * number, length)
    return tensor.narrow(dimension, start, min(size, length - start))


def copies(like: Tensor) -> int:
    """How many processes have the same shard of a tensor."""
    placed: Any = like
    sizes = enumerate(placed.placements)
    parts: int = prod(placed.device_mesh.size(n) for n, one in sizes if not one.is_replicate())
    return current().size // parts


def plain_network(network: N) -> N:
    """A network with whole weights, for the first process to save: itself, or the plain copy of a sharded one, on the CPU."""
    if network.sharded is None:
        return network
    return network.sharded.copied(torch.device("cpu"), current().first)  # type: ignore[no-any-return]


def gathering(policy: Policy, make: Callable[[Policy], Sampler]) -> Sampler:
    """A sampler of the policy. If its weights are sharded, the sampler has a gathered copy of them."""
    if policy.sharded is None:
        return make(policy)
    from posttrain.train.sharding import GatheringSampler

    copied = policy.sharded.copied(policy.device)
    return GatheringSampler(make(copied), copied, policy.sharded)


def whole(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Gather a sharded tensor, or the tensor whose shard this is, sharded like `like`. All processes must call this."""
    sharded: Any = tensor
    if like is not None and is_sharded(like):
        from torch.distributed.tensor import DTensor

        placed: Any = like
        shape, stride = like.shape, like.stride()
        mesh, placements = placed.device_mesh, placed.placements
        sharded = DTensor.from_local(tensor, mesh, placements, shape=shape, stride=stride)
    return sharded.detach().full_tensor() if is_sharded(sharded) else tensor
