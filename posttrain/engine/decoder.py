"""The decoder of a Llama-like model in as few calls as possible, for generating on the CPU.

There a small model's time goes to Python and to operators of a few microseconds: transformers makes some sixty calls a layer, this
makes twenty. It has no parameters: it reads those of the policy's own module when it is made, which is at every call of `generate`.
Whether it computes what the module computes is not a matter of names: `rules_of` compares the two on tokens, and a model that differs
in the least is left to its own module.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.engine.packed_linear import PackedLinear
from posttrain.models import layers as familiar
from posttrain.models.attention import Layout, Rule
from posttrain.models.lora import adapter_of
from posttrain.models.policy import Policy


@torch.inference_mode()
def rules_of(policy: Policy) -> tuple[Rule, ...] | None:
    """Each layer's attention rule, where a `Decoder` of this familiar policy computes what its module computes; else None."""
    ids = torch.arange(1, 12) % policy.model.config.get_text_config().vocab_size
    position = torch.cat([torch.arange(7), torch.arange(4)])
    rules, expected, packed = familiar.rules_of(policy, ids, position, (0, 7, 11))
    if rules is None:
        return None
    decoder = Decoder(policy, rules, pack=False)
    decoder.reach(7)
    found = decoder.hidden(ids[None], position[None], packed)[0]
    worst, scale = float((found - expected).abs().max()), float(expected.abs().max())
    return rules if worst <= familiar.TOLERANCE[policy.dtype] * scale else None


def suits(policy: Policy) -> bool:
    """Whether a float32 module on the CPU has the parts of a Llama, each of the plain kind: no adapters, hooks or other layers."""
    if (
        policy.device.type != "cpu"
        or policy.dtype != torch.float32
        or familiar.unsupported_reason(policy) is not None
    ):
        return False
    norms = [m for name, m in policy.body.named_modules() if "norm" in name.rsplit(".", 1)[-1]]
    adapted = any(adapter_of(m) is not None for m in policy.body.modules())
    silu = all(familiar.activation(layer.mlp.act_fn) is False for layer in policy.body.layers)
    plain = (
        all(hasattr(m, "variance_epsilon") for m in norms)
        and type(policy.body.embed_tokens) is nn.Embedding
    )
    return silu and plain and not adapted


class _Norm:
    """Root-mean-square normalisation, x / sqrt(mean(x^2) + epsilon) * weight, in the fewest calls."""

    __slots__ = ("epsilon", "share", "weight")

    def __init__(self, module: Any):
        self.weight = module.weight.detach()
        self.epsilon, self.share = (
            self.weight.new_full((1,), module.variance_epsilon),
            1.0 / self.weight.shape[0],
        )

    def plain(self, x: Tensor) -> Tensor:
        """Without the weight, for a matrix that has taken it in."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self.epsilon, norm, norm, value=self.share).rsqrt_()

    def __call__(self, x: Tensor) -> Tensor:
        return self.plain(x).mul_(self.weight)


class _Layer:
    """One decoder layer on flat tokens: [T, H] -> [T, H]."""

    def __init__(self, number: int, module: Any, rule: Rule, pack: bool):
        attention, mlp = module.self_attn, module.mlp
        self.number, self.rule, self.width = number, replace(rule, scaling=1.0), attention.head_dim
        three = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.before, self.after = (
            _Norm(module.input_layernorm),
            _Norm(module.post_attention_layernorm),
        )
        self.heads, self.keys, _ = (m.out_features // self.width for m in three)
        turned = (self.heads + self.keys) * self.width
        weight = torch.cat([m.weight.detach() for m in three]).mul_(self.before.weight)
        bias = (
            torch.cat([m.bias.detach() for m in three])
            if attention.q_proj.bias is not None
            else None
        )
        for rows in (weight, bias):
            if rows is not None:
                rows[:turned] = self._paired(rows[:turned])
        self.query_norm, self.key_norm = (
            _Norm(getattr(attention, name)) if hasattr(attention, name) else None
            for name in ("q_norm", "k_norm")
        )
        for norm in (self.query_norm, self.key_norm):
            if norm is not None:
                norm.weight = self._paired(norm.weight).clone()
        scaled = [self.query_norm.weight] if self.query_norm is not None else [weight, bias]
        for rows in scaled:  # attention need not scale what the queries bring scaled
            if rows is not None:
                rows[: self.heads * self.width].mul_(rule.scaling)
        self.project = PackedLinear(weight, bias, pack)
        two = (mlp.gate_proj, mlp.up_proj)
        weight = torch.cat([m.weight.detach() for m in two]).mul_(self.after.weight)
        bias = torch.cat([m.bias.detach() for m in two]) if mlp.gate_proj.bias is not None else None
        self.widen = PackedLinear(weight, bias, pack)
        self.out, self.down = (
            PackedLinear(m.weight.detach(), None if m.bias is None else m.bias.detach(), pack)
            for m in (attention.o_proj, mlp.down_proj)
        )

    def _paired(self, rows: Tensor) -> Tensor:
        """Rows of heads with those that are turned together side by side (0, half, 1, ...). Products of query and key stay the same."""
        return (
            rows.view(-1, 2, self.width // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
        )

    def __call__(self, x: Tensor, shape: torch.Size, turn: Tensor, layout: Layout) -> Tensor:
        heads, turned = self.heads, self.heads + self.keys
        mixed = self.project(self.before.plain(x)).view(*shape, turned + self.keys, self.width)
        if self.query_norm is not None and self.key_norm is not None:
            mixed[:, :, :heads] = self.query_norm(mixed[:, :, :heads])
            mixed[:, :, heads:turned] = self.key_norm(mixed[:, :, heads:turned])
        # the module's x cos + rotate_half(x) sin is a product of complex numbers
        torch.view_as_complex(mixed.view(*shape, -1, self.width // 2, 2).narrow(2, 0, turned)).mul_(
            turn
        )
        query, key, value = mixed.transpose(1, 2).split_with_sizes((heads, self.keys, self.keys), 1)
        seen = layout.attend(self.number, query, key, value, self.rule)
        x = self.out.plus(seen.reshape(x.shape[0], -1), x)
        gate, up = self.widen(self.after.plain(x)).chunk(2, 1)
        return self.down.plus(F.silu(gate).mul_(up), x)


class Decoder:
    """Hidden states as `Policy.hidden` gives them, from the weights of the moment it was made. The weights of a layer's two norms are
    multiplied into the matrices after them."""

    def __init__(self, policy: Policy, rules: tuple[Rule, ...], pack: bool):
        self.body = policy.body
        self.embedding = self.body.embed_tokens.weight.detach()
        self.layers = [_Layer(n, m, rules[n], pack) for n, m in enumerate(self.body.layers)]
        self.norm = _Norm(self.body.norm)
        self.turn = torch.empty(0, 1, 0, dtype=torch.complex64)  # [positions, 1, half of a head]

    @property
    def bytes(self) -> int:
        """Memory of packed copies."""
        return sum(
            m.bytes
            for layer in self.layers
            for m in (layer.project, layer.out, layer.widen, layer.down)
        )

    def reach(self, positions: int) -> None:
        """Have angles for this many positions."""
        if positions <= self.turn.shape[0]:
            return
        at = torch.arange(max(positions, 2 * self.turn.shape[0]))
        cos, sin = self.body.rotary_emb(self.embedding, at[None])
        half = sin.shape[-1] // 2
        self.turn = torch.complex(
            cos[0, :, None, :half].contiguous(), sin[0, :, None, :half].contiguous()
        )

    def hidden(self, ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        """[B, S] ids at explicit positions -> [B, S, H]. `reach` must cover them."""
        turn = self.turn.index_select(0, position_ids.reshape(-1)).view(*ids.shape, 1, -1)
        x = F.embedding(ids.reshape(-1), self.embedding)
        for layer in self.layers:
            x = layer(x, ids.shape, turn, layout)
        return self.norm(x).view(*ids.shape, -1)
