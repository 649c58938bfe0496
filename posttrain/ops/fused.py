"""The element-wise parts of a decoder layer on CUDA with their derivatives, one pass over memory each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PROGRAMS = 132 * 8  # that share the rows of a norm's backward pass


def _triton() -> Any:
    from posttrain.ops import triton_training

    return triton_training


def power_of_two(n: int) -> int:
    """The smallest one that is at least n: the sizes of Triton's blocks."""
    return 1 << max(0, n - 1).bit_length()


def row_block(width: int) -> tuple[int, int]:
    """The block and the warps of a program that reads a row of this width."""
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
        """`residual_TH` is the gradient of the sum, which is None where it is unused; `grad_TH` that of the normalised."""
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
    """(s, s / sqrt(mean(s^2) + epsilon) * weight) with s = x + y: the residual stream and what the next layer reads of it.

    `shifted`: * (1 + weight), before rounding, as Gemma has it.
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
        rows, width = both_TI.shape[0], both_TI.shape[1] // 2
        out, block = torch.empty_like(both_TI), min(1024, power_of_two(width))
        _triton().gated_backward_kernel[(rows, -(-width // block))](
            grad_TI.contiguous(), both_TI, out, width, ctx.tanh, block
        )
        return out, None


def gated(both_TI: Tensor, tanh: bool) -> Tensor:
    """act(gate) * up of [T, 2I] rows that hold the gate and then the rest; silu, or gelu by its tanh approximation."""
    return _Gated.apply(both_TI, tanh)  # type: ignore[no-untyped-call, no-any-return]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: int, width: int, cos: Tensor, sin: Tensor, position_T: Tensor
    ) -> Tensor:
        ctx.save_for_backward(cos, sin, position_T)
        ctx.heads, ctx.width = heads, width
        ctx.mark_dirty(qkv)
        return _rotate_in_place(ctx, qkv, (cos, sin, position_T), 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        back = _rotate_in_place(ctx, grad.contiguous().clone(), ctx.saved_tensors, -1)
        return back, None, None, None, None, None


def _rotate_in_place(ctx: Any, qkv: Tensor, angles: tuple[Tensor, ...], sign: int) -> Tensor:
    """The first heads of each row by their position's angle, or (sign -1) by the transposed rotation."""
    heads, width = ctx.heads, ctx.width
    sizes = (heads, width, power_of_two(heads), power_of_two(width // 2))
    _triton().rotate_kernel[(qkv.shape[0],)](qkv, *angles, qkv.stride(0), sign, *sizes)
    return qkv


def rotate(
    qkv: Tensor, heads: int, width: int, rope: tuple[Tensor, Tensor], position_T: Tensor
) -> Tensor:
    """Rotary embedding of the first `heads` heads of [T, any] rows, in place: x cos + rotate_half(x) sin."""
    return _Rotate.apply(qkv, heads, width, *rope, position_T)  # type: ignore[no-untyped-call, no-any-return]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_K: Tensor, source_T: Tensor) -> Tensor:
        ctx.save_for_backward(source_T)
        ctx.count = x_K.shape[0]
        return x_K.index_select(0, source_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Any, ...]:
        (source_T,) = ctx.saved_tensors
        wide = grad_T if grad_T.dtype == torch.float64 else grad_T.float()
        total = torch.zeros(ctx.count, *grad_T.shape[1:], dtype=wide.dtype, device=grad_T.device)
        return total.index_add_(0, source_T, wide).to(grad_T.dtype), None


def spread(x_K: Tensor, source_T: Tensor) -> Tensor:
    """x[source], whose gradients are summed in float32: a prompt's keys are read by every sample of it."""
    return _Spread.apply(x_K, source_T)  # type: ignore[no-untyped-call, no-any-return]
