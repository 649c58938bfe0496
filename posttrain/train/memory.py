"""Estimates of the device memory that training needs, with and without activation checkpointing, and of the memory that is free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from posttrain.errors import require
from posttrain.models.fused_body import takes_fused_pass
from posttrain.models.policy import Network
from posttrain.models.routing import routers
from posttrain.ops.device import usable_bytes
from posttrain.ops.logprobs import chunk_size, kept_room

# tokens of a micro-batch, of which the largest that fits is taken: larger products are no faster
BUDGETS = (65536, 49152, 32768, 24576, 16384, 12288)
PLAIN_BUDGET = 8192  # if memory is unknown, or nothing larger fits
SMALL_BUDGETS = (PLAIN_BUDGET, 4096, 2048, 1024)  # tried in turn if even that does not fit
SAFETY = 1.15  # an estimate, by which a budget is chosen, may be that much too small


def weight_bytes(policy: Network) -> float:
    return float(sum(p.numel() * p.element_size() for p in policy.model.parameters()))


def copied_bytes(policy: Network) -> float:
    """Bytes of weights that the CUDA decoder copies next to each other: queries, keys and values, and gate and up of a feed-forward
    layer."""
    text = policy.model.config.get_text_config()
    if policy.device.type != "cuda" or not takes_fused_pass(policy):
        return 0.0
    heads = text.num_attention_heads * (key_width(text) // text.num_key_value_heads)
    rows = heads + 2 * key_width(text) + 2 * text.intermediate_size
    return float(policy.dtype.itemsize * text.num_hidden_layers * text.hidden_size * rows)


def learning_bytes(policy: Network, count: int, moments: float) -> dict[str, float]:
    """Bytes that training `count` weights needs besides the weights, with `moments` bytes of optimizer state for each."""
    masters = 0.0 if policy.dtype.itemsize == 4 else 4.0 * count
    states = {"float32 master weights": masters, "optimizer": moments * count}
    return {"gradients": 4.0 * count, **states}


def activation_bytes(policy: Network, tokens: int, checkpointed: bool = False) -> float:
    """Bytes kept of a micro-batch for the backward pass.

    Of width H, feed-forward width I and key-value width K, a decoder layer keeps about 9 H + 4 I + 2 K numbers a token in
    transformers' own module (counted by the tensors that autograd saves; the layer at work needs 4 H + 4 I more for its gradients), and
    6 H + 3 I + 2 K in the fused pass. With E experts a token, I is that of all of them, and 2 E H more are kept: what they read and
    write. Checkpointed, each layer keeps its input (the fused pass: the
    stream and what is to be added to it), and one layer at a time all of it.
    """
    text = policy.model.config.get_text_config()
    names = ("intermediate_size", "n_inner", "ffn_dim")  # Llama, GPT-2, OPT
    inner = _number(text, *names) or 4 * text.hidden_size
    hidden, keys, layers = text.hidden_size, key_width(text), text.num_hidden_layers
    chosen = _number(text, "num_experts_per_tok") if routers(policy.body) else 0
    inner = chosen * (_number(text, "moe_intermediate_size") or inner) if chosen else inner
    fused = takes_fused_pass(policy)
    layer = ((6 if fused else 9) + 2 * chosen) * hidden + (3 if fused else 4) * inner + 2 * keys
    kept = layers * (2 if fused else 1) * hidden + layer if checkpointed else layers * layer
    working = 0 if fused else 4 * (hidden + inner)
    return float(policy.dtype.itemsize * tokens * (kept + working))


def logits_bytes(policy: Network, tokens: int) -> float:
    """Bytes of the logits of one chunk and their gradients; logits of all tokens never exist at once. On CUDA also the values kept
    for the backward pass."""
    size = int(policy.model.config.get_text_config().vocab_size)
    chunk = min(tokens * size, chunk_size(policy.device))
    if policy.device.type != "cuda":
        return 8.0 * chunk
    return 6.0 * chunk + min(float(policy.dtype.itemsize * tokens * size), kept_room(policy.device))


def head_bytes(policy: Network) -> float:
    """Bytes of the gradient of a trained head on CUDA: summed in float32 over chunks, then in the dtype of the weights."""
    head = policy.model.get_output_embeddings()
    if policy.device.type != "cuda" or head is None or not head.weight.requires_grad:
        return 0.0
    return float(head.weight.numel() * (4 + policy.dtype.itemsize % 4))


def cache_bytes(policy: Network, rows: int, length: int) -> float:
    """Bytes of the keys and values of `rows` responses of `length` tokens each."""
    text = policy.model.config.get_text_config()
    width = 2 * key_width(text) * text.num_hidden_layers
    return float(rows * length * width * policy.dtype.itemsize)


def key_width(text: Any) -> int:
    """The width of all keys of a layer, from the model's config; 0 of a model without attention."""
    heads = _number(text, "num_attention_heads")
    width = _number(text, "head_dim") or text.hidden_size // max(heads, 1)
    return (_number(text, "num_key_value_heads") or heads) * width if heads else 0


def _number(text: Any, *names: str) -> int:
    """The first of these settings that a config has, 0 if it has none; of one for each layer (Gemma 3n, Gemma 4) the largest."""
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    for name in names:
        found = [one for layer in layers if (one := getattr(layer, name, None))]
        if found:
            return int(max(max(one) if isinstance(one, list | tuple) else one for one in found))
    return 0


def at_hand(device: torch.device) -> float | None:
    """Free bytes of a CUDA device. None on other devices, where it is unknown, and if there is no CUDA."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return usable_bytes(device)


def step_bytes(models: Sequence[Network], learning: float, tokens: int, layered: bool) -> float:
    """Bytes that a step needs beyond what is allocated after the optimizers are made: gradients and moments (`learning`),
    activations, and a chunk of logits."""
    activations = sum(activation_bytes(m, tokens, layered) for m in models)
    return learning + logits_bytes(models[0], tokens) + head_bytes(models[0]) + activations


def choose_budget(
    asked: int | str, need: Callable[[int], float], have: float | None, fixed: float = 0.0
) -> int:
    """Tokens in a micro-batch: as asked or, for `auto`, the most that fit into `have` bytes by the estimate `need`. `fixed` bytes
    of the need are known exactly.

    >>> [choose_budget(asked, float, have) for asked, have in ((700, 1e9), ("auto", 4e4), ("auto", 9.0), ("auto", None))]
    [700, 32768, 8192, 8192]
    """
    if isinstance(asked, int):
        return asked
    fitting = (n for n in BUDGETS if have is not None and _safe(need(n), fixed) <= have)
    return next(fitting, PLAIN_BUDGET)


def _safe(need: float, fixed: float) -> float:
    return fixed + SAFETY * (need - fixed)


def choose_way(
    asked: int | str,
    setting: str,
    need: Callable[[bool, int], float],
    have: float | None,
    fixed: float = 0.0,
) -> tuple[int, bool]:
    """(tokens in a micro-batch, whether layers are checkpointed). If `auto` finds no room for the usual number of tokens, it first
    checkpoints, then takes fewer tokens.

    >>> need = lambda layered, tokens: (0.25 if layered else 1.0) * tokens
    >>> [choose_way("auto", "auto", need, have) for have in (4e4, 9e3, 7e3, 2e3, 1e2, None)]
    [(32768, False), (8192, False), (8192, True), (4096, True), (1024, True), (8192, False)]
    """
    tokens = choose_budget(asked, partial(need, setting == "layer"), have, fixed)
    on = checkpointing_pays(setting, need(False, tokens), have)
    settled = on or setting != "auto"
    if have is not None and asked == "auto" and tokens == PLAIN_BUDGET and settled:
        fitting = (n for n in SMALL_BUDGETS if _safe(need(on, n), fixed) <= have)
        tokens = next(fitting, SMALL_BUDGETS[-1])
    return tokens, on


def checkpointing_pays(setting: str, need: float, have: float | None) -> bool:
    """Whether to checkpoint layers: as set or, for `auto`, if a step would not fit otherwise.

    >>> [checkpointing_pays("auto", need, have) for need, have in ((2.0, 1.0), (1.0, 2.0), (9.0, None))]
    [True, False, False]
    """
    return setting == "layer" or (setting == "auto" and have is not None and need > have)


def set_checkpointing(model: nn.Module, on: bool) -> None:
    """Switch recomputation of each decoder layer in the backward pass on or off. Gradients are the same.

    transformers' own switch also puts a hook on the embeddings, which non-reentrant checkpointing does not need and which would
    keep the model from the fused pass.
    """
    found = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    cannot = f"{type(model).__name__} cannot be checkpointed by layers"
    advice = "leave it out and lower optimizer.token_budget"
    require(found or not on, f"optimizer.checkpointing=layer: {cannot}; {advice}")
    for module in found:
        module.gradient_checkpointing = on  # type: ignore[assignment]
        module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]
