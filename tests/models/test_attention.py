"""Our attention against the formula, in float64: causal, windowed, soft-capped, grouped; packed; and what it refuses."""

from __future__ import annotations

import math
from inspect import signature
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from posttrain.models import attention as module
from posttrain.models.attention import LAYOUT, WASTE, Packed, Rule, attend_packed, attention, bucket, causal, varlen

WIDE = torch.float64
RULES = [
    Rule(0.5),
    Rule(0.3, sliding_window=3),
    Rule(0.3, sliding_window=100),
    Rule(1.0, softcap=1.5),
    Rule(0.4, sliding_window=2, softcap=2.0),
]


def made(batch: int, length: int, heads: int = 4, groups: int = 2, width: int = 3, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, h, length, width, dtype=WIDE, generator=generator) for h in (heads, groups, groups)]


def by_the_formula(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """softmax(softcap(q k / scale)) v, one query at a time."""
    batch, heads, length, _ = query.shape
    out = torch.zeros_like(query)
    for b in range(batch):
        for h in range(heads):
            g = h * key.shape[1] // heads
            for t in range(length):
                first = 0 if rule.sliding_window is None else max(0, t - rule.sliding_window + 1)
                scores = key[b, g, first : t + 1] @ query[b, h, t] * rule.scaling
                if rule.softcap is not None:
                    scores = rule.softcap * torch.tanh(scores / rule.softcap)
                out[b, h, t] = scores.softmax(-1) @ value[b, g, first : t + 1]
    return out


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_values_are_those_of_the_formula(rule: Rule, groups: int) -> None:
    tensors = made(2, 7, groups=groups)
    torch.testing.assert_close(causal(*tensors, rule), by_the_formula(*tensors, rule), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradients_by_finite_differences(rule: Rule) -> None:
    tensors = [t.requires_grad_() for t in made(1, 4)]
    assert torch.autograd.gradcheck(lambda *t: causal(*t, rule), tensors, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_packed_is_each_sequence_alone(rule: Rule) -> None:
    lengths = [5, 1, 30, 6, 29]
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    tensors = made(1, starts[-1])
    packed = Packed(tuple(starts)).attend(0, *tensors, rule)[0]
    for start, end in pairwise(starts):
        alone = causal(*(t[:, :, start:end] for t in tensors), rule)[0].transpose(0, 1)
        torch.testing.assert_close(packed[start:end], alone, rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=30))
def test_buckets_hold_everything_once_and_waste_little(lengths: list[int]) -> None:
    groups = bucket(lengths)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        inside = [lengths[i] for i in group]
        assert max(inside) <= WASTE * min(inside) + 8


class Layer(nn.Module):
    layer_idx = 0


def test_the_default_scale_is_that_of_the_width() -> None:
    query, key, value = made(1, 5, groups=4)
    found, _ = attention(Layer(), query, key, value, None)
    torch.testing.assert_close(
        found.transpose(1, 2), by_the_formula(query, key, value, Rule(1 / math.sqrt(3))), rtol=0, atol=1e-12
    )


def test_options_it_does_not_know_are_refused_not_ignored() -> None:
    query, key, value = made(1, 3)
    with pytest.raises(NotImplementedError, match="Layer asks its attention for head_mask, which posttrain does not do"):
        attention(Layer(), query, key, value, None, head_mask=torch.ones(4))
    attention(Layer(), query, key, value, None, head_mask=None, use_cache=False)


def test_a_foreign_cache_is_refused() -> None:
    query, key, value = made(1, 3)
    with pytest.raises(NotImplementedError, match="sample with its engine, not with model.generate"):
        attention(Layer(), query[:, :, -1:], key, value, None)
    found, _ = attention(Layer(), query, key, value, None, **{LAYOUT: Packed((0, 3))}, scaling=0.5)
    torch.testing.assert_close(found.transpose(1, 2), causal(query, key, value, Rule(0.5)), rtol=0, atol=1e-12)


def test_the_kernel_for_packed_sequences_gets_bounds_scale_and_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, in the place of the kernel; tests/gpu compares its outputs. Shared key heads must be asked for where torch asks."""
    asked: list[tuple[list[object], dict[str, object]]] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, *bounds: object, **how: object) -> Tensor:
        asked.append(([b.tolist() if isinstance(b, Tensor) else b for b in bounds], how))
        return query

    monkeypatch.setattr(module, "available", lambda *_: True)
    monkeypatch.setattr(module, "varlen", lambda: kernel)
    tokens = torch.zeros(5, 2, 8)
    for window in (None, 3):
        attend_packed((2, 3), torch.device("cpu"))(0, tokens, tokens, tokens, Rule(0.5, window))
    attend_packed((2, 3), torch.device("cpu"), (1, 1))(0, tokens[:2], tokens, tokens, Rule(0.5))
    assert asked == [
        ([[0, 2, 5], [0, 2, 5], 3, 3], {"scale": 0.5, "window_size": (-1, 0)}),
        ([[0, 2, 5], [0, 2, 5], 3, 3], {"scale": 0.5, "window_size": (2, 0)}),
        ([[0, 1, 2], [0, 2, 5], 1, 3], {"scale": 0.5, "window_size": (-1, 0)}),
    ]
    takes = "enable_gqa" in signature(varlen().func).parameters
    assert varlen().keywords == ({"enable_gqa": True} if takes else {})
