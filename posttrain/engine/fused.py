"""The forward pass of a described model (models/layers.py) as a short list of kernels over flat tokens, for prefilling and for
decoding in CUDA graphs.

It reads the parameters of the policy's own module. Products that share their input are done as one, for which their weights are
copied side by side (`refresh`, at every call of `generate`, a millisecond for a billion weights); everything else is the module's own
memory, so that an optimizer step in place is seen by graphs already captured. Adapters are not merged, which in bf16 would round
small ones away: they are two narrow products in addition to each wide one.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.engine.kernels import rms_norm, rotate_store
from posttrain.models.attention import Packed, Rule
from posttrain.models.layers import (
    Heads,
    LayerDescription,
    ModelDescription,
    Norm,
    Projection,
    RopeTable,
    describe,
    prove,
)
from posttrain.models.policy import Policy
from posttrain.ops.fused import gated


class Attend(Protocol):
    """How a layer's tokens attend: rotated [T, (Hq + 2 Hk) D] in, [T, Hq D] out."""

    def __call__(self, layer: int, qkv: Tensor, heads: Heads, rule: Rule, /) -> Tensor: ...


def _normalised(x: Tensor, norm: Norm) -> Tensor:
    return rms_norm(x, norm.weight.detach(), norm.epsilon, norm.shifted)


class Products:
    """y = x W^T + b + (x A^T) B^T of one or more linear layers that read the same x: weights side by side, adapters (scale in B, one
    block of it a layer) likewise. A layer alone lends its own weight; what is copied is filled by `copies`."""

    def __init__(self, projection: Projection):
        self.projection, self.copied = projection, len(projection.modules) > 1
        self.allocate()

    def allocate(self) -> None:
        """Room for the copies."""
        modules, rows = self.projection.modules, sum(self.projection.sizes)
        first, bias = modules[0].weight.detach(), modules[0].bias
        self.weight = first.new_empty(rows, first.shape[1]) if self.copied else first
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = first.new_empty(rows) if self.copied else bias.detach()
        ranks = sum(adapter.a_RI.shape[0] for adapter in self.projection.present)
        self.down, self.up = first.new_empty(ranks, first.shape[1]), first.new_zeros(rows, ranks)

    def release(self) -> None:
        """Give the copies back, until `allocate`."""
        self.weight = self.down = self.up = self.projection.modules[0].weight.detach()[:0]

    def copies(self) -> tuple[list[Tensor], list[Tensor]]:
        """(targets, sources) of what is copied."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        modules, sizes = self.projection.modules, self.projection.sizes
        if self.copied:
            targets += self.weight.split_with_sizes(sizes)
            sources += [m.weight.detach() for m in modules]
            if self.bias is not None:
                targets += self.bias.split_with_sizes(sizes)
                sources += [m.bias.detach() for m in modules]
        rank = 0
        for adapter, part in zip(
            self.projection.adapters, self.up.split_with_sizes(sizes), strict=True
        ):
            if adapter is not None:
                until = rank + adapter.a_RI.shape[0]
                targets += [self.down[rank:until], part[:, rank:until]]
                sources += [adapter.a_RI.detach(), adapter.scale * adapter.b_OR.detach()]
                rank = until
        return targets, sources

    def __call__(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        return self._adapt(out, x)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """total += what a call gives, summed inside the products."""
        total.addmm_(x, self.weight.t())
        if self.bias is not None:
            total += self.bias
        self._adapt(total, x)

    def _adapt(self, out: Tensor, x: Tensor) -> Tensor:
        return out if not self.down.shape[0] else out.addmm_(F.linear(x, self.down), self.up.t())


class Layer:
    """One decoder layer on flat tokens, in place on the residual stream."""

    def __init__(self, layer: LayerDescription):
        self.described, self.heads, self.rule = layer, layer.heads, layer.rule
        self.qkv, self.gate_up, self.out, self.down = map(Products, layer.projections)
        self.products = (self.qkv, self.gate_up, self.out, self.down)

    def __call__(
        self,
        x: Tensor,
        rope: RopeTable,
        position: Tensor,
        slot: Tensor,
        store: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> None:
        layer = self.described
        qkv = self.qkv(_normalised(x, layer.input_norm))
        rotate_store(qkv, self.heads, rope, position, slot, store, layer.qk_norms)
        self.out.add_to(x, attend(layer.number, qkv, self.heads, self.rule))
        self.down.add_to(x, gated(self.gate_up(_normalised(x, layer.post_norm)), layer.tanh))


class Fused:
    """Hidden states of flat tokens at explicit positions, with keys and values stored as they come. It has the weights of the moment
    it was made, until `refresh`."""

    def __init__(self, policy: Policy, described: ModelDescription):
        self.policy, self.body, self.described = policy, policy.body, described
        self.layers = [Layer(layer) for layer in described.layers]
        self.scale = getattr(self.body.embed_tokens, "embed_scale", None)
        self.rope: RopeTable | None = None
        self.places, self.released = self.addresses(), False
        self.refresh()

    @property
    def heads(self) -> tuple[Heads, ...]:
        return tuple(layer.heads for layer in self.layers)

    @property
    def bytes(self) -> int:
        """Memory of the weights and adapters that are copied side by side."""
        return sum(
            t.numel() * t.element_size() for product in self.products for t in product.copies()[0]
        )

    @property
    def products(self) -> list[Products]:
        return [product for layer in self.layers for product in layer.products]

    def addresses(self) -> tuple[int, ...]:
        """Where the parameters lie. A captured graph is valid as long as they stay there."""
        return (
            *(p.data_ptr() for p in self.body.parameters()),
            self.policy.head.weight_VH.data_ptr(),
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the present weights into the copies."""
        if self.released:
            for product in self.products:
                product.allocate()
            self.released = False
        pairs = [product.copies() for product in self.products]
        torch._foreach_copy_(
            [t for targets, _ in pairs for t in targets],
            [s for _, sources in pairs for s in sources],
        )

    def release(self) -> None:
        """Give the memory of the copies back; `refresh` takes it anew, in another place."""
        for product in self.products:
            product.release()
        self.released = True

    def ensure_rope_table(self, positions: int) -> bool:
        """Have angles for this many positions; true where the table had to be made anew."""
        if self.rope is not None and positions <= self.rope[0].shape[0]:
            return False
        self.rope = self.described.rope_table(positions)
        return True

    def embed(self, id_T: Tensor) -> Tensor:
        x = F.embedding(id_T, self.body.embed_tokens.weight.detach())
        return x if self.scale is None else x * self.scale.to(x.dtype)

    def hidden(
        self,
        id_T: Tensor,
        position_T: Tensor,
        slot_T: Tensor,
        stores: list[tuple[Tensor, Tensor]],
        attend: Attend,
    ) -> Tensor:
        """[T] ids -> [T, H] final hidden states. `ensure_rope_table` must cover the positions."""
        assert self.rope is not None
        x = self.embed(id_T)
        for layer, store in zip(self.layers, stores, strict=True):
            layer(x, self.rope, position_T, slot_T, store, attend)
        return self.final_norm(x)

    def final_norm(self, x_TH: Tensor) -> Tensor:
        return _normalised(x_TH, self.described.norm)

    def layer_alone(self, number: int, x_TH: Tensor, position_T: Tensor, packed: Packed) -> Tensor:
        x, tokens, heads = x_TH.clone(), len(x_TH), self.layers[number].heads
        store = x.new_empty(2, tokens, heads.keys, heads.width)
        rope = self.described.rope_table(int(position_T.max()) + 1)
        slots = torch.arange(tokens, device=x.device)
        attend = packed_attend(packed)
        self.layers[number](x, rope, position_T, slots, (store[0], store[1]), attend)
        return x


def fused(policy: Policy) -> tuple[Fused | None, str]:
    """The fused decoder of a policy, proved on tokens to compute what the module computes; or None, and why not."""
    described = describe(policy)
    if isinstance(described, str):
        return None, described
    reason = prove(policy, described, "cuda", lambda: Fused(policy, described))
    return (None, reason) if reason else (Fused(policy, described), "")


def packed_attend(packed: Packed) -> Attend:
    """Whole sequences end to end, by torch's own attention."""

    def attend(layer: int, qkv: Tensor, heads: Heads, rule: Rule) -> Tensor:
        split = qkv.view(1, qkv.shape[0], -1, heads.width).transpose(1, 2)
        query, key, value = split.split_with_sizes([heads.heads, heads.keys, heads.keys], 1)
        return packed.attend(layer, query, key, value, rule).reshape(qkv.shape[0], -1)

    return attend
