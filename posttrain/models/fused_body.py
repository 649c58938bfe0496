"""A training pass through a Llama-like model in few kernels: the module's own parameters, products that share their input done as one,
and the element-wise rest one pass over memory each way. Whether it computes what the module computes is proved on tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain.models.attention import Packed, Rule
from posttrain.models.layers import TOLERANCE, activation, distance, rules_of, unsupported_reason
from posttrain.models.lora import ADAPTER, adapter_of, perturbed_adapters
from posttrain.models.policy import Network
from posttrain.models.varlen import available, fits, offsets, varlen
from posttrain.ops.fused import add_norm, gated, rotate, spread

Attend = Callable[
    [int, Tensor, Tensor, Tensor, Rule], Tensor
]  # layer, [T, Hq, D], [T, Hk, D], [T, Hk, D], rule -> [T, Hq, D]
PROVED: WeakKeyDictionary[nn.Module, tuple[bool, FusedBody | None]] = (
    WeakKeyDictionary()
)  # with adapters or without
SAID: WeakSet[nn.Module] = WeakSet()


class FusedBody:
    """Final hidden states of flat tokens, differentiable in the module's parameters."""

    def __init__(self, network: Network, rules: tuple[Rule, ...]):
        self._body, self.rules = (
            ref(network.body),
            rules,
        )  # weak: `PROVED` would keep the model alive for ever
        self.angles: tuple[Tensor, Tensor] | None = None

    @property
    def body(self) -> Any:
        return self._body()

    def hidden(self, id_T: Tensor, position_T: Tensor, positions: int, attend: Attend) -> Tensor:
        """[T] ids at positions below `positions` -> [T, H]."""
        x = self.body.embed_tokens(id_T)
        angles, y = self._angles(x, positions), None
        for number, layer in enumerate(self.body.layers):
            if (
                self.body.gradient_checkpointing and torch.is_grad_enabled()
            ):  # as transformers' own switch says
                x, y = checkpoint(
                    self._layer,
                    number,
                    layer,
                    x,
                    y,
                    angles,
                    position_T,
                    attend,
                    use_reentrant=False,
                )
            else:
                x, y = self._layer(number, layer, x, y, angles, position_T, attend)
        return add_norm(x, y, *_norm(self.body.norm))[1]

    @torch.no_grad()
    def proved(
        self, network: Network, ids_T: Tensor, position_T: Tensor, layout: Packed, attend: Attend
    ) -> bool:
        """Whether each layer gives what the module's gives, on these tokens."""
        body = self.body
        angles = self._angles(body.embed_tokens(ids_T[:1]), int(position_T.max()) + 1)
        if angles[0].shape[1] != body.layers[0].self_attn.head_dim:
            return False

        def through(number: int, before: Tensor) -> Tensor:
            x, y = self._layer(
                number, body.layers[number], before, None, angles, position_T, attend
            )
            return x + y

        def norm(x: Tensor) -> Tensor:
            return add_norm(x, None, *_norm(body.norm))[1]

        worst = distance(
            network, ids_T, position_T, layout, lambda: body.embed_tokens(ids_T), through, norm
        )
        return worst <= TOLERANCE[network.dtype]

    def _angles(self, x: Tensor, positions: int) -> tuple[Tensor, Tensor]:
        if (
            self.angles is None
            or self.angles[0].shape[0] < positions
            or self.angles[0].device != x.device
        ):
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
        y = _beside(seen, attention.o_proj)
        x, inner = add_norm(x, y, *_norm(layer.post_attention_layernorm))
        acted = gated(_beside(inner, mlp.gate_proj, mlp.up_proj), bool(activation(mlp.act_fn)))
        return x, _beside(acted, mlp.down_proj)


def _beside(x: Tensor, *modules: Any) -> Tensor:
    """The products of one input with several weights, as one product; and all their adapters as two narrow ones."""
    if len(modules) == 1:
        out = F.linear(x, modules[0].weight, modules[0].bias)
    else:
        bias = None if modules[0].bias is None else torch.cat([m.bias for m in modules])
        out = F.linear(x, torch.cat([m.weight for m in modules]), bias)
    adapters = [adapter_of(m) for m in modules]
    present = [adapter for adapter in adapters if adapter is not None]
    if not present:
        return out
    inner = F.linear(x, torch.cat([adapter.a_RI for adapter in present]))
    blocks = [
        x.new_zeros(m.out_features, 0) if adapter is None else adapter.scale * adapter.b_OR
        for m, adapter in zip(modules, adapters, strict=True)
    ]
    return torch.addmm(out, inner, torch.block_diag(*blocks).t())


def _norm(module: Any) -> tuple[Tensor, float, bool]:
    llama = hasattr(module, "variance_epsilon")
    return module.weight, module.variance_epsilon if llama else module.eps, not llama


def fused_body(network: Network) -> FusedBody | None:
    """The fused way through a policy or a scorer on CUDA in half precision, where its layers are the module's own; else None. That a
    model there has to do without is said once."""
    body = network.body
    if not available(next(network.model.parameters()), 64, None):
        return None
    reason = unsupported_reason(network)
    if reason is None:
        adapted = any(ADAPTER in name for name, _ in body.named_parameters())
        if PROVED.get(body, (None,))[0] != adapted:
            with perturbed_adapters(body):
                PROVED[body] = adapted, _prove(network)
        found = PROVED[body][1]
        if found is not None:
            return found
        reason = "layers that attend in another way, or whose outputs differ from the module's own"
    if body not in SAID:
        SAID.add(body)
        name = network.source or type(network.model).__name__
        sys.stderr.write(
            f"training: {name} takes the plain pass through its own module, about 1.5 times slower: {reason}\n"
        )
    return None


def takes_fused_pass(network: Network) -> bool:
    """Whether a model goes the fused way on its device. Where its weights lie elsewhere, in a plan for a GPU that is not here, by all
    but the proof on tokens."""
    if network.device.type == network.model.device.type:
        return fused_body(network) is not None
    return (
        fits(network.dtype, 64, None)
        and unsupported_reason(network) is None
        and _attention(network)[0] is not None
    )


@torch.no_grad()
def _attention(network: Network) -> tuple[tuple[Rule, ...] | None, Tensor, Tensor, Packed]:
    """What the layers ask of their attention, None where the kernel cannot do it; and the tokens by which it was found."""
    device = network.model.device
    ids = torch.arange(1, 12, device=device) % network.model.config.get_text_config().vocab_size
    position = torch.cat([torch.arange(7), torch.arange(4)]).to(device)
    rules, _, layout = rules_of(network, ids, position, (0, 7, 11))
    width = network.body.layers[0].self_attn.head_dim
    good = rules is not None and all(fits(network.dtype, width, rule.softcap) for rule in rules)
    return rules if good else None, ids, position, layout


def _prove(network: Network) -> FusedBody | None:
    rules, ids, position, layout = _attention(network)
    if rules is None:
        return None
    mine = FusedBody(network, rules)
    return mine if mine.proved(network, ids, position, layout, packed((7, 4), ids.device)) else None


def packed(
    lengths: tuple[int, ...],
    device: torch.device,
    queries: tuple[int, ...] | None = None,
    source_T: Tensor | None = None,
) -> Attend:
    """Sequences end to end. Where beginnings are shared, only the last `queries` tokens of each are computed, and `source_T` says
    which computed token stands for each."""
    queries = lengths if queries is None else queries
    from_N, of_N, max_q, max_k = (
        offsets(queries, device),
        offsets(lengths, device),
        max(queries),
        max(lengths),
    )

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        if source_T is not None:
            key, value = spread(key, source_T), spread(value, source_T)
        return varlen(
            query, key, value, from_N, of_N, max_q, max_k, rule.scaling, rule.sliding_window
        )

    return attend
