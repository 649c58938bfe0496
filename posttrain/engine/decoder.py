"""The CPU forward pass of a described model (models/layers.py) for generation, in as few calls as possible.

There a small model's time goes to Python and to operators of a few microseconds: transformers makes some sixty calls a layer, this
some twenty-five. It has no parameters: it reads those of the policy's own module when it is made, at every call of `generate`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.engine.cache import Decode
from posttrain.models import layers
from posttrain.models.attention import Layout, Packed
from posttrain.models.policy import Policy
from posttrain.ops.experts import Routes


class Linear:
    """x W^T + b for two-dimensional x. `pack` keeps a copy of W^T, its rows contiguous: a product with few rows reads that a third
    faster. The copy is a snapshot; its owner makes a new one when the weights change."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, pack: bool):
        self.weight, self.bias = weight.t().contiguous() if pack else weight.t(), bias

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(x, self.weight)
        return torch.addmm(self.bias, x, self.weight)

    def add(self, total: Tensor, x: Tensor) -> Tensor:
        """Add x W^T + b to `total`, in its place."""
        total.addmm_(x, self.weight)
        return total if self.bias is None else total.add_(self.bias)


def cpu_decoder(policy: Policy, pack: bool) -> Decoder | None:
    """A decoder with the policy's current weights, if it computes the same as the module: a float32 model on the CPU without
    adapters, with silu and RMS norms. `pack` lays out its weights for the processor."""
    if policy.device.type != "cpu" or policy.dtype != torch.float32:
        return None
    described = layers.describe(policy)
    if (
        isinstance(described, str)
        or described.adapted
        or any(norm.shifted for norm in described.norms)
        or any(layer.tanh for layer in described.layers)
        or type(policy.body.embed_tokens) is not nn.Embedding
    ):
        return None
    with torch.inference_mode():
        if layers.prove(policy, described, "cpu", lambda: Decoder(described, pack=False)):
            return None
        return Decoder(described, pack)


class _Norm:
    """RMS norm, x / sqrt(mean(x^2) + epsilon) * weight, in the fewest calls: x / hypot(|x|, floor), with the square root of the width
    in the weight."""

    __slots__ = ("floor", "weight")

    def __init__(self, norm: layers.Norm):
        width = norm.weight.shape[0]
        self.weight = norm.weight.detach() * math.sqrt(width)
        self.floor = self.weight.new_full((1,), math.sqrt(norm.epsilon * width))

    def without_weight(self, x: Tensor) -> Tensor:
        """The norm without its weight, which was multiplied into the next matrix."""
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x / length.hypot_(self.floor)

    def __call__(self, x: Tensor) -> Tensor:
        return self.without_weight(x).mul_(self.weight)


class _Layer:
    """One decoder layer on flat tokens: [T, H] -> [T, H]."""

    def __init__(self, layer: layers.LayerDescription, pack: bool):
        self.number, self.rule = layer.number, replace(layer.rule, scaling=1.0)
        self.heads, self.keys, self.width = layer.heads.heads, layer.heads.keys, layer.heads.width
        self.group = self.heads // self.keys
        self.input_norm, self.post_norm = _Norm(layer.input_norm), _Norm(layer.post_norm)
        weight, bias = _scaled(layer.qkv, self.input_norm)
        self.qk_norms = None if layer.qk_norms is None else tuple(map(_Norm, layer.qk_norms))
        for norm in self.qk_norms or ():
            norm.weight = self._paired(norm.weight).clone()
        scaled = [self.qk_norms[0].weight] if self.qk_norms is not None else [weight, bias]
        for rows in scaled:  # attention need not scale what the queries bring scaled
            if rows is not None:
                rows[: self.heads * self.width].mul_(layer.rule.scaling)
        ordered = None if bias is None else self._grouped(bias)
        self.qkv = Linear(self._grouped(weight), ordered, pack)
        self.experts, self.out = layer.experts, _plain(layer.out, pack)
        if layer.experts is None:
            # apart: two smaller products are faster, and what they return is contiguous
            weight, bias = _scaled(layer.gate_up, self.post_norm)
            biases = (None, None) if bias is None else bias.chunk(2)
            sides = zip(weight.chunk(2), biases, strict=True)
            self.gate, self.up = (Linear(*side, pack) for side in sides)
            self.down = _plain(layer.down, pack)

    def _paired(self, rows: Tensor) -> Tensor:
        """Reorder the rows of heads so that those rotated together are neighbours (0, half, 1, ...). Products of queries and keys
        stay the same."""
        halves = rows.view(-1, 2, self.width // 2, *rows.shape[1:])
        return halves.transpose(1, 2).reshape(rows.shape)

    def _grouped(self, rows: Tensor) -> Tensor:
        """Reorder the rows of all heads, by key head: its queries, its key, its value. Then attention reads and stores them as they
        are."""
        sizes = [n * self.width for n in (self.heads, self.keys, self.keys)]
        query, key, value = rows.split_with_sizes(sizes)
        parts = (self._paired(query), self._paired(key), value)
        by_key = [part.view(self.keys, -1, *rows.shape[1:]) for part in parts]
        return torch.cat(by_key, 1).view(rows.shape)

    def __call__(
        self,
        x: Tensor,
        shape: torch.Size,
        rope: Tensor,
        layout: Layout,
        routes: Routes | None = None,
    ) -> Tensor:
        """Adds to x in its place."""
        group = self.group
        qkv = self.qkv(self.input_norm.without_weight(x)).view(-1, self.keys, group + 2, self.width)
        if self.qk_norms is not None:
            query_norm, key_norm = self.qk_norms
            qkv[:, :, :group] = query_norm(qkv[:, :, :group])
            qkv[:, :, group] = key_norm(qkv[:, :, group])
        # the module's x cos + rotate_half(x) sin is a product of complex numbers
        qkv.view(torch.complex64).narrow(2, 0, group + 1).mul_(rope)
        if isinstance(layout, Decode) and self.rule.softcap is None:
            seen = layout.attend_grouped(self.number, qkv, self.rule)
        else:
            parts = qkv.view(*shape, *qkv.shape[1:]).split_with_sizes((group, 1, 1), 3)
            query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in parts)
            seen = layout.attend(self.number, query, key, value, self.rule)
        x = self.out.add(x, seen.reshape(x.shape[0], -1))
        if self.experts is not None:
            return x.add_(self.experts(self.post_norm(x), _gated, routes))
        inner = self.post_norm.without_weight(x)
        return self.down.add(x, F.silu(self.gate(inner), inplace=True).mul_(self.up(inner)))


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, 1)
    return F.silu(gate).mul_(up)


def _plain(projection: layers.Projection, pack: bool) -> Linear:
    return Linear(projection.weight().detach(), _detached(projection.bias()), pack)


def _scaled(projection: layers.Projection, norm: _Norm) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of layers that share their input, with the weight of the preceding norm multiplied in."""
    return projection.weight().detach().mul_(norm.weight), _detached(projection.bias())


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


class Decoder:
    """The same hidden states as `Policy.hidden`, from the weights at the time it was made."""

    def __init__(self, described: layers.ModelDescription, pack: bool):
        self.body = described.body
        self.embedding = described.body.embed_tokens.weight.detach()
        self.layers = [_Layer(layer, pack) for layer in described.layers]
        self.final_norm = _Norm(described.norm)
        # [positions, 1, 1, half of a head]
        self.rope = torch.empty(0, 1, 1, 0, dtype=torch.complex64)

    def ensure_rope_table(self, positions: int) -> None:
        """Compute rotary angles for this many positions, if they are missing."""
        if positions <= self.rope.shape[0]:
            return
        at = torch.arange(max(positions, 2 * self.rope.shape[0]))
        angles = layers.rotary_angles(self.body, at)
        parts = (t[:, None, None, : t.shape[-1] // 2].contiguous() for t in angles)
        self.rope = torch.complex(*parts)

    def hidden(self, ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        """[B, S] ids at explicit positions -> [B, S, H]. `ensure_rope_table` must cover them."""
        rope = self.rope.index_select(0, position_ids.reshape(-1))
        x = self.embed(ids.reshape(-1))
        for layer in self.layers:
            x = layer(x, ids.shape, rope, layout)
        return self.final_norm(x).view(*ids.shape, -1)

    def embed(self, id_T: Tensor) -> Tensor:
        return F.embedding(id_T, self.embedding)

    def layer_alone(
        self, number: int, x_TH: Tensor, position_T: Tensor, packed: Packed, routes: Routes | None
    ) -> Tensor:
        self.ensure_rope_table(int(position_T.max()) + 1)
        rope = self.rope.index_select(0, position_T)
        return self.layers[number](x_TH.clone(), torch.Size((1, len(x_TH))), rope, packed, routes)
