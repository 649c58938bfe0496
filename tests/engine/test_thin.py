"""Products of few rows in one kernel each, against the kernels that they stand for."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels_for_tests import INTERPRETED, decode_in_pages
from material_for_tests import small_policy
from torch import Tensor

from posttrain.collect import Prompt, generate_groups
from posttrain.engine import fused, thin
from posttrain.engine.engine import Engine
from posttrain.engine.rows import PAGE, Rows
from posttrain.models.attention import Rule
from posttrain.models.layers import Heads, Norm
from posttrain.ops.fused import add_norm, gated
from posttrain.types import Sampling

NARROW = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter knows no products in bf16


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(NARROW)


def close(found: Tensor, expected: Tensor) -> None:
    """Two orders of the same sums, rounded."""
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("rows", [1, 20])
def test_the_norm_before_and_the_bias_after(rows: int, shifted: bool) -> None:
    x, weight, bias = random(rows, 256), random(96, 256, scale=0.06), random(96)
    norm = Norm(random(256), 1e-3, shifted)
    found = thin.product(x, weight, x.new_empty(rows, 96), early=False, bias=bias, norm=norm)
    close(found, F.linear(add_norm(x, None, norm.weight, 1e-3, shifted)[1], weight, bias))


@pytest.mark.parametrize("tanh", [False, True])
def test_the_gate_after(tanh: bool) -> None:
    x, weight, norm = random(9, 256), random(128, 256, scale=0.06), Norm(random(256), 1e-3, False)
    found = thin.product(x, weight, x.new_empty(9, 64), early=False, norm=norm, gated=True, tanh=tanh)
    close(found, gated(F.linear(add_norm(x, None, norm.weight, 1e-3)[1], weight), tanh))


@pytest.mark.parametrize("depth", [256, 2176])  # of which the second is cut into parts, the last ones empty
def test_the_sum_after(depth: int) -> None:
    x, weight, total = random(9, depth), random(64, depth, scale=0.02), random(9, 64)
    expected, arrived = torch.addmm(total, x, weight.t()), torch.zeros(64, dtype=torch.int32)
    for _ in range(2):  # the counts are as before
        close(thin.product(x, weight, total.clone(), early=False, add=True, arrived=arrived), expected)
    assert not arrived.any()


def paged(device: str, dtype: torch.dtype, heads: Heads) -> tuple[Tensor, tuple[Tensor, Tensor], Rows]:
    """Six rows of three prompts, of which one row is done and one past the live ones; a prompt of one token, one of three pages."""
    generator = torch.Generator().manual_seed(0)
    state = Rows(8, 6, 3, 1, torch.device(device))
    order = torch.randperm(8 * 6 + 3 * 3, generator=generator).int() + 1
    state.table.copy_(order[: 8 * 6].view(8, 6))
    state.prompt_table[:3].copy_(order[8 * 6 :].view(3, 3))
    # the last was there before
    state.tile[:, :4] = torch.tensor([[0, 2, 3, 1], [2, 1, 3, 4], [1, PAGE, 2 * PAGE + 5, 9]], dtype=torch.int32)
    state["count"][:7] = torch.tensor([1, PAGE, 3 * PAGE + 1, 5 * PAGE, 7, 2, 2])
    state["position"][:6] = torch.tensor([1, PAGE, 4 * PAGE, 7 * PAGE + 4, 2 * PAGE + 11, 2 * PAGE + 6])
    state["done"][:6] = torch.tensor([0, 0, 0, 0, 1, 0])
    shape = (len(order) + 1) * PAGE, heads.keys, heads.width
    store = torch.randn(2, *shape, generator=generator).to(device, dtype)
    query = torch.randn(7, heads.heads + 2 * heads.keys, heads.width, generator=generator).to(device, dtype)
    return query[:, : heads.heads], (store[0], store[1]), state


def check_attention(device: str, dtype: torch.dtype, heads: Heads, tolerance: float) -> None:
    """Prompts and own tokens at once give what they give one after the other; twice, as the counts are as before."""
    query, store, state = paged(device, dtype, heads)
    for softcap in (None, 5.0):
        rule = Rule(0.3, softcap=softcap)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(thin, "TOGETHER", 0)
            expected = fused.attend_pages(query, store, state, heads, rule, 3, fused.tile_rows(heads, 3)[1])
        live = [0, 1, 2, 3, 5]
        for programs, _ in product((512, 1), range(2)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(thin, "SPREAD", programs)
                found = thin.attend(query, store, state, heads, rule, 3, fused._hopper(torch.device(device)))
            torch.testing.assert_close(found[live], expected[live], rtol=tolerance, atol=tolerance)
        assert not state.arrived.any()


def test_attention_to_prompts_and_own_tokens_at_once() -> None:
    check_attention("cpu", torch.float32, Heads(4, 2, 16), 1e-5)


@pytest.mark.skipif(INTERPRETED, reason="in bf16")
def test_a_model_with_few_rows_samples_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers by these kernels, and with more rows than they take by the others: log-probs are equal up to rounding."""
    decode_in_pages(monkeypatch)
    made: list[tuple[int, int]] = []
    plain = thin.product

    def counted(x: Tensor, weight: Tensor, out: Tensor, **what: Any) -> Tensor:
        made.append((len(x), out.shape[1]))
        return plain(x, weight, out, **(what | {"early": False}))

    policy = small_policy(dtype=NARROW, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
    prompts = [Prompt((5, 6, 7), 2, 1, Sampling(12, min_new_tokens=12))]
    expected = next(generate_groups(Engine(copy.deepcopy(policy)), prompts))
    assert not made
    monkeypatch.setattr(thin, "product", counted)
    monkeypatch.setattr(fused, "_hopper", lambda device: True)
    found = next(generate_groups(Engine(policy), prompts))
    assert {width for rows, width in made if rows == 2} == {256, 128}
    for one, other in zip(found, expected, strict=True):
        same = next((n for n, pair in enumerate(zip(one.ids, other.ids, strict=True)) if pair[0] != pair[1]), 12)
        assert same > 3
        torch.testing.assert_close(torch.tensor(one.logprobs[:same]), torch.tensor(other.logprobs[:same]), rtol=0, atol=0.03)
