"""Which tokens have a loss, and which do not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from material_for_tests import (
    CASES,
    ONLINE,
    STOP,
    VOCABULARY,
    assert_same_gradients,
    bare,
    gradients,
    group,
    material,
    rollout,
    segment,
    shared_policy,
    small_policy,
    trainer_for,
)

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.sft import SFT
from posttrain.collect import Prompt, generate_groups
from posttrain.engine.engine import Engine
from posttrain.models.attention import LAYOUT, Packed
from posttrain.ops.logprobs import head_logits
from posttrain.train.forward import forward, positions
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_examples, pack_groups
from posttrain.types import Batch, Example, Sampling


def example(ids: list[int], mask: list[int]) -> Example:
    return Example(np.array(ids), np.array(mask, dtype=bool))


def test_uniform_logits_give_the_log_of_the_vocabulary() -> None:
    policy = small_policy()
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.zero_()
    batch = SFT().prepare(pack_examples([example([5, 6, 7, 8], [0, 1, 1, 1]), example([3, 9], [0, 1])]), {})
    loss, _ = gradients(SFT(), batch, policy=policy)
    assert loss == pytest.approx(math.log(VOCABULARY), rel=1e-7)


def test_tokens_after_the_last_with_loss_do_not_matter() -> None:
    one = SFT().prepare(pack_examples([example([5, 6, 7, 8, 9], [0, 1, 1, 0, 0]), example([4, 3], [0, 1])]), {})
    other = one.replace(ids_T=one.ids_T.clone())
    other.ids_T[3], other.ids_T[4] = 20, 21
    assert_same_gradients(gradients(SFT(), one), gradients(SFT(), other), 1e-13)


@pytest.mark.proves("masks")
@pytest.mark.parametrize("algorithm", CASES)
def test_tokens_without_loss_have_no_weight_nor_term(algorithm: Algorithm) -> None:
    step = material(algorithm)
    prepared = algorithm.prepare(step, {})
    assert "weight_T" not in prepared.columns or not prepared.weight_T[~step.mask_T].any()
    assert not bool((prepared.mask_T & ~step.mask_T).any())
    terms = algorithm.terms(trainer_for(algorithm, shared_policy(), Optimization()).outputs(prepared), prepared)
    by_token = [t for t in terms.terms if t.loss.shape == step.mask_T.shape]
    assert all(not (term.weight * term.loss)[~step.mask_T].any() for term in by_token)


def test_the_loss_of_two_turns_is_the_sum_over_them() -> None:
    ids = [5, 6, 7, 8, 9, 10, 11]
    both = SFT().prepare(pack_examples([example(ids, [0, 1, 1, 0, 0, 1, 0])]), {})
    first = both.replace(mask_T=both.mask_T & (torch.arange(7) < 4), weight_T=both.weight_T.where(torch.arange(7) < 4, 0.0))
    second = both.replace(mask_T=both.mask_T & (torch.arange(7) >= 4), weight_T=both.weight_T.where(torch.arange(7) >= 4, 0.0))
    whole, parts = gradients(SFT(), both), [gradients(SFT(), part) for part in (first, second)]
    added = {name: parts[0][1][name] + parts[1][1][name] for name in whole[1]}
    assert_same_gradients(whole, (parts[0][0] + parts[1][0], added), 1e-12)


def test_the_stop_token_is_trained_when_it_was_sampled() -> None:
    """Any of several stop ids, only where it was sampled, and never by comparing ids: the prompt may hold the same id."""
    policy = small_policy(dtype=torch.float32, stop_ids=(STOP, 5, 9, 11, 14, 17, 20))
    prompt = (STOP, 4, 5, 9)
    (completions,) = generate_groups(Engine(policy), [Prompt(prompt, 8, 0, Sampling(40))])
    stopped = [c for c in completions if c.finish == "stop"]
    assert len({int(c.ids[-1]) for c in stopped}) > 1, "the seed should end responses with different stop ids"
    for completion in stopped:
        assert not set(completion.ids[:-1].tolist()) & set(policy.stop_ids)
        one = rollout([segment(prompt, False), segment(completion.ids, True, completion.logprobs)], 1.0)
        batch = pack_groups([group([one])], 1.0)
        assert batch.mask_T.tolist() == [False] * 4 + [True] * len(completion.ids)
        assert SFT().prepare(batch, {}).weight_T[-1] > 0


@pytest.mark.proves("masks")
@pytest.mark.parametrize("algorithm", CASES)
def test_an_all_masked_micro_batch_adds_nothing(algorithm: Algorithm) -> None:
    prepared = algorithm.prepare(material(algorithm), {})
    weights = {name: torch.zeros_like(w) for name, w in prepared.columns.items() if name in ("weight_T", "weight_N")}
    empty = prepared.replace(mask_T=torch.zeros_like(prepared.mask_T), **weights)
    policy = shared_policy()
    policy.model.zero_grad()
    metrics = trainer_for(algorithm, policy, Optimization()).forward_backward(empty)
    assert [float(m.total) for m in metrics if m.name == "loss"] == [0.0]
    assert all(p.grad is None or not p.grad.any() for p in policy.model.parameters())
    policy.model.zero_grad()


@pytest.mark.proves("masks")
@pytest.mark.parametrize("algorithm", CASES)
def test_an_all_masked_step_moves_nothing(algorithm: Algorithm) -> None:
    """Not the weights, not the optimizer's moments, not its step count: a second Adam step on zeros would move all three."""
    policy = small_policy()
    trainer = trainer_for(algorithm, policy, Optimization(lr=1e-2, weight_decay=0.1), shared_policy(1))
    step = material(algorithm)
    assert trainer.update(algorithm.prepare(step, {}), 1e-2).moved
    weights = {name: t.clone() for name, t in trainer.weights().items()}
    moments = {name: t.clone() for name, t in trainer.moments().items()}
    update = trainer.update(algorithm.prepare(step.replace(mask_T=torch.zeros_like(step.mask_T)), {}), 1e-2)
    assert not update.moved and update.grad_norm == 0.0
    assert [(m.name, m.value) for m in update.metrics] == [("skipped", 1.0)]
    assert all(torch.equal(t, weights[name]) for name, t in trainer.weights().items())
    assert all(torch.equal(t, moments[name]) for name, t in trainer.moments().items())


@pytest.mark.parametrize("t", [0, 3, 6])
def test_a_log_prob_depends_on_no_later_token(t: int) -> None:
    ids = np.array([5, 6, 7, 8, 9, 10, 11, 12])
    changed = ids.copy()
    changed[t + 1 :] = (changed[t + 1 :] + 7) % VOCABULARY
    mask = np.arange(8) > 0
    with torch.no_grad():
        one, other = (forward(shared_policy(), pack_examples([Example(i, mask)])) for i in (ids, changed))
    assert torch.equal(one.logprob_T[: t + 1], other.logprob_T[: t + 1])
    # the entropy is of the distribution a token was drawn from: it does not even depend on the token itself
    assert torch.equal(one.entropy_T[: t + 2], other.entropy_T[: t + 2])
    assert not torch.equal(one.logprob_T[t + 1 :], other.logprob_T[t + 1 :])


def test_a_log_prob_is_aligned_with_its_own_token() -> None:
    """A response of one token after a prompt of one. Its log-prob is read at the prompt's position."""
    batch = pack_examples([example([5, 6], [0, 1])])
    policy = shared_policy()
    with torch.no_grad():
        hidden = policy.hidden(batch.ids_T[None], positions(batch)[None], **{LAYOUT: Packed(batch.starts)})[0]
        by_hand = torch.log_softmax(head_logits(hidden, policy.head), -1)[0, 6]
        assert float(forward(policy, batch).logprob_T[1]) == pytest.approx(float(by_hand), abs=1e-13)
    loss, found = gradients(SFT(), SFT().prepare(batch, {}))
    assert loss == pytest.approx(-float(by_hand)) and any(g.any() for g in found.values())


def test_the_first_token_cannot_carry_loss() -> None:
    with pytest.raises(ValueError, match="its first token cannot carry loss: nothing predicts it"):
        pack_examples([example([5, 6], [1, 1])])
    with pytest.raises(ValueError, match="its first token cannot carry loss: nothing predicts it"):
        pack_groups([group([rollout([segment([5, 6], True)], 1.0)])], 1.0)


@pytest.mark.parametrize("algorithm", CASES)
def test_no_algorithm_gives_loss_to_a_first_token(algorithm: Algorithm) -> None:
    prepared = algorithm.prepare(material(algorithm), {})
    first = torch.tensor(prepared.starts[:-1])
    assert not prepared.mask_T[first].any()
    assert "weight_T" not in prepared.columns or not prepared.weight_T[first].any()


def observed(observation: list[int]) -> Batch:
    """A rollout in which a tool answers: prompt, call, observation, answer."""
    parts = [segment([5, 6], False), segment([7, 8], True), segment(observation, False), segment([9, STOP], True)]
    other = [segment([5, 6], False), segment([10, STOP], True)]
    return pack_groups([group([rollout(parts, 1.0), rollout(other, 0.0)])], 1.0)


@pytest.mark.parametrize("algorithm", ONLINE)
def test_observations_carry_no_loss_and_count_in_no_length(algorithm: Algorithm) -> None:
    """Their weight is 0, and a longer observation leaves every other token's weight and advantage as they were."""
    short, long = observed([12]), observed([12, 13, 14, 15])
    assert short.mask_T.tolist() == [False, False, True, True, False, True, True, False, False, True, True]
    weights = []
    for step in (short, long):
        prepared = algorithm.prepare(bare(step), {})
        assert not prepared.weight_T[~step.mask_T].any() and not prepared.advantage_T[~step.mask_T].any()
        weights.append((prepared.weight_T[step.mask_T], prepared.advantage_T[step.mask_T]))
    assert torch.equal(weights[0][0], weights[1][0]) and torch.equal(weights[0][1], weights[1][1])


def test_ids_are_trained_as_they_were_sampled() -> None:
    """The text of a segment plays no part: what was decoded is never encoded again."""
    part = segment([7, 8, 7], True, [-0.5, -0.25, -1.0])
    renamed = type(part)(part.ids, "quite another text", True, part.logprobs)
    batch = pack_groups([group([rollout([segment([5], False), renamed], 1.0)])], 1.0)
    assert batch.ids_T.tolist() == [5, 7, 8, 7]
    assert batch.behaviour_T.tolist() == [0.0, -0.5, -0.25, -1.0]
