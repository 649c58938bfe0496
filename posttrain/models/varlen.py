"""Attention of packed sequences: torch's flash kernel on CUDA, plain attention elsewhere, as its reference."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from posttrain.models.attention import Rule, masked

NARROW = (torch.bfloat16, torch.float16)
WIDEST = 256  # elements of a head that the kernel takes
# torch 2.12 and later ask for it where key heads are shared; 2.11 has no such argument, and shares them unasked
GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
)


def fits(dtype: torch.dtype, width: int, softcap: float | None) -> bool:
    return dtype in NARROW and width <= WIDEST and width % 8 == 0 and softcap is None


def available(tensor: Tensor, width: int, softcap: float | None) -> bool:
    return tensor.is_cuda and fits(tensor.dtype, width, softcap)


def offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    """[N + 1] int32: where each sequence begins, and the end."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32).to(
        device, non_blocking=True
    )


def varlen(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    from_N: Tensor,
    of_N: Tensor,
    max_q: int,
    max_k: int,
    rule: Rule,
) -> Tensor:
    """Causal attention within each sequence, [Tq, Hq, D] -> [Tq, Hq, D]; the last query stands at the last key.

    `from_N` and `of_N` are `offsets` of the queries and of the keys, `max_q` and `max_k` the longest. A rule's window counts the token
    itself, torch's counts those to its left.
    """
    if not query_THD.is_cuda:
        return varlen_plain(query_THD, key_THD, value_THD, from_N, of_N, max_q, max_k, rule)
    window = (-1 if rule.sliding_window is None else rule.sliding_window - 1, 0)
    return varlen_attn(  # type: ignore[return-value]  # a pair only where the log-sum-exp is asked for
        query_THD,
        key_THD,
        value_THD,
        from_N,
        of_N,
        max_q,
        max_k,
        scale=rule.scaling,
        window_size=window,
        **GROUPED,
    )


def varlen_plain(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    from_N: Tensor,
    of_N: Tensor,
    max_q: int,
    max_k: int,
    rule: Rule,
) -> Tensor:
    """`varlen` by torch's own attention, sequence by sequence, on any device and for any rule."""
    out, at = [], torch.arange(max_k, device=query_THD.device)
    for (a, b), (c, d) in zip(pairwise(from_N.tolist()), pairwise(of_N.tolist()), strict=True):
        behind = at[d - c - (b - a) : d - c, None] - at[: d - c]
        allowed = behind >= 0
        if rule.sliding_window is not None:
            allowed &= behind < rule.sliding_window
        parts = (query_THD[a:b], key_THD[c:d], value_THD[c:d])
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        out.append(masked(query, key, value, allowed, rule)[0].transpose(0, 1))
    return torch.cat(out)
