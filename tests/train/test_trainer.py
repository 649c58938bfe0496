"""One optimizer step: what it reports, what it refuses, and how much it keeps alive."""

from __future__ import annotations

import math
import weakref

import numpy as np
import pytest
import torch
from material_for_tests import CASES, VOCABULARY, material, shared_policy, small_policy, trainer_for

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.sft import SFT
from posttrain.errors import GuardStop
from posttrain.runs.metrics import merge
from posttrain.train.forward import forward
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import micro_batches, pack_examples
from posttrain.train.trainer import Trainer
from posttrain.types import Batch, Example, Outputs, Terms


class Held:
    """A saved tensor whose end can be noticed."""

    def __init__(self, content: torch.Tensor):
        self.content = content


class Alive:
    """Bytes that autograd keeps for backward passes, now and at most."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def pack(self, tensor: torch.Tensor) -> Held:
        size = tensor.numel() * tensor.element_size()
        self.now += size
        self.peak = max(self.peak, self.now)
        held = Held(tensor)
        weakref.finalize(held, self.release, size)
        return held

    def release(self, size: int) -> None:
        self.now -= size

    def unpack(self, held: Held) -> torch.Tensor:
        return held.content


def equal_examples(count: int) -> Batch:
    generator = np.random.default_rng(0)
    return pack_examples([Example(generator.integers(3, VOCABULARY, 12), np.arange(12) > 0) for _ in range(count)])


def peak(count: int, budget: int) -> int:
    policy = small_policy(dtype=torch.float32)
    trainer = Trainer(policy, SFT(), Optimization(token_budget=budget))
    alive = Alive()
    with torch.autograd.graph.saved_tensors_hooks(alive.pack, alive.unpack):
        trainer.update(SFT().prepare(equal_examples(count), {}), 1e-3)
    assert alive.now == 0, "nothing is kept after the step"
    return alive.peak


def test_what_is_alive_does_not_grow_with_micro_batches() -> None:
    """Sixteen micro-batches hold as much as one; a budget twice as large holds twice as much."""
    one = peak(2, 24)
    assert peak(8, 24) == one and peak(32, 24) == one
    assert peak(32, 48) > 1.5 * one


def test_metrics_hold_no_graph() -> None:
    policy = small_policy(dtype=torch.float32)
    for algorithm in (SFT(), GRPO(entropy=0.1)):
        trainer = Trainer(policy, algorithm, Optimization(), shared_policy(1))
        update = trainer.update(algorithm.prepare(material(algorithm), {}), 1e-3)
        for metric in update.metrics:
            for value in (metric.total, metric.count):
                assert not isinstance(value, torch.Tensor) or not value.requires_grad, metric.name


@pytest.mark.parametrize("algorithm", CASES)
def test_an_update_reports_its_loss_and_terms(algorithm: Algorithm) -> None:
    policy = small_policy()
    prepared = algorithm.prepare(material(algorithm), {})
    trainer = trainer_for(algorithm, policy, Optimization(token_budget=20), shared_policy(1))
    with torch.no_grad():
        terms = algorithm.terms(trainer.outputs(prepared), prepared)
        expected = {f"loss/{t.name}": float((t.weight * t.loss).sum()) for t in terms.terms}
    update = trainer.update(prepared, 1e-3)
    figures = merge(update.metrics)
    assert figures["trained"] == int(prepared.mask_T.sum())
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert figures["loss"] == pytest.approx(sum(expected.values()), rel=1e-9)
    assert update.moved and update.grad_norm > 0


def test_fill_asks_the_reference_at_the_same_temperature() -> None:
    algorithm = GRPO()
    step = material(algorithm).replace(reference_T=None)
    trainer = Trainer(small_policy(), algorithm, Optimization(token_budget=15), shared_policy(1))
    filled = trainer.fill(step)
    with torch.no_grad():
        expected = forward(shared_policy(1), step).logprob_T
    assert filled.reference_T is not None and not filled.reference_T.requires_grad
    torch.testing.assert_close(filled.reference_T, expected, rtol=0, atol=1e-12)
    assert len(micro_batches(step, 15)) > 1
    alone = Trainer(small_policy(), GRPO(beta=0.0), Optimization())
    assert alone.fill(step) is step


def test_the_reference_is_never_moved() -> None:
    """I62: its weights are the same bits after steps of the policy."""
    reference = small_policy(1)
    before = [p.detach().clone() for p in reference.model.parameters()]
    algorithm = GRPO()
    trainer = Trainer(small_policy(), algorithm, Optimization(lr=1e-2), reference)
    for _ in range(3):
        trainer.update(algorithm.prepare(trainer.fill(material(algorithm).replace(reference_T=None)), {}), 1e-2)
    assert all(torch.equal(p, b) for p, b in zip(reference.model.parameters(), before, strict=True))
    assert all(p.grad is None for p in reference.model.parameters())


class Broken(SFT):
    """Its loss is not finite."""

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        terms = super().terms(outputs, batch)
        return Terms((type(terms.terms[0])("nll", terms.terms[0].loss * math.inf, terms.terms[0].weight),))


def test_i58_a_loss_that_is_not_finite_stops_the_run_before_it_moves() -> None:
    policy = small_policy()
    before = [p.detach().clone() for p in policy.model.parameters()]
    trainer = Trainer(policy, Broken(), Optimization())
    with pytest.raises(GuardStop, match="the gradient's norm is nan: nothing was updated"):
        trainer.update(SFT().prepare(equal_examples(2), {}), 1e-3)
    assert all(torch.equal(p, b) for p, b in zip(policy.model.parameters(), before, strict=True))
    assert all(p.grad is None for p in policy.model.parameters())
    assert not trainer.optimizer.adam.state


def test_the_same_step_twice_is_the_same_to_the_last_bit() -> None:
    """T08 in small: two runs of the same steps have identical losses."""
    losses = []
    for _ in range(2):
        trainer = Trainer(small_policy(dtype=torch.float32), SFT(), Optimization(lr=1e-2, token_budget=30))
        steps = [trainer.update(SFT().prepare(equal_examples(8), {}), 1e-2) for _ in range(5)]
        losses.append([merge(update.metrics)["loss"].hex() for update in steps])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 5
