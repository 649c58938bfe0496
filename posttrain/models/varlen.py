"""Attention of packed sequences by torch's flash kernel: no padding, queries may be the last tokens of their keys' sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NARROW = (torch.bfloat16, torch.float16)
WIDEST = 256  # elements of a head that the kernel takes


def fits(dtype: torch.dtype, width: int, softcap: float | None) -> bool:
    return dtype in NARROW and width <= WIDEST and width % 8 == 0 and softcap is None


def available(tensor: Tensor, width: int, softcap: float | None) -> bool:
    return tensor.is_cuda and fits(tensor.dtype, width, softcap)


def offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    """[N + 1] int32: where each sequence begins, and the end."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32).to(
        device, non_blocking=True
    )


@torch.library.custom_op("posttrain::varlen", mutates_args=())
def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    from_N: Tensor,
    of_N: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        from_N,
        of_N,
        max_q,
        max_k,
        0.0,
        window < 0,
        False,
        scale=scale,
        window_size_left=window,
        window_size_right=-1 if window < 0 else 0,
    )
    return out, lse


@_varlen.register_fake
def _(query, key, value, from_N, of_N, max_q, max_k, scale, window):  # type: ignore[no-untyped-def]
    return torch.empty_like(query), query.new_empty(
        (query.shape[1], query.shape[0]), dtype=torch.float32
    )


@torch.library.custom_op("posttrain::varlen_backward", mutates_args=())
def _varlen_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    from_N: Tensor,
    of_N: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    state = torch.zeros(
        2, dtype=torch.uint64, device=query.device
    )  # of a dropout that does not happen
    return torch.ops.aten._flash_attention_backward(
        grad.contiguous(),
        query,
        key,
        value,
        out,
        lse,
        from_N,
        of_N,
        max_q,
        max_k,
        0.0,
        window < 0,
        state,
        state,
        scale=scale,
        window_size_left=window,
        window_size_right=-1 if window < 0 else 0,
    )


@_varlen_backward.register_fake
def _(grad, query, key, value, out, lse, from_N, of_N, max_q, max_k, scale, window):  # type: ignore[no-untyped-def]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _remember(ctx, inputs, output):  # type: ignore[no-untyped-def]
    query, key, value, from_N, of_N, ctx.max_q, ctx.max_k, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, from_N, of_N)


def _differentiate(ctx, grad, _):  # type: ignore[no-untyped-def]
    query, key, value, out, lse, from_N, of_N = ctx.saved_tensors
    grads = _varlen_backward(
        grad,
        query,
        key,
        value,
        out,
        lse,
        from_N,
        of_N,
        ctx.max_q,
        ctx.max_k,
        ctx.scale,
        ctx.window,
    )
    return *grads, None, None, None, None, None, None


_varlen.register_autograd(_differentiate, setup_context=_remember)


def varlen(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    from_N: Tensor,
    of_N: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Causal attention within each sequence, [Tq, Hq, D] -> [Tq, Hq, D]; the last query stands at the last key.

    `from_N` and `of_N` are `offsets` of the queries and of the keys, `max_q` and `max_k` the longest. A window counts the token
    itself, torch's counts those to its left.
    """
    return _varlen(
        query_THD,
        key_THD,
        value_THD,
        from_N,
        of_N,
        max_q,
        max_k,
        scale,
        -1 if window is None else window - 1,
    )[0]
