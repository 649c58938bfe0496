"""The chunked divergences over a vocabulary: values and gradients against the dense computation and finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.ops.divergence import DIVERGENCES, vocabulary_divergence
from posttrain.ops.logprobs import Head

WIDE = torch.float64
every_kind = pytest.mark.parametrize("kind", DIVERGENCES)


def pair(tokens: int = 7, words: int = 11, more: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Hidden states and head of a student of width 4 and a teacher of width 6, whose head has `more` rows."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (
        [torch.randn(n, width, generator=generator, dtype=WIDE).requires_grad_() for n in (tokens, rows)]
        for width, rows in ((4, words), (6, words + more))
    )
    return student, teacher


def dense(kind: str, z: Tensor, y: Tensor, beta: float) -> Tensor:
    """The definitions, of all logits at once."""
    p, q = z.softmax(-1), y.detach().softmax(-1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(-1)

    m = beta * q + (1 - beta) * p
    values = {"reverse": kl(p, q), "forward": kl(q, p), "jensen_shannon": beta * kl(q, m) + (1 - beta) * kl(p, m)}
    return values[kind]


@pytest.mark.parametrize("chunk", [1, 100, 10**6])
@every_kind
def test_values_and_gradients_are_those_of_the_dense_computation_whatever_the_chunk(kind: str, chunk: int) -> None:
    (hidden, weight), (other, target) = pair()
    bias = torch.linspace(-1, 1, 11, dtype=WIDE).requires_grad_()
    logits = 2.0 * torch.tanh((1.5 * hidden @ weight.t() + bias) / 2.0)
    expected_N = dense(kind, logits / 0.7, other @ target.t() / 0.7, 0.3)
    heads = (Head(weight, bias, 1.5, 2.0), Head(target))
    found_N = vocabulary_divergence(hidden, heads[0], other, heads[1], kind, 0.7, 0.3, chunk)
    torch.testing.assert_close(found_N, expected_N)
    weights, learned = torch.arange(7, dtype=WIDE), [hidden, weight, bias]
    expected = torch.autograd.grad((weights * expected_N).sum(), learned)
    slopes = torch.autograd.grad((weights * found_N).sum(), [*learned, other, target], allow_unused=True)
    for ours, theirs in zip(slopes, expected, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert slopes[3:] == (None, None), "the teacher is fixed"


@every_kind
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    (hidden, weight), (other, target) = pair(tokens=3, words=5)

    def value(*student: Tensor) -> Tensor:
        return vocabulary_divergence(student[0], Head(student[1]), other, Head(target), kind, 1.3, 0.6, 8)

    assert torch.autograd.gradcheck(value, (hidden, weight))


@every_kind
def test_equal_distributions_have_no_divergence_and_no_gradient(kind: str) -> None:
    (hidden, weight), _ = pair()
    found = vocabulary_divergence(hidden, Head(weight), hidden.detach(), Head(weight.detach()), kind)
    (slope,) = torch.autograd.grad(found.sum(), hidden)
    assert float(found.detach().abs().max()) < 1e-12 and float(slope.abs().max()) < 1e-12


def test_jensen_shannon_goes_from_forward_to_reverse_and_is_bounded() -> None:
    (hidden, weight), (other, target) = pair()
    given = (hidden.detach(), Head(weight.detach()), other, Head(target))
    forward, reverse = (vocabulary_divergence(*given, kind) for kind in ("forward", "reverse"))
    near_0, near_1 = (vocabulary_divergence(*given, "jensen_shannon", beta=b) for b in (1e-6, 1 - 1e-6))
    torch.testing.assert_close(near_0 / 1e-6, forward, rtol=1e-3, atol=0)
    torch.testing.assert_close(near_1 / 1e-6, reverse, rtol=1e-3, atol=0)
    far = vocabulary_divergence(given[0] * 50, given[1], other * 50, Head(target), "jensen_shannon")
    assert float(far.max()) <= math.log(2) + 1e-12


@every_kind
def test_extreme_logits_give_no_nan(kind: str) -> None:
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight, target = torch.tensor([[1.0], [-1.0], [0.0]]), torch.tensor([[-1.0], [1.0], [0.0]])
    found = vocabulary_divergence(hidden, Head(weight), hidden.detach(), Head(target), kind)
    (slope,) = torch.autograd.grad(found.sum(), hidden)
    assert bool(found.isfinite().all()) and bool(slope.isfinite().all())


@pytest.mark.parametrize("more", [-2, 3])
@every_kind
def test_rows_that_one_head_alone_has_do_not_count(kind: str, more: int) -> None:
    (hidden, weight), (other, target) = pair(more=more)
    words = min(len(weight), len(target))
    found = vocabulary_divergence(hidden, Head(weight), other, Head(target), kind)
    expected = dense(kind, hidden @ weight[:words].t(), other @ target[:words].t(), 0.5)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(one.sum(), weight, retain_graph=True)[0] for one in (found, expected))
    torch.testing.assert_close(ours, theirs)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple) else (made,):
            self.elements = max(self.elements, one.numel() if isinstance(one, Tensor) else 0)
        return made


@every_kind
def test_no_tensor_of_all_tokens_by_all_words_is_made_or_kept(kind: str) -> None:
    (hidden, weight), (other, target) = pair(tokens=64, words=100)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with Largest() as largest, saved_tensors_hooks(pack, lambda tensor: tensor):
        vocabulary_divergence(hidden, Head(weight), other, Head(target), kind, chunk_logits=4 * 100 * 8).sum().backward()
    assert largest.elements == 8 * 100, "a chunk of 8 rows is the largest"
    assert kept and max(kept) < 8 * 100, "not even a chunk is kept: it is computed again"


def test_an_unknown_divergence_is_refused() -> None:
    (hidden, weight), (other, target) = pair()
    with pytest.raises(ValueError, match="unknown divergence 'both': one of reverse, forward, jensen_shannon"):
        vocabulary_divergence(hidden, Head(weight), other, Head(target), "both")
