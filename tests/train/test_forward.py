"""Equal beginnings are computed once in training, and nothing but the work changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from material_for_tests import small_policy

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


def test_values_and_gradients_are_those_of_computing_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = small_policy(dtype=torch.float64)
    counted: list[int] = []
    inner = policy.hidden

    def hidden(ids: torch.Tensor, *rest: Any, **layout: Any) -> torch.Tensor:
        counted.append(ids.numel())
        return inner(ids, *rest, **layout)

    monkeypatch.setattr(policy, "hidden", hidden)
    found = []
    for least in (module.SHARED, 10**6):
        monkeypatch.setattr(module, "SHARED", least)
        policy.model.zero_grad()
        outputs = forward(policy, batch(*GROUP))
        weight = torch.arange(len(outputs.logprob_T), dtype=torch.float64)
        (weight * outputs.logprob_T + outputs.entropy_T).sum().backward()
        found.append(
            (outputs.logprob_T.detach(), {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None})
        )
    assert counted == [21, 32]
    (shared, gradients), (plain, expected) = found
    assert torch.allclose(shared, plain, rtol=0, atol=1e-12)
    for name, gradient in expected.items():
        assert torch.allclose(gradients[name], gradient, rtol=0, atol=1e-10), name
