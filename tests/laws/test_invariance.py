"""Splitting, ordering, packing or bucketing a step differently does not change the gradient."""

from __future__ import annotations

import copy
import math
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from material_for_tests import (
    CASES,
    VOCABULARY,
    assert_same_gradients,
    gradients,
    material,
    shared_policy,
    shared_trainer,
    small_policy,
    trainer_for,
)
from torch import Tensor

from posttrain.algorithms.base import Algorithm
from posttrain.models import attention
from posttrain.models.attention import LAYOUT, Packed
from posttrain.ops.logprobs import head_logits
from posttrain.runs.metrics import merge
from posttrain.train.forward import forward, positions
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import gather, micro_batches, mini_batches, pack_examples, with_loss
from posttrain.types import Batch, Example

quick = settings(max_examples=12, deadline=None)
every_case = pytest.mark.parametrize("algorithm", CASES)


@lru_cache
def whole(algorithm: Algorithm) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of the step in one piece."""
    return gradients(algorithm, algorithm.prepare(material(algorithm), {}))


CUTS: dict[tuple[Algorithm, tuple[int, ...]], tuple[float, dict[str, Tensor]]] = {}


def cut(algorithm: Algorithm, budget: int) -> tuple[float, dict[str, Tensor]]:
    """The same of the step in micro-batches of a token budget. Many budgets cut a step at the same places: those are computed once."""
    prepared = algorithm.prepare(material(algorithm), {})
    places = tuple(piece.sequences for piece in micro_batches(with_loss(prepared), budget))
    if (algorithm, places) not in CUTS:
        CUTS[algorithm, places] = gradients(algorithm, prepared, budget)
    return CUTS[algorithm, places]


@pytest.mark.proves("layout")
@every_case
@quick
@given(budget=st.integers(1, 80))
def test_any_token_budget_gives_the_same_gradient(algorithm: Algorithm, budget: int) -> None:
    """Weights are those of the whole step, so micro-batches simply add, however ragged they are."""
    assert_same_gradients(whole(algorithm), cut(algorithm, budget))


@pytest.mark.proves("layout")
@every_case
def test_any_token_budget_gives_the_same_gradient_in_float32(algorithm: Algorithm) -> None:
    policy = small_policy(dtype=torch.float32)
    prepared = algorithm.prepare(material(algorithm), {})
    one, other = gradients(algorithm, prepared, policy=policy), gradients(algorithm, prepared, 1, policy)
    assert_same_gradients(one, other, 1e-6)


def reordered(step: Batch, order: list[int]) -> Batch:
    """Units in another order; sequences of one unit stay neighbours, and units are numbered anew."""
    units = [[n for n, u in enumerate(step.unit_N) if u == unit] for unit in dict.fromkeys(step.unit_N)]
    sequences = [n for i in order for n in units[i]]
    return gather(step, sequences).replace(unit_N=tuple(i for i, unit in enumerate(order) for _ in units[unit]))


@pytest.mark.proves("layout")
@every_case
@quick
@given(data=st.data())
def test_any_order_of_units_gives_the_same_gradient(algorithm: Algorithm, data: Any) -> None:
    step = material(algorithm)
    order = data.draw(st.permutations(range(len(set(step.unit_N)))))
    budget = data.draw(st.integers(1, 80))
    assert_same_gradients(whole(algorithm), gradients(algorithm, algorithm.prepare(reordered(step, list(order)), {}), budget))


@pytest.mark.proves("layout")
@every_case
def test_a_packed_batch_gives_the_gradient_of_its_documents_one_by_one(algorithm: Algorithm) -> None:
    """Every unit alone in its forward pass, without any other before it."""
    prepared = algorithm.prepare(material(algorithm), {})
    pieces = micro_batches(prepared, 1)
    assert len(pieces) == len(set(prepared.unit_N))
    assert_same_gradients(whole(algorithm), cut(algorithm, 1))


@pytest.mark.parametrize("waste", [1.0, 100.0])
def test_padding_inside_the_attention_changes_nothing(waste: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Similar lengths share a padded call; all in one bucket or nearly each in its own, the log-probs are the same."""
    generator = np.random.default_rng(0)
    lengths = [2, 3, 11, 12, 14, 31, 40, 41]
    batch = pack_examples([Example(generator.integers(0, VOCABULARY, n), np.arange(n) > 0) for n in lengths])
    with torch.no_grad():
        expected = forward(shared_policy(), batch).logprob_T
        monkeypatch.setattr(attention, "WASTE", waste)
        buckets = len(Packed(batch.starts).buckets)
        found = forward(shared_policy(), batch).logprob_T
    assert buckets == (1 if waste > 1 else 4)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def packed_logits(batch: Batch) -> Tensor:
    policy = shared_policy()
    layout = Packed(batch.starts)
    with torch.no_grad():
        return head_logits(policy.hidden(batch.ids_T[None], positions(batch)[None], **{LAYOUT: layout})[0], policy.head)


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_document_does_not_see_its_neighbours(changed: int) -> None:
    """With any other ids in one document, every other document's logits are the same to the last bit."""
    ids = [np.array([5, 6, 7, 8]), np.array([9, 10, 11, 12, 13, 14]), np.array([3, 4, 15])]
    one = pack_examples([Example(i, np.arange(len(i)) > 0) for i in ids])
    ids[changed] = (ids[changed] + 5) % VOCABULARY
    other = pack_examples([Example(i, np.arange(len(i)) > 0) for i in ids])
    before, after = packed_logits(one), packed_logits(other)
    for n in range(3):
        part = slice(one.starts[n], one.starts[n + 1])
        assert torch.equal(before[part], after[part]) == (n != changed)


def test_positions_start_again_in_every_document() -> None:
    batch = pack_examples([Example(np.arange(n) + 3, np.arange(n) > 0) for n in (3, 1, 4)])
    assert positions(batch).tolist() == [0, 1, 2, 0, 0, 1, 2, 3]


def test_documents_equal_transformers_alone() -> None:
    """The packed logits of each document are those of the stock model on that document by itself."""
    from transformers import AutoModelForCausalLM

    policy = small_policy(dtype=torch.float32)
    stock = AutoModelForCausalLM.from_config(
        copy.deepcopy(policy.model.config), attn_implementation="eager", dtype=torch.float32
    ).eval()
    stock.load_state_dict(policy.model.state_dict())
    batch = pack_examples([Example(np.arange(n) % 20 + 3, np.arange(n) > 0) for n in (9, 2, 30)])
    with torch.no_grad():
        hidden = policy.hidden(batch.ids_T[None], positions(batch)[None], **{LAYOUT: Packed(batch.starts)})[0]
        ours = head_logits(hidden, policy.head)
        for start, end in zip(batch.starts, batch.starts[1:], strict=False):
            torch.testing.assert_close(ours[start:end], stock(batch.ids_T[None, start:end]).logits[0], rtol=1e-5, atol=1e-5)


@every_case
def test_units_without_loss_can_be_left_out(algorithm: Algorithm) -> None:
    """The trainer drops them; their place in the denominators is already in the weights."""
    prepared = algorithm.prepare(material(algorithm), {})
    assert_same_gradients(whole(algorithm), gradients(algorithm, prepared, dropped=False), 1e-12)


@every_case
def test_a_mini_batch_is_a_step_of_its_own(algorithm: Algorithm) -> None:
    """Cut first, prepared after: denominators are those of the optimizer step, not of the whole rollout."""
    step = material(algorithm)
    pieces = mini_batches(step, 2, 0)
    assert len(pieces) == 2 and sum(p.sequences for p in pieces) == step.sequences
    kind = getattr(algorithm, "reduction", "")
    for piece in pieces:
        prepared = algorithm.prepare(piece, {})
        if kind in ("token_mean", "sequence_mean") and "weight_T" in prepared.columns:
            assert float(prepared.weight_T.sum()) == pytest.approx(1.0, rel=1e-5)


@every_case
@pytest.mark.parametrize("budget", [1, 17])
def test_figures_do_not_depend_on_the_layout(algorithm: Algorithm, budget: int) -> None:
    """Metrics are sums over counts: no mean of means."""
    prepared = with_loss(algorithm.prepare(material(algorithm), {}))
    trainer = shared_trainer(algorithm)

    def figures(token_budget: int) -> dict[str, float]:
        found = [m for piece in micro_batches(prepared, token_budget) for m in trainer.forward_backward(piece)]
        for network in [learner.network for learner in trainer.learners]:
            if network is not None:
                network.model.zero_grad()
        return dict(merge(found))

    one, other = figures(10**6), figures(budget)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert math.isfinite(value) and other[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


@every_case
def test_a_whole_update_does_not_depend_on_the_layout(algorithm: Algorithm) -> None:
    """Clipping, Adam and weight decay included."""
    moved = []
    for budget in (10**6, 1):
        policy = small_policy()
        settings = Optimization(lr=1e-2, token_budget=budget, clip_norm=0.5, weight_decay=0.1)
        trainer = trainer_for(algorithm, policy, settings)
        update = trainer.update(algorithm.prepare(material(algorithm), {}), 1e-2)
        moved.append((update.grad_norm, {name: p.clone() for name, p in trainer.weights().items()}))
    assert_same_gradients(moved[0], moved[1], 1e-6)  # Adam divides by the gradient: tiny ones lose digits
