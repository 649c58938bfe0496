"""The gradient of a step is that of one process, however many share it: of every algorithm, with whole and with sharded weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import ranks_for_tests as ranks
import torch
from material_for_tests import (
    CASES,
    DEFAULTS,
    VOCABULARY,
    gradients,
    material,
    plain_batch,
    shared_policy,
    small_mixture,
    small_policy,
    trainer_for,
)
from torch import Tensor

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.ppo import PPO
from posttrain.algorithms.sft import SFT
from posttrain.models import fused_body
from posttrain.models.lora import Lora, add_adapters
from posttrain.models.policy import Policy
from posttrain.runs.metrics import merge
from posttrain.system.world import ALONE, World, using
from posttrain.train import parallel
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import with_loss
from posttrain.train.parts import whole
from posttrain.train.trainer import NonFinite, Trainer
from posttrain.types import Batch

CLOSE = 1e-10
BUDGETS = (10**6, 24)  # one micro-batch, and several: some processes have fewer than others
Case = tuple[Algorithm, Batch, Any]


def found_gradients(trainer: Trainer, prepared: Batch) -> tuple[float, dict[str, Tensor]]:
    """The loss and whole gradients of a step that this process shares with others, as `Trainer.update` makes them."""
    (_, own), *_ = trainer.accumulate(with_loss(prepared), [], lambda: None)
    metrics = parallel.sum_metrics(own)
    for learner in () if trainer.sharded else trainer.learners:
        parallel.sum_gradients(learner.optimizer)
    found = {}
    for learner in trainer.learners:
        masters, parameters = learner.optimizer.masters, learner.optimizer.parameters
        for name, master in masters.items():
            if master.grad is not None:
                found[learner.prefix + name] = whole(master.grad, parameters[name]).clone()
    return sum(float(m.total) for m in metrics if m.name == "loss"), found


def worst(trainer: Trainer, prepared: Batch, expected: tuple[float, dict[str, Tensor]]) -> float:
    loss, found = found_gradients(trainer, prepared)
    for learner in trainer.learners:
        learner.optimizer.zero()
    assert set(found) == set(expected[1])
    largest = [float((found[n] - g).abs().max() / g.abs().max().clamp(min=1.0)) for n, g in expected[1].items()]
    return max(abs(loss - expected[0]), *largest)


def distances(world: World, cases: list[Case], budgets: Sequence[int]) -> list[list[float]]:
    found = []
    for algorithm, prepared, expected in cases:
        each = []
        for budget in budgets:
            trainer = trainer_for(algorithm, copy.deepcopy(shared_policy()), Optimization(token_budget=budget))
            each.append(worst(trainer, prepared, expected))
        found.append(each)
    return found


def prepared_cases(cases: Sequence[Any]) -> list[Case]:
    made = []
    for case in cases:
        algorithm = case.values[0]
        prepared = algorithm.prepare(material(algorithm), algorithm.start())
        made.append((algorithm, prepared, gradients(algorithm, prepared)))
    return made


def check(count: int, sharding: str, cases: Sequence[Any], budgets: Sequence[int]) -> None:
    for rank, found in enumerate(ranks.run(count, distances, prepared_cases(cases), budgets, sharding=sharding)):
        for case, each in zip(cases, found, strict=True):
            assert max(each) < CLOSE, f"process {rank}, {case.id}: {each}"


@pytest.mark.parametrize("sharding", ["never", "always"])
def test_the_gradient_of_every_algorithm_is_that_of_one_process(sharding: str) -> None:
    check(2, sharding, DEFAULTS, BUDGETS[1:])


@pytest.mark.cluster
@pytest.mark.parametrize("sharding", ["never", "always"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_with_every_setting_and_number_of_processes_too(count: int, sharding: str) -> None:
    check(count, sharding, CASES, BUDGETS)


def trained(world: World, make: Callable[[], Trainer], batch: Batch) -> list[Any]:
    """Two updates, and what a checkpoint holds after them; in the first process, as bytes that are the same in one process."""
    trainer = make()
    updates = [trainer.update(batch, 1e-2) for _ in range(2)]
    weights, moments = trainer.weights(), trainer.moments()
    return [[u.grad_norm for u in updates], *({n: t.tolist() for n, t in tensors.items()} for tensors in (weights, moments))]


def with_adapters() -> Trainer:
    policy = copy.deepcopy(shared_policy())
    add_adapters(policy.model, Lora(rank=2), seed=0)
    return Trainer(policy, SFT(), Optimization(lr=1e-2))


def odd_vocabulary() -> Trainer:
    """Tied embeddings of 25 rows, which neither 2 nor 4 processes divide; the last rows must learn too."""
    return Trainer(small_policy(vocab_size=VOCABULARY + 1), SFT(), Optimization(lr=1e-2))


def experts() -> Trainer:
    """A mixture of experts, with the auxiliary loss of its routers."""
    return Trainer(small_mixture(torch.float64), SFT(), Optimization(lr=1e-2, router_aux_loss_coef=0.1, token_budget=24))


@pytest.mark.parametrize("make", [with_adapters, odd_vocabulary, experts])
def test_sharded_weights_learn_and_are_saved_as_those_of_one_process(make: Callable[[], Trainer]) -> None:
    algorithm = SFT()
    batch = algorithm.prepare(material(algorithm), {})
    expected = trained(ALONE, make, batch)
    found, other = ranks.run(2, trained, make, batch, sharding="always")
    assert found[0] == pytest.approx(expected[0], rel=1e-6) and found[0] == other[0], "one norm, in all processes"
    assert other[1:] == [{}, {}], "the first process saves"
    for own, wanted in zip(found[1:], expected[1:], strict=True):
        assert own.keys() == wanted.keys()
        for name in own:
            # adapters of peft are in float32
            assert np.allclose(own[name], wanted[name], rtol=0, atol=1e-9 if make is odd_vocabulary else 1e-6), name
    if make is odd_vocabulary:
        moved = np.abs(np.array(found[2]["exp_avg.model.embed_tokens.weight"]))
        assert moved[-1].max() > 0, "the last row has a gradient: every token's logit does"


def fused_distance(world: World, batch: Batch, kind: str, layered: bool) -> float:
    """The gradient of the fused pass on sharded weights against that of the modules on whole ones. It is for CUDA and runs here too."""
    import kernels_for_tests  # noqa: F401

    fused_body.available, fused_body.fits = (lambda *_: True), (lambda *_: True)
    checkpointing = "layer" if layered else "never"
    trainer = Trainer(float32_policy(kind), SFT(), Optimization(token_budget=24, checkpointing=checkpointing))
    assert fused_body.takes_fused_pass(trainer.policy) and trainer.sharded
    with using(ALONE):
        fused_body.available = lambda *_: False
        expected = found_gradients(Trainer(float32_policy(kind), SFT(), Optimization()), batch)
    fused_body.available = lambda *_: True
    return worst(trainer, batch, expected)


def float32_policy(kind: str) -> Policy:
    policy = small_mixture() if kind == "experts" else small_policy(dtype=torch.float32)
    if kind == "adapters":
        add_adapters(policy.model, Lora(rank=2), seed=0)
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
    return policy


@pytest.mark.parametrize(("kind", "layered"), [("dense", False), ("adapters", True), ("experts", True)])
def test_the_fused_pass_reads_sharded_layers_while_they_are_gathered(kind: str, layered: bool) -> None:
    algorithm = SFT()
    batch = algorithm.prepare(material(algorithm), {})
    found = ranks.run(2, fused_distance, batch, kind, layered, sharding="always")
    assert max(found) < 1e-5


def test_shares_are_cut_between_units_and_balanced_by_tokens() -> None:
    batch = plain_batch([1.0, 0.0] * 4, [0, 0, 1, 1, 2, 2, 3, 3], [9, 1, 1, 1, 1, 1, 1, 9])
    cut = parallel.shares(batch, 2)
    assert [piece.tokens for piece in cut] == [16, 16]
    whole_units = parallel.shares(batch.replace(unit_N=(0, 0, 0, 0, 0, 0, 0, 1)), 2)
    assert [piece.sequences for piece in whole_units] == [7, 1]
    assert [piece.sequences for piece in parallel.shares(batch.replace(unit_N=(0,) * 8), 3)] in (
        [8, 0, 0],
        [0, 8, 0],
        [0, 0, 8],
    )


def early(world: World, step: Batch) -> list[Any]:
    """Norms of the gradients of both models, and some figures, where the critic learns while it gives its values."""
    algorithm = PPO(group=4, epochs=1, beta=0.0)
    trainer = trainer_for(algorithm, copy.deepcopy(shared_policy()), Optimization(token_budget=24))
    filled = trainer.fill(step, state=algorithm.start())
    assert filled.learned == {"critic"}
    figures = merge(trainer.update(algorithm.prepare(filled, algorithm.start()), 1e-3).metrics)
    return [figures[name] for name in ("loss", "loss/value", "value/mean", "grad_norm/critic", "kl/update")]


@pytest.mark.parametrize("sharding", ["never", "always"])
def test_a_critic_that_learns_early_has_the_gradient_of_one_process(sharding: str) -> None:
    step = material(PPO(group=4, epochs=1, beta=0.0)).replace(value_T=None)
    expected = early(ALONE, step)
    for found in ranks.run(2, early, step, sharding=sharding):
        assert found == pytest.approx(expected, rel=1e-6)  # the norm of shards is in float32


def out_of_memory(world: World, batch: Batch) -> list[Any]:
    """The second process runs out of memory once; all of them halve their budget and do the step again."""
    trainer = Trainer(copy.deepcopy(shared_policy()), SFT(), Optimization(token_budget=64))
    inner, calls = trainer.forward_backward, [0]

    def scarce(*given: Any) -> Any:
        calls[0] += 1
        if world.rank == 1 and calls[0] == 1:
            raise torch.OutOfMemoryError("no memory left")
        return inner(*given)

    trainer.forward_backward = scarce  # type: ignore[method-assign]
    update = trainer.update(batch, 1e-3)
    return [trainer.token_budget, update.grad_norm]


def test_where_one_process_has_no_memory_all_halve_their_budget() -> None:
    algorithm = SFT()
    batch = algorithm.prepare(material(algorithm), {})
    alone = Trainer(copy.deepcopy(shared_policy()), SFT(), Optimization()).update(batch, 1e-3)
    found = ranks.run(2, out_of_memory, batch)
    assert found[0] == found[1] == [32, pytest.approx(alone.grad_norm, rel=1e-6)]


def not_finite(world: World, batch: Batch) -> str:
    trainer = Trainer(copy.deepcopy(shared_policy()), SFT(), Optimization())
    before = {name: t.clone() for name, t in trainer.weights().items()}
    with pytest.raises(NonFinite) as error:
        trainer.update(batch, 1e-3)
    assert all(torch.equal(t, before[name]) for name, t in trainer.weights().items())
    return error.value.what


@pytest.mark.parametrize("sharding", ["never", "always"])
def test_a_loss_that_is_not_finite_in_one_process_is_refused_by_all(sharding: str) -> None:
    """A decision of one process alone would leave the others waiting for it."""
    algorithm = SFT()
    batch = algorithm.prepare(material(algorithm), {})
    weight_T = batch.weight_T.clone()
    weight_T[-1] = torch.inf  # in the share of the last process
    found = ranks.run(2, not_finite, batch.replace(weight_T=weight_T), sharding=sharding)
    assert found[0] == found[1] and "is" in found[0]


def own_start(world: World) -> list[float]:
    """Each process begins with other weights, as after a random initialisation of its own."""
    policy = small_policy(seed=world.rank)
    trainer = Trainer(policy, SFT(), Optimization())
    (first, *_) = trainer.learners[0].optimizer.parameters.values()
    return whole(first).flatten()[:8].tolist()


@pytest.mark.parametrize("sharding", ["never", "always"])
def test_all_processes_begin_with_the_weights_of_the_first(sharding: str) -> None:
    found = ranks.run(2, own_start, sharding=sharding)
    assert found[0] == found[1] == next(small_policy(seed=0).model.parameters()).flatten()[:8].tolist()
