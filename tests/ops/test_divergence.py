"""The chunked divergences over a vocabulary: values and gradients against the dense computation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from posttrain.ops.kl import vocabulary_kl
from posttrain.ops.logprobs import Head

WIDE = torch.float64


def pair(tokens: int = 7, words: int = 11) -> tuple[list[Tensor], list[Tensor]]:
    """Hidden states and head of a student of width 4 and a teacher of width 6."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (
        [torch.randn(n, width, generator=generator, dtype=WIDE).requires_grad_() for n in (tokens, words)] for width in (4, 6)
    )
    return student, teacher


@pytest.mark.parametrize("chunk", [1, 50, 10**6])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_values_and_gradients_are_those_of_the_dense_computation(direction: str, chunk: int) -> None:
    (hidden, weight), (other, target) = pair()
    logp, logq = ((h @ w.t() / 0.7).log_softmax(-1) for h, w in ((hidden, weight), (other.detach(), target.detach())))
    one, two = (logp, logq) if direction == "reverse" else (logq, logp)
    dense = (one.exp() * (one - two)).sum(-1)
    found = vocabulary_kl(hidden, Head(weight), other, Head(target), direction, 0.7, chunk)
    torch.testing.assert_close(found, dense)
    weights = torch.arange(7, dtype=WIDE)
    expected = torch.autograd.grad((weights * dense).sum(), [hidden, weight])
    slopes = torch.autograd.grad((weights * found).sum(), [hidden, weight, other, target], allow_unused=True)
    for ours, theirs in zip(slopes[:2], expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert slopes[2:] == (None, None), "the teacher is fixed"


def test_equal_distributions_have_no_divergence_and_no_gradient() -> None:
    (hidden, weight), _ = pair()
    found = vocabulary_kl(hidden, Head(weight), hidden.detach(), Head(weight.detach()))
    (slope,) = torch.autograd.grad(found.sum(), hidden)
    assert float(found.detach().abs().max()) < 1e-12 and float(slope.abs().max()) < 1e-12


def test_no_tensor_of_all_tokens_by_all_words_is_kept() -> None:
    (hidden, weight), (other, target) = pair(tokens=64, words=100)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        vocabulary_kl(hidden, Head(weight), other, Head(target), chunk_logits=2 * 100 * 8).sum().backward()
    assert kept and max(kept) < 8 * 100, "not even a chunk is kept: it is computed again"


def test_an_unknown_direction_is_refused() -> None:
    (hidden, weight), (other, target) = pair()
    with pytest.raises(ValueError, match="unknown direction 'both': forward or reverse"):
        vocabulary_kl(hidden, Head(weight), other, Head(target), "both")
