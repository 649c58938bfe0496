"""Log-probabilities and entropies of given tokens, computed from hidden states in chunks of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.ops import fused
from posttrain.ops.device import device_bytes, is_hopper

CHUNK_LOGITS = 1 << 25  # logits alive at once on a CPU: 128 MiB in float32
CHUNK_LOGITS_CUDA = 7 << 26  # on CUDA: 1.8 GiB, and half as much again for their gradient
CHUNK_SHARE = 0.025  # the largest share of a CUDA device's memory that these logits take
KEPT = 0.15  # the share of a CUDA device's memory for values kept for the backward pass
TILE = (128, 256, 64)  # tokens, ids and elements in a tile of the output layer's kernel
SAFE = 60.0  # exp(SAFE), summed over the vocabulary, is within the range of float32 and bfloat16


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The output layer: logits = softcap(scale * hidden W^T + bias), with softcap(z) = c tanh(z / c) if there is one."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


def head_logits(hidden_NH: Tensor, head: Head) -> Tensor:
    """Logits in float32 (float64 for float64 inputs). The trainer and the sampler both use this function, so they agree."""
    logits_NV = product_float32(hidden_NH, head.weight_VH.t())
    if head.scale != 1.0:
        logits_NV = logits_NV * head.scale
    if head.bias_V is not None:
        logits_NV = logits_NV + head.bias_V.to(logits_NV.dtype)
    if head.softcap is not None:
        logits_NV = head.softcap * torch.tanh(logits_NV / head.softcap)
    return logits_NV


def token_logprobs(
    hidden_NH: Tensor,
    target_N: Tensor,
    head: Head,
    temperature: float = 1.0,
    chunk_logits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature)[target] and the entropy of that distribution, both differentiable.

    With z = logits / temperature and p = softmax(z):
        logprob = z[target] - logsumexp(z),            d logprob / d z_j = 1[j = target] - p_j
        entropy = logsumexp(z) - sum_j p_j z_j,        d entropy / d z_j = -p_j (log p_j + entropy)
    The backward pass recomputes the logits of each chunk, so memory is one chunk, whatever the number of tokens. On CUDA, d logprob
    / d z of the first chunks is kept instead, rounded to the weights' type, as far as `kept_room` allows. If `in_tiles` is true,
    one kernel computes tiles of logits and sums over them without writing them to memory.
    """
    if chunk_logits is None:
        chunk_logits = chunk_size(hidden_NH.device)
    rows = max(1, chunk_logits // head.weight_VH.shape[0])
    rows = rows // 256 * 256 or rows  # whole tiles of a product
    settings = (head.scale, head.softcap, temperature, rows, kept_chunks(hidden_NH, head, rows))
    given = (hidden_NH, head.weight_VH, head.bias_V, target_N, settings)
    return _TokenLogprobs.apply(*given)  # type: ignore[no-untyped-call, no-any-return]


def chunk_size(device: torch.device) -> int:
    """How many logits may be alive at once."""
    if device.type != "cuda":
        return CHUNK_LOGITS
    there = torch.cuda.is_available()
    share = CHUNK_SHARE * device_bytes(device) / 4 if there else CHUNK_LOGITS_CUDA
    return min(CHUNK_LOGITS_CUDA, int(share))


def kept_chunks(hidden_NH: Tensor, head: Head, rows: int) -> int:
    """For how many chunks of `rows` tokens the derivative of the log-probs is kept for the backward pass."""
    if not hidden_NH.is_cuda or hidden_NH.dtype.itemsize == 4 or not _plain(head):
        return 0
    chunk = rows * head.weight_VH.shape[0] * hidden_NH.dtype.itemsize
    return int(kept_room(hidden_NH.device) // chunk)


def kept_room(device: torch.device) -> float:
    """Bytes of a CUDA device for values kept for the backward pass. They depend on the size of the device and not on what is free, so
    that a repeated run computes the same. 0 without a CUDA device."""
    return KEPT * device_bytes(device) if torch.cuda.is_available() else 0.0


def _plain(head: Head) -> bool:
    return head.softcap is None and head.bias_V is None and head.scale == 1.0


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        settings: tuple[float, float | None, float, int, int],
    ) -> tuple[Tensor, Tensor]:
        scale, softcap, temperature, rows, kept = ctx.settings = settings
        ctx.set_materialize_grads(False)
        head = Head(weight_VH, bias_V, scale, softcap)
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        logprob_N = hidden_NH.new_empty(hidden_NH.shape[0], dtype=wide)
        entropy_N, normaliser_N = torch.empty_like(logprob_N), torch.empty_like(logprob_N)
        ctx.kept = list[tuple[Tensor, Tensor]]()
        kept = kept if any(ctx.needs_input_grad) else 0
        tiled = in_tiles(hidden_NH, head)
        for part in chunks(hidden_NH, rows):
            found = (logprob_N[part], entropy_N[part], normaliser_N[part])
            if tiled:
                given = (hidden_NH[part], target_N[part], weight_VH, temperature)
                derivative = tile_statistics(*given, found, len(ctx.kept) < kept)
                ctx.kept += [derivative] if derivative is not None else []
                continue
            logits = head_logits(hidden_NH[part], head)
            if hidden_NH.is_cuda and wide == torch.float32:
                statistics(logits, target_N[part], temperature, found)
                if len(ctx.kept) < kept:
                    ones, zeros = torch.ones_like(found[0]), torch.zeros_like(found[0])
                    parts = [target_N[part].contiguous(), found[2], found[1], ones, zeros]
                    narrow_NV = logits_gradient(logits, parts, temperature, weight_VH.dtype)
                    ctx.kept.append((narrow_NV, ones))
                continue
            scaled = logits / temperature
            normaliser = torch.logsumexp(scaled, dim=-1)
            logprob_N[part] = scaled.gather(-1, target_N[part, None])[:, 0] - normaliser
            energy = (torch.exp(scaled - normaliser[:, None]) * scaled).sum(-1)
            entropy_N[part], normaliser_N[part] = normaliser - energy, normaliser
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, target_N, normaliser_N, entropy_N)
        return logprob_N, entropy_N

    @staticmethod
    @once_differentiable  # a second derivative through the saved statistics would be wrong, so it is refused
    def backward(
        ctx: Any, grad_logprob_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Any, ...]:
        hidden_NH, weight_VH, bias_V, target_N, normaliser_N, entropy_N = ctx.saved_tensors
        kept = ctx.kept if grad_entropy_N is None else []
        grad_logprob_N = torch.zeros_like(entropy_N) if grad_logprob_N is None else grad_logprob_N
        grad_entropy_N = torch.zeros_like(entropy_N) if grad_entropy_N is None else grad_entropy_N
        scale, softcap, temperature, rows, _ = ctx.settings
        head = Head(weight_VH, bias_V, scale, softcap)
        found = HeadGradients(hidden_NH, head, ctx.needs_input_grad)
        for number, part in enumerate(chunks(hidden_NH, rows)):
            if number < len(kept):
                narrow_NV, factor_N = kept[number]
                found.add_scaled(part, narrow_NV, (grad_logprob_N[part] * factor_N)[:, None])
                continue
            logits = head_logits(hidden_NH[part], head)
            if found.by_kernel:
                columns = (target_N, normaliser_N, entropy_N, grad_logprob_N, grad_entropy_N)
                parts = [column[part].contiguous() for column in columns]
                found.add(part, logits_gradient(logits, parts, temperature, weight_VH.dtype))
                continue
            logp = logits / temperature - normaliser_N[part, None]
            p = logp.exp()
            grad = -p * grad_logprob_N[part, None]
            grad.scatter_add_(1, target_N[part, None], grad_logprob_N[part, None])
            grad -= p * (logp + entropy_N[part, None]) * grad_entropy_N[part, None]
            grad /= temperature
            found.add_logits(part, grad, logits)
        return *found.sums(), None, None


class HeadGradients:
    """Accumulates the gradients of hidden states, weight and bias over chunks of logits. Sums are in float32, so that a bf16 gradient
    does not depend on the number of chunks."""

    def __init__(self, hidden_NH: Tensor, head: Head, needs: Sequence[bool]):
        self.hidden_NH, self.head = hidden_NH, head
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        self.by_kernel = hidden_NH.is_cuda and wide == torch.float32 and _plain(head)
        weight_VH, bias_V = head.weight_VH, head.bias_V if needs[2] else None
        self.hidden = torch.empty_like(hidden_NH) if needs[0] else None
        self.weight = torch.zeros_like(weight_VH, dtype=wide) if needs[1] else None
        self.bias = None if bias_V is None else torch.zeros_like(bias_V, dtype=wide)

    def add_logits(self, part: slice, grad_NV: Tensor, logits_NV: Tensor) -> None:
        """Add a chunk, given the gradient of its logits, which is modified in place."""
        head = self.head
        if head.softcap is not None:
            grad_NV *= 1 - (logits_NV / head.softcap) ** 2
        if self.bias is not None:
            self.bias += grad_NV.sum(0)
        if head.scale != 1.0:
            grad_NV *= head.scale
        self.add(part, grad_NV.to(head.weight_VH.dtype))

    def add(self, part: slice, narrow_NV: Tensor) -> None:
        """Add a chunk, given the gradient of its product of hidden states and weight."""
        if self.hidden is not None:
            self.hidden[part] = narrow_NV @ self.head.weight_VH
        if self.weight is not None and self.by_kernel:
            add_product_float32(self.weight, narrow_NV.t(), self.hidden_NH[part])
        elif self.weight is not None:
            self.weight += narrow_NV.t() @ self.hidden_NH[part]

    def add_scaled(self, part: slice, narrow_NV: Tensor, factor_N1: Tensor) -> None:
        """Add a chunk whose gradient D still needs a factor f for each row: d hidden = f (D W), d W = D^T (f hidden)."""
        weight_VH = self.head.weight_VH
        if self.hidden is not None:
            self.hidden[part] = factor_N1 * product_float32(narrow_NV, weight_VH)
        if self.weight is not None:
            scaled_NH = (factor_N1 * self.hidden_NH[part]).to(weight_VH.dtype)
            add_product_float32(self.weight, narrow_NV.t(), scaled_NH)

    def sums(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of hidden states, weight and bias; None for those not needed."""
        weight, bias, head = self.weight, self.bias, self.head
        weight = weight.to(head.weight_VH.dtype) if weight is not None else None
        bias = bias.to(head.bias_V.dtype) if bias is not None and head.bias_V is not None else None
        return self.hidden, weight, bias


def chunks(hidden_NH: Tensor, rows: int) -> list[slice]:
    count = hidden_NH.shape[0]
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]


def in_tiles(hidden_NH: Tensor, head: Head) -> bool:
    """Whether the tiled kernel supports this layer and device: bfloat16, which has the exponent range of float32, and rows that
    begin at multiples of 16 bytes."""
    if hidden_NH.dtype != torch.bfloat16 or not _plain(head):
        return False
    return all(size % 8 == 0 for size in head.weight_VH.shape) and is_hopper(hidden_NH.device)


def tile_statistics(
    hidden_NH: Tensor,
    target_N: Tensor,
    weight_VH: Tensor,
    temperature: float,
    found: tuple[Tensor, Tensor, Tensor],
    keep: bool,
) -> tuple[Tensor, Tensor] | None:
    """Write log-probs, entropies and normalisers of one chunk into `found`, from tiles of logits that stay on the chip. With
    `keep`, also return d logprob / d logits, as a matrix and a factor for each row.

    d logprob / d z = 1[target] - exp(z - c) exp(c - n), with the normaliser n and any shift c of the row that is within SAFE of n. So
    the matrix is known, up to a factor for each row, before n is. The logit of the target is such a shift.
    """
    kernels, (count, width), size = fused._triton(), hidden_NH.shape, weight_VH.shape[0]
    tall, broad, deep = TILE
    across, target_N = -(-size // broad), target_N.contiguous()
    shift_N = torch.linalg.vecdot(hidden_NH, weight_VH[target_N]) / temperature
    chosen_N = torch.empty_like(found[0])
    top, total, energy = found[0].new_empty(3, across, count)
    kept_NV = hidden_NH.new_empty(count, size) if keep else hidden_NH
    matrices = [
        (hidden_NH, tall, deep),
        (weight_VH, broad, deep),
        (kept_NV, tall, broad if keep else deep),
    ]
    inputs = (*(kernels.tiles(*one) for one in matrices), target_N, shift_N)
    sizes = (count, size, 1.0 / temperature, width, keep, *TILE, SAFE)
    grid = (-(-count // tall), across)
    kernels.logprob_tiles_kernel[grid](
        *inputs, top, total, energy, chosen_N, *sizes, num_warps=8, num_stages=4
    )
    sums = (top, total, energy, chosen_N, *found, count, across)
    kernels.logprob_sums_kernel[(-(-count // 32),)](*sums, 32, 32)
    if not keep:
        return None
    factor_N, given = torch.empty_like(chosen_N), (target_N, shift_N, top, found[0], found[2])
    kernels.logprob_kept_kernel[(count,)](kept_NV, *given, factor_N, count, size, 4096, broad, SAFE)
    return kept_NV, factor_N / -temperature


def statistics(
    logits_NV: Tensor, target_N: Tensor, temperature: float, found: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Write log-probs, entropies and normalisers of one chunk on CUDA into `found`, reading the logits once."""
    count, size = logits_NV.shape
    fused._triton().statistics_kernel[(count,)](
        logits_NV, target_N.contiguous(), *found, size, 1.0 / temperature, 2048, num_warps=8
    )


def logits_gradient(
    logits_NV: Tensor, parts: list[Tensor], temperature: float, dtype: torch.dtype
) -> Tensor:
    """The gradient of the logits of one chunk on CUDA, rounded once to `dtype`. `parts` are the targets, normalisers and entropies of
    its rows, and the gradients of their log-probs and entropies."""
    count, size = logits_NV.shape
    out = torch.empty(count, size, dtype=dtype, device=logits_NV.device)
    fused._triton().logits_gradient_kernel[(count, -(-size // 4096))](
        logits_NV, *parts, out, size, 1.0 / temperature, 4096, num_warps=8
    )
    return out


def product_float32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 (float64 for float64 inputs). On CUDA a bf16 product is accumulated and returned in float32: logits rounded to
    bf16 would lose three digits of the log-prob."""
    if a.is_cuda and a.dtype.itemsize < 4:
        return torch.mm(a, b, out_dtype=torch.float32)
    product = a @ b
    return product if product.dtype == torch.float64 else product.float()


def add_product_float32(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b on CUDA, summed in float32 within the product, whatever the dtype of the matrices."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
