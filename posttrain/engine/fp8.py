"""Generation in fp8, by choice: the products of the MLP in the type float8_e4m3fn.

    q = x / s rounded to e4m3,    s = largest |x| of the row / 448,    x W^T is about s_i t sum_k q_ik v_jk

with v and t the same of W, which has one scale. Weights are quantised when the sampler takes them (`refresh`), activations by row in
the kernels that make them, the norm and the gate; what reads a product multiplies the rows' scales in. On CUDA the sums are torch's
`_scaled_mm`. Products of the attention and of the vocabulary, the cache of keys and values, and adapters keep the model's own type.

The sampler draws from the quantised model and returns the log-probs of that: training corrects for the difference.
Elsewhere than on CUDA products are emulated in float32 (`Emulation`), for tests and toy models: it is slower than without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from posttrain.errors import require
from posttrain.models import layers
from posttrain.models.policy import Policy
from posttrain.ops.fused import power_of_two, row_block

if TYPE_CHECKING:
    from posttrain.engine.fused import Products

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # finite number of the type
ALIGNED = 16  # sizes of a product must be multiples of this
CAPABILITY = (8, 9)  # of the first GPUs with fp8
# of a layer's largest output: how far one with products in fp8 may be from the module's
TOLERANCE = 0.15


@dataclass(frozen=True, slots=True)
class Precision:
    """What the engine computes in fp8, by vLLM's name."""

    quantization: str = "none"  # or fp8: the products of the MLP

    @property
    def products(self) -> bool:
        return self.quantization == "fp8"

    def check_device(self, device: torch.device | str) -> None:
        """Refuse a GPU that has no fp8, where it is one."""
        device = torch.device(device)
        if not self.products or device.type != "cuda" or not torch.cuda.is_available():
            return
        found = torch.cuda.get_device_capability(device)
        text = "sampler_quantization=fp8 needs a GPU of compute capability 8.9 or more (Ada, Hopper), and this one has"
        require(found >= CAPABILITY, f"{text} {found[0]}.{found[1]}; leave it out")


AS_TRAINED = Precision()


def quantize(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in e4m3 and their scales, float32 [N]. A row of zeros has a scale above 0."""
    wide = x_NK.float()
    scale_N = wide.abs().amax(-1).clamp(min=1e-12) / LARGEST
    return (wide / scale_N[:, None]).to(E4M3), scale_N


def quantize_weights(weights: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Matrices in e4m3 and the scale that they share, float32. A scale a row was no nearer: e4m3 has exponents."""
    scale = torch.stack([weight.abs().amax() for weight in weights]).amax().float() / LARGEST
    scale = scale.clamp(min=1e-12)
    return [(weight.float() / scale).to(E4M3) for weight in weights], scale


def row_product(q_TK: Tensor, weight_NK: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """scale * sum_k q_tk v_nk, [T, N], summed in float32, without the scales of the rows; elsewhere than on CUDA of the numbers in
    float32."""
    if not q_TK.is_cuda:
        return (q_TK.float() @ weight_NK.float().t() * scale).to(dtype)
    # float16 would overflow: the rows' scales come later
    dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    options: dict[str, Any] = {"out_dtype": dtype, "use_fast_accum": True}
    return torch._scaled_mm(q_TK, weight_NK.t(), _one(q_TK.device), scale, **options)


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def unsupported(described: layers.ModelDescription) -> str:
    """Why the MLP of a model cannot be computed in fp8, or nothing."""
    for layer in described.layers:
        if layer.experts is not None:
            return "experts"
        for projection in (layer.gate_up, layer.down):
            if projection.bias() is not None:
                return "an MLP with a bias"
            if any(size % ALIGNED for m in projection.modules for size in m.weight.shape):
                return f"sizes of an MLP that are no multiples of {ALIGNED}"
    return ""


class QuantizedMLP:
    """x += down(act(gate) * up) of norm(x) in place on [T, H], its two products in fp8. `gate_up` and `down` have the adapters, which
    are added in the type of x."""

    def __init__(self, layer: layers.LayerDescription, gate_up: Products, down: Products):
        self.layer, self.gate_up, self.down = layer, gate_up, down
        self.allocate()

    def allocate(self) -> None:
        """Room for the quantised weights and the scale of each of the two."""
        both = [(p, p.modules[0].weight.device) for p in self._projections]
        self.weights = [
            torch.empty(sum(p.sizes), p.modules[0].in_features, dtype=E4M3, device=device)
            for p, device in both
        ]
        self.scales = [torch.empty((), device=device) for _, device in both]

    @property
    def _projections(self) -> tuple[layers.Projection, layers.Projection]:
        return self.gate_up.projection, self.down.projection

    def release(self) -> None:
        self.weights, self.scales = [], []

    def refresh(self) -> None:
        """Quantise the present weights, into the same memory: captured graphs read it."""
        rooms = zip(self._projections, self.weights, self.scales, strict=True)
        for projection, weight, scale in rooms:
            found, own = quantize_weights([m.weight.detach() for m in projection.modules])
            torch.cat(found, out=weight) if len(found) > 1 else weight.copy_(found[0])
            scale.copy_(own)

    def __call__(self, x_TH: Tensor, early: bool) -> None:
        """`early`: the device launches kernels before those ahead have ended."""
        layer, (gate_up, down), (wide, narrow) = self.layer, self.weights, self.scales
        norm, (tokens, width), inner = layer.post_norm, x_TH.shape, down.shape[1]
        adapted, more = self.gate_up.down.shape[0] > 0, self.down.down.shape[0] > 0
        kernels, (block, warps) = _triton(), row_block(width)
        q_TH, row_T = _rows(x_TH, width)
        # those that adapters read are also kept as they are
        normalised = torch.empty_like(x_TH) if adapted else x_TH
        rows = (x_TH, norm.weight.detach(), normalised, q_TH, row_T)
        sizes = (width, norm.epsilon, norm.shifted, adapted, block, early)
        how: dict[str, Any] = {"num_warps": warps, "launch_pdl": early}
        kernels.norm_rows_kernel[(tokens,)](*rows, *sizes, **how)
        both_TI = row_product(q_TH, gate_up, wide, x_TH.dtype)
        added = self.gate_up.adapted(normalised) if adapted else both_TI
        q_TI, inner_row_T = _rows(x_TH, inner)
        gated = x_TH.new_empty(tokens, inner) if more else x_TH
        inner_rows = (both_TI, row_T, added, gated, q_TI, inner_row_T)
        inner_sizes = (inner, layer.tanh, adapted, more, *pieces(inner), early)
        inner_how = how | {"num_warps": 8 if inner <= 8192 else 16}
        kernels.gated_rows_kernel[(tokens,)](*inner_rows, *inner_sizes, **inner_how)
        out_TH = row_product(q_TI, down, narrow, x_TH.dtype)
        out = (x_TH, out_TH, inner_row_T, width, block, early)
        kernels.add_rows_kernel[(tokens,)](*out, **how)
        if more:
            x_TH += self.down.adapted(gated)


def pieces(width: int) -> tuple[int, int]:
    """Two powers of 2 that hold a row.

    >>> pieces(4864), pieces(512), pieces(16)
    ((4096, 1024), (256, 256), (8, 8))
    """
    first = power_of_two(width) // 2
    return first, power_of_two(width - first)


def _rows(like: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Room for as many quantised rows, and for their scales."""
    count, device = len(like), like.device
    return torch.empty(count, width, dtype=E4M3, device=device), torch.empty(count, device=device)


def _triton() -> Any:
    from posttrain.engine import triton_fp8

    return triton_fp8


class Emulation(TorchFunctionMode):
    """Within it the linear layers of the MLPs compute with the quantised weights of the moment it was made, and quantised inputs."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        described = layers.describe(policy)
        reason = described if isinstance(described, str) else unsupported(described)
        unknown = f"sampler_quantization=fp8 does not know this model: {reason}; leave it out"
        require(not reason, unknown)
        assert not isinstance(described, str)
        both = (p for layer in described.layers for p in (layer.gate_up, layer.down))
        # parameters are kept, so that no other gets the same id
        self.quantised: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for projection in both:
            self.add([module.weight for module in projection.modules])

    def add(self, weights: Sequence[Tensor]) -> None:
        """Quantise these too, with one scale."""
        found, scale = quantize_weights([weight.detach() for weight in weights])
        for weight, quantised in zip(weights, found, strict=True):
            self.quantised[id(weight)] = weight, quantised, scale

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), options: Any = None
    ) -> Any:
        found = self.quantised.get(id(args[1])) if function is F.linear else None
        if found is None:
            return function(*args, **(options or {}))
        (x, _, *bias), (_, weight_NK, scale) = args, found
        q_TK, row_T = quantize(x.reshape(-1, x.shape[-1]))
        out_TN = row_product(q_TK, weight_NK, scale, torch.float32) * row_T[:, None]
        out_TN += 0.0 if not bias or bias[0] is None else bias[0]
        return out_TN.to(x.dtype).view(*x.shape[:-1], -1)
