"""Sharded training with FSDP2: each process keeps a part of every trained tensor, with its gradient and moments.

torch's `fully_shard` gathers the weights of a layer for its pass and sums gradients while the backward pass goes on. With
tensor_parallel, the linear layers of a decoder layer are first divided over neighbours by torch's `parallelize_module`. What needs
whole weights gets them from `Sharded`: a checkpoint, an export, and the copy that the engine generates with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import parallel

from posttrain.errors import require
from posttrain.models.fused_body import takes_fused_pass
from posttrain.models.policy import Network, Policy
from posttrain.models.scorer import Scorer
from posttrain.system.world import current
from posttrain.train import checkpoint
from posttrain.train.memory import learning_bytes, weight_bytes
from posttrain.train.parts import whole
from posttrain.types import Outputs, Sampler, Statistics

LAYER = "layers.*."  # prefix of module names in a family's plan
# styles of such plans; a norm over heads sees the heads of this process (the third dimension), and its gradient is summed
STYLES: dict[str, Callable[[], parallel.ParallelStyle]] = {
    "colwise": parallel.ColwiseParallel,
    "rowwise": parallel.RowwiseParallel,
    "replicated_with_grad_allreduce": partial(
        parallel.SequenceParallel, sequence_dim=2, use_local_output=True
    ),
}
ROOM = 0.5  # share of a device: weights, gradients and moments beyond this are sharded


def wanted(network: Network, count: int, moments: float) -> bool:
    """Whether to shard the weights of a trained network: as set, or if they would take half of a GPU."""
    world = current()
    if world.tensor > 1 or world.sharding != "auto" or network.device.type != "cuda":
        return world.tensor > 1 or world.sharding == "always"
    learning = sum(learning_bytes(network, count, moments).values())
    whole = torch.cuda.get_device_properties(network.device).total_memory
    return world.any(weight_bytes(network) + learning > ROOM * whole)


def spread(network: Policy | Scorer, moments: float) -> None:
    """Give all processes the first one's weights of a trained network: whole, or a shard in each."""
    learning = [p for p in network.model.parameters() if p.requires_grad]
    for parameter in learning:
        dist.broadcast(parameter.detach(), 0)
    if network.sharded is None and wanted(network, sum(p.numel() for p in learning), moments):
        network.sharded = Sharded(network)


class Sharded:
    """The sharded weights of a network, and a plain copy of its module, which takes no memory until it is needed."""

    def __init__(self, network: Policy | Scorer):
        model: Any = network.model
        wide = all(p.is_floating_point() for p in model.parameters())
        require(wide, "weights in 4 bits cannot be spread over processes; use parallel=ddp")
        # the processes would call their layers at different times
        own = f"{type(model).__name__} keeps its own attention, whose weights cannot be spread over processes"
        require(not network.padded, f"{own}; use parallel=ddp")
        # proved now, where its layers can be run one by one
        takes_fused_pass(network)
        memo: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
            for p in model.parameters()
        }
        self.network, self.device, self.divided = network, network.device, current().tensor > 1
        self.plain: Policy | Scorer = replace(network, model=copy.deepcopy(model, memo))
        self.plain.events, self.plain.router_replay = network.events, network.router_replay
        mesh = self._mesh()
        narrow = network.dtype in (torch.bfloat16, torch.float16)
        # sums over processes are made in float32
        policy = fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None)
        kinds = set(getattr(model, "_no_split_modules", None) or ())
        layers = [module for module in model.modules() if type(module).__name__ in kinds]
        if self.divided:
            plan = tensor_plan(model, current().tensor)
            for layer in layers:
                parallel.parallelize_module(layer, mesh["tensor"], plan)
            mesh = mesh["data"]
        for module in (*layers, model):
            fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
            # the weights of the loss are those of the whole step: gradients add
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.within = MethodType(_within, module)
            fsdp.register_fsdp_forward_method(module, "within")

    def _mesh(self) -> DeviceMesh:
        world = current()
        if not self.divided:
            return init_device_mesh(self.device.type, (world.size,))
        shape, names = (world.shares, world.tensor), ("data", "tensor")
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def weights(self, every: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by name, one at a time; all processes must take part. Yields trained weights and persistent buffers,
        as `checkpoint.weights`, or with `every` all parameters."""
        model = self.reshard()
        found = dict(model.named_parameters()) if every else checkpoint.weights(model)
        for name, tensor in found.items():
            yield name, whole(tensor)

    def reshard(self) -> Any:
        """Put the sharded parameters back in place: after a pass, some are whole."""
        for module in self.network.model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()
        return self.network.model

    def copied(self, device: torch.device, kept: bool = True) -> Policy | Scorer:
        """The plain copy of the network with whole weights on a device. A process with `kept` false only takes part in gathering."""
        twins = dict(self.plain.model.named_parameters())
        for name, weight in self.weights(every=True):
            if kept:
                replace_parameter(self.plain.model, twins[name], weight.to(device))
        if not kept:
            return self.plain
        buffers = dict(self.network.model.named_buffers())
        for name, buffer in self.plain.model.named_buffers():
            buffer.data = buffers[name].detach().to(device)
        return self.plain


def tensor_plan(model: Any, count: int) -> dict[str, parallel.ParallelStyle]:
    """The tensor-parallel plan of a decoder layer, by module name, as the model's family defines it in its configuration."""
    config = model.config.get_text_config()
    given = getattr(config, "base_model_tp_plan", None) or {}
    found = {n.removeprefix(LAYER): kind for n, kind in given.items() if n.startswith(LAYER)}
    where = f"tensor_parallel={count}: {type(model).__name__}"
    none = f"{where} has no layers that can be divided by rows and columns"
    require(found and set(found.values()) <= STYLES.keys(), f"{none}; use parallel=fsdp")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(config, name)
        text = f"{where} has {name}={size}, which {count} processes do not divide"
        require(size % count == 0, text)
    return {name: STYLES[kind]() for name, kind in found.items()}


def _within(model: nn.Module, function: Any, *given: Any) -> tuple[list[Tensor], Any]:
    """Run a function of the weights as a forward pass. Tensors in its result are returned separately, because FSDP's hooks look for
    them."""
    found = function(*given)
    tensors = list(found) if isinstance(found, tuple) else [found]
    if isinstance(found, Outputs):
        tensors = [*found.columns.values(), *(p.hidden_MH for p in found.predictions.values())]
    return tensors, found


def replace_parameter(model: nn.Module, old: nn.Parameter, new: Tensor) -> None:
    """Replace a parameter wherever the model refers to it."""
    made = nn.Parameter(new, old.requires_grad)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                setattr(module, name, made)


class GatheringSampler:
    """A sampler with a copy of sharded weights: `publish` gathers them, `release` frees the copy."""

    def __init__(self, sampler: Sampler, policy: Policy, sharded: Sharded):
        self.sampler, self.policy, self.sharded = sampler, policy, sharded
        self.submit, self.poll, self.cancel = sampler.submit, sampler.poll, sampler.cancel
        self.close = sampler.close
        self.sizes = {p: p.untyped_storage().nbytes() for p in policy.model.parameters()}

    @property
    def capacity(self) -> int:
        return self.sampler.capacity

    @property
    def statistics(self) -> Statistics:
        return self.sampler.statistics

    def pause(self) -> None:
        """Nothing to stop: its weights are a copy. But this process samples and trains in turn."""

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        for parameter, size in self.sizes.items():
            if not parameter.untyped_storage().nbytes():
                parameter.untyped_storage().resize_(size)
        given = self.sharded.weights(every=True) if weights is None else weights
        self.sampler.publish(version, given)

    def release(self) -> None:
        self.sampler.release()
        for parameter in self.sizes if self.policy.device.type == "cuda" else ():
            parameter.untyped_storage().resize_(0)
