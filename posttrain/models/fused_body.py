"""A training pass through a described model (models/layers.py) in few kernels: the module's own parameters, products that share their
input done as one, and the element-wise rest one pass over memory each way."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posttrain.models import layers
from posttrain.models.attention import Attend, Packed, attend_packed, available, fits
from posttrain.models.nf4 import product
from posttrain.models.policy import Network
from posttrain.ops.experts import Routes
from posttrain.ops.fused import Sharing, add_norm, attention_heads, gated
from posttrain.ops.hopper import gated_product


class FusedBody:
    """Final hidden states of flat tokens, differentiable in the module's parameters."""

    def __init__(self, described: layers.ModelDescription, sharded: bool = False):
        self.described, self.sharded = described, sharded

    def hidden(
        self,
        id_T: Tensor,
        position_T: Tensor,
        positions: int,
        attend: Attend,
        routes: Routes | None = None,
        sharing: Sharing | None = None,
    ) -> Tensor:
        """[T] ids at positions below `positions` -> [T, H]. `sharing`: they stand for more tokens, to whose keys they attend."""
        x, y, rope = self.embed(id_T), None, self.described.rope_table(positions)
        recomputed = self.described.body.gradient_checkpointing and torch.is_grad_enabled()
        for number in range(len(self.described.layers)):
            given = (number, x, y, rope, position_T, attend, routes, sharing)
            x, y = (
                checkpoint(self.layer, *given, use_reentrant=False)
                if recomputed
                else self.layer(*given)
            )
        return _add_norm(x, y, self.described.norm)[1]

    def layer(self, number: int, *given: Any) -> tuple[Tensor, Tensor]:
        """One layer; of a sharded model with its weights gathered."""
        described = self.described.layers[number]
        if not self.sharded:
            return _layer(described, *given)
        module = self.described.body.layers[number]
        # FSDP looks for tensors in what is given: those of the description would get gradients
        return module.within(partial(_gathered, module, described), *given)[1]  # type: ignore[no-any-return]

    def embed(self, id_T: Tensor) -> Tensor:
        return self.described.body.embed_tokens(id_T)  # type: ignore[no-any-return]

    def layer_alone(
        self, number: int, x_TH: Tensor, position_T: Tensor, packed: Packed, routes: Routes | None
    ) -> Tensor:
        rope = self.described.rope_table(max(packed.lengths))
        attend = attend_packed(packed.lengths, x_TH.device)
        x, y = self.layer(number, x_TH, None, rope, position_T, attend, routes)
        return x + y

    def final_norm(self, x_TH: Tensor) -> Tensor:
        return _add_norm(x_TH, None, self.described.norm)[1]


def _layer(
    layer: layers.LayerDescription,
    x: Tensor,
    y: Tensor | None,
    rope: layers.RopeTable,
    position_T: Tensor,
    attend: Attend,
    routes: Routes | None,
    sharing: Sharing | None = None,
) -> tuple[Tensor, Tensor]:
    """The residual stream before and what must be added to it, through one layer; the sum is done with the next norm."""
    heads, keys, width = layer.heads.heads, layer.heads.keys, layer.heads.width
    tokens = x.shape[0]
    x, inner = _add_norm(x, y, layer.input_norm)
    qkv = _linear(layer.qkv, inner)
    if layer.qk_norms is not None:
        query, key, value = qkv.view(tokens, -1, width).split_with_sizes([heads, keys, keys], 1)
        query, key = (
            _add_norm(part.reshape(-1, width), None, norm)[1].view(tokens, -1, width)
            for part, norm in zip((query, key), layer.qk_norms, strict=True)
        )
        qkv = torch.cat([query, key, value], 1).view(tokens, -1)
    query, key, value = attention_heads(qkv, (heads, keys, width), rope, position_T, sharing)
    seen = attend(layer.number, query, key, value, layer.rule)
    seen = (seen if sharing is None else sharing.computed(seen)).reshape(tokens, -1)
    x, inner = _add_norm(x, _linear(layer.out, seen), layer.post_norm)
    if layer.experts is not None:
        return x, layer.experts(inner, partial(gated, tanh=layer.tanh), routes)
    return x, _linear(layer.down, _gated(layer.gate_up, inner, layer.tanh))


def _gathered(
    module: Any, described: layers.LayerDescription, *given: Any
) -> tuple[Tensor, Tensor]:
    """A layer whose parameters are others since its weights were gathered."""
    now = layers.describe_layer(described.number, module, described.rule)
    assert isinstance(now, layers.LayerDescription)
    return _layer(now, *given)


def _add_norm(x: Tensor, y: Tensor | None, norm: layers.Norm) -> tuple[Tensor, Tensor]:
    return add_norm(x, y, norm.weight, norm.epsilon, norm.shifted)


def _linear(projection: layers.Projection, x: Tensor) -> Tensor:
    """The products of one input with several weights, as one product; and all their adapters as two narrow ones."""
    if projection.narrow:
        out = product(x, projection.weight, projection.bias())
    else:
        out = F.linear(x, projection.weight(), projection.bias())
    if not projection.present:
        return out
    inner = F.linear(x, torch.cat([adapter.a_RI for adapter in projection.present]))
    blocks = [
        x.new_zeros(size, 0) if adapter is None else adapter.scale * adapter.b_OR
        for size, adapter in zip(projection.sizes, projection.adapters, strict=True)
    ]
    scaled_OR = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]  # torch has no types for it
    return out.addmm_(inner, scaled_OR.t())  # nothing needs what it was before


def _gated(projection: layers.Projection, x: Tensor, tanh: bool) -> Tensor:
    if projection.plain:
        return gated_product(x, projection.weight(), tanh)
    return gated(_linear(projection, x), tanh)


def fused_body(network: Network) -> FusedBody | None:
    """The fused pass of a policy or a scorer on CUDA in half precision, where it computes what the module computes; else None, which
    is reported once."""
    divided = network.sharded is not None and network.sharded.divided
    if divided or not available(next(network.model.parameters()), 64, None):
        return None
    described = _fitting(network)
    reason = described
    if isinstance(described, layers.ModelDescription):
        body = FusedBody(described, network.sharded is not None)
        reason = layers.prove(network, described, "training", lambda: body)
        if not reason:
            return body
    layers.report_plain_path(network, "training", str(reason))
    return None


def takes_fused_pass(network: Network) -> bool:
    """Whether a model takes the fused pass on its device. Where its weights lie elsewhere, in a plan for a GPU that is not here, by
    all but the proof on tokens."""
    if network.device.type == network.model.device.type:
        return fused_body(network) is not None
    return fits(network.dtype, 64, None) and isinstance(_fitting(network), layers.ModelDescription)


def _fitting(network: Network) -> layers.ModelDescription | str:
    """The description of a model whose attention the kernel can do."""
    described = layers.describe(network)
    if isinstance(described, str):
        return described
    shapes = ((layer.heads.width, layer.rule.softcap) for layer in described.layers)
    good = all(fits(network.dtype, *shape) for shape in shapes)
    return described if good else "attention that the kernel for packed sequences cannot do"
