"""A matrix product whose weight is laid out once for many products, with what follows it done in the same pass.

On the CPU a product with few rows spends a quarter of its time rearranging the weight. oneDNN can keep the rearranged copy. It is a
snapshot: its owner makes it anew when the weights have changed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST = 1 << 15  # weights below this many elements are not worth oneDNN's slower call


def available() -> bool:
    """Whether this build of torch and this processor have oneDNN's prepacked products."""
    return torch.backends.mkldnn.is_available() and hasattr(  # type: ignore[no-untyped-call]  # in torch
        torch.ops.mkldnn, "_linear_pointwise"
    )


# looked up once: finding the overload for each of a thousand calls takes as long as some of them
LINEAR: Any = torch.ops.mkldnn._linear_pointwise if available() else None
UNARY: Any = getattr(LINEAR, "default", None)
BINARY: Any = getattr(LINEAR, "binary", None)


class PackedLinear:
    """x W^T + b for two-dimensional float32 x on the CPU. `pack` keeps W in oneDNN's own layout, where that pays."""

    __slots__ = ("bias", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, pack: bool):
        pack = pack and weight.numel() >= SMALLEST and available()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight) if pack else None
        self.weight, self.bias = weight, bias

    @property
    def bytes(self) -> int:
        """Memory of the copy. oneDNN hides its size; it is the weight's, to within a block."""
        return 0 if self.packed is None else self.weight.numel() * self.weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        return UNARY(x, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """x W^T + b + other."""
        if self.packed is not None:
            return BINARY(x, other, self.packed, self.bias, "add")  # type: ignore[no-any-return]
        if self.bias is None:
            return torch.addmm(other, x, self.weight.t())
        return F.linear(x, self.weight, self.bias).add_(other)
