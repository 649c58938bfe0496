"""One optimizer step: what it reports, what it refuses, and how much it keeps alive."""

from __future__ import annotations

import math
import weakref

import numpy as np
import pytest
import torch
from events_for_tests import Emitted
from material_for_tests import CASES, VOCABULARY, material, shared_policy, small_policy, trainer_for

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ppo import PPO
from posttrain.algorithms.sft import SFT
from posttrain.errors import GuardStop, OutOfMemory, UserError
from posttrain.models.lora import Lora, add_adapters
from posttrain.models.policy import Policy
from posttrain.runs.metrics import merge
from posttrain.system.processes import HALVED
from posttrain.train import trainer as trainer_module
from posttrain.train.forward import forward
from posttrain.train.memory import activation_bytes, set_checkpointing
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import micro_batches, pack_examples
from posttrain.train.roles import reference as reference_module
from posttrain.train.roles.reference import Reference
from posttrain.train.trainer import Trainer
from posttrain.types import Batch, Example, Outputs, Terms


def test_sampler_and_trainer_are_compared_in_three_figures() -> None:
    """Two tokens with p = 0.3 and 0.6 now that were sampled at 0.2 and 0.75; what is outside the mask may hold anything."""
    batch = pack_examples([Example(np.arange(4), np.array([False, True, False, True]))])
    log, odd = math.log, float("nan")
    batch = batch.replace(behaviour_T=torch.tensor([odd, log(0.2), math.inf, log(0.75)], dtype=torch.float64))
    logprob_T = torch.tensor([odd, log(0.3), 5.0, log(0.6)], dtype=torch.float64)
    figures = merge(trainer_module.mismatch(logprob_T, batch))
    assert figures["mismatch"] == pytest.approx((log(1.5) + log(1.25)) / 2)
    assert figures["mismatch/max"] == pytest.approx(log(1.5))
    assert figures["mismatch/kl"] == pytest.approx(((1.5 - 1 - log(1.5)) + (0.8 - 1 - log(0.8))) / 2)
    # a token of older weights is meant to differ, and is counted apart
    batch = batch.replace(stale_T=torch.tensor([True, True, False, False]))
    figures = merge(trainer_module.mismatch(logprob_T, batch))
    assert figures["mismatch/stale"] == pytest.approx(log(1.5))
    assert figures["mismatch"] == figures["mismatch/max"] == pytest.approx(log(1.25))
    assert figures["mismatch/kl"] == pytest.approx(0.8 - 1 - log(0.8))
    # of tokens of older weights alone there is no mismatch, and so no largest one; other micro-batches keep theirs
    older = trainer_module.mismatch(logprob_T, batch.replace(stale_T=torch.tensor([True] * 4)))
    alone = merge(older)
    assert all(math.isnan(alone[name]) for name in ("mismatch", "mismatch/max", "mismatch/kl"))
    both = merge([*older, *trainer_module.mismatch(logprob_T, batch)])
    assert both["mismatch/max"] == both["mismatch"] == pytest.approx(log(1.25))


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
        trainer = Trainer(policy, algorithm, Optimization(), [Reference(shared_policy(1))])
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


def test_what_is_left_of_the_side_work_is_done_before_the_update_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, done = SFT(), list[int]()
    trainer = Trainer(small_policy(), algorithm, Optimization(token_budget=20))
    prepared = algorithm.prepare(material(algorithm), {})
    pieces, work = len(micro_batches(prepared, 20)), iter(range(1, 99))
    norm = trainer.optimizer.norm
    monkeypatch.setattr(trainer.optimizer, "norm", lambda: done.append(-1) or norm())
    trainer.update(prepared, 1e-3, lambda: done.append(next(work)) or done[-1] < pieces + 5)
    assert done == [*range(1, pieces + 6), -1]


def test_fill_asks_the_reference_at_the_same_temperature() -> None:
    algorithm = GRPO()
    step = material(algorithm).replace(reference_T=None)
    trainer = Trainer(small_policy(), algorithm, Optimization(token_budget=15), [Reference(shared_policy(1))])
    filled = trainer.fill(step)
    with torch.no_grad():
        expected = forward(shared_policy(1), step).logprob_T
    assert filled.reference_T is not None and not filled.reference_T.requires_grad
    torch.testing.assert_close(filled.reference_T, expected, rtol=0, atol=1e-12)
    assert len(micro_batches(step, 15)) > 1
    alone = Trainer(small_policy(), GRPO(beta=0.0), Optimization())
    assert alone.fill(step) is step


def test_the_reference_is_never_moved() -> None:
    """Its weights are the same bits after steps of the policy."""
    reference = small_policy(1)
    before = [p.detach().clone() for p in reference.model.parameters()]
    algorithm = GRPO()
    trainer = Trainer(small_policy(), algorithm, Optimization(lr=1e-2), [Reference(reference)])
    for _ in range(3):
        trainer.update(algorithm.prepare(trainer.fill(material(algorithm).replace(reference_T=None)), {}), 1e-2)
    assert all(torch.equal(p, b) for p, b in zip(reference.model.parameters(), before, strict=True))
    assert all(p.grad is None for p in reference.model.parameters())


class Broken(SFT):
    """Its loss is not finite."""

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        terms = super().terms(outputs, batch)
        return Terms((type(terms.terms[0])("nll", terms.terms[0].loss * math.inf, terms.terms[0].weight),))


def test_a_loss_that_is_not_finite_stops_the_run_before_it_moves() -> None:
    policy = small_policy()
    before = [p.detach().clone() for p in policy.model.parameters()]
    trainer = Trainer(policy, Broken(), Optimization())
    with pytest.raises(GuardStop, match="the gradient's norm is nan: nothing was updated"):
        trainer.update(SFT().prepare(equal_examples(2), {}), 1e-3)
    assert all(torch.equal(p, b) for p, b in zip(policy.model.parameters(), before, strict=True))
    assert all(p.grad is None for p in policy.model.parameters())
    assert not trainer.optimizer.adam.state


def test_the_same_step_twice_is_the_same_to_the_last_bit() -> None:
    """Two runs of the same steps have identical losses."""
    losses = []
    for _ in range(2):
        trainer = Trainer(small_policy(dtype=torch.float32), SFT(), Optimization(lr=1e-2, token_budget=30))
        steps = [trainer.update(SFT().prepare(equal_examples(8), {}), 1e-2) for _ in range(5)]
        losses.append([merge(update.metrics)["loss"].hex() for update in steps])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 5


class Full(SFT):
    """No memory for micro-batches of more than `most` tokens, in the forward pass of the second of them."""

    def __init__(self, most: int):
        super().__init__()
        object.__setattr__(self, "most", most)
        object.__setattr__(self, "seen", [])

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        self.seen.append(batch.tokens)
        if len(self.seen) > 1 and batch.tokens > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().terms(outputs, batch)


def weights_after(algorithm: SFT, budget: int, steps: int = 2) -> tuple[Trainer, list[torch.Tensor], list[float]]:
    trainer = Trainer(small_policy(), algorithm, Optimization(lr=1e-2, token_budget=budget), events=Emitted())
    updates = [trainer.update(algorithm.prepare(equal_examples(8), {}), 1e-2) for _ in range(steps)]
    return trainer, list(trainer.policy.model.parameters()), [merge(u.metrics)["loss"] for u in updates]


def test_an_automatic_token_budget_is_what_memory_allows_and_8192_where_nobody_can_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own needs, those of others, and what a halved one leaves."""
    policy = small_policy()

    def chosen(**given: float) -> int:
        return Trainer(policy, SFT(), Optimization(checkpointing="never"), **given).token_budget

    assert chosen() == 8192, "the CPU"
    trainer = Trainer(policy, SFT(), Optimization(token_budget=48))
    need = trainer._need(False, 32768)
    monkeypatch.setattr("posttrain.train.trainer.at_hand", lambda device: 1.2 * need)
    assert chosen() == 32768 and Trainer(policy, SFT(), Optimization(token_budget=48)).token_budget == 48
    assert chosen(reserved_bytes=0.5 * need) == 16384 and chosen(reserved_bytes=2 * need) == 1024
    longer = Trainer(policy, SFT(), Optimization(), longest=49152, events=Emitted())
    assert longer.checkpointed and longer.token_budget == 8192, "one sequence decides where it is longer than a micro-batch"


def test_without_memory_the_token_budget_is_halved_once_with_the_same_gradient() -> None:
    """To the last bit the step of a trainer that had half the budget from the start, and to rounding that of the whole budget; the
    first micro-batch's gradient, which was there when memory ran out, does not count twice."""
    full = Full(24)
    trainer, found, losses = weights_after(full, 48)
    assert full.seen == [48, 48, *[24] * 8], "one went well, one failed, and both steps in pieces of two examples"
    _, halved, halved_losses = weights_after(SFT(), 24)
    _, whole, whole_losses = weights_after(SFT(), 48)
    assert losses == halved_losses and all(torch.equal(a, b) for a, b in zip(found, halved, strict=True))
    assert losses == pytest.approx(whole_losses, rel=1e-12)
    for mine, expected in zip(found, whole, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-9)
    (text,) = trainer.events.texts  # type: ignore[attr-defined]
    assert "out of memory in training" in text and "token_budget is halved to 24" in text and trainer.token_budget == 24
    assert trainer.settings.token_budget == 48


def test_without_memory_a_second_time_it_stops() -> None:
    policy = small_policy()
    before = [p.detach().clone() for p in policy.model.parameters()]
    full, events = Full(12), Emitted()
    trainer = Trainer(policy, full, Optimization(token_budget=48), events=events)
    with pytest.raises(torch.OutOfMemoryError, match="2.00 GiB"):
        trainer.update(full.prepare(equal_examples(8), {}), 1e-2)
    assert full.seen == [48, 48, 24], "once whole, once halved"
    assert all(torch.equal(p, b) for p, b in zip(policy.model.parameters(), before, strict=True))
    assert len(events.of("memory")) == 1


def test_with_sharded_weights_all_processes_are_started_again_with_half_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are in the middle of a pass, so that nothing can be done again here; once only, as without them."""
    full, optimization = Full(12), Optimization(token_budget=48)
    trainer = Trainer(small_policy(), full, optimization)
    trainer.sharded = True
    with pytest.raises(OutOfMemory, match=r"out of memory in training, in process 0 of 1 \(CUDA out of memory"):
        trainer.update(full.prepare(equal_examples(8), {}), 1e-2)
    monkeypatch.setenv(HALVED, "1")
    assert Trainer(small_policy(), full, optimization).token_budget == 48, "its weights are whole"


def test_the_reference_is_asked_in_halves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = GRPO()
    step = material(algorithm).replace(reference_T=None)
    expected = Trainer(small_policy(), algorithm, Optimization(), [Reference(shared_policy(1))]).fill(step).reference_T
    plain, sizes = reference_module.forward, []

    def forward_once(policy: Policy, piece: Batch) -> Outputs:
        sizes.append(piece.tokens)
        if len(sizes) == 1:
            raise torch.OutOfMemoryError("full")
        return plain(policy, piece)

    monkeypatch.setattr(reference_module, "forward", forward_once)
    trainer = Trainer(small_policy(), algorithm, Optimization(token_budget=step.tokens), [Reference(shared_policy(1))])
    found = trainer.fill(step).reference_T
    assert sizes[0] == step.tokens and len(sizes) > 2 and max(sizes[1:]) <= step.tokens // 2
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("algorithm", [SFT(), GRPO(beta=0.0), PPO(group=4)])
@pytest.mark.parametrize("adapted", [False, True])
def test_checkpointed_layers_give_the_same_gradients_and_keep_less(algorithm: Algorithm, adapted: bool) -> None:
    """Of the policy, of adapters on it, and of a critic. Twelve layers, so that what one of them needs again is little."""
    found, peaks = [], []
    for way in ("never", "layer"):
        policy = small_policy(num_hidden_layers=12)
        if adapted:
            pytest.importorskip("peft")
            add_adapters(policy.model, Lora(rank=2), 0)
        trainer = trainer_for(algorithm, policy, Optimization(checkpointing=way))
        assert trainer.checkpointed == (way == "layer") == policy.body.layers[3].gradient_checkpointing
        alive = Alive()
        with torch.autograd.graph.saved_tensors_hooks(alive.pack, alive.unpack):
            trainer.accumulate(algorithm.prepare(material(algorithm), {}), [], lambda: None)
        peaks.append(alive.peak)
        optimizers = [learner.optimizer for learner in trainer.learners]
        found.append([g.clone() for optimizer in optimizers for g in optimizer.gradients()])
    assert len(found[0]) > 20 and all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    if not adapted:
        assert peaks[1] < 0.5 * peaks[0]


def test_checkpointing_is_chosen_by_the_memory_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, settings = small_policy(dtype=torch.float32), Optimization(token_budget=1000)
    kept = 4.0 * 1000 * (2 * (9 * 16 + 4 * 24 + 2 * 8) + 4 * (16 + 24))
    need = kept + 12.0 * policy.parameters + 8.0 * 1000 * VOCABULARY  # logits of all tokens, which are fewer than a chunk
    for have, beside, expected in ((need + 1, 0.0, False), (need - 1, 0.0, True), (need + 1, 2.0, True), (None, 9e99, False)):
        monkeypatch.setattr(trainer_module, "at_hand", lambda device, have=have: have)
        events = Emitted()
        trainer = Trainer(policy, SFT(), settings, reserved_bytes=beside, events=events)
        assert trainer.checkpointed == expected == policy.body.gradient_checkpointing
        assert len(events.of("memory")) == expected
    monkeypatch.setattr(trainer_module, "at_hand", lambda device: 0.0)
    assert not Trainer(policy, SFT(), Optimization(checkpointing="never")).checkpointed


def test_what_checkpointed_layers_keep() -> None:
    """Each layer its input of 16 numbers, and one layer at a time all that it needs."""
    policy = small_policy(dtype=torch.float32)
    layer, working = 9 * 16 + 4 * 24 + 2 * 8, 4 * (16 + 24)
    assert activation_bytes(policy, 10) == 4 * 10 * (2 * layer + working)
    assert activation_bytes(policy, 10, checkpointed=True) == 4 * 10 * (2 * 16 + layer + working)


def test_a_model_without_layers_to_checkpoint_is_refused_in_words() -> None:
    with pytest.raises(UserError, match="checkpointing=layer: Linear cannot be checkpointed by layers; leave it out"):
        set_checkpointing(torch.nn.Linear(2, 2), True)
    set_checkpointing(torch.nn.Linear(2, 2), False)
    with pytest.raises(UserError, match="checkpointing must be auto, never or layer, not 'always'"):
        Optimization(checkpointing="always")
