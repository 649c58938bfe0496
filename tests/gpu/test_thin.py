"""The kernels of few rows on a CUDA device, against the products and kernels that they stand for. Run with `make test-gpu`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.engine import fused, thin
from posttrain.models.layers import Heads, Norm
from posttrain.ops.fused import add_norm, gated
from tests.engine.test_thin import check_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WIDTH, INNER, QKV = 896, 4864, 1152


def random(*shape: int, scale: float = 1.0) -> Tensor:
    torch.manual_seed(sum(shape))
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def check(found: Tensor, expected: Tensor) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < 4e-3, f"off by {float(error):.4f}"


@pytest.mark.parametrize("rows", [1, 8, 17, 32, 64])
def test_few_rows(rows: int) -> None:
    """Several times in a row, as a step launches them: each kernel begins before the one ahead has ended."""
    early = fused._hopper(torch.device("cuda"))
    x, norm = random(rows, WIDTH), Norm(random(WIDTH), 1e-6, False)
    qkv, bias, out = random(QKV, WIDTH, scale=0.03), random(QKV), random(WIDTH, WIDTH, scale=0.03)
    both, down = random(2 * INNER, WIDTH, scale=0.03), random(WIDTH, INNER, scale=0.02)
    arrived = torch.zeros(WIDTH, dtype=torch.int32, device="cuda")
    for turn in range(3):
        inner = add_norm(x, None, norm.weight, norm.epsilon)[1]
        made = thin.product(x, qkv, x.new_empty(rows, QKV), early=early, bias=bias, norm=norm)
        check(made, F.linear(inner, qkv, bias))
        gate = thin.product(x, both, x.new_empty(rows, INNER), early=early, norm=norm, gated=True, tanh=turn == 1)
        check(gate, gated(F.linear(inner, both), turn == 1))
        total, expected = x.clone(), torch.addmm(x, gate, down.t()).addmm_(inner, out.t())
        thin.product(gate, down, total, early=early, add=True, arrived=arrived)
        thin.product(inner, out, total, early=early, add=True)
        check(total, expected)
        assert not arrived.any()
        x = (total / total.float().std()).bfloat16()


def test_attention() -> None:
    """Heads of Qwen2.5-0.5B, and of width 128."""
    for heads in (Heads(14, 2, 64), Heads(16, 8, 128)):
        check_attention("cuda", torch.bfloat16, heads, 2e-2)
    check_attention("cuda", torch.float32, Heads(4, 2, 64), 1e-4)


def test_the_same_bits_each_time() -> None:
    """Parts of a cut product are added in their order, whichever comes last."""
    x, weight, arrived = random(8, INNER), random(WIDTH, INNER), torch.zeros(WIDTH, dtype=torch.int32, device="cuda")
    found = [thin.product(x, weight, x.new_zeros(8, WIDTH), early=False, add=True, arrived=arrived) for _ in range(20)]
    assert all(torch.equal(one, found[0]) for one in found)
