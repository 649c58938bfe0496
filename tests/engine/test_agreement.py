"""Training and sampling agree: one set of weights, one log-prob."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from material_for_tests import group, rollout, segment, small_policy

from posttrain.algorithms.grpo import GRPO
from posttrain.collect import Prompt, generate_groups
from posttrain.engine.engine import Engine
from posttrain.models.policy import Policy
from posttrain.ops.policy import importance_ratio
from posttrain.train.forward import forward
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_groups
from posttrain.train.trainer import Trainer
from posttrain.types import Batch, Sampling

pytestmark = pytest.mark.usefixtures("every_way")
PROMPTS = [(5,), (6, 7, 8, 9, 10), (11, 12), (13, 14, 15)]


def sampled(policy: Policy, sampling: Sampling, seed: int = 0, rows: int = 5) -> Batch:
    requests = [Prompt(prompt, 4, seed + n, sampling) for n, prompt in enumerate(PROMPTS)]
    groups = []
    for request, completions in zip(requests, generate_groups(Engine(policy, rows), requests), strict=True):
        members = [[segment(request.ids, False), segment(c.ids, True, c.logprobs)] for c in completions]
        groups.append(group([rollout(parts, float(n % 2)) for n, parts in enumerate(members)]))
    return pack_groups(groups, sampling.temperature)


def ratios(policy: Policy, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        logprob_T = forward(policy, batch).logprob_T
    return importance_ratio(logprob_T, batch.behaviour_T)[batch.mask_T]


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.5])
def test_the_importance_ratio_is_one_at_every_temperature(temperature: float) -> None:
    """What the trainer recomputes of what the engine sampled, through other rows, packs and a cache."""
    policy = small_policy(dtype=torch.float32)
    ratio = ratios(policy, sampled(policy, Sampling(24, temperature)))
    assert len(ratio) > 100
    assert float(ratio.mean()) == pytest.approx(1.0, abs=1e-5)
    assert float((ratio - 1).abs().max()) < 1e-4


def test_a_ratio_without_the_temperature_is_detected() -> None:
    """Not in the mean, which is 1 in expectation under any policy, but in every single ratio."""
    policy = small_policy(dtype=torch.float32)
    ratio = ratios(policy, sampled(policy, Sampling(24, 0.6)).replace(temperature=1.0))
    assert float((ratio - 1).abs().mean()) > 0.3


def test_truncated_sampling_is_detected() -> None:
    """Under top-k the ratio is the kept mass, not 1: training refuses it (the rl stage), and here is why."""
    policy = small_policy(dtype=torch.float32)
    ratio = ratios(policy, sampled(policy, Sampling(24, top_k=3)))
    assert float(ratio.mean()) < 0.95


def test_the_first_update_has_no_mismatch() -> None:
    policy = small_policy(dtype=torch.float32)
    algorithm = GRPO(beta=0.0)
    trainer = Trainer(policy, algorithm, Optimization(lr=1e-2))
    update = trainer.update(algorithm.prepare(sampled(policy, Sampling(24)), {}), 1e-2)
    figures = {m.name: m.value for m in update.metrics}
    assert update.moved and figures["mismatch"] < 1e-5 and figures["clip_fraction"] == 0.0
    assert 0 < figures["mismatch"] <= figures["mismatch/max"] < 1e-4 and 0 <= figures["mismatch/kl"] < 1e-9


def test_the_next_token_comes_from_the_new_weights() -> None:
    """There is one copy: after an optimizer step, ratios of fresh samples are 1 and those of old samples are not."""
    policy = small_policy(dtype=torch.float32)
    algorithm = GRPO(beta=0.0)
    trainer = Trainer(policy, algorithm, Optimization(lr=2e-2))
    old = sampled(policy, Sampling(24))
    for _ in range(3):
        trainer.update(algorithm.prepare(old, {}), 2e-2)
        fresh = sampled(policy, Sampling(24))
        assert float((ratios(policy, fresh) - 1).abs().max()) < 1e-4
    assert float((ratios(policy, old) - 1).abs().mean()) > 0.05
    assert fresh.ids_T.tolist() != old.ids_T.tolist()


def test_the_log_prob_is_that_of_the_sampled_id() -> None:
    policy = small_policy(dtype=torch.float32)
    batch = sampled(policy, Sampling(1))
    with torch.no_grad():
        for n, start in enumerate(batch.starts[:-1]):
            end = batch.starts[n + 1]
            logits = policy.model(batch.ids_T[None, start : end - 1], use_cache=False).logits[0, -1]
            expected = float(torch.log_softmax(logits, -1)[batch.ids_T[end - 1]])
            assert float(batch.behaviour_T[end - 1]) == pytest.approx(expected, abs=1e-5)


def test_decode_equals_prefill() -> None:
    """A continuation of a prompt that ends with the first half of a response has the log-probs of the second half."""
    policy = small_policy(dtype=torch.float32)
    engine = Engine(policy)
    ((whole,),) = generate_groups(engine, [Prompt((5, 6), 1, 4, Sampling(20, min_new_tokens=20))])
    half = (5, 6, *whole.ids[:10].tolist())
    with torch.no_grad():
        logits = policy.model(torch.tensor([half]), use_cache=False).logits[0, -1]
    assert float(torch.log_softmax(logits, -1)[whole.ids[10]]) == pytest.approx(float(whole.logprobs[10]), abs=1e-5)
    ((greedy,),) = generate_groups(engine, [Prompt((5, 6), 1, 0, Sampling(20, 0.0, min_new_tokens=20))])
    ((rest,),) = generate_groups(
        engine, [Prompt((5, 6, *greedy.ids[:10].tolist()), 1, 0, Sampling(10, 0.0, min_new_tokens=10))]
    )
    np.testing.assert_array_equal(greedy.ids[10:], rest.ids)
