"""Rejection sampling: what is accepted, what happens when nothing is, and a reward that rises."""

from __future__ import annotations

import pytest
import torch
from material_for_tests import small_policy

from posttrain.algorithms.best_of_n import BestOfN
from posttrain.algorithms.raft import RAFT
from posttrain.errors import UserError
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_groups
from posttrain.train.trainer import Trainer
from posttrain.types import Outputs
from tests.algorithms.test_best_of_n import reward, scored, train


def kept(algorithm: RAFT, *rewards: float | None) -> list[int]:
    return [r.sample for r in algorithm.accepted(scored(*rewards))]


def test_the_top_share_is_accepted() -> None:
    assert kept(RAFT(share=0.5), 0.0, 3.0, 1.0, 2.0) == [1, 3]
    assert kept(RAFT(share=0.25), 0.0, 3.0, 1.0, 2.0) == [1]
    assert kept(RAFT(share=0.3), 0.0, 3.0, 1.0, 2.0) == [1, 3], "a share is rounded up"
    assert kept(RAFT(share=0.5), 1.0, 1.0, 1.0, 1.0) == [0, 1], "equals in the order they were sampled"
    assert kept(RAFT(share=0.5), None, 0.0, -1.0, None) == [1], "a share of those that could be scored"
    assert kept(RAFT(share=0.28, group=25), *range(25)) == [*range(18, 25)], "28% of 25 are 7"
    assert kept(RAFT(), None, None) == []


def test_the_threshold_rejects() -> None:
    verifier = RAFT(share=1.0, threshold=1.0)
    assert kept(verifier, 1.0, 0.0, 1.0, None) == [0, 2]
    assert kept(verifier, 0.0, 0.5) == []
    assert kept(RAFT(share=0.5, threshold=1.0), 1.0, 0.0, 1.0, 1.0) == [0, 2]
    groups = [scored(1.0, 0.0, 1.0), scored(0.0, 0.0)]
    selection = verifier.select(groups, {})
    assert [[r.sample for r in g.rollouts] for g in selection.groups] == [[0, 2]]
    assert {m.name: m.value for m in selection.metrics} == {"accepted": pytest.approx(2 / 5), "reward/accepted": 1.0}


def test_a_step_in_which_nothing_is_accepted_moves_nothing() -> None:
    algorithm = RAFT(share=1.0, threshold=1.0)
    selection = algorithm.select([scored(0.0, 0.5), scored(0.0, 0.0)], {})
    assert {m.name: float(m.total) for m in selection.metrics} == {"accepted": 0.0, "reward/accepted": 0.0}
    policy = small_policy(dtype=torch.float32)
    trainer = Trainer(policy, algorithm, Optimization(lr=1e-2))
    before = [p.clone() for p in policy.model.parameters()]
    update = trainer.update(algorithm.prepare(pack_groups(selection.groups, 1.0), {}), 1e-2)
    assert not update.moved
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))


@pytest.mark.proves("value")
def test_by_hand() -> None:
    """Accepted: responses of 1 and 3 tokens. Token mean over four tokens; the rejected one in the middle is not there."""
    algorithm = RAFT(share=0.5, threshold=0.5)
    groups = algorithm.select([scored(1.0, 0.0, 2.0)], {}).groups
    batch = algorithm.prepare(pack_groups(groups, 1.0), {})
    logprob_T = torch.tensor([0, 0, -8.0, 0, 0, -1.0, -2.0, -3.0], dtype=torch.float64)
    terms = algorithm.terms(Outputs(logprob_T, logprob_T), batch)
    assert float((terms.terms[0].weight * terms.terms[0].loss).sum()) == pytest.approx((8 + 1 + 2 + 3) / 4, rel=1e-6)


def test_one_over_the_group_is_best_of_n() -> None:
    groups = [scored(0.0, 2.0, 2.0, 1.0), scored(-1.0, None, 0.0, 0.0)]
    ours, theirs = RAFT(group=4, share=0.25).select(groups, {}), BestOfN(group=4).select(groups, {})
    assert [[r.sample for r in g.rollouts] for g in ours.groups] == [[r.sample for r in g.rollouts] for g in theirs.groups]


@pytest.mark.proves("refusals")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"share": 0.0}, r"share must be in \(0, 1\], not 0.0"),
        ({"share": 1.0}, "nothing is rejected and nothing is learned; lower share, or set threshold"),
        ({"group": 1}, "nothing is rejected"),
        ({"threshold": float("nan")}, "threshold must be a finite reward"),
        ({"group": 0}, "group must be at least 1"),
        ({"reduction": "sum"}, "reduction must be token_mean or sequence_mean"),
    ],
)
def test_refusals(settings: dict, words: str) -> None:
    with pytest.raises(UserError, match=f"^raft: .*{words}"):
        RAFT(**settings)


@pytest.mark.proves("learns")
def test_the_reward_rises() -> None:
    """In 12 rounds, by the top quarter (seen 0.38 to 0.89), and by a threshold that at first few reach (0.38 to 0.80)."""
    before, after = train(RAFT(group=8, share=0.25), 12)
    assert after > before + 0.3
    before, after = train(RAFT(group=8, share=1.0, threshold=0.6), 12, reward)
    assert after > before + 0.3
