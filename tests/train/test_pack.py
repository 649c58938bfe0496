"""From rollouts and examples to flat tensors, and from those to pieces: by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from material_for_tests import copies_that_wait, group, rollout, segment

from posttrain.algorithms.rloo import RLOO
from posttrain.train.pack import (
    gather,
    micro_batches,
    mini_batches,
    pack_examples,
    pack_groups,
    take,
    token_versions,
    with_loss,
)
from posttrain.types import Batch, Example, Group, Score


def example(ids: list[int], mask: list[int], unit: int = -1) -> Example:
    return Example(np.array(ids), np.array(mask, dtype=bool), unit)


def two_groups() -> Batch:
    first = rollout([segment([1, 2], False), segment([3, 4], True, [-0.5, -0.25])], 1.0)
    tool = [segment([1, 2], False), segment([5], True, [-1.0]), segment([6, 7], False), segment([8], True, [-2.0])]
    third = rollout([segment([9], False), segment([10], True, [-3.0])], 0.5)
    return pack_groups([group([first, rollout(tool, None)]), group([third])], temperature=0.7)


def test_groups_by_hand() -> None:
    batch = two_groups()
    assert batch.ids_T.tolist() == [1, 2, 3, 4, 1, 2, 5, 6, 7, 8, 9, 10]
    assert batch.starts == (0, 4, 10, 12) and batch.tokens == 12 and batch.sequences == 3
    assert batch.sequence_T.tolist() == [0] * 4 + [1] * 6 + [2] * 2
    assert batch.mask_T.int().tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 0, 1]
    assert batch.behaviour_T.tolist() == [0, 0, -0.5, -0.25, 0, 0, -1, 0, 0, -2, 0, -3]
    assert batch.reward_N[0] == 1.0 and math.isnan(batch.reward_N[1]) and batch.reward_N[2] == 0.5
    assert batch.valid_N.tolist() == [True, False, True]
    assert batch.group_N.tolist() == [0, 0, 1]
    assert batch.unit_N == (0, 1, 2)
    assert batch.temperature == 0.7


def test_packing_waits_for_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor that of columns which few batches have: parts of rewards, rewards by turn, episodes, experts, labels of steps."""
    waited = copies_that_wait(monkeypatch)
    turns = [segment([1], False), replace(segment([2], True, [-1.0]), reward=0.5)]
    one = replace(rollout(turns, None), score=Score(1.0, {"task": 1.0}), routes=np.zeros((1, 2), np.int16))
    batch = pack_groups([Group(one.problem, (one, one))], 1.0, parts=["task"])
    assert {"episode_N", "paid_T", "part/task_N", "routes_T"} <= batch.columns.keys()
    steps = replace(example([1, 2], [0, 1]), steps=np.array([np.nan, 1.0], np.float32))
    assert "step_T" in pack_examples([steps]).columns
    assert token_versions([Group(one.problem, (one, one))], batch).tolist() == [-1] * 4 and waited == []


def test_sequences_of_one_episode_share_its_vote() -> None:
    assert "episode_N" not in two_groups().columns
    turns = [segment([1], False), segment([2], True, [-1.0])]
    members = [replace(rollout(turns, 1.0), sample=n) for n in (0, 1, 1)]
    batch = pack_groups([Group(members[0].problem, tuple(members)), group([rollout(turns, 0.0)])], 1.0)
    assert batch.episode_N.tolist() == [0, 1, 1, 2]


def test_what_could_not_be_scored_takes_nothing_of_its_episodes_vote() -> None:
    """The other sequence of the episode has its whole vote: advantages are those without the failed one."""
    turns = [segment([1], False), segment([2], True, [-1.0])]
    scored = [(0, 1.0), (0, None), (1, 0.0), (2, 0.5), (2, 0.5)]
    members = [replace(rollout(turns, reward), sample=n) for n, reward in scored]
    batch = pack_groups([Group(members[0].problem, tuple(members))], 1.0)
    step = batch.replace(reference_T=batch.behaviour_T)
    assert RLOO().prepare(step, {}).advantage_T[1::2].tolist() == pytest.approx([0.75, 0, -0.75, 0, 0])


def test_examples_by_hand() -> None:
    batch = pack_examples([example([1, 2, 3], [0, 1, 0]), example([4, 5], [0, 1])])
    assert batch.ids_T.tolist() == [1, 2, 3, 4, 5]
    assert batch.mask_T.int().tolist() == [0, 1, 0, 0, 1]
    assert batch.starts == (0, 3, 5) and batch.unit_N == (0, 1)
    assert bool(batch.valid_N.all()) and bool(batch.reward_N.isnan().all()) and batch.temperature == 1.0


@pytest.mark.parametrize(("ids", "mask"), [([1, 2], [1, 1]), ([1, 2], [0, 1, 1]), ([], [])])
def test_refusals(ids: list[int], mask: list[int]) -> None:
    with pytest.raises(ValueError, match="a sequence needs a mask of its own length, and its first token cannot carry loss"):
        pack_examples([example(ids, mask)])


def test_a_column_that_was_not_filled_is_an_error_that_names_it() -> None:
    batch = two_groups()
    with pytest.raises(AttributeError, match="the Batch has no column reference_T.*there are rollout_N"):
        _ = batch.reference_T
    filled = batch.replace(reference_T=torch.ones(12))
    assert filled.reference_T.tolist() == [1.0] * 12 and "reference_T" not in filled.replace(reference_T=None).columns


def test_host_copies_follow_every_cut() -> None:
    """So that a micro-batch is laid out without waiting for the device. A new mask has no copy yet; `with_loss` makes one."""
    batch = two_groups()
    for part in (batch, take(batch, 1, 3), gather(batch, [2, 0]), *micro_batches(batch, 6)):
        assert part.ids is not None and part.ids.tolist() == part.ids_T.tolist()
        assert part.mask is not None and part.mask.tolist() == part.mask_T.tolist()
    masked = batch.replace(mask_T=batch.mask_T & (batch.sequence_T == 1))
    assert masked.mask is None and masked.ids is not None
    kept = with_loss(masked)
    assert kept.mask is not None and kept.mask.tolist() == kept.mask_T.tolist() and kept.starts == (0, 6)


def test_cutting_waits_for_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, waited = two_groups(), copies_that_wait(monkeypatch)
    gather(batch, [2, 0]), micro_batches(batch, 6), with_loss(batch.replace(mask_T=batch.mask_T & (batch.sequence_T == 1)))
    assert not waited


def test_examples_of_one_item_are_a_unit_only_where_the_algorithm_needs_them_together() -> None:
    examples = [example([1, 2], [0, 1], unit) for unit in (0, 0, 1)]
    assert pack_examples(examples).unit_N == (0, 0, 1)
    assert pack_examples(examples, together=False).unit_N == (0, 1, 2)


def test_take_and_gather_by_hand() -> None:
    batch = two_groups().replace(advantage_T=torch.arange(12.0), weight_T=torch.ones(12))
    for part in (take(batch, 1, 3), gather(batch, [1, 2])):
        assert part.starts == (0, 6, 8)
        assert part.ids_T.tolist() == [1, 2, 5, 6, 7, 8, 9, 10]
        assert part.sequence_T.tolist() == [0] * 6 + [1] * 2
        assert part.advantage_T is not None and part.advantage_T.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
        assert part.valid_N.tolist() == [False, True] and part.group_N.tolist() == [0, 1]
        assert part.unit_N == (1, 2) and part.temperature == 0.7 and "reference_T" not in part.columns
    turned = gather(batch, [2, 0])
    assert turned.ids_T.tolist() == [9, 10, 1, 2, 3, 4] and turned.starts == (0, 2, 6)
    assert gather(batch, []).tokens == 0


def test_micro_batches_by_hand() -> None:
    batch = two_groups()  # lengths 4, 6, 2
    cuts = {budget: [piece.starts for piece in micro_batches(batch, budget)] for budget in (1, 6, 8, 10, 12)}
    assert cuts == {
        1: [(0, 4), (0, 6), (0, 2)],  # longer than the budget: alone
        6: [(0, 4), (0, 6), (0, 2)],
        8: [(0, 4), (0, 6, 8)],
        10: [(0, 4, 10), (0, 2)],
        12: [(0, 4, 10, 12)],
    }


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), budget=st.integers(1, 30), members=st.integers(1, 3))
def test_micro_batches_cover_all_and_cut_only_between_units(lengths: list[int], budget: int, members: int) -> None:
    batch = pack_examples([example([5] * n, [0] * n, 1 + i // members) for i, n in enumerate(lengths)])
    pieces = micro_batches(batch, budget)
    assert torch.equal(torch.cat([p.ids_T for p in pieces]), batch.ids_T)
    assert sum((p.unit_N for p in pieces), ()) == batch.unit_N
    seen = [set(p.unit_N) for p in pieces]
    assert all(not one & other for i, one in enumerate(seen) for other in seen[i + 1 :])
    assert all(p.tokens <= budget or len(set(p.unit_N)) == 1 for p in pieces)


def test_units_without_loss_are_dropped_whole_units_with_some_kept() -> None:
    batch = pack_examples(
        [example([1, 2], [0, 1], 1), example([3, 4], [0, 0], 1), example([5, 6], [0, 0], 2), example([7], [0], 3)]
    )
    assert with_loss(batch).ids_T.tolist() == [1, 2, 3, 4]
    kept = pack_examples([example([1, 2], [0, 1])])
    assert with_loss(kept) is kept


def test_mini_batches_are_whole_groups() -> None:
    rewards = [[1.0, 0.0, 0.5], [1.0], [0.0, 1.0], [0.0], [1.0, 1.0]]
    groups = [group([rollout([segment([3], False), segment([4], True)], r) for r in values]) for values in rewards]
    batch = pack_groups(groups, 1.0)
    assert mini_batches(batch, 1, 7) == [batch]
    for count in (2, 3, 5, 99):
        pieces = [m.group_N.tolist() for m in mini_batches(batch, count, 7)]
        assert len(pieces) == min(count, 5) and all(piece == sorted(piece) for piece in pieces), "groups keep their order"
        assert sorted(n for piece in pieces for n in piece) == [0, 0, 0, 1, 2, 2, 3, 4, 4], "each goes once, and whole"


def test_a_step_that_is_not_split_is_not_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = two_groups()
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: pytest.fail("this waits for the device"))
    assert mini_batches(batch, 1, 0) == [batch]


def test_which_groups_go_together_depends_on_the_seed_alone() -> None:
    groups = [group([rollout([segment([3], False), segment([4 + n], True)], 1.0) for _ in range(2)]) for n in range(8)]
    batch = pack_groups(groups, 1.0, together=True)
    dealt = [tuple(tuple(m.group_N.tolist()) for m in mini_batches(batch, 2, seed)) for seed in range(40)]
    assert dealt == [tuple(tuple(m.group_N.tolist()) for m in mini_batches(batch, 2, seed)) for seed in range(40)]
    assert len(set(dealt)) > 25, "of 70 ways"
    piece = mini_batches(batch, 2, 3)[0]
    chosen = piece.group_N.tolist()[::2]
    assert piece.ids_T.tolist() == [i for n in chosen for _ in range(2) for i in (3, 4 + n)]
    assert piece.unit_N == tuple(n for n in chosen for _ in range(2)) and piece.rollout_N.tolist() == [
        r for n in chosen for r in (2 * n, 2 * n + 1)
    ]


@settings(max_examples=40, deadline=None)
@given(groups=st.integers(1, 12), count=st.integers(1, 12))
def test_mini_batches_are_as_equal_as_can_be(groups: int, count: int) -> None:
    one = rollout([segment([3], False), segment([4], True)], 1.0)
    sizes = [m.sequences for m in mini_batches(pack_groups([group([one])] * groups, 1.0), count, count)]
    assert sum(sizes) == groups and len(sizes) == min(groups, count) and max(sizes) - min(sizes) <= 1
