"""Roles in the trainer: which columns they fill and when, what they add, where they live, and what a checkpoint keeps of them."""

from __future__ import annotations

from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from material_for_tests import material, roles_for, shared_policy, small_policy

from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ppo import PPO
from posttrain.models.scorer import from_policy
from posttrain.ops.kl import kl_estimate
from posttrain.runs.layout import TokenArrays
from posttrain.runs.metrics import merge
from posttrain.train.checkpoint import with_arrays, without_arrays
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import micro_batches
from posttrain.train.roles.critic import Critic
from posttrain.train.roles.reference import MovingReference, Reference
from posttrain.train.trainer import Trainer
from posttrain.types import Example, Metric

TEXT = [Example(np.array([3, 4, 5, 6]), np.arange(4) > 0), Example(np.array([7, 8, 9]), np.arange(3) > 0)]


def test_a_watched_reference_fills_only_what_is_shown_and_gives_the_kl() -> None:
    algorithm = GRPO(beta=0.0)
    step = material(algorithm)
    trainer = Trainer(small_policy(), algorithm, Optimization(), [Reference(shared_policy(1), watched=True)])
    assert trainer.fill(step) is step and trainer.role_metrics(step) == []
    shown = trainer.fill(step, shown=True)
    (metric,) = trainer.role_metrics(shown)
    kl_T = kl_estimate("k3", step.behaviour_T, shown.reference_T).where(step.mask_T, 0.0)
    assert metric.name == "kl" and metric.value == pytest.approx(float(kl_T.sum() / step.mask_T.sum()))
    needed = Trainer(small_policy(), GRPO(), Optimization(), [Reference(shared_policy(1))])
    assert needed.role_metrics(needed.fill(step)) == [], "the algorithm has its own"


def test_for_a_stop_at_a_kl_that_of_responses_is_measured_in_every_step() -> None:
    """Of algorithms that measure it themselves, and of those that only watch it."""
    for algorithm, watched in ((GRPO(beta=0.0), True), (GRPO(), False)):
        step = material(algorithm)
        trainer = Trainer(small_policy(), algorithm, Optimization(), [Reference(shared_policy(1), watched, every_step=True)])
        filled = trainer.fill(step)
        found = {metric.name: metric.value for metric in trainer.role_metrics(filled)}
        k1_T = (step.behaviour_T - filled.reference_T).where(step.mask_T, 0.0)
        assert found.pop("kl/response") == pytest.approx(float(k1_T.sum()) / step.sequences)
        assert list(found) == ["kl"] * watched


def test_a_watched_reference_measures_the_first_groups_of_a_large_step(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, role = GRPO(beta=0.0), Reference(shared_policy(1), watched=True)
    step = material(algorithm)
    trainer = Trainer(small_policy(), algorithm, Optimization(), [role])
    whole = trainer.fill(step, shown=True).reference_T
    cut = step.starts[step.sequences // 2]
    monkeypatch.setattr("posttrain.train.trainer.SHOWN_TOKENS", cut)
    shown = trainer.fill(step, shown=True)
    torch.testing.assert_close(shown.reference_T[:cut], whole[:cut])
    assert bool(shown.reference_T[cut:].isnan().all())
    (metric,) = trainer.role_metrics(shown)
    kl_T = kl_estimate("k3", step.behaviour_T, whole).where(step.mask_T, 0.0)[:cut]
    assert metric.value == pytest.approx(float(kl_T.sum() / step.mask_T[:cut].sum()))
    arrays = TokenArrays(np.array(step.starts), {"ids": step.ids_T.numpy(), "kl": role.token_arrays(shown)["kl"].numpy()})
    assert {"ids", "kl"} == set(arrays.sequence(0)) and {"ids"} == set(arrays.sequence(step.sequences - 1))


def test_a_critic_is_a_learner_with_a_prefix_and_a_rate_of_its_own() -> None:
    policy, slow = small_policy(), Optimization(lr=1e-4)
    trainer = Trainer(policy, PPO(beta=0.0), Optimization(lr=1e-2), [Critic(from_policy(policy, zero=False, seed=1), slow)])
    names = set(trainer.weights())
    assert {name.startswith("critic.") for name in names} == {True, False}
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    algorithm = trainer.algorithm
    trainer.update(algorithm.prepare(material(algorithm), {}), 1e-2)
    far = {name: float((tensor - before[name]).abs().max()) for name, tensor in trainer.weights().items()}
    moved = {own: max(v for name, v in far.items() if name.startswith("critic.") == own) for own in (True, False)}
    assert moved[True] == pytest.approx(1e-4, rel=0.2) and moved[False] == pytest.approx(1e-2, rel=0.2)
    weights, moments = ({n: t.clone() for n, t in tensors.items()} for tensors in (trainer.weights(), trainer.moments()))
    trainer.update(algorithm.prepare(material(algorithm), {}), 1e-2)
    trainer.restore(weights, moments)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in trainer.weights().items())
    assert all(torch.equal(tensor, moments[name]) for name, tensor in trainer.moments().items())


def test_pretraining_text_is_drawn_for_every_update_and_its_place_is_saved() -> None:
    algorithm, policy = PPO(ptx=0.5, beta=0.0), small_policy()
    roles = roles_for(algorithm, policy, Optimization(), text=TEXT)
    trainer = Trainer(policy, algorithm, Optimization(), roles)
    (role,) = [role for role in roles if role.name == "pretraining"]
    start = role.state()
    update = trainer.update(algorithm.prepare(material(algorithm), {}), 1e-6)
    assert {"pretraining/nll", "pretraining/loss/nll"} <= {m.name for m in update.metrics} and role.state() != start
    first = role.draw()
    role.restore(start)
    role.draw()
    assert torch.equal(role.draw().batch.ids_T, first.batch.ids_T)
    assert float(first.batch.weight_T.sum()) == pytest.approx(0.5)


@pytest.mark.parametrize(("ema", "every", "expected"), [(0.75, 0, [1.25, 1.4375]), (0.0, 2, [1.0, 2.0])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reference_that_moves_follows_the_policy(ema: float, every: int, expected: list[float], dtype: torch.dtype) -> None:
    """From weights of 1 to those of a policy at 2: a quarter of the way a step, or all of it after every second one."""
    reference, policy = (small_policy(dtype=dtype) for _ in range(2))
    for model, value in ((reference.model, 1.0), (policy.model, 2.0)):
        for weight in model.parameters():
            weight.data.fill_(value)
    role = MovingReference(reference, policy, ema, every)
    for step, value in enumerate(expected, 1):
        role.after_step(step)
        assert {float(weight.detach().unique()) for weight in reference.model.parameters()} == {value}
    assert {float(weight.detach().unique()) for weight in policy.model.parameters()} == {2.0}


def test_small_steps_of_a_reference_of_16_bits_are_not_rounded_away_and_are_in_its_state() -> None:
    """The 40 steps of 0.5% from 1 to 2 are 0.18 together, each less than bfloat16 can hold; after a restore they go on alike."""
    first, second, policy = (small_policy(dtype=torch.bfloat16) for _ in range(3))
    for model, value in ((first.model, 1.0), (second.model, 7.0), (policy.model, 2.0)):
        for weight in model.parameters():
            weight.data.fill_(value)
    role, other = (MovingReference(one, policy, 0.995, 0) for one in (first, second))
    for step in range(1, 41):
        role.after_step(step)
    weight = next(first.model.parameters())
    assert float(weight.detach().max()) == pytest.approx(2 - 0.995**40, abs=0.004)
    assert role.frozen is None, "its weights are in the checkpoint, and are not compared with those of the start"
    other.restore(with_arrays(*without_arrays(role.state())))
    for one in (role, other):
        one.after_step(41)
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(torch.equal(mean, other.means[name]) for name, mean in role.means.items())


def one_update(algorithm: PPO, early: bool, budget: int = 15) -> tuple[Trainer, dict[str, float]]:
    """A trainer after one step, whose critic learned before the policy or beside it, and the step's figures."""
    policy, settings = small_policy(), Optimization(lr=1e-2, token_budget=budget)
    trainer = Trainer(policy, algorithm, settings, roles_for(algorithm, policy, settings, shared_policy(1)))
    state, step = algorithm.start(), material(algorithm).replace(value_T=None, reference_T=None)
    filled = trainer.fill(step, state=state if early else None)
    assert filled.learned == ({"critic"} if early and algorithm.reuse.once else frozenset())
    return trainer, dict(merge(trainer.update(algorithm.prepare(filled, state), 1e-2).metrics))


EARLY = [
    {},
    {"beta": 0.0, "lam_alpha": 0.05, "lam": 1.0},
    {"whiten_rewards": True, "credit": "turn"},
    {"kl_in": "loss", "entropy": 0.1, "clip_value": 0.0},
    {"supervision": "both", "reduction": "sequence_mean", "missing_eos": 0.3},
]


@pytest.mark.parametrize("settings", EARLY, ids=str)
def test_a_critic_that_learns_while_it_gives_its_values_learns_the_same(settings: dict[str, Any]) -> None:
    """Values and gradient of one pass are those of two: in several micro-batches, one with a response that has no score."""
    algorithm = PPO(group=4, epochs=1, **settings)
    assert len(micro_batches(material(algorithm), 15)) > 2
    (one, figures), (two, expected) = (one_update(algorithm, early) for early in (True, False))
    for name, weight in two.weights().items():
        torch.testing.assert_close(one.weights()[name], weight, rtol=0, atol=1e-12)
    assert figures == pytest.approx(expected, rel=1e-9, nan_ok=True)


def test_a_critic_that_learns_early_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, plain = [], Critic.outputs
    monkeypatch.setattr(Critic, "outputs", lambda role, piece: asked.append(piece.tokens) or plain(role, piece))
    monkeypatch.setattr(Critic, "fill", None)
    algorithm = PPO(group=4, epochs=1)
    one_update(algorithm, True)
    assert sum(asked) == material(algorithm).tokens


def test_the_step_that_a_critic_learned_early_is_not_kept_after_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, plain = list[ref[torch.Tensor]](), Trainer._learn

    def learn(trainer: Trainer, role: Any, learner: Any, batch: Any) -> Any:
        kept.append(ref(batch.token_reward_T))
        return plain(trainer, role, learner, batch)

    monkeypatch.setattr(Trainer, "_learn", learn)
    trainer, _ = one_update(PPO(group=4, epochs=1), True)
    assert [one() for one in kept] == [None] and not trainer.early


@pytest.mark.parametrize("settings", [{"epochs": 2}, {"epochs": 1, "mini_batches": 2}, {"epochs": 1, "critic_warmup": 3}])
def test_a_critic_whose_values_are_read_again_learns_in_the_update(settings: dict[str, int]) -> None:
    algorithm = PPO(group=4, **settings)
    assert algorithm.early(material(algorithm), algorithm.start()) is None


def test_where_memory_runs_out_in_the_update_what_was_learned_early_is_learned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = PPO(group=4, epochs=1)
    budget, plain, failed = material(algorithm).tokens, Trainer.forward_backward, []

    def forward_backward(trainer: Trainer, *given: Any) -> list[Metric]:
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("full")
        return plain(trainer, *given)

    expected = one_update(algorithm, False, budget)[0].weights()
    monkeypatch.setattr(Trainer, "forward_backward", forward_backward)
    found = one_update(algorithm, True, budget)[0]
    assert failed and found.token_budget == budget // 2
    for name, weight in expected.items():
        torch.testing.assert_close(found.weights()[name], weight, rtol=0, atol=1e-12)
