"""Our one attention function, plugged into transformers modules, with three modes: plain, packed and cached.

The mode is a `layout` object handed to the model's forward as a keyword; transformers passes it down to every attention layer.
No layout: plain causal attention over a batch. `Packed`: sequences end to end in one row, each attending to itself alone.
`Cached`: one new token per row against a key-value cache, or packed prompts whose keys and values are stored in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION = "posttrain"
LAYOUT = "posttrain_layout"  # the keyword that carries the mode through the model
SUPPORTED = {"scaling", "dropout", "sliding_window", "softcap", "is_causal", LAYOUT}
IGNORED = {"position_ids", "cache_position", "use_cache", "position_embeddings"}
IGNORED |= {"output_attentions", "output_hidden_states"}
WASTE = 1.25  # sequences share a padded attention call while the longest is at most this many times the shortest


class Layout(Protocol):
    """How the tokens of a forward pass attend."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """[B, Hq, S, D] queries with [B, Hk, S, D] keys and values -> [B, S, Hq, D]."""
        ...


@dataclass(frozen=True, slots=True)
class Rule:
    """What a model asks of its attention."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls: [B, H, S, D] in, [B, S, H, D] out. Options we do not know are refused, not ignored."""
    unknown = [
        k
        for k, v in options.items()
        if k not in SUPPORTED | IGNORED and v is not None and v is not False
    ]
    if unknown:
        raise NotImplementedError(
            f"{type(module).__name__} asks its attention for {', '.join(unknown)}, which posttrain does not do"
        )
    scaling = options.get("scaling")
    rule = Rule(
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        options.get("sliding_window"),
        options.get("softcap"),
    )
    layout: Layout | None = options.get(LAYOUT)
    if layout is None:
        if key.shape[2] != query.shape[2]:
            raise NotImplementedError(
                "posttrain's attention keeps its own cache: sample with its engine, not with model.generate"
            )
        return causal(query, key, value, rule).transpose(1, 2), None
    return layout.attend(module.layer_idx, query, key, value, rule), None  # type: ignore[arg-type]


def causal(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """Causal attention of equal-length rows, [B, H, S, D] -> [B, H, S, D]. Right padding needs no mask: nothing looks ahead."""
    length = query.shape[2]
    window = (
        rule.sliding_window
        if rule.sliding_window is not None and rule.sliding_window < length
        else None
    )
    if window is None and rule.softcap is None:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=rule.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    at = torch.arange(length, device=query.device)
    allowed = at[:, None] >= at[None, :]
    if window is not None:
        allowed &= at[:, None] - at[None, :] < window
    return masked(query, key, value, allowed, rule)


def masked(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, rule: Rule) -> Tensor:
    """Attention under a boolean mask that broadcasts to [B, H, S, L]; grouped heads share keys without copying them."""
    grouped = query.shape[1] // key.shape[1]
    if rule.softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, scale=rule.scaling, enable_gqa=grouped > 1
        )
    batch, heads, length, width = query.shape
    rows = query.reshape(batch, key.shape[1], grouped * length, width)
    scores = (rows @ key.transpose(-1, -2)).view(batch, heads, length, -1)
    scores = (scores if scores.dtype == torch.float64 else scores.float()) * rule.scaling
    scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    weights = scores.softmax(-1).to(value.dtype).view(batch, key.shape[1], grouped * length, -1)
    return (weights @ value).view(batch, heads, length, width)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Sequences end to end without padding. Similar lengths share one call, padded inside it and nowhere else.

    Where sequences begin alike, the beginning need be computed once: `kept` says which of the tokens are computed, `source` which
    of those stands for each token. Queries, keys and values are then those of the kept tokens, and so is the output.
    """

    starts: tuple[int, ...]
    device: torch.device | str = "cpu"
    kept: Tensor | None = None
    source: Tensor | None = None
    buckets: list[Tensor] = field(
        init=False, default_factory=list
    )  # [n, L]: where each token of n sequences is found
    order: Tensor | None = field(
        init=False, default=None
    )  # where each output lies among the buckets'; None: as they come

    def __post_init__(self) -> None:
        lengths = [b - a for a, b in zip(self.starts, self.starts[1:], strict=False)]
        if self.source is None and len(set(lengths)) == 1:
            self.buckets.append(torch.arange(self.starts[-1]).view(-1, lengths[0]))
            return
        order = torch.empty(self.starts[-1], dtype=torch.long)
        base = 0
        for members in bucket(lengths):
            longest = max(lengths[i] for i in members)
            at = torch.arange(longest)
            first = torch.tensor([self.starts[i] for i in members])
            last = torch.tensor([lengths[i] - 1 for i in members])
            gather = first[:, None] + torch.minimum(at[None, :], last[:, None])
            inside = at[None, :] <= last[:, None]
            order[gather[inside]] = (
                base + torch.arange(len(members) * longest).view(len(members), longest)[inside]
            )
            self.buckets.append(
                (gather if self.source is None else self.source[gather]).to(self.device)
            )
            base += gather.numel()
        order = order if self.kept is None else order[self.kept]
        object.__setattr__(self, "order", order.to(self.device))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        flat = [t[0].transpose(0, 1) for t in (query, key, value)]  # [T, H, D]
        outputs = []
        for gather in self.buckets:
            taken = (
                flat if self.order is None else [t.index_select(0, gather.view(-1)) for t in flat]
            )
            q, k, v = (t.reshape(*gather.shape, *t.shape[1:]).transpose(1, 2) for t in taken)
            outputs.append(
                causal(q, k, v, rule).transpose(1, 2).reshape(gather.numel(), *flat[0].shape[1:])
            )
        joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return (joined if self.order is None else joined.index_select(0, self.order))[None]


def bucket(lengths: Sequence[int]) -> list[list[int]]:
    """Indices grouped so that in each group the longest is at most `WASTE` times the shortest, longest first."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and lengths[groups[-1][0]] <= WASTE * lengths[i] + 8:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def install(model: nn.Module) -> None:
    """Make a transformers model use this attention. It has no mask function on purpose: layouts say who sees whom."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
    model.set_attn_implementation(ATTENTION)  # type: ignore[operator]
