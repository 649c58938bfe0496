"""The CPU forward pass of a described model (models/layers.py) for generation, in as few calls as possible.

There a small model's time goes to Python and to operators of a few microseconds: transformers makes some sixty calls a layer, this
makes twenty. It has no parameters: it reads those of the policy's own module when it is made, which is at every call of `generate`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.models import layers
from posttrain.models.attention import Layout, Packed
from posttrain.models.policy import Policy
from posttrain.ops.experts import Routes

SMALLEST = 1 << 15  # weights below this many elements are not worth oneDNN's slower call


def available() -> bool:
    """Whether this build of torch and this processor support oneDNN's prepacked products."""
    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # in torch
    return there and hasattr(torch.ops.mkldnn, "_linear_pointwise")


# looked up once: finding the overload for each of a thousand calls takes as long as some of them
LINEAR: Any = torch.ops.mkldnn._linear_pointwise if available() else None
UNARY: Any = getattr(LINEAR, "default", None)
BINARY: Any = getattr(LINEAR, "binary", None)


class PackedLinear:
    """x W^T + b for two-dimensional float32 x on the CPU, fused with the operation that follows. `pack` keeps W in oneDNN's own
    layout where that pays: a product with few rows spends a quarter of its time rearranging the weight. The packed copy is a
    snapshot; its owner makes a new one when the weights change."""

    __slots__ = ("bias", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, pack: bool):
        pack = pack and weight.numel() >= SMALLEST and available()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight) if pack else None
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        return UNARY(x, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """x W^T + b + other."""
        if self.packed is not None:
            return BINARY(x, other, self.packed, self.bias, "add")  # type: ignore[no-any-return]
        if self.bias is None:
            return torch.addmm(other, x, self.weight.t())
        return F.linear(x, self.weight, self.bias).add_(other)


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
    """RMS norm, x / sqrt(mean(x^2) + epsilon) * weight, in the fewest calls."""

    __slots__ = ("epsilon", "share", "weight")

    def __init__(self, norm: layers.Norm):
        self.weight = norm.weight.detach()
        self.epsilon = self.weight.new_full((1,), norm.epsilon)
        self.share = 1.0 / self.weight.shape[0]

    def without_weight(self, x: Tensor) -> Tensor:
        """The norm without its weight, which was multiplied into the next matrix."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self.epsilon, norm, norm, value=self.share).rsqrt_()

    def __call__(self, x: Tensor) -> Tensor:
        return self.without_weight(x).mul_(self.weight)


class _Layer:
    """One decoder layer on flat tokens: [T, H] -> [T, H]."""

    def __init__(self, layer: layers.LayerDescription, pack: bool):
        self.number, self.rule = layer.number, replace(layer.rule, scaling=1.0)
        self.heads, self.keys, self.width = layer.heads.heads, layer.heads.keys, layer.heads.width
        rotated = (self.heads + self.keys) * self.width
        self.input_norm, self.post_norm = _Norm(layer.input_norm), _Norm(layer.post_norm)
        weight, bias = _scaled(layer.qkv, self.input_norm)
        for rows in (weight, bias):
            if rows is not None:
                rows[:rotated] = self._paired(rows[:rotated])
        self.qk_norms = None if layer.qk_norms is None else tuple(map(_Norm, layer.qk_norms))
        for norm in self.qk_norms or ():
            norm.weight = self._paired(norm.weight).clone()
        scaled = [self.qk_norms[0].weight] if self.qk_norms is not None else [weight, bias]
        for rows in scaled:  # attention need not scale what the queries bring scaled
            if rows is not None:
                rows[: self.heads * self.width].mul_(layer.rule.scaling)
        self.qkv = PackedLinear(weight, bias, pack)
        self.experts, self.out = layer.experts, _plain(layer.out, pack)
        if layer.experts is None:
            self.gate_up = PackedLinear(*_scaled(layer.gate_up, self.post_norm), pack)
            self.down = _plain(layer.down, pack)

    def _paired(self, rows: Tensor) -> Tensor:
        """Reorder the rows of heads so that those rotated together are neighbours (0, half, 1, ...). Products of queries and keys
        stay the same."""
        halves = rows.view(-1, 2, self.width // 2, *rows.shape[1:])
        return halves.transpose(1, 2).reshape(rows.shape)

    def __call__(
        self,
        x: Tensor,
        shape: torch.Size,
        rope: Tensor,
        layout: Layout,
        routes: Routes | None = None,
    ) -> Tensor:
        heads, rotated = self.heads, self.heads + self.keys
        inner = self.input_norm.without_weight(x)
        qkv = self.qkv(inner).view(*shape, rotated + self.keys, self.width)
        if self.qk_norms is not None:
            query_norm, key_norm = self.qk_norms
            qkv[:, :, :heads] = query_norm(qkv[:, :, :heads])
            qkv[:, :, heads:rotated] = key_norm(qkv[:, :, heads:rotated])
        # the module's x cos + rotate_half(x) sin is a product of complex numbers
        pairs = qkv.view(*shape, -1, self.width // 2, 2).narrow(2, 0, rotated)
        torch.view_as_complex(pairs).mul_(rope)
        query, key, value = qkv.transpose(1, 2).split_with_sizes((heads, self.keys, self.keys), 1)
        seen = layout.attend(self.number, query, key, value, self.rule)
        x = self.out.plus(seen.reshape(x.shape[0], -1), x)
        if self.experts is not None:
            return self.experts(self.post_norm(x), _gated, routes).add_(x)
        return self.down.plus(_gated(self.gate_up(self.post_norm.without_weight(x))), x)


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, 1)
    return F.silu(gate).mul_(up)


def _plain(projection: layers.Projection, pack: bool) -> PackedLinear:
    return PackedLinear(projection.weight().detach(), _detached(projection.bias()), pack)


def _scaled(projection: layers.Projection, norm: _Norm) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of layers that share their input, with the weight of the preceding norm multiplied in."""
    return projection.weight().detach().mul_(norm.weight), _detached(projection.bias())


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


class Decoder:
    """The same hidden states as `Policy.hidden`, from the weights at the time it was made."""

    def __init__(self, described: layers.ModelDescription, pack: bool):
        self.rotary = described.body.rotary_emb
        self.embedding = described.body.embed_tokens.weight.detach()
        self.layers = [_Layer(layer, pack) for layer in described.layers]
        self.final_norm = _Norm(described.norm)
        self.rope = torch.empty(0, 1, 0, dtype=torch.complex64)  # [positions, 1, half of a head]

    def ensure_rope_table(self, positions: int) -> None:
        """Compute rotary angles for this many positions, if they are missing."""
        if positions <= self.rope.shape[0]:
            return
        at = torch.arange(max(positions, 2 * self.rope.shape[0]))
        cos, sin = self.rotary(self.embedding, at[None])
        parts = (t[0, :, None, : t.shape[-1] // 2].contiguous() for t in (cos, sin))
        self.rope = torch.complex(*parts)

    def hidden(self, ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        """[B, S] ids at explicit positions -> [B, S, H]. `ensure_rope_table` must cover them."""
        rope = self.rope.index_select(0, position_ids.reshape(-1)).view(*ids.shape, 1, -1)
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
        rope = self.rope.index_select(0, position_T).view(1, len(x_TH), 1, -1)
        return self.layers[number](x_TH, torch.Size((1, len(x_TH))), rope, packed, routes)
