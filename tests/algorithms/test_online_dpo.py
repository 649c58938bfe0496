"""Online DPO: the pair it takes from a group, the DPO it holds, its known optimum, and a reward climbed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from material_for_tests import VOCABULARY, group, rollout, segment, small_policy, trainer_for
from pairs_for_tests import REWARD, boltzmann, divergence, figures, hand_pairs, loss_and_slope, tabular_optimum

from posttrain.algorithms.dpo import DPO
from posttrain.algorithms.ipo import IPO
from posttrain.algorithms.kto import KTO
from posttrain.algorithms.online_dpo import OnlineDPO
from posttrain.algorithms.simpo import SimPO
from posttrain.collect import Prompt, generate_groups
from posttrain.config_tree import from_tree, to_tree
from posttrain.engine.engine import Engine
from posttrain.errors import UserError
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_groups
from posttrain.types import Group, Sampling


def answers(rewards: list[float | None]) -> Group:
    return group([rollout([segment([3], False), segment([4 + n], True)], r, sample=n) for n, r in enumerate(rewards)])


@pytest.mark.parametrize(
    ("rewards", "pair"),
    [
        ([0.0, 1.0, 0.5], (1, 0)),
        ([0.2, None, 0.9, 0.9, 0.1, 0.1], (2, 4)),  # the first of equals; what could not be scored takes no part
        ([1.0, 0.0], (0, 1)),
    ],
)
def test_the_best_and_the_worst(rewards: list[float | None], pair: tuple[int, int]) -> None:
    selection = OnlineDPO().select([answers(rewards)], {})
    assert [tuple(r.sample for r in g.rollouts) for g in selection.groups] == [pair]
    assert [(m.name, m.value) for m in selection.metrics] == [("groups/tied", 0.0)]
    assert selection.refill == 0


def test_ties_are_dropped_and_counted() -> None:
    groups = [answers([0.5, 0.5]), answers([1.0, 0.0]), answers([None, 1.0]), answers([None, None])]
    selection = OnlineDPO().select(groups, {})
    assert len(selection.groups) == 1
    assert [(m.name, m.total, m.count) for m in selection.metrics] == [("groups/tied", 3, 4)]


@pytest.mark.parametrize("rewards", [[0.5, 0.5, 0.5], [None, 1.0], [None, None]])
def test_a_step_of_ties_moves_nothing(rewards: list[float | None]) -> None:
    algorithm, policy = OnlineDPO(), small_policy()
    trainer = trainer_for(algorithm, policy, Optimization(lr=1e-2), small_policy(1))
    batch = pack_groups(algorithm.select([answers(rewards)], {}).groups, 1.0, together=True)
    update = trainer.update(algorithm.prepare(trainer.fill(batch), {}), 1e-2)
    assert not update.moved and [m.name for m in update.metrics] == ["skipped"]


@pytest.mark.proves("value")
def test_it_is_the_loss_that_it_holds() -> None:
    for inner in (DPO(beta=0.3, alpha=0.1), IPO(tau=0.5), SimPO()):
        algorithm = OnlineDPO(loss=inner)
        assert algorithm.roles == inner.roles
        assert loss_and_slope(algorithm, *hand_pairs()) == loss_and_slope(inner, *hand_pairs())
        assert figures(algorithm, *hand_pairs()) == figures(inner, *hand_pairs())


def test_settings_go_through_a_configuration() -> None:
    algorithm = OnlineDPO(group=4, loss=IPO(tau=0.5))
    tree = to_tree(algorithm)
    assert tree == {"name": "online_dpo", "group": 4, "loss": {"name": "ipo", "tau": 0.5, "length": "mean"}}
    from posttrain.algorithms.base import Algorithm

    assert from_tree(tree, Algorithm, "rl.algorithm") == algorithm


@pytest.mark.proves("refusals")
def test_refusals_and_what_it_is() -> None:
    with pytest.raises(UserError, match=r"^online_dpo: group must be at least 2 \(a pair needs two responses\), not 1$"):
        OnlineDPO(group=1)
    for inner in (KTO(), OnlineDPO()):
        with pytest.raises(UserError, match="^online_dpo: loss must learn a policy from pairs"):
            OnlineDPO(loss=inner)
    assert OnlineDPO.learns_from == "rollouts" and OnlineDPO.unit == "pair" and OnlineDPO(group=5).group_size == 5


@pytest.mark.proves("optimum")
def test_its_optimum_is_that_of_rl_with_a_kl_penalty() -> None:
    """Pairs as it would take them from groups of a policy with full support, with the reward's own odds as labels."""
    generator = np.random.default_rng(0)
    algorithm = OnlineDPO(group=3, loss=DPO(beta=0.5, labels="soft"))
    groups = [
        group(
            [rollout([segment([9], False), segment([int(y)], True)], float(REWARD[y]), sample=n) for n, y in enumerate(drawn)]
        )
        for drawn in generator.choice(5, (200, 3))
    ]
    chosen = [g.rollouts for g in algorithm.select(groups, {}).groups]
    pairs = [(int(a.ids[1]), int(b.ids[1])) for a, b in chosen]
    rewards = [(float(a.score.value or 0), float(b.score.value or 0)) for a, b in chosen]
    assert divergence(tabular_optimum(algorithm, pairs, rewards), boltzmann(0.5)) < 1e-8


@pytest.mark.proves("learns")
@pytest.mark.parametrize(("seed", "sign"), [(0, 1.0), (1, 1.0), (2, 1.0), (0, -1.0)])
def test_it_climbs_its_reward(seed: int, sign: float) -> None:
    """The share of tokens below 12 in what it writes: up by 0.2 or more in twelve steps, or down where the reward is turned round."""
    policy, reference = small_policy(seed, torch.float32), small_policy(seed, torch.float32)
    algorithm = OnlineDPO(group=6)
    trainer = trainer_for(algorithm, policy, Optimization(lr=5e-3), reference)
    engine = Engine(policy)

    def share(ids: np.ndarray) -> float:
        return float(np.mean(ids < VOCABULARY // 2))

    def sample(step: int) -> list[Group]:
        prompts = [(3 + p, 5, 7) for p in range(6)]
        found = generate_groups(
            engine, [Prompt(p, 6, 100 * step + n, Sampling(8, min_new_tokens=8)) for n, p in enumerate(prompts)]
        )
        return [
            group(
                [
                    rollout([segment(p, False), segment(c.ids, True, c.logprobs)], sign * share(c.ids), f"p{n}", k)
                    for k, c in enumerate(completions)
                ]
            )
            for n, (p, completions) in enumerate(zip(prompts, found, strict=True))
        ]

    def level(groups: list[Group]) -> float:
        return sign * float(np.mean([r for g in groups for r in g.rewards]))

    before = level(sample(1000))
    for step in range(12):
        batch = pack_groups(algorithm.select(sample(step), {}).groups, 1.0, together=True)
        trainer.update(algorithm.prepare(trainer.fill(batch), {}), 5e-3)
        engine.publish(step + 1)
    after = level(sample(1000))
    assert sign * (after - before) > 0.2
