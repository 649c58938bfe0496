"""Exploratory preference optimisation: its pairs, a bonus that is the expectation under the reference, and a reward climbed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pairs_for_tests import RATIOS, figures, hand_pairs, loss_and_slope, total
from tabular_for_tests import BANDIT, TREE, Table, divergence, every_group, train

from posttrain.algorithms.dpo import DPO
from posttrain.algorithms.ipo import IPO
from posttrain.algorithms.kto import KTO
from posttrain.algorithms.simpo import SimPO
from posttrain.algorithms.xpo import XPO
from posttrain.errors import UserError
from posttrain.types import Batch, Outputs
from tests.algorithms.test_online_dpo import answers

BETA = 0.5


def hand_step(rewards: tuple[float, ...] = (1.0, 0.0, 0.0, 1.0)) -> tuple[Batch, Outputs]:
    """Pairs sampled by the policy itself: log ref - log mu is -1, 0.5, 2 and -2."""
    batch, outputs = hand_pairs(rewards)
    return batch.replace(behaviour_T=outputs.logprob_T.detach()), outputs


@pytest.mark.proves("value")
def test_by_hand() -> None:
    """DPO's loss, and alpha / 4 of the log-probs -3, -1, -8 and -2, weighted by e^-1, e^0.5, 5 (e^2 is more) and e^-2."""
    plain, slope = loss_and_slope(DPO(), *hand_pairs())
    found, with_bonus = loss_and_slope(XPO(alpha=0.1, max_weight=5.0), *hand_step())
    weights = [math.exp(-1), math.exp(0.5), 5.0, math.exp(-2)]
    assert found - plain == pytest.approx(0.1 / 4 * -(3 * weights[0] + weights[1] + 8 * weights[2] + 2 * weights[3]))
    added = [0.1 / 4 * weights[n] for n in (0, 0, 1, 2, 2, 2, 3)]
    assert with_bonus == pytest.approx([a + b for a, b in zip(slope, added, strict=True)])
    assert figures(XPO(), *hand_step()) == figures(DPO(), *hand_pairs())


def test_without_a_bonus_it_is_the_loss_that_it_holds() -> None:
    for inner in (DPO(beta=0.3, alpha=0.1), DPO(form="hinge"), IPO(tau=0.5), SimPO()):
        algorithm = XPO(loss=inner, alpha=0.0)
        assert algorithm.roles == inner.roles | {"reference"}
        assert loss_and_slope(algorithm, *hand_step()) == loss_and_slope(inner, *hand_pairs())


@pytest.mark.parametrize("rewards", [(1, 0, 0.5, 0.5), (1, 0, math.nan, 0)])
def test_a_pair_that_prefers_nothing_has_the_bonus_alone(rewards: tuple[float, ...]) -> None:
    """And what has no score not even that."""
    plain, _ = loss_and_slope(DPO(), *hand_pairs(rewards))
    found, slope = loss_and_slope(XPO(alpha=0.1), *hand_step(rewards))
    weight = [0.0 if math.isnan(r) else math.exp(-ratio) for r, ratio in zip(rewards, RATIOS, strict=True)]
    count = sum(w > 0 for w in weight)
    sums = (-3, -1, -8, -2)
    assert found - plain == pytest.approx(0.1 / count * sum(w * s for w, s in zip(weight, sums, strict=True)))
    assert slope[3:] == pytest.approx([0.1 / count * weight[n] for n in (2, 2, 2, 3)])


def test_samples_are_paired_as_they_were_drawn() -> None:
    groups = [answers([0.0, 1.0, 0.5, 0.5]), answers([None, 1.0, 0.2, 0.9]), answers([1.0, None])]
    selection = XPO(group=4).select(groups, {})
    assert [tuple(r.sample for r in g.rollouts) for g in selection.groups] == [(0, 1), (2, 3), (1, 2)]
    assert [(m.name, m.total, m.count) for m in selection.metrics] == [("pairs/tied", 1, 3)]


@pytest.mark.proves("refusals")
def test_refusals_and_what_it_is() -> None:
    with pytest.raises(UserError, match=r"^xpo: group must be even, as responses are paired, not 3$"):
        XPO(group=3)
    with pytest.raises(UserError, match="^xpo: group must be at least 2 and even"):
        XPO(group=1)
    with pytest.raises(UserError, match="^xpo: max_weight must be at least 1"):
        XPO(max_weight=0.5)
    with pytest.raises(UserError, match="^xpo: alpha must be at least 0"):
        XPO(alpha=-1.0)
    with pytest.raises(UserError, match="^xpo: loss must learn a policy from pairs"):
        XPO(loss=KTO())
    assert XPO.learns_from == "rollouts" and XPO.unit == "pair" and XPO(group=6).group_size == 6


def expected_gradient(algorithm: XPO, table: Table, logits_SV: torch.Tensor) -> torch.Tensor:
    """Of the whole loss over every pair that could be drawn, each as likely as the policy makes it."""
    step = every_group(table, algorithm)
    filled = step.filled(logits_SV, torch.zeros(len(table.states)), algorithm)
    prepared = step.weighted(algorithm.prepare(filled, {}), table.policy(logits_SV))
    logits = logits_SV.clone().requires_grad_()
    logprob_T = step.logprobs(logits)
    total(algorithm.terms(Outputs(logprob_T, torch.zeros_like(logprob_T)), prepared)).backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.proves("slope")
@pytest.mark.parametrize("table", [BANDIT, TREE], ids=["bandit", "tree"])
def test_the_bonus_is_the_expectation_under_the_reference(table: Table) -> None:
    """At a policy far from it, from samples of that policy: alpha times the gradient of E_ref log pi, exactly."""
    generator = torch.Generator().manual_seed(0)
    logits_SV = table.start + torch.randn(table.start.shape, generator=generator, dtype=torch.float64)
    with_bonus, without = (
        expected_gradient(XPO(alpha=alpha, max_weight=1e6, loss=DPO(labels="soft")), table, logits_SV) for alpha in (0.3, 0.0)
    )
    reference, logits = torch.from_numpy(table.policy(table.start)), logits_SV.clone().requires_grad_()
    state_T, token_T = table.cells(table.responses)
    owner_T, prompt_T = table.owners
    logprob_T = logits.log_softmax(1)[state_T, token_T].where(~prompt_T, 0.0)
    (0.3 * (reference[owner_T] * logprob_T).sum()).backward()
    assert logits.grad is not None
    torch.testing.assert_close(with_bonus - without, logits.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.proves("optimum", "flipped")
@pytest.mark.parametrize("flip", [False, True], ids=["reward", "flipped"])
def test_where_it_ends(flip: bool) -> None:
    """Without a bonus at pi* (soft labels), with one near it, on the side away from the reference: what the reference says, and most
    of all what it says often, is less likely than in pi*."""
    table = BANDIT.flipped if flip else BANDIT
    soft = DPO(beta=BETA, labels="soft")
    plain, bold = (
        train(XPO(alpha=alpha, max_weight=1e6, loss=soft), every_group(table, XPO()), steps=200) for alpha in (0.0, 0.01)
    )
    optimum, reference = table.optimum(BETA), table.policy(table.start)
    assert divergence(plain, optimum) < 1e-3
    assert 1e-5 < divergence(bold, optimum) < 0.1
    assert float(reference @ np.log(bold)) < float(reference @ np.log(optimum)) - 1e-3
    assert int(np.argmax(bold / reference)) == table.best


@pytest.mark.proves("learns")
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_it_climbs_its_reward(sign: float) -> None:
    """On the tree, whose best response begins with an unlikely token; with the reward turned round it goes to the other end."""
    table = replace(TREE, reward=tuple(sign * r for r in TREE.reward))
    found = train(XPO(alpha=1e-3, loss=DPO(beta=0.2)), every_group(table, XPO()), steps=80, rate=0.3)
    assert found[table.best] > 0.9
