"""A description of the decoder layers of a Llama-like model, read from the transformers module and checked against it on tokens.

Three forward passes are built from it: the decoder that generates on the CPU (engine/decoder.py), the one that generates on CUDA
(engine/fused.py), and the training pass on CUDA (models/fused_body.py). They read the same fields and call different kernels: the
first packs weights with the norms multiplied in, the second works in place and stores keys, the third is differentiable. A model that
is built in another way, or a pass whose layers give other outputs than the module's (`prove`), keeps the module's own forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.models.attention import LAYOUT, Packed, Rule
from posttrain.models.lora import Adapter, adapter_of, perturbed_adapters
from posttrain.models.nf4 import Linear4bit
from posttrain.models.policy import Network, probe_tokens
from posttrain.models.routing import EXPERTS, ROUTES, choose, plain_experts
from posttrain.ops.experts import Routes, mixture, route

BODY = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION, NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # their angles depend on the position alone
# of a layer's largest output: rounding alone
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.05, torch.float16: 0.01}
ROPE_BLOCK = 1024  # positions by which a table of angles grows

RopeTable = tuple[Tensor, Tensor]  # cos and sin, [positions, head width] each


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of an attention layer: query heads, key-value heads, width of each."""

    heads: int
    keys: int
    width: int

    @property
    def grouped(self) -> int:
        return self.heads // self.keys


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """x / sqrt(mean(x^2) + epsilon) * weight. `shifted` multiplies by (1 + weight) instead, before rounding, as in Gemma."""

    weight: Tensor
    epsilon: float
    shifted: bool

    @staticmethod
    def known(module: Any) -> bool:
        """Whether it has a weight; OLMo's have none."""
        epsilon = hasattr(module, "variance_epsilon") or hasattr(module, "eps")
        return epsilon and isinstance(getattr(module, "weight", None), Tensor)

    @classmethod
    def of(cls, module: Any) -> Norm:
        """Read a norm module. Llama calls epsilon variance_epsilon; Gemma and torch call it eps, and only Gemma adds 1 to the
        weight."""
        llama = hasattr(module, "variance_epsilon")
        epsilon = module.variance_epsilon if llama else module.eps
        return cls(module.weight, epsilon, not llama and not isinstance(module, nn.RMSNorm))


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """Linear layers that read the same input, computed as one product, and the adapter of each."""

    modules: tuple[Any, ...]
    adapters: tuple[Adapter | None, ...]

    @classmethod
    def of(cls, *modules: Any) -> Projection:
        return cls(modules, tuple(adapter_of(m) for m in modules))

    @property
    def sizes(self) -> list[int]:
        return [m.out_features for m in self.modules]

    @property
    def present(self) -> list[Adapter]:
        return [adapter for adapter in self.adapters if adapter is not None]

    @property
    def narrow(self) -> list[Linear4bit]:
        """The layers, if all of them are stored in 4 bits."""
        found = [getattr(m, "base_layer", m) for m in self.modules]
        return found if all(isinstance(layer, Linear4bit) for layer in found) else []

    @property
    def plain(self) -> bool:
        """Whether nothing but the weights makes the outputs."""
        return not (self.present or self.narrow) and self.modules[0].bias is None

    def weight(self) -> Tensor:
        """[outputs of all, inputs]; the parameter itself if there is one layer. 4-bit weights are dequantised at each call."""
        if narrow := self.narrow:
            out = narrow[0].scale.new_empty(sum(self.sizes), narrow[0].in_features)
            for layer, part in zip(narrow, out.split_with_sizes(self.sizes), strict=True):
                layer.write(part)
            return out
        weights = [m.weight for m in self.modules]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def bias(self) -> Tensor | None:
        biases = [m.bias for m in self.modules]
        if biases[0] is None:
            return None
        return biases[0] if len(biases) == 1 else torch.cat(biases)

    def unsupported_reason(self) -> str:
        plain = (nn.Linear, Linear4bit)
        pairs = zip(self.modules, self.adapters, strict=True)
        if any(type(module) not in plain and adapter is None for module, adapter in pairs):
            return "linear layers that are neither plain matrices nor have a plain adapter"
        mixed = len({m.bias is None for m in self.modules}) > 1
        return "layers of which some have a bias and some have none" if mixed else ""


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """A router and the weights of all experts, several MLPs. The router chooses `count` experts for each token."""

    number: int  # of the layer
    router: Tensor  # [E, H]
    gate_up: Tensor  # [E, 2I, H]
    down: Tensor  # [E, H, I]
    count: int
    normalised: bool

    @classmethod
    def of(cls, number: int, block: Any) -> Experts:
        gate, experts = block.gate, block.experts
        weights = (gate.weight, experts.gate_up_proj, experts.down_proj)
        return cls(number, *weights, gate.top_k, gate.norm_topk_prob)

    def __call__(
        self, x_TH: Tensor, activation: Callable[[Tensor], Tensor], routes: Routes | None = None
    ) -> Tensor:
        logit_TE = F.linear(x_TH, self.router)
        weight_TK, index_TK = route(logit_TE, self.count, self.normalised, self.number, routes)
        return mixture(x_TH, weight_TK, index_TK, self.gate_up, self.down, activation)


@dataclass(frozen=True, slots=True, eq=False)
class LayerDescription:
    """One decoder layer: x += out(attention(rope(qkv(input_norm(x))))), then x += down(act(gate) * up) of post_norm(x); or what
    `experts` make of that, where gate_up and down are of no layers."""

    number: int
    heads: Heads
    input_norm: Norm
    qkv: Projection
    qk_norms: tuple[Norm, Norm] | None  # of each query's and each key's head, before the rotation
    rule: Rule  # what the layer asks of its attention
    out: Projection
    post_norm: Norm
    gate_up: Projection
    tanh: bool  # gelu by its tanh approximation, not silu
    down: Projection
    experts: Experts | None = None

    @property
    def projections(self) -> tuple[Projection, ...]:
        mlp = (self.gate_up, self.down) if self.experts is None else ()
        return self.qkv, self.out, *mlp


@dataclass(frozen=True, slots=True, eq=False)
class ModelDescription:
    """The body of a Llama-like model."""

    body: Any
    layers: tuple[LayerDescription, ...]
    norm: Norm

    @property
    def adapted(self) -> bool:
        return any(p.present for layer in self.layers for p in layer.projections)

    @property
    def norms(self) -> Iterator[Norm]:
        yield self.norm
        for layer in self.layers:
            yield from (layer.input_norm, layer.post_norm, *(layer.qk_norms or ()))

    def rope_table(self, positions: int) -> RopeTable:
        """cos and sin of at least this many positions, in the dtype of the weights. Cached as long as the module lives."""
        rotary, weight = self.body.rotary_emb, self.body.embed_tokens.weight
        table = _TABLES.get(rotary)
        kind = (weight.device, weight.dtype)
        known = table is not None and (table[0].device, table[0].dtype) == kind
        if table is None or not known or len(table[0]) < positions:
            # made by the engine or the trainer, read by both: autograd refuses tensors of inference mode
            with torch.inference_mode(False), torch.no_grad():
                at = torch.arange(-(-positions // ROPE_BLOCK) * ROPE_BLOCK, device=weight.device)
                angles = rotary_angles(self.body, at)
                cos, sin = (t.to(weight.dtype).contiguous() for t in angles)
                table = (cos, sin)
            _TABLES[rotary] = table
        return table


_TABLES: WeakKeyDictionary[nn.Module, RopeTable] = WeakKeyDictionary()


def rotary_angles(body: Any, position_T: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of these positions, [T, D]."""
    at = position_T[None]
    if hasattr(body.rotary_emb, "mrope_section"):
        at = at.expand(3, 1, -1)  # text is at the same place in time, height and width
    cos, sin = body.rotary_emb(body.embed_tokens.weight[:1], at)
    return cos[0], sin[0]


_RULES: WeakKeyDictionary[nn.Module, tuple[Rule, ...] | str] = WeakKeyDictionary()
_PROVED: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], str]] = WeakKeyDictionary()
_REPORTED: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def describe(network: Network) -> ModelDescription | str:
    """The description of the body of a policy or a scorer, or the reason why it has none.

    The modules are read at each call, because adapters and hooks may have come; what the layers ask of their attention is found by a
    run on tokens, once for each body.
    """
    body = network.body
    if network.padded:
        return "a state besides attention, or attention of its own"
    if network.dtype not in TOLERANCE:
        return f"weights of type {network.dtype}"
    if not isinstance(getattr(body, "layers", None), nn.ModuleList) or _parts(body) != BODY:
        return f"{type(body).__name__} is not built like a Llama"
    # those of a sharded one gather its weights, also for another pass (Network.within)
    if not network.sharded and any(
        m._forward_pre_hooks or {*m._forward_hooks.values()} - {choose} for m in body.modules()
    ):
        return "the model has hooks"
    kind = getattr(body.rotary_emb, "rope_type", "")
    if not isinstance(kind, str) or kind not in STATIC_ROPE:
        return f"rotary embedding of kind {kind}"
    for module in body.layers:
        if reason := _unsupported_layer(module):
            return reason
    if not Norm.known(body.norm):
        return f"norm {type(body.norm).__name__}"
    if body not in _RULES:
        _RULES[body] = _rules(network)
    rules = _RULES[body]
    if isinstance(rules, str):
        return rules
    layers = []
    for number, module in enumerate(body.layers):
        layer = describe_layer(number, module, rules[number])
        if isinstance(layer, str):
            return layer
        layers.append(layer)
    return ModelDescription(body, tuple(layers), Norm.of(body.norm))


def _parts(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _unsupported_layer(layer: Any) -> str:
    if _parts(layer) != LAYER:
        return f"{type(layer).__name__} is not the layer of a Llama"
    mlp = layer.mlp.experts if _parts(layer.mlp) == EXPERTS else layer.mlp
    if _parts(mlp) != MLP and not plain_experts(layer.mlp):
        return f"{type(layer.mlp).__name__} is not the MLP of a Llama"
    if _parts(layer.self_attn) not in (ATTENTION, ATTENTION | NORMS):
        return f"{type(layer.self_attn).__name__} is not the attention of a Llama"
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    for norm in (*norms, *(getattr(layer.self_attn, name, None) for name in NORMS)):
        if norm is not None and not Norm.known(norm):
            return f"norm {type(norm).__name__}"
    return "" if _tanh(mlp.act_fn) is not None else f"activation {type(mlp.act_fn).__name__}"


def _tanh(activation: nn.Module) -> bool | None:
    """False for silu, True for gelu by its tanh approximation, None for others."""
    name = type(activation).__name__.lower()
    return False if "silu" in name else True if name in ("gelutanh", "pytorchgelutanh") else None


def describe_layer(number: int, module: Any, rule: Rule) -> LayerDescription | str:
    """The description of one layer, with its current parameters."""
    attention, mlp = module.self_attn, module.mlp
    experts = Experts.of(number, mlp) if _parts(mlp) == EXPERTS else None
    parts = ((), ()) if experts is not None else ((mlp.gate_proj, mlp.up_proj), (mlp.down_proj,))
    projections = qkv, out, gate_up, down = (
        Projection.of(attention.q_proj, attention.k_proj, attention.v_proj),
        Projection.of(attention.o_proj),
        *(Projection.of(*part) for part in parts),
    )
    for projection in projections:
        if reason := projection.unsupported_reason():
            return reason
    width, normed = attention.head_dim, hasattr(attention, "q_norm")
    queries, keys, _ = (size // width for size in qkv.sizes)
    return LayerDescription(
        number=number,
        heads=Heads(queries, keys, width),
        input_norm=Norm.of(module.input_layernorm),
        qkv=qkv,
        qk_norms=(Norm.of(attention.q_norm), Norm.of(attention.k_norm)) if normed else None,
        rule=rule,
        out=out,
        post_norm=Norm.of(module.post_attention_layernorm),
        gate_up=gate_up,
        tanh=bool(_tanh(mlp.act_fn if experts is None else mlp.experts.act_fn)),
        down=down,
        experts=experts,
    )


@dataclass(slots=True)
class _Recorder:
    """A layout that records what each layer requires of its attention."""

    packed: Packed
    rules: dict[int, Rule]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        self.rules[layer] = rule
        return self.packed.attend(layer, query, key, value, rule)


@torch.no_grad()
def _rules(network: Network) -> tuple[Rule, ...] | str:
    """What each layer requires of its attention."""
    body, (ids_T, position_T, starts) = network.body, probe_tokens(network.model)
    if rotary_angles(body, position_T)[0].shape[-1] != body.layers[0].self_attn.head_dim:
        return "rotary angles for a part of each head"
    recorder = _Recorder(Packed(starts, ids_T.device), {})
    network.hidden(ids_T[None], position_T[None], **{LAYOUT: recorder})
    count = len(body.layers)
    if sorted(recorder.rules) != list(range(count)):
        return "layers that do not call our attention once each"
    if any(rule.sinks is not None for rule in recorder.rules.values()):
        return "attention with sinks"
    return tuple(recorder.rules[n] for n in range(count))


class Pass(Protocol):
    """Another forward pass of a described model, part by part, for `prove`."""

    def embed(self, id_T: Tensor) -> Tensor: ...

    def layer_alone(
        self, number: int, x_TH: Tensor, position_T: Tensor, packed: Packed, routes: Routes | None
    ) -> Tensor:
        """The residual stream after one layer. `packed` says which tokens form a sequence, `routes` which experts they use."""

    def final_norm(self, x_TH: Tensor) -> Tensor: ...


def prove(
    network: Network,
    described: ModelDescription,
    name: str,
    build: Callable[[], Pass],
    tolerance: float = 0.0,
) -> str:
    """ "" if each part of a pass computes the same as the module on tokens, else the reason why the pass cannot be used.

    It is checked once for each body, name of a pass and device, and again when adapters came. They begin as 0, so that they are
    perturbed for it. `tolerance`: of a pass that rounds more than the model's own type does.
    """
    key = (name, network.model.device, described.adapted)
    found = _PROVED.setdefault(described.body, {})
    if key not in found:
        with perturbed_adapters(described.body):
            worst = distance(network, build())
        reason = f"a layer whose output differs from the module's own by {worst:.2g} of the largest"
        found[key] = "" if worst <= (tolerance or TOLERANCE[network.dtype]) else reason
    return found[key]


@torch.no_grad()
def distance(network: Network, other: Pass) -> float:
    """The largest difference between another pass and the module in any layer's output, relative to the largest output.

    Each layer is given the module's own stream. From end to end, rounding adds up: two right passes through 28 layers in bf16 differ
    by 5%, as much as a wrong one may. It is also given the experts that the module chose: rounding decides between two that are
    nearly equal.
    """
    body, streams, routes = network.body, list[Tensor](), Routes()
    ids_T, position_T, starts = probe_tokens(network.model)
    packed = Packed(starts, ids_T.device)
    given: dict[str, Any] = {LAYOUT: packed, ROUTES: routes}

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        streams.append(inputs[0][0])

    hooks = [part.register_forward_pre_hook(record) for part in (*body.layers, body.norm)]
    try:
        hidden_TH = network.hidden(ids_T[None], position_T[None], **given)[0]
    finally:
        for hook in hooks:
            hook.remove()
    pairs = [(other.embed(ids_T), streams[0]), (other.final_norm(streams[-1]), hidden_TH)]
    for n, (before, after) in enumerate(pairwise(streams)):
        pairs.append((other.layer_alone(n, before, position_T, packed, routes.replay()), after))
    wide = [(found.float(), own.float()) for found, own in pairs]
    return max(float((found - own).abs().max() / own.abs().max()) for found, own in wide)


def report_plain_path(network: Network, by: str, reason: str) -> None:
    """Report once for each model and caller that it runs its own module, and what that costs."""
    cost = {
        "training": "takes the plain pass through its own module, about 1.5 times slower",
        "engine": "generates on the plain path, without CUDA graphs, several times slower",
    }[by]
    reported = _REPORTED.setdefault(network.body, set())
    if by not in reported:
        reported.add(by)
        name = network.source or type(network.model).__name__
        network.events.emit("message", f"{by}: {name} {cost}: {reason}", "warning")
