"""The fused pieces of a decoder layer against what they stand for, with gradients, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernels_for_tests  # noqa: F401  kernels run on the CPU too
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.ops import fused
from posttrain.ops.fused import Sharing, add_norm, attention_heads, gated, gated_backward

COS, SIN = (
    f(torch.arange(12)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03]).repeat(2)).double() for f in (torch.cos, torch.sin)
)
POSITION = torch.tensor([0, 5, 11, 5])


def check(ours: Callable[..., Any], plain: Callable[..., Any], *inputs: Tensor) -> None:
    """Equal outputs, and equal gradients of a random weighting of them."""
    results = []
    for function in (ours, plain):
        taken = [x.detach().clone().requires_grad_() for x in inputs]
        out = function(*taken)
        out = out if isinstance(out, tuple) else (out,)
        generator = torch.Generator().manual_seed(1)
        sum((o * torch.randn(o.shape, generator=generator, dtype=o.dtype)).sum() for o in out).backward()  # type: ignore[union-attr]
        results.append([*out, *(x.grad for x in taken)])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shifted", [False, True])
def test_add_norm(shifted: bool) -> None:
    def plain(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        s = x + y
        return s, s / (s.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * (weight + 1 if shifted else weight)

    check(lambda x, y, w: add_norm(x, y, w, 1e-3, shifted), plain, random(5, 6), random(5, 6) + 1, random(6))
    alone = random(5, 6)
    check(lambda x, w: add_norm(x, None, w, 1e-3, shifted), lambda x, w: plain(x, torch.zeros_like(x), w), alone, random(6))


def test_add_norm_reads_no_gradient_of_an_output_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the sum of a query's norm; and of the normalised values alone, there is nothing to differentiate."""
    given, plain = [], fused._AddNorm.backward

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        given.append([grad is None for grad in grads])
        return plain(ctx, *grads)

    monkeypatch.setattr(fused._AddNorm, "backward", staticmethod(backward))
    x, y, weight = (random(*shape).requires_grad_() for shape in ((5, 6), (5, 6), (6,)))
    add_norm(x, None, weight, 1e-3)[1].sum().backward()
    add_norm(x, y, weight, 1e-3)[0].sum().backward()
    assert given == [[True, False], [False, True]]
    assert y.grad is not None and torch.equal(y.grad, torch.ones(5, 6, dtype=torch.float64))


def test_add_norm_by_hand() -> None:
    """(3, 4) has mean square 12.5; with epsilon 0 and weights (1, 2): 3 / sqrt(12.5), 8 / sqrt(12.5)."""
    total, out = add_norm(torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 0.0]]), torch.tensor([1.0, 2.0]), 0.0)
    assert total.tolist() == [[3.0, 4.0]]
    torch.testing.assert_close(out, torch.tensor([[3.0, 8.0]]) / 12.5**0.5)


@pytest.mark.parametrize("tanh", [False, True])
def test_gated(tanh: bool) -> None:
    def plain(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, 1)
        return (F.gelu(gate, approximate="tanh") if tanh else gate / (1 + torch.exp(-gate))) * up

    check(lambda both: gated(both, tanh), plain, 2 * random(4, 10))


def test_gradients_by_hand_of_gate_and_up_side_by_side() -> None:
    """silu(0) = 0 and silu'(0) = 1/2: of the pair (0, 3), dgate = g 3/2 and dup = 0; of two such elements in either order."""
    pairs = torch.tensor([[0.0, 3.0, 0.0, 5.0]])
    assert gated_backward(torch.tensor([[2.0, 4.0]]), pairs, False, pairs=True).tolist() == [[3.0, 10.0, 0.0, 0.0]]
    assert gated_backward(torch.tensor([[2.0, 4.0]]), pairs[:, [0, 2, 1, 3]], False).tolist() == [[3.0, 10.0, 0.0, 0.0]]


SHAPE = (1, 1, 8)  # heads, key heads, width
SOURCE, KEPT = torch.tensor([0, 1, 2, 0, 1, 3, 0]), torch.tensor([0, 1, 2, 5])  # three sequences that begin alike


def plain_heads(x: Tensor, source: Tensor) -> tuple[Tensor, ...]:
    heads = x.view(4, 3, 8)
    half = torch.cat([-heads[..., 4:], heads[..., :4]], -1)
    turned = heads * COS[POSITION][:, None] + half * SIN[POSITION][:, None]
    return turned[:, :1], turned[source, 1:2], heads[source, 2:]


@pytest.mark.parametrize("shared", [False, True])
def test_attention_heads_are_rotated_and_read_by_all_tokens_for_which_they_stand(shared: bool) -> None:
    sharing = Sharing.of(SOURCE, KEPT) if shared else None
    source = SOURCE if shared else torch.arange(4)
    check(lambda x: attention_heads(x, SHAPE, (COS, SIN), POSITION, sharing), lambda x: plain_heads(x, source), random(4, 24))


def test_where_all_tokens_ask_outputs_and_gradients_are_those_of_the_computed_ones() -> None:
    whole = Sharing.of(SOURCE, KEPT, whole=True)

    def asked(x: Tensor) -> tuple[Tensor, ...]:
        query, key, value = attention_heads(x, SHAPE, (COS, SIN), POSITION, whole)
        assert len(query) == len(SOURCE)
        return whole.computed(query), key, value

    check(asked, lambda x: plain_heads(x, SOURCE), random(4, 24))


def test_rotation_keeps_lengths() -> None:
    x = random(4, 24)
    query = attention_heads(x, SHAPE, (COS, SIN), POSITION)[0][:, 0]
    torch.testing.assert_close(query.norm(dim=1), x[:, :8].norm(dim=1))
    assert torch.equal(query[0], x[0, :8]) and not torch.allclose(query[1], x[1, :8])


def test_gradients_of_a_token_that_many_read_are_summed_in_float32() -> None:
    narrow = torch.zeros(1, 24, dtype=torch.bfloat16, requires_grad=True)
    sharing = Sharing.of(torch.zeros(257, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    _, _, value = attention_heads(narrow, SHAPE, (COS.bfloat16(), SIN.bfloat16()), torch.zeros(1, dtype=torch.long), sharing)
    value.backward(torch.tensor([256.0, *[1.0] * 256]).bfloat16()[:, None, None].expand_as(value))
    assert narrow.grad[0, -1].item() == 512.0, "one by one in bfloat16, 256 + 1 + 1 + ... would stay at 256"
