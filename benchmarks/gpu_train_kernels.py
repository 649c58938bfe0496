"""Times the kernels of a training pass on one GPU, each compared with alternatives, at the shapes of case a.

    python benchmarks/gpu_train_kernels.py --parts attention,logprobs,tiles,sums

Prints one JSON line for each part. A part that fails reports it and does not stop the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from gpu_cases import run_parts  # noqa: E402

from posttrain.models import attention as packing  # noqa: E402
from posttrain.models.attention import Rule, attend_packed  # noqa: E402
from posttrain.ops import logprobs as module  # noqa: E402
from posttrain.ops.logprobs import Head, token_logprobs  # noqa: E402

CUDA, RULE = torch.device("cuda"), Rule(0.125)
HIDDEN, INNER, VOCABULARY, HEADS, KEYS, WIDTH = 896, 4864, 151936, 14, 2, 64
WIDE = (28, 4, 128)  # heads, those of keys, elements of each: as in 7B
SHAPES = ((64, 1024), (48, 768), (64, 512))  # sequences, tokens of each


def kernels(work: Callable[[], Any], repeats: int = 3) -> dict[str, float]:
    """Milliseconds of all kernels of a call, and of the longest ones."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    times = {e.key[:60]: e.self_device_time_total / 1000 / repeats for e in seen.key_averages()}
    longest = sorted(times.items(), key=lambda item: -item[1])[:5]
    return {"all": round(sum(times.values()), 4), **{name: round(ms, 4) for name, ms in longest}}


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=CUDA) * scale).bfloat16().requires_grad_()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@contextmanager
def changed(module: ModuleType, **values: Any) -> Iterator[None]:
    """With other constants or functions of a module."""
    old = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(module, name, value)


def attention() -> dict[str, Any]:
    """A layer forward and backward: torch's flash of packed sequences, beside cuDNN of a batch; fewer queries than keys; lengths as
    gsm8k's; all samples of 8 prompts to their prompt; and packed sequences by FlashAttention 4 where it is installed."""
    with changed(packing, flash=lambda *_: None):
        found = {**packed("flash"), **batched(), **to_prompts()}
    return found | (packed("FlashAttention 4") if packing.flash(CUDA, WIDTH) else {})


def passes(attend: Any, queries: int, keys: int, shape: tuple[int, int, int] = (HEADS, KEYS, WIDTH)) -> dict[str, float]:
    """The kernels of an attention, forward and backward."""
    heads, shared, width = shape
    q, k, v = (random(tokens, each, width) for tokens, each in ((queries, heads), (keys, shared), (keys, shared)))
    grad = torch.randn_like(q)
    return kernels(lambda: torch.autograd.grad(attend(0, q, k, v, RULE), (q, k, v), grad))


def like_gsm8k(tokens: int = 45_000) -> tuple[int, ...]:
    """Lengths of prompts with their answers, as gpu_train.py has them, of so many tokens or a few more."""
    draw, found = np.random.default_rng(0), list[int]()
    while sum(found) < tokens:
        found.append(100 + int(draw.integers(131, 395)))
    return tuple(found)


def packed(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for count, length in SHAPES:
        found[f"{count} of {length}, {kind} of packed ones"] = passes(
            attend_packed((length,) * count, CUDA), *[count * length] * 2
        )
    for count, new, length in ((64, 512, 768), (64, 512, 1024)):
        attend = attend_packed((length,) * count, CUDA, (new,) * count)
        found[f"{count} of {length}, the last {new} ask, {kind}"] = passes(attend, count * new, count * length)
    for name, lengths in {"gsm8k's lengths": like_gsm8k(), "8 of 4,096": (4096,) * 8}.items():
        for shape in ((HEADS, KEYS, WIDTH), WIDE):
            attend, (heads, _, width) = attend_packed(lengths, CUDA), shape
            found[f"{name}, {heads} heads of {width}, {kind}"] = passes(attend, *[sum(lengths)] * 2, shape)
    return found


def batched() -> dict[str, Any]:
    return {
        f"{count} of {length}, cuDNN of a batch": passes(
            attend_packed((length,) * count, CUDA, None, True), *[count * length] * 2
        )
        for count, length in SHAPES
    }


def to_prompts() -> dict[str, Any]:
    q, k, v = random(8, HEADS, 4096, WIDTH), random(8, KEYS, 256, WIDTH), random(8, KEYS, 256, WIDTH)
    grad = torch.randn_like(q)

    def both() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, scale=RULE.scaling, enable_gqa=True)
        return torch.autograd.grad(out, (q, k, v), grad)

    return {"8 x 4096 queries to 256 keys, cuDNN": kernels(both)}


def logprobs() -> dict[str, Any]:
    """Log-probs of 32,768 tokens with their gradient, and without; and how far the gradient of 2,048 is from float32's."""
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    hidden, weight = random(32768, HIDDEN), random(VOCABULARY, HIDDEN, scale=0.06)
    target, factor = torch.randint(0, VOCABULARY, (32768,), device=CUDA), torch.randn(32768, device=CUDA) / 32768

    def both(count: int) -> list[Tensor]:
        part = hidden.detach()[:count].requires_grad_()
        logprob, _ = token_logprobs(part, target[:count], Head(weight))
        return [logprob.detach(), *torch.autograd.grad((logprob * factor[:count]).sum(), (part, weight))]

    wide = [t.detach().float().requires_grad_() for t in (hidden[:2048], weight)]
    exact = torch.log_softmax(wide[0] @ wide[1].t(), -1).gather(1, target[:2048, None])[:, 0]
    expected = [exact.detach(), *torch.autograd.grad((exact * factor[:2048]).sum(), wide)]
    for way, tiled in (("logits written", False), ("in tiles", True)):
        with changed(module, in_tiles=lambda *_, tiled=tiled: tiled):
            found[way] = kernels(lambda: both(32768))
            with torch.no_grad():
                found[f"{way}, without gradient"] = kernels(lambda: token_logprobs(hidden, target, Head(weight)))
            found[f"{way}, error"] = [error(a, b) for a, b in zip(both(2048), expected, strict=True)]
    return found


def tiles() -> dict[str, Any]:
    """The forward pass of 3,072 tokens with what is kept, by the shape of tiles."""
    found: dict[str, Any] = {}
    hidden, weight = random(3072, HIDDEN).detach(), random(VOCABULARY, HIDDEN, scale=0.06).detach()
    target, out = torch.randint(0, VOCABULARY, (3072,), device=CUDA), torch.empty(3, 3072, device=CUDA)
    for shape in ((128, 256, 64), (256, 128, 64), (128, 128, 64), (128, 256, 128)):
        with changed(module, TILE=shape):
            try:
                found[str(shape)] = kernels(lambda: module.tile_statistics(hidden, target, weight, 1.0, tuple(out), True))  # type: ignore[arg-type]
            except Exception as problem:
                found[str(shape)] = str(problem)[:100]
    found["the product alone, to float32"] = kernels(lambda: module.product_float32(hidden, weight.t()))
    return found


def sums() -> dict[str, Any]:
    """The gradient of a weight over 34,816 tokens, added to a float32 sum after its product, and inside it."""
    found: dict[str, Any] = {}
    for name, (rows, columns) in {"gate and up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER), "out": (HIDDEN, HIDDEN)}.items():
        grad, x = random(34816, rows).detach(), random(34816, columns).detach()
        total = torch.zeros(rows, columns, device=CUDA)
        found[f"{name}, after"] = kernels(lambda t=total, g=grad, x=x: t.add_(g.t() @ x))
        found[f"{name}, inside"] = kernels(lambda t=total, g=grad, x=x: module.add_product_float32(t, g.t(), x))
    return found


PARTS: dict[str, Callable[[], dict[str, Any]]] = {"attention": attention, "logprobs": logprobs, "tiles": tiles, "sums": sums}


if __name__ == "__main__":
    run_parts(PARTS, __doc__)
