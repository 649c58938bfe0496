"""The decoder of a Llama-like model in as few calls as possible, for generating on the CPU.

There a small model's time goes to Python and to operators of a few microseconds: transformers makes some sixty calls a layer, this
makes twenty. It has no parameters: it reads those of the policy's own module when it is made, which is at every call of `generate`.
Whether it computes what the module computes is not a matter of names: `rules_of` compares the two on tokens, and a model that differs
in the least is left to its own module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.engine.packed_linear import PackedLinear
from posttrain.models.attention import LAYOUT, Layout, Packed, Rule
from posttrain.models.policy import Policy

TOLERANCE = 2e-5  # of the largest hidden state: rounding of float32, and nothing else
BODY, LAYER = (
    {"embed_tokens", "layers", "norm", "rotary_emb"},
    {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
)
ATTENTION, NORMS, MLP = (
    {"q_proj", "k_proj", "v_proj", "o_proj"},
    {"q_norm", "k_norm"},
    {"gate_proj", "up_proj", "down_proj", "act_fn"},
)
STATIC_ROTARY = {"default", "linear", "llama3", "yarn"}  # their angles depend on the position alone


@dataclass(slots=True)
class _Watch:
    """A layout that notes what each layer asks of its attention."""

    packed: Packed
    rules: dict[int, Rule]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        self.rules[layer] = rule
        return self.packed.attend(layer, query, key, value, rule)


@torch.inference_mode()
def rules_of(policy: Policy) -> tuple[Rule, ...] | None:
    """Each layer's attention rule, where a `Decoder` of this familiar policy computes what its module computes; else None."""
    ids = torch.arange(1, 12) % policy.model.config.get_text_config().vocab_size
    position = torch.cat([torch.arange(7), torch.arange(4)])
    watch = _Watch(Packed((0, 7, 11)), {})
    expected = policy.hidden(ids[None], position[None], **{LAYOUT: watch})
    layers = len(policy.body.layers)
    if sorted(watch.rules) != list(range(layers)):
        return None
    rules = tuple(watch.rules[n] for n in range(layers))
    decoder = Decoder(policy, rules, pack=False)
    decoder.reach(7)
    found = decoder.hidden(ids[None], position[None], watch.packed)
    worst, scale = float((found - expected).abs().max()), float(expected.abs().max())
    return rules if worst <= TOLERANCE * scale else None


def familiar(policy: Policy) -> bool:
    """Whether a float32 module on the CPU has the parts of a Llama, each of the plain kind: no adapters, hooks or other layers."""
    body = policy.body
    if policy.device.type != "cpu" or policy.dtype != torch.float32:
        return False
    if set(dict(body.named_children())) != BODY or any(m._forward_hooks or m._forward_pre_hooks for m in body.modules()):
        return False
    kind = getattr(body.rotary_emb, "rope_type", "")  # a mapping where layers differ in it, as in Gemma 3
    if not isinstance(kind, str) or kind not in STATIC_ROTARY:
        return False
    for layer in body.layers:
        if set(dict(layer.named_children())) != LAYER or set(dict(layer.mlp.named_children())) != MLP:
            return False
        parts = dict(layer.self_attn.named_children())
        if set(parts) not in (ATTENTION, ATTENTION | NORMS) or "silu" not in type(layer.mlp.act_fn).__name__.lower():
            return False
        matrices = [*(parts[name] for name in ATTENTION), layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
        norms = [layer.input_layernorm, layer.post_attention_layernorm, *(parts[name] for name in NORMS if name in parts)]
        if any(type(m) is not nn.Linear for m in matrices) or any(not hasattr(m, "variance_epsilon") for m in norms):
            return False
    return hasattr(body.norm, "variance_epsilon") and type(body.embed_tokens) is nn.Embedding


class _Norm:
    """Root-mean-square normalisation, x / sqrt(mean(x^2) + epsilon) * weight, in the fewest calls."""

    __slots__ = ("epsilon", "share", "weight")

    def __init__(self, module: Any):
        self.weight = module.weight.detach()
        self.epsilon, self.share = self.weight.new_full((1,), module.variance_epsilon), 1.0 / self.weight.shape[0]

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
        self.number, self.rule, self.width = number, rule, attention.head_dim
        three = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.before, self.after = _Norm(module.input_layernorm), _Norm(module.post_attention_layernorm)
        weight = torch.cat([m.weight.detach() for m in three]).mul_(self.before.weight)
        bias = torch.cat([m.bias.detach() for m in three]) if attention.q_proj.bias is not None else None
        self.heads, self.keys, _ = (m.out_features // self.width for m in three)
        self.project = PackedLinear(weight, bias, pack)
        self.query_norm = _Norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = _Norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.out, self.gate, self.up, self.down = (
            PackedLinear(
                m.weight.detach() if norm is None else m.weight.detach() * norm.weight,
                None if m.bias is None else m.bias.detach(),
                pack,
            )
            for m, norm in (
                (attention.o_proj, None),
                (mlp.gate_proj, self.after),
                (mlp.up_proj, self.after),
                (mlp.down_proj, None),
            )
        )

    def __call__(self, x: Tensor, shape: torch.Size, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        turned = self.heads + self.keys
        mixed = self.project(self.before.plain(x)).view(x.shape[0], turned + self.keys, self.width)
        both, value = mixed[:, :turned], mixed[:, turned:]
        if self.query_norm is not None and self.key_norm is not None:
            both = torch.cat([self.query_norm(both[:, : self.heads]), self.key_norm(both[:, self.heads :])], 1)
        # the module's x cos + rotate_half(x) sin, with rotate_half's sign in the sine
        half, plain = self.width // 2, both
        both = plain * cos
        both[..., :half].addcmul_(plain[..., half:], sin[..., :half])
        both[..., half:].addcmul_(plain[..., :half], sin[..., half:])
        both, value = (
            both.view(*shape, turned, self.width).transpose(1, 2),
            value.view(*shape, self.keys, self.width).transpose(1, 2),
        )
        seen = layout.attend(self.number, both[:, : self.heads], both[:, self.heads :], value, self.rule)
        x = self.out.plus(seen.reshape(x.shape[0], -1), x)
        inner = self.after.plain(x)
        return self.down.plus(self.up.times(inner, self.gate.silu(inner)), x)


class Decoder:
    """Hidden states as `Policy.hidden` gives them, from the weights of the moment it was made. The weights of a layer's two norms are
    multiplied into the matrices after them."""

    def __init__(self, policy: Policy, rules: tuple[Rule, ...], pack: bool):
        self.body = policy.body
        self.embedding = self.body.embed_tokens.weight.detach()
        self.layers = [_Layer(n, m, rules[n], pack) for n, m in enumerate(self.body.layers)]
        self.norm = _Norm(self.body.norm)
        self.cos = self.sin = torch.empty(0, 1, 0)

    @property
    def bytes(self) -> int:
        """Memory of packed copies."""
        return sum(m.bytes for layer in self.layers for m in (layer.project, layer.out, layer.gate, layer.up, layer.down))

    def reach(self, positions: int) -> None:
        """Have angles for this many positions."""
        if positions <= self.cos.shape[0]:
            return
        at = torch.arange(max(positions, 2 * self.cos.shape[0]))
        cos, sin = self.body.rotary_emb(self.embedding, at[None])
        half = sin.shape[-1] // 2
        self.cos, self.sin = cos[0, :, None], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)[:, None]

    def hidden(self, ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        """[B, S] ids at explicit positions -> [B, S, H]. `reach` must cover them."""
        at = position_ids.reshape(-1)
        cos, sin = self.cos.index_select(0, at), self.sin.index_select(0, at)
        x = F.embedding(ids.reshape(-1), self.embedding)
        for layer in self.layers:
            x = layer(x, ids.shape, cos, sin, layout)
        return self.norm(x).view(*ids.shape, -1)
