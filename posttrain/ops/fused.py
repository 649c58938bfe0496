"""Fused element-wise operations of a decoder layer on CUDA (norm, gated activation, rotary embedding) with their derivatives. Each
reads memory once, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PROGRAMS = 132 * 8  # programs that share the rows in the backward pass of a norm
READERS = 4  # how many tokens' gradients a program adds at once to a token that they share


def _triton() -> Any:
    from posttrain.ops import triton_training

    return triton_training


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, for the size of a Triton block."""
    return 1 << max(0, n - 1).bit_length()


def row_block(width: int) -> tuple[int, int]:
    """(block size, number of warps) of a program that reads a row of this width."""
    block = power_of_two(width)
    return block, 4 if block <= 2048 else 8


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, y_TH: Tensor | None, weight_H: Tensor, epsilon: float, shifted: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        sum_TH = torch.empty_like(x_TH) if y_TH is not None else x_TH
        out, scale_T = torch.empty_like(x_TH), x_TH.new_empty(x_TH.shape[0], dtype=wide)
        rows, width = x_TH.shape
        inputs = (x_TH, y_TH if y_TH is not None else x_TH, weight_H)
        flags, (block, warps) = (y_TH is not None, shifted), row_block(width)
        _triton().add_norm_kernel[(rows,)](
            *inputs, sum_TH, out, scale_T, width, epsilon, *flags, block, num_warps=warps
        )
        ctx.save_for_backward(sum_TH, weight_H, scale_T)
        ctx.added, ctx.shifted = y_TH is not None, shifted
        ctx.set_materialize_grads(False)  # the sum of a query's norm is unused: no zeros to add
        return x_TH.view_as(x_TH) if y_TH is None else sum_TH, out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, residual_TH: Tensor | None, grad_TH: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """`residual_TH` is the gradient of the sum, None if that is unused; `grad_TH` is the gradient of the normalised output."""
        if grad_TH is None:
            return residual_TH, residual_TH if ctx.added else None, None, None, None
        sum_TH, weight_H, scale_T = ctx.saved_tensors
        rows, width = sum_TH.shape
        programs, dx_TH = min(PROGRAMS, rows), torch.empty_like(sum_TH)
        parts = scale_T.new_empty(programs, width)
        residual = residual_TH.contiguous() if residual_TH is not None else grad_TH
        inputs = (grad_TH.contiguous(), residual, sum_TH, weight_H, scale_T)
        flags, (block, warps) = (residual_TH is not None, ctx.shifted), row_block(width)
        _triton().add_norm_backward_kernel[(programs,)](
            *inputs, dx_TH, parts, rows, width, *flags, block, num_warps=warps
        )
        dweight_H = parts.sum(0).to(weight_H.dtype)
        return dx_TH, dx_TH if ctx.added else None, dweight_H, None, None


def add_norm(
    x_TH: Tensor, y_TH: Tensor | None, weight_H: Tensor, epsilon: float, shifted: bool = False
) -> tuple[Tensor, Tensor]:
    """(s, s / sqrt(mean(s^2) + epsilon) * weight) with s = x + y: the residual stream, and its RMS norm.

    `shifted` multiplies by (1 + weight) instead, before rounding, as in Gemma.
    """
    return _AddNorm.apply(x_TH, y_TH, weight_H, epsilon, shifted)  # type: ignore[no-untyped-call, no-any-return]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both_TI: Tensor, tanh: bool) -> Tensor:
        ctx.save_for_backward(both_TI)
        ctx.tanh = tanh
        rows, width = both_TI.shape[0], both_TI.shape[1] // 2
        out, block = both_TI.new_empty(rows, width), min(1024, power_of_two(width))
        _triton().gated_kernel[(rows, -(-width // block))](both_TI, out, width, tanh, block)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TI: Tensor) -> tuple[Any, ...]:
        (both_TI,) = ctx.saved_tensors
        return gated_backward(grad_TI, both_TI, ctx.tanh), None


def gated_backward(grad_TI: Tensor, both_TI: Tensor, tanh: bool, pairs: bool = False) -> Tensor:
    """The gradient of gate and then up, [T, 2I]. `pairs`: `both_TI` has gate and up of each element side by side."""
    rows, width = both_TI.shape[0], both_TI.shape[1] // 2
    out, block = torch.empty_like(both_TI), min(1024, power_of_two(width))
    _triton().gated_backward_kernel[(rows, -(-width // block))](
        grad_TI.contiguous(), both_TI, out, width, tanh, pairs, block
    )
    return out


def gated(both_TI: Tensor, tanh: bool) -> Tensor:
    """act(gate) * up of rows [T, 2I] that hold gate and then up. act is silu or, with `tanh`, the tanh approximation of gelu."""
    return _Gated.apply(both_TI, tanh)  # type: ignore[no-untyped-call, no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """How T tokens share K computed ones, because sequences with a common prefix compute it once. `source_T` is the computed token of
    each token; `kept_K` the position of each computed token. `reader_T` lists the tokens sorted by their computed token; those of
    computed token k begin at `first_K`[k]. `whole`: queries are made for all T tokens, for attention that needs them."""

    source_T: Tensor
    kept_K: Tensor
    reader_T: Tensor
    first_K: Tensor  # K + 1 entries
    whole: bool

    @classmethod
    def of(cls, source_T: Tensor, kept_K: Tensor, whole: bool = False) -> Sharing:
        """Sort on the device, so that the host does not wait."""
        sorted_T, reader_T = source_T.sort(stable=True)
        counted = torch.arange(len(kept_K) + 1, device=source_T.device)
        return cls(source_T, kept_K, reader_T, torch.searchsorted(sorted_T, counted), whole)

    def computed(self, x_T: Tensor) -> Tensor:
        """The rows of the computed tokens. With `whole`, `x_T` has a row for every token; else it has these rows already."""
        return _Computed.apply(x_T, self) if self.whole else x_T  # type: ignore[no-untyped-call]


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_T: Tensor, sharing: Sharing) -> Tensor:
        ctx.sharing = sharing
        return x_T.index_select(0, sharing.kept_K)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_K: Tensor) -> tuple[Any, ...]:
        tokens, width = len(ctx.sharing.source_T), grad_K[0].numel()
        out = grad_K.new_empty(tokens, *grad_K.shape[1:])
        given = (grad_K.contiguous(), ctx.sharing.source_T, ctx.sharing.kept_K, out)
        block, warps = row_block(width)
        _triton().own_rows_kernel[(tokens,)](*given, width, block, num_warps=warps)
        return out, None


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        shape: tuple[int, int, int],
        cos: Tensor,
        sin: Tensor,
        position_K: Tensor,
        sharing: Sharing | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin, position_K)
        ctx.shape, ctx.sharing = shape, sharing
        heads, keys, width = shape
        computed, (shared, whole) = len(qkv), _flags(sharing)
        tokens = computed if sharing is None else len(sharing.source_T)
        query = qkv.new_empty(tokens if whole else computed, heads, width)
        key, value = (qkv.new_empty(tokens, keys, width) for _ in range(2))
        which = (position_K,) * 2 if sharing is None else (sharing.source_T, sharing.kept_K)
        given = (qkv.contiguous(), cos, sin, position_K, *which, query, key, value)
        _triton().heads_kernel[(tokens,)](
            *given, *_blocks(shape), shared, whole, num_warps=_warps(shape)
        )
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        heads, keys, width = ctx.shape
        angles, sharing = ctx.saved_tensors, ctx.sharing
        position_K = angles[2]
        out = grads[0].new_empty(len(position_K), (heads + 2 * keys) * width)
        which = (position_K,) * 3
        if sharing is not None:
            which = (sharing.first_K, sharing.reader_T, sharing.kept_K)
        given = (*(grad.contiguous() for grad in grads), *angles, *which, out)
        sizes = (*_blocks(ctx.shape), *_flags(sharing), 1 if sharing is None else READERS)
        _triton().heads_backward_kernel[(len(out),)](*given, *sizes, num_warps=_warps(ctx.shape))
        return out, None, None, None, None, None


def _flags(sharing: Sharing | None) -> tuple[bool, bool]:
    return sharing is not None, sharing is not None and sharing.whole


def _blocks(shape: tuple[int, int, int]) -> tuple[int, ...]:
    heads, keys, width = shape
    return (*shape, power_of_two(heads), power_of_two(keys), power_of_two(width // 2))


def _warps(shape: tuple[int, int, int]) -> int:
    """One warp for 1,024 elements of a token's queries: a program mostly waits for indices, so many must run at once."""
    heads, _, width = shape
    return min(8, max(1, power_of_two(heads) * power_of_two(width) // 1024))


def attention_heads(
    qkv: Tensor,
    shape: tuple[int, int, int],
    rope: tuple[Tensor, Tensor],
    position_K: Tensor,
    sharing: Sharing | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """[K, Hq, D] queries of computed tokens (`whole` sharing: [T, Hq, D] of all), [T, Hk, D] keys and values of all, from
    [K, (Hq + 2 Hk) D] rows; `shape` is (Hq, Hk, D).

    Queries and keys have the rotary embedding, x cos + rotate_half(x) sin. The gradients of a token that several sequences share, such
    as a prompt's, are summed in float32.
    """
    return _Heads.apply(qkv, shape, *rope, position_K, sharing)  # type: ignore[no-untyped-call, no-any-return]
