"""Best of N: what is kept, how it is weighed, and a reward that rises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from material_for_tests import VOCABULARY, group, rollout, segment, small_policy

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.best_of_n import BestOfN
from posttrain.collect import Prompt, generate_groups
from posttrain.engine.engine import Engine
from posttrain.errors import UserError
from posttrain.ops.kl import best_of_n_kl
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_groups
from posttrain.train.trainer import Trainer
from posttrain.types import Group, Outputs, Sampling

PROMPT = (3, 4)


def scored(*rewards: float | None) -> Group:
    made = [segment([4 + n] * (n + 1), True) for n in range(len(rewards))]
    return group(
        [rollout([segment(PROMPT, False), m], r, sample=n) for n, (m, r) in enumerate(zip(made, rewards, strict=True))]
    )


def test_the_best_of_each_group_is_kept() -> None:
    """The first of equals; a failure is never the best, not even beside negative scores; a group of failures is left out."""
    groups = [scored(0.0, 2.0, 1.0), scored(-1.0, None, -1.0), scored(None, None), scored(None, -5.0)]
    selection = BestOfN(group=3).select(groups, {})
    assert [[r.sample for r in g.rollouts] for g in selection.groups] == [[1], [0], [1]]
    assert selection.refill == 0
    found = {m.name: (float(m.total), float(m.count or 0)) for m in selection.metrics}
    assert found["best"] == (2.0 - 1.0 - 5.0, 3.0)
    assert found["kl/best"] == pytest.approx((best_of_n_kl(3) + best_of_n_kl(2) + best_of_n_kl(1), 3.0))


@pytest.mark.proves("value")
def test_by_hand() -> None:
    """Two kept responses of 2 and 1 tokens, log-probs -1, -2 and -4: token mean 7/3, sequence mean (3/2 + 4)/2."""
    kept = BestOfN(group=3).select([scored(0.0, 2.0, 1.0), scored(1.0, 0.0)], {}).groups
    batch = pack_groups(kept, 1.0)
    assert batch.mask_T.tolist() == [False, False, True, True, False, False, True]
    logprob_T = torch.tensor([float("nan"), float("nan"), -1.0, -2.0, float("nan"), float("nan"), -4.0], dtype=torch.float64)
    for reduction, expected in (("token_mean", 7 / 3), ("sequence_mean", (3 / 2 + 4) / 2)):
        algorithm = BestOfN(group=3, reduction=reduction)
        terms = algorithm.terms(Outputs(logprob_T, logprob_T), algorithm.prepare(batch, {}))
        assert float((terms.terms[0].weight * terms.terms[0].loss).sum()) == pytest.approx(expected, rel=1e-6)
        assert {m.name: m.value for m in terms.metrics} == {"nll": pytest.approx(7 / 3)}


@pytest.mark.proves("refusals")
def test_refusals() -> None:
    with pytest.raises(UserError, match=r"^best_of_n: group must be at least 2 \(the best of one is any sample\), not 1$"):
        BestOfN(group=1)
    with pytest.raises(UserError, match="^best_of_n: reduction must be token_mean or sequence_mean"):
        BestOfN(reduction="sum")
    assert BestOfN().group_size == 8 and BestOfN().roles == frozenset() and BestOfN.learns_from == "rollouts"


def reward(ids: np.ndarray, low: int = 14) -> float:
    """The share of tokens in the upper part of the vocabulary."""
    return float((ids >= low).mean())


def train(algorithm: Algorithm, steps: int, judge=reward) -> tuple[float, float]:
    """Mean reward of 256 samples before and after `steps` rounds on eight prompts of two tokens."""
    policy = small_policy(dtype=torch.float32)
    engine, trainer = Engine(policy), Trainer(policy, algorithm, Optimization(lr=5e-3))
    prompts = [(3 + n, 20 - n) for n in range(8)]

    def sample(seed: int, count: int) -> list[Group]:
        requests = [Prompt(p, count, seed * 1000 + n, Sampling(6)) for n, p in enumerate(prompts)]
        return [
            group([rollout([segment(r.ids, False), segment(c.ids, True, c.logprobs)], judge(c.ids), sample=n)
                   for n, c in enumerate(completions)])
            for r, completions in zip(requests, generate_groups(engine, requests), strict=True)
        ]  # fmt: skip

    def mean(seed: int) -> float:
        return float(np.mean([v for g in sample(seed, 32) for v in g.rewards]))

    before = mean(900)
    for number in range(steps):
        kept = algorithm.select(sample(number, algorithm.group_size), {})
        trainer.update(algorithm.prepare(pack_groups(kept.groups, 1.0), {}), 5e-3)
        engine.publish(number + 1)
    return before, mean(901)


@pytest.mark.proves("flipped", "learns")
def test_the_reward_rises_and_falls_when_it_is_flipped() -> None:
    """In 12 rounds: seen 0.38 to 0.89, and to 0.06 with the reward upside down."""
    assert VOCABULARY == 24
    before, after = train(BestOfN(group=8), 12)
    assert before < 0.6 and after > before + 0.3
    before, after = train(BestOfN(group=8), 12, lambda ids: -reward(ids))
    assert after > before + 0.3, "rewards are negative here: nearer to 0 is fewer of those tokens"
