"""Properties of advantages within groups, and bugs of other libraries that they exclude."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from material_for_tests import CASES, ONLINE, bare, gradients, material, plain_batch

from posttrain import catalogue
from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.grpo import GRPO
from posttrain.errors import UserError
from posttrain.ops.advantages import group_advantages
from posttrain.train.pack import gather, micro_batches, pack_groups

WIDE = torch.float64
REWARDS = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=2, max_size=12)
KINDS = [(baseline, scale) for baseline in ("mean", "leave_one_out") for scale in ("group", "batch", "none")]
every_kind = pytest.mark.parametrize(("baseline", "scale"), KINDS)
# those whose baseline is the group, not all of the step, a critic, an answer that `select` takes out, or the values of steps
GROUPED = [
    c
    for c in ONLINE
    if c.values[0].group_size > 1
    and "critic" not in c.values[0].roles
    and catalogue.name_of(c.values[0]) not in ("remax", "vineppo")
]
quick = settings(max_examples=60, deadline=None)


def advantages(rewards: list[float], groups: list[int] | None = None, valid: list[bool] | None = None, **options: Any):
    valid_N = torch.tensor(valid if valid is not None else [True] * len(rewards), dtype=torch.bool)
    group_N = torch.tensor(groups if groups is not None else [0] * len(rewards))
    return group_advantages(torch.tensor(rewards, dtype=WIDE), valid_N, group_N, **options)


@every_kind
@quick
@given(rewards=REWARDS)
def test_advantages_of_a_group_add_up_to_zero(baseline: str, scale: str, rewards: list[float]) -> None:
    advantage_N = advantages(rewards, baseline=baseline, scale=scale)
    spread = max(rewards) - min(rewards)
    # what cancels is the size of the rewards, not of their differences: 1e-14 of it may remain
    rounding = 1e-14 * max(map(abs, rewards)) / max(spread, 1e-300)
    assert abs(float(advantage_N.sum())) <= (1e-9 + rounding) * len(rewards) * float(advantage_N.abs().max())


@every_kind
@quick
@given(rewards=REWARDS, shift=st.integers(-8, 8))
def test_a_constant_added_to_all_rewards_changes_nothing(baseline: str, scale: str, rewards: list[float], shift: int) -> None:
    rewards = [round(r * 64) / 64 for r in rewards]  # sums with a whole number are exact
    one = advantages(rewards, baseline=baseline, scale=scale)
    other = advantages([r + shift for r in rewards], baseline=baseline, scale=scale)
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@quick
@given(rewards=REWARDS, factor=st.floats(0.01, 100))
def test_scaled_rewards_scale_or_keep_the_advantages(rewards: list[float], factor: float) -> None:
    """Without epsilon the scale cancels; with it A(a r) = a c / (a s + epsilon); without a divisor A is linear."""
    assume(max(rewards) - min(rewards) > 1e-3)
    scaled = [factor * r for r in rewards]
    for scale in ("group", "batch"):
        one, other = advantages(rewards, scale=scale, epsilon=0.0), advantages(scaled, scale=scale, epsilon=0.0)
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(
        advantages(scaled, scale="none"), factor * advantages(rewards, scale="none"), rtol=1e-8, atol=1e-8
    )
    reward_N = torch.tensor(rewards, dtype=WIDE)
    exact = factor * (reward_N - reward_N.mean()) / (factor * reward_N.std() + 1e-2)
    torch.testing.assert_close(advantages(scaled, epsilon=1e-2), exact, rtol=1e-8, atol=1e-8)


@every_kind
@quick
@given(data=st.data(), rewards=REWARDS)
def test_order_of_samples_and_numbers_of_groups_do_not_matter(
    baseline: str, scale: str, data: Any, rewards: list[float]
) -> None:
    """Grouping is by the problem's number, not by place: samples may come in any order and groups have any numbers."""
    count = len(rewards)
    groups = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    order = data.draw(st.permutations(range(count)))
    names = data.draw(st.permutations(range(4)))
    one = advantages(rewards, groups, baseline=baseline, scale=scale)
    other = advantages([rewards[i] for i in order], [names[groups[i]] for i in order], baseline=baseline, scale=scale)
    torch.testing.assert_close(other, one[list(order)], rtol=1e-9, atol=1e-9)


@every_kind
@pytest.mark.parametrize(("value", "count"), [(0.7, 7), (0.1, 8), (0.3, 12), (0.0, 2), (1e9, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, WIDE])
def test_equal_rewards_give_exactly_zero(baseline: str, scale: str, value: float, count: int, dtype: torch.dtype) -> None:
    """Tested by max == min. In float32 the std of [0.7] * 7 is not 0 but 6e-8, and |A| would be 0.8 at epsilon 1e-8."""
    reward_N = torch.tensor([value] * count + [0.0, 1.0], dtype=dtype)  # a second group, so that the batch has a spread
    group_N = torch.tensor([0] * count + [1, 1])
    advantage_N = group_advantages(
        reward_N, torch.ones(count + 2, dtype=torch.bool), group_N, baseline=baseline, scale=scale, epsilon=1e-8
    )
    assert advantage_N[:count].tolist() == [0.0] * count
    assert float(advantage_N[-1]) > 0


@pytest.mark.parametrize("algorithm", [c for c in GROUPED if not c.values[0].roles and not getattr(c.values[0], "entropy", 0)])
def test_a_group_of_equal_rewards_has_no_gradient(algorithm: Algorithm) -> None:
    if getattr(
        algorithm, "l_max", 0
    ):  # a punishment of length is a reward too; groups it would tell apart are left out by `select`
        algorithm = replace(algorithm, l_max=10**6, l_cache=1)
    step = material(algorithm)
    flat = gather(step, [n for n in range(step.sequences) if int(step.group_N[n]) == 1])
    if getattr(algorithm, "truncated", "") == "zero":  # what was cut off is paid less
        flat = flat.replace(truncated_N=torch.zeros_like(flat.truncated_N))
    prepared = algorithm.prepare(flat, {})
    assert not bool(prepared.mask_T.any()) or all(not g.any() for g in gradients(algorithm, prepared)[1].values())


@pytest.mark.parametrize("junk", [1e9, -1e9, math.nan, math.inf, 0.0])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scale": "none"}, [2 / 3, 0, -1 / 3, -1 / 3]),
        ({"scale": "group", "epsilon": 0.0}, [1.154700538, 0, -0.577350269, -0.577350269]),
        ({"baseline": "leave_one_out", "scale": "none"}, [1, 0, -0.5, -0.5]),
    ],
)
def test_an_unscored_rollout_has_no_vote_in_the_baseline(junk: float, options: dict, expected: list[float]) -> None:
    """The second of four failed: its placeholder changes nothing, and its own advantage is 0."""
    found = advantages([1, junk, 0, 0], valid=[True, False, True, True], **options)
    assert found.tolist() == pytest.approx(expected, abs=1e-8)


@pytest.mark.proves("unscored")
@pytest.mark.parametrize("junk", [1e9, math.nan, math.inf])
@pytest.mark.parametrize("algorithm", ONLINE)
def test_an_unscored_rollout_does_not_change_the_step(algorithm: Algorithm, junk: float) -> None:
    step = material(algorithm)
    assert not bool(step.valid_N.all())
    one = algorithm.prepare(step, {})
    other = algorithm.prepare(step.replace(reward_N=step.reward_N.where(step.valid_N, junk)), {})
    for name in ("mask_T", "advantage_T", "weight_T", "return_T"):
        ours, theirs = getattr(one, name, None), getattr(other, name, None)
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)
    failed_T = ~step.valid_N[step.sequence_T]
    assert not bool(one.mask_T[failed_T].any()) and not bool(one.weight_T[failed_T].any())


def test_zero_is_a_score() -> None:
    assert advantages([1.0, 0.0], scale="none").tolist() == [0.5, -0.5]


@every_kind
@quick
@given(rewards=REWARDS)
def test_leave_one_out_is_the_mean_baseline_times_a_factor(baseline: str, scale: str, rewards: list[float]) -> None:
    count = len(rewards)
    one = advantages(rewards, baseline="leave_one_out", scale=scale)
    torch.testing.assert_close(one, count / (count - 1) * advantages(rewards, scale=scale), rtol=1e-12, atol=1e-12)


@every_kind
def test_one_valid_sample_has_no_advantage(baseline: str, scale: str) -> None:
    """Its reward is its own baseline; taking mean 0 and std 1 instead, as some do, trains on the raw reward."""
    assert advantages([5.0], baseline=baseline, scale=scale).tolist() == [0.0]
    assert advantages([5.0, 1.0], [0, 1], baseline=baseline, scale=scale).tolist() == [0.0, 0.0]
    assert advantages([5.0, 1.0, 2.0], valid=[True, False, False], baseline=baseline, scale=scale).tolist() == [0.0, 0.0, 0.0]
    assert advantages([5.0, 1.0], valid=[False, False], baseline=baseline, scale=scale).tolist() == [0.0, 0.0]


def test_groups_of_one_are_refused() -> None:
    with pytest.raises(UserError, match="group must be at least 2"):
        GRPO(group=1)


@pytest.mark.parametrize("algorithm", GROUPED)
def test_two_problems_with_equal_prompts_are_two_groups(algorithm: Algorithm) -> None:
    """Two problems with the same prompt text and ids stay two groups."""
    step = plain_batch([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1])
    assert step.group_N.tolist() == [0, 0, 1, 1]
    prepared = algorithm.prepare(bare(step), {})
    assert prepared.advantage_T is not None and not prepared.advantage_T.any()


@pytest.mark.parametrize("algorithm", ONLINE)
def test_advantages_do_not_leak_past_the_mask(algorithm: Algorithm) -> None:
    prepared = algorithm.prepare(material(algorithm), {})
    assert prepared.advantage_T is not None
    assert not prepared.advantage_T[~prepared.mask_T].any()


@pytest.mark.parametrize("algorithm", CASES)
def test_preparing_changes_nothing_in_place(algorithm: Algorithm) -> None:
    """A rollout is prepared again in every epoch, and once more for the viewer."""
    step = material(algorithm)
    before = {
        name: getattr(step, name).clone() for name in ("ids_T", "mask_T", "behaviour_T", "reward_N", "valid_N", "group_N")
    }
    one, other = algorithm.prepare(step, {}), algorithm.prepare(step, {})
    for name, value in before.items():
        assert torch.equal(getattr(step, name).nan_to_num(), value.nan_to_num())
    weights = [(one.columns.get(name), other.columns.get(name)) for name in ("weight_T", "weight_N")]
    assert any(ours is not None for ours, _ in weights)
    for ours, theirs in weights:
        assert ours is None or (torch.equal(ours, theirs) and not ours.requires_grad)


def test_no_groups_at_all_are_an_empty_step() -> None:
    """What a selection of nothing becomes; the loop leaves such a step out."""
    batch = pack_groups([], 1.0)
    assert (batch.sequences, batch.tokens, micro_batches(batch, 10)) == (0, 0, [])
