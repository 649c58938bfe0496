"""Equal beginnings are computed once in training, and nothing but the work changes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import kernels_for_tests  # noqa: F401  kernels run on the CPU too
import numpy as np
import pytest
import torch
from material_for_tests import small_policy
from torch import Tensor

from posttrain.models.fused_body import FusedBody
from posttrain.models.layers import TOLERANCE, ModelDescription, describe
from posttrain.train import forward as module
from posttrain.train.forward import forward, shared_beginnings
from posttrain.train.pack import pack_examples
from posttrain.types import Batch, Example


def batch(*sequences: list[int]) -> Batch:
    return pack_examples([Example(np.array(s), np.arange(len(s)) >= 5) for s in sequences])


GROUP = ([3, 4, 5, 6, 7, 8, 9, 10], [3, 4, 5, 6, 7, 8, 11], [3, 4, 5, 6, 7, 12, 9, 10, 13], [9, 4, 5, 6, 7, 8, 9, 10])


def test_what_is_computed_by_hand() -> None:
    kept, source = shared_beginnings(batch(*GROUP))
    assert kept.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 14, 20, 21, 22, 23, *range(24, 32)]
    assert source[8:15].tolist() == [0, 1, 2, 3, 4, 5, 8]
    assert source[24:].tolist() == list(range(13, 21)), "another first token shares nothing"


def test_short_beginnings_are_left_alone() -> None:
    kept, _ = shared_beginnings(batch([3, 4, 5, 9, 9, 9], [3, 4, 5, 8, 8, 8]))
    assert len(kept) == 12


SYSTEM = [3, 4, 5, 6, 7, 8]


def chat(*groups: tuple[list[int], list[list[int]]]) -> list[list[int]]:
    """Sequences under a chat template: a system prompt that all share, then each group's question, then its answers."""
    return [SYSTEM + question + answer for question, answers in groups for answer in answers]


def answers(*first: int) -> list[list[int]]:
    return [[token, 5, 6] for token in first]


CASES: dict[str, tuple[list[list[int]], int]] = {  # sequences, and how many of their tokens must be computed, by hand
    "one group and a stranger": (list(GROUP), 8 + 1 + 4 + 8),
    # 6 of the system prompt, 4 of each of 3 questions, 3 of each of 6 answers; of all 78
    "three groups under one system prompt": (
        chat(([9, 9, 9, 9], answers(3, 4)), ([10, 9, 9, 9], answers(3, 4)), ([11, 9, 9, 9], answers(3, 4))), 6 + 12 + 18),
    "a group of one between others": (
        chat(([9, 9], answers(3, 4)), ([10, 9], answers(3)), ([11, 9], answers(3, 4))), 6 + 6 + 15),
    "the same question in groups that are not neighbours": (
        chat(([9, 9], answers(3, 4)), ([10, 9], answers(3)), ([9, 9], answers(7, 8))), 6 + 4 + 15),
    "a question that begins another, and a sequence that is all prompt": (
        chat(([9], answers(3, 4)), ([9, 9, 9], answers(3)), ([], [[]]), ([9], [[]])), 6 + 1 + 6 + 2 + 3),
    "equal sequences": (chat(([9, 9], answers(3, 3, 3)), ([9, 9], answers(3))), 6 + 2 + 3),
    "pairs": (chat(([9], answers(3, 4)), ([10], answers(3, 4)), ([11], answers(8, 8))), 6 + 3 + 15),
    "answers that go together for a while": (
        chat(([9], [[3, 4, 5, 6], [3, 4, 5, 7], [3, 8], [3, 8, 9], [3, 8, 9]])), 6 + 1 + (4 + 1) + (1 + 1)),
    "beginnings of under four tokens": ([[3, 4, 5, 9, 9, 9], [3, 4, 5, 8, 8, 8]], 12),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_how_much_is_computed_and_that_nothing_else_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers' module and by the layout of the fused pass: log-probs, entropies and the whole gradient."""
    sequences, computed = CASES[name]
    total = sum(len(s) for s in sequences)
    policy = small_policy(dtype=torch.float64)
    expected = gradients(policy, batch(*sequences), total, False, 10**6, monkeypatch)
    for fused in (False, True):
        found = gradients(policy, batch(*sequences), computed, fused, module.SHARED, monkeypatch)
        assert torch.allclose(found[0], expected[0], rtol=0, atol=1e-12)
        for mine, exact in zip(found[1:], expected[1:], strict=True):
            assert torch.allclose(mine, exact, rtol=0, atol=1e-10)


def test_a_batch_in_which_all_tokens_ask_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of equal length, of which beginnings are shared: the computed tokens, log-probs and gradients are the same."""
    sequences = chat(([9, 9], answers(3, 4, 5, 6)), ([10, 9], answers(3, 4)), ([11, 9], answers(3, 4)))
    policy, one = small_policy(dtype=torch.float64), batch(*sequences)
    total, computed = sum(len(s) for s in sequences), 6 + 3 * 2 + 8 * 3
    expected = gradients(policy, one, total, False, 10**6, monkeypatch)
    asked: list[int] = []
    inner = module.attend_packed
    monkeypatch.setattr(module, "attend_packed", lambda *given: asked.append(given[3]) or inner(*given))
    for most in (0.0, 9.0):
        monkeypatch.setattr("posttrain.models.attention.ANEW", most)
        found = gradients(policy, one, computed, True, module.SHARED, monkeypatch)
        for mine, exact in zip(found, expected, strict=True):
            assert torch.allclose(mine, exact, rtol=0, atol=1e-10)
    assert asked == [False, True]


def test_every_beginning_is_computed_once() -> None:
    """Random trees of sequences in random order: as many tokens as there are different beginnings, each stood for by its equal."""
    generator = np.random.default_rng(0)
    for _ in range(100):
        sequences = [
            SYSTEM + generator.integers(0, 3, generator.integers(0, 7)).tolist() for _ in range(generator.integers(1, 12))
        ]
        one = batch(*sequences)
        kept, source = shared_beginnings(one)
        begins = {(*s[: n + 1],) for s in sequences for n in range(len(s))}
        at = [(*one.ids_T[start : t + 1].tolist(),) for start, end in pairwise(one.starts) for t in range(start, end)]
        assert len(kept) == len(begins)
        assert all(at[kept[source[t]]] == begin for t, begin in enumerate(at))


def gradients(policy: Any, one: Batch, computed: int, fused: bool, least: int, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Log-probs with entropies, and the gradient of each weight; `computed` tokens went through the model."""
    counted: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "SHARED", least)
        patch.setitem(TOLERANCE, torch.float64, 1e-12)
        described = describe(policy)
        assert isinstance(described, ModelDescription)
        body = FusedBody(described) if fused else policy
        inner = body.hidden
        patch.setattr(body, "hidden", lambda ids, *rest, **more: counted.append(ids.numel()) or inner(ids, *rest, **more))
        patch.setattr(module, "fused_body", lambda _: body if fused else None)
        policy.model.zero_grad()
        outputs = forward(policy, one)
        weight = torch.arange(len(outputs.logprob_T), dtype=torch.float64)
        (weight * outputs.logprob_T + outputs.entropy_T).sum().backward()
    assert counted == [computed]
    learned = [p.grad.clone() for p in policy.model.parameters()]
    return [torch.stack([outputs.logprob_T, outputs.entropy_T]).detach(), *learned]


def test_a_forward_pass_reads_ids_and_mask_from_their_host_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from the device would wait for all that the device is still at."""
    packed = batch(*GROUP)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: pytest.fail("waits for the device"))
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda tensor: pytest.fail("waits for the device"))
    forward(small_policy(), packed)
    with pytest.raises(pytest.fail.Exception, match="waits"):
        forward(small_policy(), packed.replace(mask_T=packed.mask_T))
