"""The attention function that is plugged into transformers modules, with three modes (plain, packed and cached), and attention over
packed sequences for our own forward passes.

The mode is a `layout` object handed to the model's forward as a keyword; transformers passes it down to every attention layer.
No layout: plain causal attention over a batch. `Packed`: sequences end to end in one row, each attending to itself alone.
Those of engine/cache.py: one new token per row against a key-value cache, or packed prompts whose keys and values are stored in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from posttrain.ops.device import sent
from posttrain.ops.hopper import flash

ATTENTION = "posttrain"
LAYOUT = "posttrain_layout"  # the keyword that carries the mode through the model
SUPPORTED = {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal", LAYOUT}
IGNORED = {"position_ids", "cache_position", "use_cache", "position_embeddings"}
IGNORED |= {"output_attentions", "output_hidden_states", "output_router_logits"}
SLIDING = "sliding_attention"
KINDS = {"full_attention", SLIDING, "chunked_attention"}  # of layers that our attention computes
WASTE = 1.25  # sequences share a padded attention call while the longest is at most this many times the shortest
NARROW = (torch.bfloat16, torch.float16)
MANY = 8  # sequences of equal length that are worth a batch
ANEW = 1.25  # pairs of tokens in such a batch, in those of which the outputs are needed
BATCHED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
WIDEST = 256  # elements of a head that torch's kernel for packed sequences takes


class Layout(Protocol):
    """How the tokens of a forward pass attend."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """[B, Hq, S, D] queries with [B, Hk, S, D] keys and values -> [B, S, Hq, D]."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a model requires of its attention: scale, window, soft cap, and sinks, [Hq]: the score of a key without a value that every
    query of a head sees (gpt-oss)."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether torch's attention computes it."""
        return self.softcap is None and self.sinks is None


# layer, [T, Hq, D], [T, Hk, D], [T, Hk, D], rule -> [T, Hq, D]
Attend = Callable[[int, Tensor, Tensor, Tensor, Rule], Tensor]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: [B, H, S, D] in, [B, S, H, D] out. Unknown options are refused, not ignored."""
    given = {name for name, value in options.items() if value is not None and value is not False}
    if unknown := sorted(given - SUPPORTED - IGNORED):
        asked = f"{type(module).__name__} asks its attention for {', '.join(unknown)}"
        raise NotImplementedError(f"{asked}, which posttrain does not do")
    scaling = query.shape[-1] ** -0.5 if options.get("scaling") is None else options["scaling"]
    rule = Rule(scaling, *(options.get(name) for name in ("sliding_window", "softcap", "s_aux")))
    layout: Layout | None = options.get(LAYOUT)
    if layout is None:
        if key.shape[2] != query.shape[2]:
            advice = "sample with its engine, not with model.generate"
            raise NotImplementedError(f"posttrain's attention keeps its own cache: {advice}")
        return causal(query, key, value, rule).transpose(1, 2), None
    width = value.shape[-1]
    if width != key.shape[-1]:  # as in DeepSeek; caches hold keys and values of one width
        widest = max(width, key.shape[-1])
        query, key, value = (F.pad(t, (0, widest - t.shape[-1])) for t in (query, key, value))
    outputs = layout.attend(module.layer_idx, query, key, value, rule)  # type: ignore[arg-type]
    return outputs[..., :width], None


def causal(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """Causal attention of equal-length rows, [B, H, S, D] -> [B, H, S, D]. Right padding needs no mask, because nothing attends to
    later tokens."""
    length = query.shape[2]
    if rule.plain and (rule.sliding_window or length) >= length:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=rule.scaling, enable_gqa=grouped
        )
    return masked(query, key, value, seen(length, length, rule, query.device), rule)


def seen(queries: int, keys: int, rule: Rule, device: torch.device) -> Tensor:
    """[S, L], true where a key is at or before its query, and within the window. The last query is at the position of the last key."""
    at = torch.arange(keys, device=device)
    behind = at[keys - queries :, None] - at
    return (behind >= 0) & (behind < (rule.sliding_window or keys))


def masked(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, rule: Rule) -> Tensor:
    """Attention under a boolean mask that broadcasts to [B, H, S, L]; grouped heads share keys without copying them."""
    grouped = query.shape[1] // key.shape[1]
    if rule.plain:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, scale=rule.scaling, enable_gqa=grouped > 1
        )
    batch, heads, length, width = query.shape
    rows = query.reshape(batch, key.shape[1], grouped * length, width)
    scores = (rows @ key.transpose(-1, -2)).view(batch, heads, length, -1)
    scores = (scores if scores.dtype == torch.float64 else scores.float()) * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    if rule.sinks is not None:
        sinks = rule.sinks.to(scores.dtype).view(-1, 1, 1).expand(batch, -1, length, 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1).to(value.dtype)[..., : key.shape[2]]
    rows = weights.reshape(batch, key.shape[1], grouped * length, -1)
    return (rows @ value).view(batch, heads, length, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Sequences concatenated without padding. Sequences of similar length share one call, padded only within it.

    Where sequences begin alike, the beginning need be computed once: `kept` says which of the tokens are computed, `source` which
    of those stands for each token. Queries, keys and values are then those of the kept tokens, and so is the output.
    """

    starts: tuple[int, ...]
    device: torch.device | str = "cpu"
    kept: Tensor | None = None
    source: Tensor | None = None
    # [n, L]: where each token of n sequences is found
    buckets: list[Tensor] = field(init=False, default_factory=list)
    # where each output lies among the buckets'; None: as they come
    order: Tensor | None = field(init=False, default=None)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in pairwise(self.starts))

    def __post_init__(self) -> None:
        lengths = self.lengths
        if self.source is None and len(set(lengths)) == 1:
            self.buckets.append(torch.arange(self.starts[-1]).view(-1, lengths[0]))
            return
        order = torch.empty(self.starts[-1], dtype=torch.long)
        base = 0
        for members in bucket(lengths):
            at = torch.arange(max(lengths[i] for i in members))
            first = torch.tensor([self.starts[i] for i in members])
            last = torch.tensor([lengths[i] - 1 for i in members])
            gather = first[:, None] + torch.minimum(at[None, :], last[:, None])
            inside = at[None, :] <= last[:, None]
            order[gather[inside]] = base + torch.arange(gather.numel()).view_as(gather)[inside]
            base += gather.numel()
            gather = gather if self.source is None else self.source[gather]
            self.buckets.append(gather.to(self.device))
        order = order if self.kept is None else order[self.kept]
        object.__setattr__(self, "order", order.to(self.device))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        flat = [t[0].transpose(0, 1) for t in (query, key, value)]  # [T, H, D]
        outputs, taken = [], flat
        for gather in self.buckets:
            if self.order is not None:
                taken = [t.index_select(0, gather.view(-1)) for t in flat]
            q, k, v = (t.reshape(*gather.shape, *t.shape[1:]).transpose(1, 2) for t in taken)
            outputs.append(causal(q, k, v, rule).transpose(1, 2).flatten(0, 1))
        joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return (joined if self.order is None else joined.index_select(0, self.order))[None]


@dataclass(frozen=True, slots=True)
class Once:
    """A layout for a trial of layers of this configuration, each of which must attend once and do nothing else: DiffLlama's attend
    twice, some of Qwen3.5's carry a state, and those of Qwen2-MoE have a window in their mask alone. Numbers may not show it, least of
    all of weights that nobody trained."""

    layout: Layout
    config: Any
    asked: set[int] = field(default_factory=set)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        kinds, window = (getattr(self.config, n, None) for n in ("layer_types", "sliding_window"))
        slides = kinds is None or kinds[layer] == SLIDING
        if layer in self.asked or (slides and window and rule.sliding_window != window):
            raise NotImplementedError("a layer attends more than once, or hides its window")
        self.asked.add(layer)
        return self.layout.attend(layer, query, key, value, rule)

    def check(self) -> None:
        """Raise an error unless all layers have attended."""
        others = {*(getattr(self.config, "layer_types", None) or ())} - KINDS
        if others or len(self.asked) != self.config.num_hidden_layers:
            raise NotImplementedError("some layers do other than attend, or attend by themselves")


def bucket(lengths: Sequence[int]) -> list[list[int]]:
    """Indices grouped so that in each group the longest is at most `WASTE` times the shortest, longest first."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and lengths[groups[-1][0]] <= WASTE * lengths[i] + 8:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def fits(dtype: torch.dtype, width: int, softcap: float | None) -> bool:
    """Whether torch's flash kernel for packed sequences supports such heads."""
    return dtype in NARROW and width <= WIDEST and width % 8 == 0 and softcap is None


def available(tensor: Tensor, width: int, softcap: float | None) -> bool:
    return tensor.is_cuda and fits(tensor.dtype, width, softcap)


def as_batch(lengths: Sequence[int], queries: Sequence[int]) -> bool:
    """Whether sequences, of which the last `queries` tokens are queries, are faster as a batch in which all tokens are: if they
    have equal length, and that adds few pairs of tokens. A few sequences may be equal by chance, and cuDNN plans each new shape.

    >>> as_batch([768] * 16, [768] + [512] * 15), as_batch([768] * 15 + [767], [512] * 16), as_batch([768] * 16, [768] + [64] * 15)
    (True, False, False)
    """
    length, count = lengths[0], len(lengths)
    asked = sum(n * (length - n / 2) for n in queries)
    equal = count >= MANY and all(n == length for n in lengths)
    return equal and count * length**2 / 2 <= ANEW * asked


@cache
def varlen() -> Callable[..., Tensor]:
    """Return torch's kernel for packed sequences. It is imported here because its module imports torch's compiler (1.5 seconds),
    which commands on a CPU do not need."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.12 and later ask for it where key heads are shared; 2.11 has no such argument, and shares them unasked
    shared: Any = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    # it returns a pair only where the log-sum-exp is asked for
    return partial(varlen_attn, **shared)  # type: ignore[return-value]


def attend_packed(
    lengths: tuple[int, ...],
    device: torch.device,
    queries: tuple[int, ...] | None = None,
    batched: bool = False,
) -> Attend:
    """Causal attention within each of several concatenated sequences: by FlashAttention 4 where that is installed (ops/hopper.py), else
    by torch's flash kernel if available, else plain attention. `batched` sequences have equal length, for which cuDNN has a faster
    kernel.

    Of each sequence only the last `queries` tokens ask. A rule's window counts the token itself, torch's counts those to its left.
    """
    new = lengths if queries is None else queries
    starts = [torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in (new, lengths)]
    from_N, of_N = (sent(start_N, device) for start_N in starts)
    longest = (max(new), max(lengths))
    packed = cache(lambda: Packed((0, *accumulate(lengths)), device))

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        fitting = available(query, query.shape[-1], rule.softcap)
        whole = (rule.sliding_window or longest[1]) >= longest[1]
        if fitting and batched and whole:
            batch = [t.view(len(lengths), -1, *t.shape[1:]) for t in (query, key, value)]
            rows = [t.transpose(1, 2) for t in batch]
            with sdpa_kernel(BATCHED, set_priority=True):
                return causal(rows[0], rows[1], rows[2], rule).transpose(1, 2).flatten(0, 1)
        if fitting:
            window = (-1 if rule.sliding_window is None else rule.sliding_window - 1, 0)
            given = (query, key, value, from_N, of_N, *longest)
            if whole and (faster := flash(query.device, query.shape[-1])) is not None:
                return faster(*given, scale=rule.scaling)
            return varlen()(*given, scale=rule.scaling, window_size=window)
        rows = [t.transpose(0, 1)[None] for t in (query, key, value)]
        if queries is None:
            return packed().attend(layer, rows[0], rows[1], rows[2], rule)[0]
        counts = (list(new), list(lengths), list(lengths))
        parts = (t.split_with_sizes(n, 2) for t, n in zip(rows, counts, strict=True))
        out = []
        for q, k, v in zip(*parts, strict=True):
            out.append(masked(q, k, v, seen(q.shape[2], k.shape[2], rule, device), rule))
        return torch.cat(out, 2)[0].transpose(0, 1)

    return attend


def install(model: nn.Module) -> None:
    """Make a transformers model use this attention. It has no mask function on purpose: layouts decide which tokens attend to which."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
    model.set_attn_implementation(ATTENTION)  # type: ignore[operator]
