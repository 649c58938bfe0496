"""What libraries compute faster on Hopper GPUs, where they are installed: quack's product of gate and up with the gate in its end (the
extra `hopper`), and FlashAttention 4 for packed sequences (`flash`). Elsewhere the usual kernels are used.

Each is first tried on a few numbers against the kernels it stands for. One that fails or differs is named in a warning and not used.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.ops.device import is_hopper
from posttrain.ops.fused import gated, gated_backward

LOG = logging.getLogger(__name__)
FEW = 128  # rows; fewer are as fast by two kernels
TALL = 128  # rows of a tile
MANY = 4096  # rows from which on two tiles share what they read
BROAD = (160, 192, 128)  # columns of a tile: those that were timed
WIDEST = 128  # elements of a head for which FlashAttention 4 was timed
# of the norm of what the usual kernels give: rounding alone
TOLERANCE = 0.02


def tile(rows: int, columns: int, processors: int) -> tuple[int, int]:
    """(columns of a tile, tiles that share the weights they read) with which the multiprocessors end soonest, working in rounds.

    >>> [tile(rows, 9728, 132) for rows in (256, 384, 896, 1024, 32700)]
    [(160, 2), (128, 1), (192, 1), (160, 2), (160, 2)]
    """
    down = -(-rows // TALL)
    if rows >= MANY:
        return BROAD[0], 2
    best = min(BROAD, key=lambda broad: -(-down * -(-columns // broad) // processors) * broad)
    return best, 1 if down % 2 else 2


def gated_product(x_TH: Tensor, weight_OH: Tensor, tanh: bool) -> Tensor:
    """act(x G^T) * (x U^T), [T, I], of weights whose rows are those of G and then those of U. act is silu or, with `tanh`, the tanh
    approximation of gelu. As one kernel the sums are not rounded before the gate."""
    if len(x_TH) < FEW or not _fits(x_TH, weight_OH):
        return gated(F.linear(x_TH, weight_OH), tanh)
    if torch.is_grad_enabled() and (x_TH.requires_grad or weight_OH.requires_grad):
        return _GatedProduct.apply(x_TH, weight_OH, tanh)  # type: ignore[no-untyped-call, no-any-return]
    return _quack(x_TH, weight_OH, tanh, False)[1]


def _fits(x_TH: Tensor, weight_OH: Tensor) -> bool:
    """Rows must be whole multiples of 16 bytes."""
    narrow = x_TH.dtype in (torch.bfloat16, torch.float16)
    aligned = weight_OH.shape[0] % 16 == 0 and weight_OH.shape[1] % 8 == 0
    return narrow and aligned and x_TH.is_contiguous() and fuses_gate(x_TH.device)


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_OH: Tensor, tanh: bool) -> Tensor:
        pairs_TO, out_TI = _quack(x_TH, weight_OH, tanh, True)
        ctx.save_for_backward(x_TH, weight_OH, pairs_TO)
        ctx.tanh = tanh
        return out_TI

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TI: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weight_OH, pairs_TO = ctx.saved_tensors
        both_TO = gated_backward(grad_TI, pairs_TO, ctx.tanh, pairs=True)
        of_x, of_weight, _ = ctx.needs_input_grad
        return (
            both_TO @ weight_OH if of_x else None,
            both_TO.t() @ x_TH if of_weight else None,
            None,
        )


def _quack(x_TH: Tensor, weight_OH: Tensor, tanh: bool, keep: bool) -> tuple[Tensor | None, Tensor]:
    """The sums before the gate, if they are kept, as pairs of gate and up; and what comes out of it."""
    from quack.gemm_interface import gemm_act

    processors = torch.cuda.get_device_properties(x_TH.device).multi_processor_count
    config = _config(*tile(len(x_TH), len(weight_OH), processors))
    how = {"config": config, "concat_layout": ("B",), "store_preact": keep}
    with torch.no_grad():
        return gemm_act(x_TH, weight_OH.t(), activation="geglu" if tanh else "swiglu", **how)  # type: ignore[no-any-return]


@cache
def _config(broad: int, shared: int) -> Any:
    from quack.gemm_config import GemmConfig

    shape = {"tile_m": TALL, "tile_n": broad, "cluster_m": shared, "cluster_n": 1}
    return GemmConfig(**shape, pingpong=True, is_dynamic_persistent=False)


@cache
def fuses_gate(device: torch.device) -> bool:
    """Whether quack is there for this device and computes the gated product."""
    if not is_hopper(device) or not _installed("quack.gemm_interface"):
        return False
    # its default is a folder of temporary files whose name anybody could have taken
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("QUACK_CACHE_DIR", str(home / "posttrain" / "quack"))
    x_TH, weight_OH = _numbers(device, 256, 128), _numbers(device, 320, 128)
    # in pairs the sums are no different, which the gradient relies on
    expected = F.linear(x_TH, weight_OH)

    def trial() -> list[Tensor]:
        pairs_TO, out_TI = _quack(x_TH, weight_OH, False, True)
        assert pairs_TO is not None
        return [pairs_TO.view(256, 160, 2).transpose(1, 2).flatten(1), out_TI]

    return _agrees("quack", trial, lambda: [expected, gated(expected, False)])


def flash(device: torch.device, width: int) -> Callable[..., Tensor] | None:
    """FlashAttention 4 for packed sequences, called as torch's `varlen_attn`, if it is there for heads of this width on this device.
    Not where the same bits are wanted every time, because its gradients are added in any order; nor for the sampler's prompts: their
    passes would need kernels of their own, which take seconds to compile."""
    other = torch.is_inference_mode_enabled() or torch.are_deterministic_algorithms_enabled()
    return None if other or width > WIDEST or not is_hopper(device) else _flash(device, width)


@cache
def _flash(device: torch.device, width: int) -> Callable[..., Tensor] | None:
    if not _installed("flash_attn.cute"):
        return None
    # said of each kernel that is compiled, and of no use to anybody who does not work on it
    warnings.filterwarnings("ignore", "Argument aux_data .* cannot be converted")
    ends, cut = torch.tensor([0, 70, 200], dtype=torch.int32, device=device), (70, 130)

    def usual(*given: Any, scale: float) -> Tensor:
        attend = partial(
            F.scaled_dot_product_attention, is_causal=True, scale=scale, enable_gqa=True
        )
        rows = (tensor.transpose(0, 1)[None].split(cut, 2) for tensor in given[:3])
        return torch.cat([attend(*qkv) for qkv in zip(*rows, strict=True)], 2)[0].transpose(0, 1)

    def passes(attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Output and gradients, also where the caller wants none."""
        with torch.enable_grad():
            every = [_numbers(device, 200, heads * width) for heads in (4, 2, 2)]
            tensors = [t.view(200, -1, width).to(dtype).requires_grad_() for t in every]
            out = attend(*tensors, ends, ends, max(cut), max(cut), scale=width**-0.5)
            grads = torch.autograd.grad(out, tensors, every[0].view_as(out).to(dtype))
        return [out.detach(), *grads]

    trial, same = partial(passes, _attend, torch.bfloat16), partial(passes, usual, torch.float32)
    return _attend if _agrees("FlashAttention 4", trial, same) else None


def _attend(query: Tensor, key: Tensor, value: Tensor, *packed: Any, scale: float) -> Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    how = dict(zip(names, packed, strict=True)) | {"softmax_scale": scale, "causal": True}
    out = flash_attn_varlen_func(query, key, value, **how)
    return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]


def _installed(module: str) -> bool:
    """Also false where an older library of the same name, which has no such module, cannot be imported."""
    with suppress(ImportError):
        return find_spec(module) is not None
    return False


def _numbers(device: torch.device, rows: int, columns: int) -> Tensor:
    """Numbers without a pattern that do not move torch's generator."""
    at = torch.arange(rows * columns, device=device, dtype=torch.float64)
    return (at * at * 0.618).sin().view(rows, columns).bfloat16()


def _agrees(
    name: str, trial: Callable[[], list[Tensor]], usual: Callable[[], list[Tensor]]
) -> bool:
    """Whether a trial ends with what the usual kernels give; if not, it is said why."""
    try:
        found, expected = trial(), usual()
        apart = max(
            float((a.float() - b.float()).norm() / b.float().norm())
            for a, b in zip(found, expected, strict=True)
        )
        reason = "" if apart <= TOLERANCE else f"its results are off by {apart:.2g}"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        text = "%s is installed and is not used, the usual kernels are: %s"
        LOG.warning(text, name, " ".join(reason.split())[:300])
    return not reason
