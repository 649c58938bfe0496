"""Which models are built like a Llama, part by part: what the fused ways through a model, in generation and in training, rely on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from posttrain.models.attention import LAYOUT, Packed, Rule
from posttrain.models.lora import adapter_of
from posttrain.models.policy import Network

BODY = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION, NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
STATIC_ROTARY = {"default", "linear", "llama3", "yarn"}  # their angles depend on the position alone
TOLERANCE = {
    torch.float32: 2e-5,
    torch.bfloat16: 0.05,
    torch.float16: 0.01,
}  # of a layer's largest output: rounding alone


def unsupported_reason(network: Network) -> str | None:
    """What keeps a model from the fused decoder, in words, or None: the parts of a Llama, each of the plain kind."""
    body = network.body
    if network.dtype not in TOLERANCE:
        return f"weights of type {network.dtype}"
    if (
        not isinstance(getattr(body, "layers", None), nn.ModuleList)
        or set(dict(body.named_children())) != BODY
    ):
        return f"{type(body).__name__} is not built like a Llama"
    if any(m._forward_hooks or m._forward_pre_hooks for m in body.modules()):
        return "the model has hooks"
    kind = getattr(body.rotary_emb, "rope_type", "")
    if not isinstance(kind, str) or kind not in STATIC_ROTARY:
        return f"rotary embedding of kind {kind}"
    for layer in body.layers:
        for part, module, names in (
            ("layer", layer, LAYER),
            ("MLP", getattr(layer, "mlp", layer), MLP),
        ):
            if set(dict(module.named_children())) != names:
                return f"{type(module).__name__} is not the {part} of a Llama"
        parts = dict(layer.self_attn.named_children())
        if set(parts) not in (ATTENTION, ATTENTION | NORMS):
            return f"{type(layer.self_attn).__name__} is not the attention of a Llama"
        matrices = [
            *(parts[name] for name in ATTENTION),
            layer.mlp.gate_proj,
            layer.mlp.up_proj,
            layer.mlp.down_proj,
        ]
        if any(type(m) is not nn.Linear and adapter_of(m) is None for m in matrices):
            return "layers that are neither plain matrices nor plain adapters beside them"
        if activation(layer.mlp.act_fn) is None:
            return f"activation {type(layer.mlp.act_fn).__name__}"
    return None


def activation(module: nn.Module) -> bool | None:
    """False for silu, True for gelu by its tanh approximation, None for others."""
    name = type(module).__name__.lower()
    return False if "silu" in name else True if name in ("gelutanh", "pytorchgelutanh") else None


def rules_of(
    network: Network, ids_T: Tensor, position_T: Tensor, starts: tuple[int, ...]
) -> tuple[tuple[Rule, ...] | None, Tensor, Packed]:
    """What each layer asks of its attention, the module's own hidden states of packed ids, and the layout they were packed in. No
    rules: the layers do not call our attention once each."""
    watch = _Watch(Packed(starts, ids_T.device), {})
    hidden_TH = network.hidden(ids_T[None], position_T[None], **{LAYOUT: watch})[0].float()
    count = len(network.body.layers)
    complete = sorted(watch.rules) == list(range(count))
    return (
        tuple(watch.rules[n] for n in range(count)) if complete else None,
        hidden_TH,
        watch.packed,
    )


@torch.no_grad()
def distance(
    network: Network,
    ids_T: Tensor,
    position_T: Tensor,
    packed: Packed,
    embed: Callable[[], Tensor],
    layer: Callable[[int, Tensor], Tensor],
    norm: Callable[[Tensor], Tensor],
) -> float:
    """How far another way through a model is from the module: the largest difference of any layer's output, in parts of the largest
    output. `layer` takes a layer's number and the stream before it.

    Each layer is given the module's own stream. From end to end, rounding adds up: two right ways through 28 layers in bf16 differ by
    5%, as much as a wrong one may.
    """
    body, streams = network.body, []

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        streams.append(inputs[0][0])

    hooks = [part.register_forward_pre_hook(note) for part in (*body.layers, body.norm)]
    try:
        hidden_TH = network.hidden(ids_T[None], position_T[None], **{LAYOUT: packed})[0]
    finally:
        for hook in hooks:
            hook.remove()
    pairs = [(embed(), streams[0]), (norm(streams[-1]), hidden_TH)]
    pairs += [(layer(n, before), after) for n, (before, after) in enumerate(pairwise(streams))]
    return max(
        float((found.float() - own.float()).abs().max() / own.float().abs().max())
        for found, own in pairs
    )


@dataclass(slots=True)
class _Watch:
    """A layout that notes what each layer asks of its attention."""

    packed: Packed
    rules: dict[int, Rule]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        self.rules[layer] = rule
        return self.packed.attend(layer, query, key, value, rule)
