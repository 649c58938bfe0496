"""Frozen weights in 4 bits, for adapters on top (QLoRA, Dettmers et al. 2023): blocks of 64 weights with one scale each, and for each
weight the nearest of 16 levels, the quantiles of a normal distribution.

    w  becomes  scale * LEVELS[code],    scale = largest |w| of the block

A layer makes its weight anew for each product, forward and backward, so that never more than one weight is there in full. So do
layers that read the same input and are computed as one (models/layers.py), in training and in the decoder's graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 64  # weights that share a scale
# NF4, table E of the paper
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@cache
def _pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[256, 2]: the levels of the two codes in a byte."""
    level = torch.tensor(LEVELS, device=device, dtype=dtype)
    byte = torch.arange(256, device=device)
    return torch.stack([level[byte // 16], level[byte % 16]], dim=1)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two codes a byte, and the scales of the blocks in the weight's own dtype."""
    block_NB = weight.detach().reshape(-1, BLOCK)
    scale_N1 = block_NB.abs().amax(1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
    level = torch.tensor(LEVELS, device=weight.device)
    edges = (level[1:] + level[:-1]) / 2
    code = torch.bucketize(block_NB.float() / scale_N1.float(), edges, out_int32=True)
    code = code.to(torch.uint8).view(-1, 2)
    return code[:, 0] * 16 + code[:, 1], scale_N1[:, 0].clone()


@torch.no_grad()
def dequantize(code: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Write the weights that the codes stand for, in the dtype of the scales, into [outputs, inputs]. On CUDA in one pass over
    memory."""
    pairs = _pairs(code.device, scale.dtype)
    if code.is_cuda:
        from posttrain.ops import triton_training

        size, part = code.numel(), 2048
        given = (code, scale, pairs, out, size, BLOCK // 2, part)
        triton_training.dequantize_kernel[(-(-size // part),)](*given)
        return out
    level = F.embedding(code.int(), pairs)
    torch.mul(level.view(-1, BLOCK), scale[:, None], out=out.view(-1, BLOCK))
    return out


class _Product(torch.autograd.Function):
    """x W^T, which keeps nothing for the backward pass but how to make W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Callable[[], Tensor]) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.weight(), None


def product(x: Tensor, weight: Callable[[], Tensor], bias: Tensor | None) -> Tensor:
    """x W^T + b of a frozen weight that `weight` makes, in the backward pass anew."""
    out: Tensor = _Product.apply(x, weight)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


class Linear4bit(nn.Linear):
    """A linear layer whose frozen weight is kept in 4 bits."""

    def __init__(self, layer: nn.Linear, device: torch.device | str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        code, scale = quantize(layer.weight.to(device))
        self.code, self.scale = nn.Parameter(code, False), nn.Parameter(scale, False)
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Made anew at each use, in the dtype of the scales."""
        return self.write(self.scale.new_empty(self.out_features, self.in_features))

    def write(self, out: Tensor) -> Tensor:
        return dequantize(self.code, self.scale, out)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, lambda: self.weight, self.bias)

    def plain(self) -> nn.Linear:
        """The layer with the same weight in full."""
        made = nn.Linear(1, 1, bias=False, device="meta")
        made.in_features, made.out_features = self.in_features, self.out_features
        made.weight, made.bias = nn.Parameter(self.weight), self.bias
        return made


def fits(layer: nn.Module) -> bool:
    """Whether a layer can be kept in 4 bits: a plain one, of whole blocks."""
    return type(layer) is nn.Linear and layer.weight.numel() % BLOCK == 0


def quantize_layers(body: nn.Module, device: torch.device | str) -> None:
    """Keep the weights of a body's linear layers in 4 bits on `device`, one after the other, so that it never holds them in full."""
    for module in list(body.modules()):
        for name, child in list(module.named_children()):
            if fits(child):
                setattr(module, name, Linear4bit(child, device))  # type: ignore[arg-type]


def dequantize_layers(model: nn.Module) -> None:
    """Make plain layers of those in 4 bits, also below adapters."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear4bit):
                setattr(module, name, child.plain())
