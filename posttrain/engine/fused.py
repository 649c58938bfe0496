"""The decoder of a Llama-like model as a short list of kernels over flat tokens, for prefilling and for decoding in CUDA graphs.

It reads the parameters of the policy's own module. Products that share their input are done as one, for which their weights are
copied side by side (`refresh`, at every call of `generate`, a millisecond for a billion weights); everything else is the module's own
memory, so that an optimizer step in place is seen by graphs already captured. Whether the result is the module's is not a matter of
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
from posttrain.models.familiar import TOLERANCE, activation, rules_of, strangeness
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
        return cls(module.weight.detach(), module.variance_epsilon if llama else module.eps, not llama)

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon, self.shifted)


class Layer:
    """One decoder layer on flat tokens, in place on the residual stream."""

    def __init__(self, number: int, module: Any, rule: Rule):
        attention, mlp = module.self_attn, module.mlp
        self.number, self.rule = number, rule
        self.three = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.two = (mlp.gate_proj, mlp.up_proj)
        width = attention.head_dim
        self.heads = Heads(self.three[0].out_features // width, self.three[1].out_features // width, width)
        self.mixed_weight, self.mixed_bias = self._beside(self.three)
        self.gate_weight, self.gate_bias = self._beside(self.two)
        self.before, self.after = Norm.of(module.input_layernorm), Norm.of(module.post_attention_layernorm)
        normed = hasattr(attention, "q_norm")
        self.norms = (Norm.of(attention.q_norm), Norm.of(attention.k_norm)) if normed else None
        self.out, self.down, self.tanh = attention.o_proj, mlp.down_proj, bool(activation(mlp.act_fn))

    @staticmethod
    def _beside(modules: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
        """Room for weights side by side; `refresh` fills it."""
        first, rows = modules[0].weight, sum(m.out_features for m in modules)
        weight = torch.empty(rows, first.shape[1], dtype=first.dtype, device=first.device)
        return weight, None if modules[0].bias is None else torch.empty(rows, dtype=first.dtype, device=first.device)

    def copies(self) -> tuple[list[Tensor], list[Tensor]]:
        """(targets, sources) of the weights that lie side by side."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for modules, weight, bias in (
            (self.three, self.mixed_weight, self.mixed_bias),
            (self.two, self.gate_weight, self.gate_bias),
        ):
            sizes = [m.out_features for m in modules]
            targets += weight.split(sizes)
            sources += [m.weight.detach() for m in modules]
            if bias is not None:
                targets += bias.split(sizes)
                sources += [m.bias.detach() for m in modules]
        return targets, sources

    def __call__(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        position: Tensor,
        slot: Tensor,
        store: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> None:
        mixed = F.linear(self.before(x), self.mixed_weight, self.mixed_bias)
        norms = None if self.norms is None else (self.norms[0].weight, self.norms[1].weight)
        epsilon, shifted = (self.norms[0].epsilon, self.norms[0].shifted) if self.norms is not None else (0.0, False)
        rotate_store(mixed, self.heads, angles, position, slot, store, norms, epsilon, shifted)
        add_product(x, attend(self.number, mixed, self.heads, self.rule), self.out)
        inner = gated(F.linear(self.after(x), self.gate_weight, self.gate_bias), self.tanh)
        add_product(x, inner, self.down)


def add_product(x: Tensor, y: Tensor, matrix: Any) -> None:
    """x += y W^T + b, summed inside the product."""
    x.addmm_(y, matrix.weight.detach().t())
    if matrix.bias is not None:
        x += matrix.bias.detach()


class Fused:
    """Hidden states of flat tokens at explicit positions, with keys and values stored as they come."""

    def __init__(self, policy: Policy, rules: tuple[Rule, ...]):
        self.policy, self.body = policy, policy.body
        self.layers = [Layer(n, m, rules[n]) for n, m in enumerate(self.body.layers)]
        self.norm = Norm.of(self.body.norm)
        self.scale = getattr(self.body.embed_tokens, "embed_scale", None)
        self.angles: tuple[Tensor, Tensor] | None = None
        self.places = self.addresses()

    @property
    def heads(self) -> tuple[Heads, ...]:
        return tuple(layer.heads for layer in self.layers)

    @property
    def bytes(self) -> int:
        """Memory of the weights that are copied side by side."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.copies()[0])

    def addresses(self) -> tuple[int, ...]:
        """Where the parameters lie. A captured graph is valid as long as they stay there."""
        return (*(p.data_ptr() for p in self.body.parameters()), self.policy.head.weight_VH.data_ptr())

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the present weights into the copies."""
        pairs = [layer.copies() for layer in self.layers]
        torch._foreach_copy_([t for targets, _ in pairs for t in targets], [s for _, sources in pairs for s in sources])

    def reach(self, positions: int) -> bool:
        """Have angles for this many positions; true where the table had to be made anew."""
        if self.angles is not None and positions <= self.angles[0].shape[0]:
            return False
        weight = self.body.embed_tokens.weight
        at = torch.arange(-(-positions // 1024) * 1024, device=weight.device)
        cos, sin = self.body.rotary_emb(weight[:1], at[None])
        self.angles = cos[0].to(weight.dtype).contiguous(), sin[0].to(weight.dtype).contiguous()
        return True

    def hidden(
        self, id_T: Tensor, position_T: Tensor, slot_T: Tensor, stores: list[tuple[Tensor, Tensor]], attend: Attend
    ) -> Tensor:
        """[T] ids -> [T, H] final hidden states. `reach` must cover the positions."""
        assert self.angles is not None
        x = F.embedding(id_T, self.body.embed_tokens.weight.detach())
        if self.scale is not None:
            x = x * self.scale.to(x.dtype)
        for layer, store in zip(self.layers, stores, strict=True):
            layer(x, self.angles, position_T, slot_T, store, attend)
        return self.norm(x)


def fused(policy: Policy) -> tuple[Fused | None, str]:
    """The fused decoder of a policy, proved on tokens to compute what the module computes; or None, and why not."""
    reason = strangeness(policy)
    if reason is not None:
        return None, reason
    ids = torch.arange(1, 12, device=policy.device) % policy.model.config.get_text_config().vocab_size
    position = torch.cat([torch.arange(7), torch.arange(4)]).to(policy.device)
    rules, expected, packed = rules_of(policy, ids, position, (0, 7, 11))
    if rules is None:
        return None, "layers that do not call our attention once each"
    mine = Fused(policy, rules)
    mine.refresh()
    mine.reach(7)
    if mine.angles is not None and mine.angles[0].shape[1] != mine.heads[0].width:
        return None, "rotary angles for a part of each head"
    stores = [
        tuple(torch.empty(11, h.keys, h.width, dtype=policy.dtype, device=policy.device) for _ in "kv") for h in mine.heads
    ]
    found = mine.hidden(ids, position, torch.arange(11, device=policy.device), stores, packed_attend(packed)).float()  # type: ignore[arg-type]
    worst, scale = float((found - expected).abs().max()), float(expected.abs().max())
    if not worst <= TOLERANCE[policy.dtype] * scale:
        return None, f"hidden states that differ from the module's own by {worst / scale:.2g} of the largest"
    return mine, ""


def packed_attend(packed: Packed) -> Attend:
    """Whole sequences end to end, by torch's own attention."""

    def attend(layer: int, mixed: Tensor, heads: Heads, rule: Rule) -> Tensor:
        split = mixed.view(1, mixed.shape[0], -1, heads.width).transpose(1, 2)
        query, key, value = split.split([heads.heads, heads.keys, heads.keys], 1)
        return packed.attend(layer, query, key, value, rule).reshape(mixed.shape[0], -1)

    return attend
