"""ReMax: the greedy baseline by hand, who is left out, an independent NumPy one, and a small thing learned."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bandit_for_tests import chance_of_good, train
from material_for_tests import group, plain_batch, rollout, segment, small_policy
from numpy_for_tests import Response, parity

from posttrain.algorithms.remax import ReMax
from posttrain.errors import UserError
from posttrain.train.pack import pack_groups
from posttrain.types import Group, Sampling


@pytest.mark.proves("refusals")
def test_refusals_and_contract() -> None:
    with pytest.raises(UserError, match="^remax: group must be at least 2, not 1"):
        ReMax(group=1)
    with pytest.raises(UserError, match="^remax: beta must be at least 0"):
        ReMax(beta=-1.0)
    assert ReMax().roles == {"reference"} and ReMax(beta=0.0).roles == frozenset()


def test_the_first_answer_is_greedy_and_the_rest_are_sampled() -> None:
    drawn = ReMax(group=3).samples(Sampling(7, temperature=0.8, top_p=0.9))
    assert [s.temperature for s in drawn] == [0.0, 0.8, 0.8] and {s.max_new_tokens for s in drawn} == {7}
    assert ReMax().group_size == 2


def answers(rewards: list[float | None], problem: str = "p") -> Group:
    parts = [[segment([3], False), segment([4 + n], True)] for n in range(len(rewards))]
    return group([rollout(part, reward, problem) for part, reward in zip(parts, rewards, strict=True)], problem)


@pytest.mark.proves("value")
def test_the_baseline_by_hand() -> None:
    """Greedy answers of 0.5 and 0.25; sampled ones of 1 and 0, and of 0.25. What could not be scored stays so, and where the greedy
    answer could not, there is nothing to compare with."""
    selection = ReMax(group=4).select([answers([0.5, 1.0, 0.0, None]), answers([0.25, 0.25]), answers([None, 1.0])], {})
    assert [[r.score.value for r in g.rollouts] for g in selection.groups] == [[0.5, -0.5, None], [0.0]]
    assert [[r.sample for r in g.rollouts] for g in selection.groups] == [[1, 2, 3], [1]]
    figures = {m.name: (m.total, m.count) for m in selection.metrics}
    assert figures == {"baseline": (0.75, 2), "groups/no_baseline": (1, 3)}


def test_an_answer_that_was_cut_off_can_be_paid_nothing() -> None:
    """Greedy 1, sampled 1 (cut off), 1 and -1 (cut off): 1, 0, 1 and -1 are learned from, less 1. A greedy answer that was cut off
    is paid nothing either."""

    def learned(rewards: list[float], cut: list[int]) -> list[float]:
        parts = [
            [segment([3], False), segment([4], True, finish="length" if n in cut else "stop")] for n in range(len(rewards))
        ]
        step = group([rollout(part, reward) for part, reward in zip(parts, rewards, strict=True)])
        algorithm = ReMax(group=len(rewards), beta=0.0, truncated="zero")
        return algorithm.prepare(pack_groups(algorithm.select([step], {}).groups, 1.0), {}).advantage_T[1::2].tolist()

    assert learned([1.0, 1.0, 1.0, -1.0], [1, 3]) == [-1.0, 0.0, -2.0]
    assert learned([1.0, 1.0, 1.0], [0, 1]) == [0.0, 1.0]


@pytest.mark.proves("value")
def test_advantages_by_hand() -> None:
    """What `select` left of two scores, less 0.1 nats of KL from a token on: log mu - log ref is 1 and 2."""
    step = plain_batch([0.5, -0.5], [0, 1], [2, 1]).replace(
        behaviour_T=torch.tensor([9.0, -1.0, -1.0, 9.0, -1.0]), reference_T=torch.tensor([0, -2.0, -3.0, 0, -1.0])
    )
    prepared = ReMax(beta=0.1).prepare(step, {})
    assert prepared.advantage_T.tolist() == pytest.approx([0, 0.5 - 0.3, 0.5 - 0.2, 0, -0.5])
    assert prepared.weight_T.tolist() == pytest.approx([0, 1 / 2, 1 / 2, 0, 1 / 2])


@pytest.mark.proves("value")
def test_parity_with_an_independent_one() -> None:
    def formula(members: list[Response]) -> tuple[float, list[np.ndarray]]:
        loss, slopes = 0.0, []
        for one in members:
            cost = 0.2 * np.cumsum((one.behaviour - one.reference)[::-1])[::-1]
            value = -np.exp(one.log_ratio) * (one.reward - cost) / len(members)
            loss += value.sum()
            slopes.append(value)
        return loss, slopes

    parity(ReMax(beta=0.2), formula, 0)


@pytest.mark.proves("learns")
def test_it_learns_from_rewards() -> None:
    """From at most 0.43 of the mass on right tokens to above 0.95 in 40 steps."""
    policy = small_policy(0, torch.float32)
    assert chance_of_good(policy) < 0.6
    train(policy, ReMax(group=9, beta=0.0), 40)
    assert chance_of_good(policy) > 0.95
