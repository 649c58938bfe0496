"""The decoder of a Llama-like model as a short list of kernels over flat tokens, for prefilling and for decoding in CUDA graphs.

It reads the parameters of the policy's own module. Products that share their input are done as one, for which their weights are
copied side by side (`refresh`, at every call of `generate`, a millisecond for a billion weights); everything else is the module's own
memory, so that an optimizer step in place is seen by graphs already captured. Adapters are not merged, which in bf16 would round
small ones away: they are two narrow products beside each wide one. Whether the result is the module's is not a matter of
names: `fused` compares the two on tokens, and a model that differs is left to its own module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.engine.kernels import rms_norm, rotate_store
from posttrain.engine.rows import Heads
from posttrain.models.attention import Packed, Rule
from posttrain.models.layers import TOLERANCE, activation, distance, rules_of, unsupported_reason
from posttrain.models.lora import Adapter, adapter_of, perturbed_adapters
from posttrain.models.policy import Policy
from posttrain.ops.fused import gated


class Attend(Protocol):
    """How a layer's tokens attend: rotated [T, (Hq + 2 Hk) D] in, [T, Hq D] out."""

    def __call__(self, layer: int, mixed: Tensor, heads: Heads, rule: Rule) -> Tensor: ...


@dataclass(slots=True, eq=False)
class Norm:
    weight: Tensor
    epsilon: float
    shifted: bool  # (1 + weight), as Gemma has it

    @classmethod
    def of(cls, module: Any) -> Norm:
        llama = hasattr(module, "variance_epsilon")
        return cls(
            module.weight.detach(), module.variance_epsilon if llama else module.eps, not llama
        )

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon, self.shifted)


class Products:
    """y = x W^T + b + (x A^T) B^T of one or more linear layers that read the same x: weights side by side, adapters (scale in B, one
    block of it a layer) likewise. A layer alone lends its own weight; what is copied is filled by `copies`."""

    def __init__(self, *modules: Any):
        self.modules, self.adapters = modules, tuple(adapter_of(m) for m in modules)
        self.allocate()

    @property
    def present(self) -> list[Adapter]:
        return [adapter for adapter in self.adapters if adapter is not None]

    def allocate(self) -> None:
        """Room for the copies."""
        first, rows = self.modules[0].weight.detach(), sum(m.out_features for m in self.modules)
        bias = self.modules[0].bias
        if len(self.modules) == 1:
            self.weight, self.bias = first, None if bias is None else bias.detach()
        else:
            self.weight, self.bias = (
                first.new_empty(rows, first.shape[1]),
                None if bias is None else first.new_empty(rows),
            )
        ranks = sum(adapter.a_RI.shape[0] for adapter in self.present)
        self.down, self.up = first.new_empty(ranks, first.shape[1]), first.new_zeros(rows, ranks)

    def release(self) -> None:
        """Give the copies back, until `allocate`."""
        self.weight = self.down = self.up = self.modules[0].weight.detach()[:0]

    def copies(self) -> tuple[list[Tensor], list[Tensor]]:
        """(targets, sources) of what is copied."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        sizes = [m.out_features for m in self.modules]
        if len(self.modules) > 1:
            targets += self.weight.split(sizes)
            sources += [m.weight.detach() for m in self.modules]
            if self.bias is not None:
                targets += self.bias.split(sizes)
                sources += [m.bias.detach() for m in self.modules]
        rank = 0
        for adapter, part in zip(self.adapters, self.up.split(sizes), strict=True):
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

    def __init__(self, number: int, module: Any, rule: Rule):
        attention, mlp = module.self_attn, module.mlp
        self.number, self.rule = number, rule
        self.mixed, self.out = (
            Products(attention.q_proj, attention.k_proj, attention.v_proj),
            Products(attention.o_proj),
        )
        self.gate, self.down = Products(mlp.gate_proj, mlp.up_proj), Products(mlp.down_proj)
        self.products = (self.mixed, self.gate, self.out, self.down)
        width = attention.head_dim
        self.heads = Heads(
            attention.q_proj.out_features // width, attention.k_proj.out_features // width, width
        )
        self.before, self.after = (
            Norm.of(module.input_layernorm),
            Norm.of(module.post_attention_layernorm),
        )
        normed = hasattr(attention, "q_norm")
        self.norms = (Norm.of(attention.q_norm), Norm.of(attention.k_norm)) if normed else None
        self.tanh = bool(activation(mlp.act_fn))

    def __call__(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        position: Tensor,
        slot: Tensor,
        store: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> None:
        mixed = self.mixed(self.before(x))
        norms = None if self.norms is None else (self.norms[0].weight, self.norms[1].weight)
        epsilon, shifted = (
            (self.norms[0].epsilon, self.norms[0].shifted)
            if self.norms is not None
            else (0.0, False)
        )
        rotate_store(mixed, self.heads, angles, position, slot, store, norms, epsilon, shifted)
        self.out.add_to(x, attend(self.number, mixed, self.heads, self.rule))
        self.down.add_to(x, gated(self.gate(self.after(x)), self.tanh))


class Fused:
    """Hidden states of flat tokens at explicit positions, with keys and values stored as they come."""

    def __init__(self, policy: Policy, rules: tuple[Rule, ...]):
        self.policy, self.body = policy, policy.body
        self.layers = [Layer(n, m, rules[n]) for n, m in enumerate(self.body.layers)]
        self.norm = Norm.of(self.body.norm)
        self.scale = getattr(self.body.embed_tokens, "embed_scale", None)
        self.angles: tuple[Tensor, Tensor] | None = None
        self.places, self.released = self.addresses(), False

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

    def reach(self, positions: int) -> bool:
        """Have angles for this many positions; true where the table had to be made anew."""
        if self.angles is not None and positions <= self.angles[0].shape[0]:
            return False
        weight = self.body.embed_tokens.weight
        at = torch.arange(-(-positions // 1024) * 1024, device=weight.device)
        cos, sin = self.body.rotary_emb(weight[:1], at[None])
        self.angles = cos[0].to(weight.dtype).contiguous(), sin[0].to(weight.dtype).contiguous()
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
        """[T] ids -> [T, H] final hidden states. `reach` must cover the positions."""
        assert self.angles is not None
        x = self.embed(id_T)
        for layer, store in zip(self.layers, stores, strict=True):
            layer(x, self.angles, position_T, slot_T, store, attend)
        return self.norm(x)


def fused(policy: Policy) -> tuple[Fused | None, str]:
    """The fused decoder of a policy, proved on tokens to compute what the module computes; or None, and why not."""
    reason = unsupported_reason(policy)
    if reason is not None:
        return None, reason
    with perturbed_adapters(policy.body):
        mine, reason = _prove(policy)
    if mine is not None:
        mine.refresh()
    return mine, reason


def _prove(policy: Policy) -> tuple[Fused | None, str]:
    ids = (
        torch.arange(1, 12, device=policy.device) % policy.model.config.get_text_config().vocab_size
    )
    position = torch.cat([torch.arange(7), torch.arange(4)]).to(policy.device)
    rules, _, packed = rules_of(policy, ids, position, (0, 7, 11))
    if rules is None:
        return None, "layers that do not call our attention once each"
    mine = Fused(policy, rules)
    mine.refresh()
    mine.reach(7)
    if mine.angles is not None and mine.angles[0].shape[1] != mine.heads[0].width:
        return None, "rotary angles for a part of each head"
    slots, attend = torch.arange(11, device=policy.device), packed_attend(packed)

    def through(number: int, before: Tensor) -> Tensor:
        x, heads = before.clone(), mine.heads[number]
        key, value = (
            torch.empty(11, heads.keys, heads.width, dtype=x.dtype, device=x.device) for _ in "kv"
        )
        assert mine.angles is not None
        mine.layers[number](x, mine.angles, position, slots, (key, value), attend)
        return x

    worst = distance(policy, ids, position, packed, lambda: mine.embed(ids), through, mine.norm)
    if not worst <= TOLERANCE[policy.dtype]:
        return (
            None,
            f"a layer whose output differs from the module's own by {worst:.2g} of the largest",
        )
    return mine, ""


def packed_attend(packed: Packed) -> Attend:
    """Whole sequences end to end, by torch's own attention."""

    def attend(layer: int, mixed: Tensor, heads: Heads, rule: Rule) -> Tensor:
        split = mixed.view(1, mixed.shape[0], -1, heads.width).transpose(1, 2)
        query, key, value = split.split([heads.heads, heads.keys, heads.keys], 1)
        return packed.attend(layer, query, key, value, rule).reshape(mixed.shape[0], -1)

    return attend
