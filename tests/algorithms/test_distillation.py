"""On-policy distillation: the divergences by hand, the sampled form, a teacher with another prompt, and a small thing learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from bandit_for_tests import PROMPTS
from material_for_tests import (
    VOCABULARY,
    gradients,
    group,
    material,
    plain_batch,
    rollout,
    segment,
    shared_policy,
    shared_teacher,
    small_policy,
    trainer_for,
)
from torch import Tensor

from posttrain.algorithms.distillation import Distillation
from posttrain.collect import Prompt, generate_groups
from posttrain.engine.engine import Engine
from posttrain.errors import UserError
from posttrain.models.attention import LAYOUT, Packed
from posttrain.models.policy import Policy
from posttrain.ops.logprobs import head_logits
from posttrain.train.forward import forward, positions
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_examples, pack_groups
from posttrain.train.roles.teacher import Teacher
from posttrain.train.trainer import Trainer
from posttrain.types import Batch, Example, Group, Problem, Sampling

KINDS = ("reverse", "forward", "jensen_shannon", "sampled")


@pytest.mark.proves("refusals")
def test_refusals_and_contract() -> None:
    for settings, why in {
        ("divergence", "both"): "divergence must be reverse, forward, jensen_shannon or sampled, not 'both'",
        ("jsd_beta", 0.3): "jsd_beta is that of divergence=jensen_shannon, which is not chosen",
        ("reward_weight", 1.0): "reward_weight compares responses to one prompt; set group to 2 or more",
        ("beta", 0.1): "kl_in=reward is a part of the task's reward, whose reward_weight is 0; use kl_in=loss",
        ("truncated", "zero"): "truncated=zero changes the task's reward, whose reward_weight is 0; use truncated=mask",
    }.items():
        more = {"kl_in": "reward"} if settings[0] == "beta" else {}
        with pytest.raises(UserError, match=f"^distillation: {why}"):
            Distillation(**{settings[0]: settings[1]}, **more)
    with pytest.raises(UserError, match="at the temperature of the sampling; leave temperature out"):
        Distillation(divergence="sampled", temperature=1.0)
    assert Distillation().roles == {"teacher"} and Distillation(beta=0.1).roles == {"teacher", "reference"}
    assert [Distillation(divergence=kind).teacher_by_token for kind in KINDS] == [False, False, False, True]
    assert not Distillation().compares_episodes and Distillation(reward_weight=1.0, group=4).compares_episodes
    assert Distillation().corrected("token") == Distillation(), "there is no ratio to correct"
    sampled = Distillation(divergence="sampled")
    assert sampled.corrected("token").roles == {"teacher"}, "with one update the policy's own log-probs are those of the start"
    assert replace(sampled, epochs=2).corrected("token").roles == {"teacher", "proximal"}


def logits(policy: Policy, batch: Batch) -> np.ndarray:
    """[T, V]: what each token was drawn from, by a pass of the model itself."""
    with torch.no_grad():
        hidden = policy.hidden(batch.ids_T[None], positions(batch)[None], **{LAYOUT: Packed(batch.starts)})[0]
        return np.roll(head_logits(hidden, policy.head).numpy(), 1, axis=0)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.proves("value")
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("kind", KINDS[:3])
def test_parity_with_an_independent_one(kind: str, reduction: str) -> None:
    algorithm = Distillation(divergence=kind, reduction=reduction, jsd_beta=0.3 if kind == "jensen_shannon" else 0.5)
    step = material(algorithm)
    p, q = (softmax(logits(policy, step) / step.temperature) for policy in (shared_policy(), shared_teacher()))
    m = 0.3 * q + 0.7 * p

    def kl(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a * np.log(a / b)).sum(-1)

    values = {"reverse": kl(p, q), "forward": kl(q, p), "jensen_shannon": 0.3 * kl(q, m) + 0.7 * kl(p, m)}[kind]
    scored = (step.mask_T & step.valid_N[step.sequence_T]).numpy()
    by_response = [values[scored & (step.sequence_T.numpy() == n)] for n in range(step.sequences)]
    found = [one for one in by_response if len(one)]
    expected = np.concatenate(found).mean() if reduction == "token_mean" else np.mean([one.mean() for one in found])
    assert gradients(algorithm, algorithm.prepare(step, {}))[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.proves("value")
def test_the_sampled_form_is_the_log_ratio_to_the_teacher_as_an_advantage() -> None:
    """By hand: log q - log mu at each token of its own; with a reward, r less the mean of the others on top, times its weight."""
    step = plain_batch([1.0, 0.0, 0.5], [0, 0, 0], [2, 1, 1])
    step = step.replace(
        behaviour_T=torch.tensor([0, -1.0, -1.0, 0, -2.0, 0, -1.0]),
        teacher_T=torch.tensor([9, -2.0, -0.5, 9, -1.0, 9, -1.0]),
    )
    plain = Distillation(divergence="sampled").prepare(step, {})
    assert plain.advantage_T.tolist() == pytest.approx([0, -1, 0.5, 0, 1, 0, 0])
    assert plain.weight_T.tolist() == pytest.approx([0, 0.25, 0.25, 0, 0.25, 0, 0.25])
    both = Distillation(divergence="sampled", reward_weight=2.0, group=3).prepare(step, {})
    assert both.advantage_T.tolist() == pytest.approx([0, 0.5, 2.0, 0, -0.5, 0, 0.0])


def test_the_sampled_form_has_the_gradient_of_the_reverse_kl_on_average() -> None:
    """One token after one prompt, every token of the vocabulary weighted by its probability: the expectation, without noise."""
    ids = [np.array([5, 6, 7, token]) for token in range(VOCABULARY)]
    groups = [group([rollout([segment(i[:3], False), segment(i[3:], True)], 0.0)]) for i in ids]
    step, policy = pack_groups(groups, 1.0), shared_policy()
    with torch.no_grad():
        logprob_T = forward(policy, step).logprob_T
    found = []
    for kind in ("sampled", "reverse"):
        algorithm = Distillation(divergence=kind)
        filled = trainer_for(algorithm, policy, Optimization()).fill(step.replace(behaviour_T=logprob_T))
        prepared = algorithm.prepare(filled, {})
        chance_T = logprob_T.exp() * VOCABULARY
        found.append(gradients(algorithm, prepared.replace(weight_T=prepared.weight_T.double() * chance_T))[1])
    for name, slope in found[0].items():
        torch.testing.assert_close(slope, found[1][name], rtol=1e-5, atol=1e-7)
    assert max(float(slope.abs().max()) for slope in found[0].values()) > 1e-2


def hinted(hint: Sequence[int]) -> tuple[list[Group], Trainer]:
    """Two prompts, one with a tool's answer in the response, for a teacher that reads `hint` before them."""
    parts = [segment([5, 6], False), segment([7, 8], True), segment([12, 13], False), segment([9], True)]
    groups = [
        group([rollout(parts, 1.0, "a"), rollout([segment([5, 6], False), segment([10], True)], 0.0, "a")], "a"),
        group([rollout([segment([14], False), segment([15, 16], True)], 0.5, "b")], "b"),
    ]
    prompts = {"a": (*hint, 5, 6), "b": (*hint, 14)}

    def read(problems: Sequence[Problem]) -> list[tuple[int, ...]]:
        return [prompts[problem.id] for problem in problems]

    teacher = Teacher(shared_policy(), by_token=True, prompts=read)
    return groups, Trainer(small_policy(), Distillation(divergence="sampled"), Optimization(token_budget=7), [teacher])


def test_a_teacher_with_another_prompt_reads_the_same_responses_after_it() -> None:
    """By the log-probs of the sequences that are written down here; observations and the lengths of prompts stay in place."""
    groups, trainer = hinted([20, 21, 22])
    batch = pack_groups(groups, 0.7)
    sequences = [[20, 21, 22, 5, 6, 7, 8, 12, 13, 9], [20, 21, 22, 5, 6, 10], [20, 21, 22, 14, 15, 16]]
    masks = [[0] * 5 + [1, 1, 0, 0, 1], [0] * 5 + [1], [0] * 4 + [1, 1]]
    examples = [Example(np.array(ids), np.array(mask, bool)) for ids, mask in zip(sequences, masks, strict=True)]
    with torch.no_grad():
        whole = pack_examples(examples).replace(temperature=0.7)
        expected = forward(shared_policy(), whole).logprob_T[whole.mask_T]
        bare = forward(shared_policy(), batch).logprob_T
    filled = trainer.fill(batch, groups=groups)
    torch.testing.assert_close(filled.teacher_T[batch.mask_T], expected)
    assert not filled.teacher_T[~batch.mask_T].any()
    assert float((filled.teacher_T - bare)[batch.mask_T].abs().min()) > 1e-3, "the hint matters"


def test_a_teacher_with_the_students_own_prompt_is_one_without() -> None:
    groups, trainer = hinted([])
    batch = pack_groups(groups, 0.7)
    with torch.no_grad():
        expected = forward(shared_policy(), batch).logprob_T
    torch.testing.assert_close(trainer.fill(batch, groups=groups).teacher_T, expected)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_the_distributions_of_a_hinted_teacher_are_those_of_the_responses(kind: str) -> None:
    """A student that reads the hint itself has them: the divergence is 0, and is not without it."""
    groups, _ = hinted([20, 21])
    algorithm = Distillation(divergence=kind)
    prompts = {"a": (20, 21, 5, 6), "b": (20, 21, 14)}
    seen = [
        group([rollout([segment(prompts[g.problem.id], False), *r.segments[1:]], 1.0) for r in g.rollouts], g.problem.id)
        for g in groups
    ]
    losses = []
    for own in (seen, groups):
        role = Teacher(shared_policy(), prompts=lambda problems: [prompts[p.id] for p in problems])
        trainer = Trainer(small_policy(), algorithm, Optimization(token_budget=7), [role])
        update = trainer.update(algorithm.prepare(trainer.fill(pack_groups(own, 1.0), groups=own), {}), 0.0)
        losses.append(sum(float(m.total) for m in update.metrics if m.name == "loss"))
    assert abs(losses[0]) < 1e-12 and losses[1] > 0.01


def distance(policy: Policy, teacher: Policy) -> float:
    """KL(policy || teacher) of the first token, averaged over prompts."""
    batch = pack_examples([Example(np.array([*p, 0]), np.arange(len(p) + 1) == len(p)) for p in PROMPTS])

    def logp(one: Policy) -> Tensor:
        return torch.from_numpy(logits(one, batch))[batch.mask_T].log_softmax(-1)

    p, q = logp(policy), logp(teacher)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.proves("learns")
@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_the_teacher_from_its_own_samples(kind: str) -> None:
    """To less than a tenth of the KL in 30 steps of 3 x 16 samples; with one sampled number a token, to less than a third."""
    policy, teacher = small_policy(dtype=torch.float32), small_policy(2, torch.float32, hidden_size=32)
    algorithm = Distillation(divergence=kind, group=16)
    trainer = Trainer(policy, algorithm, Optimization(lr=1e-2), [Teacher(teacher, algorithm.teacher_by_token)])
    before, engine = distance(policy, teacher), Engine(policy)
    for step in range(30):
        requests = [Prompt(p, algorithm.group, 1000 * step + n, Sampling(1)) for n, p in enumerate(PROMPTS)]
        groups = [
            group([rollout([segment(asked.ids, False), segment(c.ids, True, c.logprobs)], 0.0) for c in drawn])
            for asked, drawn in zip(requests, generate_groups(engine, requests), strict=True)
        ]
        trainer.update(algorithm.prepare(trainer.fill(pack_groups(groups, 1.0)), {}), 1e-2)
    assert distance(policy, teacher) < before / (3 if kind == "sampled" else 10)
