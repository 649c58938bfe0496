"""The routers of a mixture of experts in transformers' own module: what they choose is recorded, and choices are replayed."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from posttrain.ops.experts import Routes, route

EXPERTS = {"experts", "gate"}
ROUTES = "routes"  # the keyword that brings them to a pass
_PLAIN: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_FOUND: WeakKeyDictionary[nn.Module, dict[int, Any]] = WeakKeyDictionary()
_ROUTES: WeakKeyDictionary[nn.Module, tuple[int, Routes]] = WeakKeyDictionary()


def plain_experts(block: Any) -> bool:
    """Whether a module is a mixture of experts like that of Qwen3: a router of one matrix, and two matrices an expert."""
    if {name for name, _ in block.named_children()} != EXPERTS:
        return False
    names = [{name for name, _ in part.named_parameters()} for part in (block.gate, block.experts)]
    known = names == [{"weight"}, {"gate_up_proj", "down_proj"}]
    settings = all(hasattr(block.gate, name) for name in ("norm_topk_prob", "top_k"))
    return known and settings and plain_router(block.gate)


@torch.no_grad()
def plain_router(gate: Any) -> bool:
    """Whether a router chooses as `route` does, tried once with other numbers in it. MiMo's, of the same parts, takes a sigmoid."""
    if gate not in _PLAIN:
        own = {**dict(gate.named_parameters()), **dict(gate.named_buffers())}
        state, width = {}, own["weight"].shape[1]
        for number, (name, tensor) in enumerate(own.items()):
            drawn = np.random.default_rng(number).normal(size=tuple(tensor.shape))
            state[name] = torch.from_numpy(drawn).to(tensor)
        x_TH = torch.linspace(-1, 1, 4 * width).view(4, width).to(own["weight"])
        try:
            logit_TE, weight_TK, index_TK = functional_call(gate, state, (x_TH,))
            expected = route(logit_TE, gate.top_k, gate.norm_topk_prob)
        except (TypeError, ValueError, RuntimeError):
            _PLAIN[gate] = False
        else:
            same = torch.equal(index_TK, expected[1])
            _PLAIN[gate] = same and torch.allclose(weight_TK, expected[0], rtol=1e-3)
    return _PLAIN[gate]


def routers(body: Any) -> dict[int, Any]:
    """The routers that choose experts, by the number of the layer; none where the model has other ones or no experts."""
    if body not in _FOUND:
        blocks = ((n, getattr(m, "mlp", None)) for n, m in enumerate(getattr(body, "layers", ())))
        found = {n: block for n, block in blocks if isinstance(block, nn.Module)}
        _FOUND[body] = {n: block.gate for n, block in found.items() if plain_experts(block)}
    return _FOUND[body]


def use_routes(body: Any, routes: Routes | None) -> None:
    """Have the routers write to `routes` and choose as those say, until the next call: layers that are checkpointed are computed
    again in the backward pass."""
    for layer, gate in routers(body).items():
        if routes is None:
            _ROUTES.pop(gate, None)
            continue
        if choose not in gate._forward_hooks.values():
            gate.register_forward_hook(choose)
        _ROUTES[gate] = (layer, routes)


def choose(gate: Any, _inputs: Any, found: tuple[Tensor, Tensor, Tensor]) -> Any:
    """A hook of a router."""
    if gate not in _ROUTES:
        return None
    layer, routes = _ROUTES[gate]
    weight_TK, index_TK = route(found[0], gate.top_k, gate.norm_topk_prob, layer, routes)
    return found[0], weight_TK, index_TK
