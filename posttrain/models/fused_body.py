"""A training pass through a Llama-like model in few kernels: the module's own parameters, products that share their input done as one,
and the element-wise rest one pass over memory each way. Whether it computes what the module computes is proved on tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain.models.attention import Rule
from posttrain.models.familiar import TOLERANCE, activation, rules_of, strangeness
from posttrain.models.policy import Policy
from posttrain.models.varlen import available, offsets, varlen
from posttrain.ops.fused import add_norm, gated, rotate, spread

Attend = Callable[[int, Tensor, Tensor, Tensor, Rule], Tensor]  # layer, [T, Hq, D], [T, Hk, D], [T, Hk, D], rule -> [T, Hq, D]
PROVED: WeakKeyDictionary[nn.Module, FusedBody | None] = WeakKeyDictionary()


class FusedBody:
    """Final hidden states of flat tokens, differentiable in the module's parameters."""

    def __init__(self, policy: Policy, rules: tuple[Rule, ...]):
        self.body, self.rules = policy.body, rules
        self.angles: tuple[Tensor, Tensor] | None = None

    def hidden(self, id_T: Tensor, position_T: Tensor, positions: int, attend: Attend) -> Tensor:
        """[T] ids at positions below `positions` -> [T, H]."""
        x = self.body.embed_tokens(id_T)
        angles, y = self._angles(x, positions), None
        for number, layer in enumerate(self.body.layers):
            if self.body.gradient_checkpointing and torch.is_grad_enabled():  # as transformers' own switch says
                x, y = checkpoint(self._layer, number, layer, x, y, angles, position_T, attend, use_reentrant=False)
            else:
                x, y = self._layer(number, layer, x, y, angles, position_T, attend)
        return add_norm(x, y, *_norm(self.body.norm))[1]

    def _angles(self, x: Tensor, positions: int) -> tuple[Tensor, Tensor]:
        if self.angles is None or self.angles[0].shape[0] < positions or self.angles[0].device != x.device:
            with torch.no_grad():
                at = torch.arange(-(-positions // 1024) * 1024, device=x.device)
                cos, sin = self.body.rotary_emb(x[:1].detach(), at[None])
                self.angles = cos[0].to(x.dtype).contiguous(), sin[0].to(x.dtype).contiguous()
        return self.angles

    def _layer(
        self,
        number: int,
        layer: Any,
        x: Tensor,
        y: Tensor | None,
        angles: tuple[Tensor, Tensor],
        position_T: Tensor,
        attend: Attend,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream before and what must be added to it, through one layer; the sum is done with the next norm."""
        attention, mlp = layer.self_attn, layer.mlp
        width, tokens = attention.head_dim, x.shape[0]
        heads, keys = (m.out_features // width for m in (attention.q_proj, attention.k_proj))
        x, inner = add_norm(x, y, *_norm(layer.input_layernorm))
        mixed = _beside(inner, attention.q_proj, attention.k_proj, attention.v_proj)
        if hasattr(attention, "q_norm"):
            query, key, value = mixed.view(tokens, -1, width).split([heads, keys, keys], 1)
            query, key = (
                add_norm(part.reshape(-1, width), None, *_norm(norm))[1].view(tokens, -1, width)
                for part, norm in ((query, attention.q_norm), (key, attention.k_norm))
            )
            mixed = torch.cat([query, key, value], 1).view(tokens, -1)
        mixed = rotate(mixed, heads + keys, width, angles, position_T).view(tokens, -1, width)
        query, key, value = mixed.split([heads, keys, keys], 1)
        seen = attend(number, query, key, value, self.rules[number]).reshape(tokens, -1)
        y = F.linear(seen, attention.o_proj.weight, attention.o_proj.bias)
        x, inner = add_norm(x, y, *_norm(layer.post_attention_layernorm))
        acted = gated(_beside(inner, mlp.gate_proj, mlp.up_proj), bool(activation(mlp.act_fn)))
        return x, F.linear(acted, mlp.down_proj.weight, mlp.down_proj.bias)


def _beside(x: Tensor, *modules: Any) -> Tensor:
    """The products of one input with several weights, as one product."""
    bias = None if modules[0].bias is None else torch.cat([m.bias for m in modules])
    return F.linear(x, torch.cat([m.weight for m in modules]), bias)


def _norm(module: Any) -> tuple[Tensor, float, bool]:
    llama = hasattr(module, "variance_epsilon")
    return module.weight, module.variance_epsilon if llama else module.eps, not llama


def fused_body(policy: Policy) -> FusedBody | None:
    """The fused way through a policy on CUDA in half precision, where its hidden states are the module's own; else None."""
    body = policy.body
    if not available(body.embed_tokens.weight if hasattr(body, "embed_tokens") else torch.empty(0), 64, None):
        return None
    if strangeness(policy) is not None:
        return None
    if body not in PROVED:
        PROVED[body] = _prove(policy)
    return PROVED[body]


@torch.no_grad()
def _prove(policy: Policy) -> FusedBody | None:
    device = policy.device
    ids = torch.arange(1, 12, device=device) % policy.model.config.get_text_config().vocab_size
    position = torch.cat([torch.arange(7), torch.arange(4)]).to(device)
    rules, expected, _ = rules_of(policy, ids, position, (0, 7, 11))
    width = policy.body.layers[0].self_attn.head_dim
    if rules is None or not all(available(policy.body.embed_tokens.weight, width, rule.softcap) for rule in rules):
        return None
    mine = FusedBody(policy, rules)
    if mine._angles(expected[:, :1].to(policy.dtype), 7)[0].shape[1] != width:
        return None
    found = mine.hidden(ids, position, 7, packed((7, 4), device)).float()
    worst, scale = float((found - expected).abs().max()), float(expected.abs().max())
    return mine if worst <= TOLERANCE[policy.dtype] * scale else None


def packed(
    lengths: tuple[int, ...], device: torch.device, queries: tuple[int, ...] | None = None, source_T: Tensor | None = None
) -> Attend:
    """Sequences end to end. Where beginnings are shared, only the last `queries` tokens of each are computed, and `source_T` says
    which computed token stands for each."""
    queries = lengths if queries is None else queries
    from_N, of_N, most_q, most_k = offsets(queries, device), offsets(lengths, device), max(queries), max(lengths)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        if source_T is not None:
            key, value = spread(key, source_T), spread(value, source_T)
        return varlen(query, key, value, from_N, of_N, most_q, most_k, rule.scaling, rule.sliding_window)

    return attend
