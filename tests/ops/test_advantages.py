"""Group advantages: numbers by hand and an independent NumPy reference; the laws are in tests/laws/test_advantages.py."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from posttrain.ops.advantages import (
    generalised_advantages,
    group_advantages,
    group_spread,
    length_adaptive,
    overlong_punishment,
    part_advantages,
    pass_at_k_advantages,
    process_advantages,
    sums_to_go,
    turn_advantages,
    turn_generalised_advantages,
    turn_starts,
)

WIDE = torch.float64


def advantages(
    rewards: list[float], groups: list[int] | None = None, valid: list[bool] | None = None, **options
) -> list[float]:
    groups = groups or [0] * len(rewards)
    valid_N = torch.tensor(valid or [True] * len(rewards), dtype=torch.bool)
    reward_N, group_N = torch.tensor(rewards, dtype=WIDE), torch.tensor(groups, dtype=torch.long)
    return group_advantages(reward_N, valid_N, group_N, **options).tolist()


def test_mean_baseline_by_hand() -> None:
    assert advantages([1, 0, 0, 1], scale="none") == [0.5, -0.5, -0.5, 0.5]
    third = 0.5 / (math.sqrt(1 / 3) + 1e-4)  # std with ddof 1: sqrt(4 * 0.25 / 3)
    assert advantages([1, 0, 0, 1]) == pytest.approx([third, -third, -third, third], abs=1e-15)


def test_the_divisor_of_the_variance_is_pinned() -> None:
    """r = [1, 0] gives 0.7071 with ddof 1 and 1.0 with ddof 0 (std 0.5)."""
    assert advantages([1, 0], ddof=1, epsilon=0.0) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])
    assert advantages([1, 0], ddof=0, epsilon=0.0) == pytest.approx([1.0, -1.0])


def test_an_episode_of_several_sequences_votes_once() -> None:
    """Rewards 1, 1 of one episode, and 0 and 0.5 of two others: as [1, 0, 0.5], with the first twice."""
    rewards, episode_N = [1.0, 1.0, 0.0, 0.5], torch.tensor([0, 0, 1, 2])
    for options in ({"scale": "none"}, {}, {"scale": "none", "baseline": "leave_one_out"}, {"scale": "batch"}):
        first, *others = advantages([1.0, 0.0, 0.5], **options)
        assert advantages(rewards, episode_N=episode_N, **options) == pytest.approx([first, first, *others], abs=1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_sequences_of_one_episode_are_not_compared_with_each_other(scale: str) -> None:
    """Where it is the only episode that was scored: it is its own baseline."""
    episode_N = torch.tensor([0, 0, 0, 1])
    assert advantages([1.0, 0.0, 0.5, 7.0], valid=[True] * 3 + [False], episode_N=episode_N, scale=scale) == [0.0] * 4


def test_leave_one_out_leaves_out_the_whole_episode() -> None:
    """Rewards 1 and -1 of one episode, 0 and 0.5 of two others: the baselines are (0 + 0.5) / 2, (0 + 0.5) / 2 and (0 + 0) / 2,
    whatever else the own episode was paid. A sequence without a score leaves its episode's vote to the other. The indices are those
    of a mini-batch, which has some of the episodes."""
    given = {"baseline": "leave_one_out", "scale": "none", "episode_N": torch.tensor([30, 30, 1, 2])}
    assert advantages([1.0, -1.0, 0.0, 0.5], **given) == pytest.approx([0.75, -1.25, -0.25, 0.5])
    valid = [True, False, True, True]
    assert advantages([1.0, -1.0, 0.0, 0.5], valid=valid, **given) == pytest.approx([0.75, 0.0, -0.75, 0.0])


def test_leave_one_out_by_hand() -> None:
    """r_i - mean of the others = n / (n - 1) (r_i - mean)."""
    assert advantages([3, 0, 0], baseline="leave_one_out", scale="none") == pytest.approx([3.0, -1.5, -1.5])


def test_batch_scale_divides_by_the_std_of_all_valid_rewards() -> None:
    rewards, groups = [0.0, 4.0, 2.0, 2.0], [0, 0, 1, 1]
    std = np.std(rewards, ddof=1)
    assert advantages(rewards, groups, scale="batch", epsilon=0.0) == pytest.approx([-2 / std, 2 / std, 0.0, 0.0])


def test_batch_scale_of_one_valid_reward() -> None:
    assert advantages([5.0, 7.0], valid=[True, False], scale="batch") == [0.0, 0.0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_independent_reference(seed: int, baseline: str, scale: str, ddof: int) -> None:
    generator = np.random.default_rng(seed)
    rewards, groups, valid = generator.normal(size=20), generator.integers(0, 5, 20), generator.random(20) > 0.2
    expected = np.zeros(20)
    for g in range(5):
        members = np.flatnonzero((groups == g) & valid)
        if len(members) < 2:
            continue
        for i in members:
            others = members[members != i] if baseline == "leave_one_out" else members
            expected[i] = rewards[i] - rewards[others].mean()
        if scale == "group":
            expected[members] /= rewards[members].std(ddof=ddof) + 1e-4
    if scale == "batch":
        expected /= rewards[valid].std(ddof=ddof) + 1e-4
    ours = advantages(rewards.tolist(), groups.tolist(), valid.tolist(), baseline=baseline, scale=scale, ddof=ddof)
    np.testing.assert_allclose(ours, expected, atol=1e-12)


def test_the_result_has_the_rewards_dtype() -> None:
    for dtype in (torch.float32, torch.float64):
        reward_N = torch.tensor([0.1, 0.7], dtype=dtype)
        assert group_advantages(reward_N, torch.tensor([True, True]), torch.tensor([0, 0])).dtype == dtype


def test_groups_need_not_be_neighbours_nor_numbered_from_zero() -> None:
    assert advantages([1, 10, 3, 20], [7, 2, 7, 2], scale="none") == [-1.0, -5.0, 1.0, 5.0]


def test_no_sequences() -> None:
    assert advantages([], [], []) == []


def test_spread_counts_only_valid_rewards() -> None:
    reward_N = torch.tensor([1.0, 5.0, 2.0, float("nan"), 3.0])
    valid_N = torch.tensor([True, True, True, False, False])
    assert group_spread(reward_N, valid_N, torch.tensor([0, 0, 1, 1, 2])).tolist() == [4.0, 0.0, 0.0]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="unknown baseline 'median': mean or leave_one_out"):
        advantages([1, 0], baseline="median")
    with pytest.raises(ValueError, match="unknown scale 'max': group, batch or none"):
        advantages([1, 0], scale="max")


def test_sums_to_go_by_hand() -> None:
    """Within each sequence, over loss tokens alone; whatever stands elsewhere."""
    value_T = torch.tensor([math.nan, 1.0, 2.0, math.inf, 4.0, 8.0, 16.0])
    mask_T = torch.tensor([False, True, True, False, True, False, True])
    sequence_T = torch.tensor([0, 0, 0, 0, 0, 1, 1])
    assert sums_to_go(value_T, mask_T, sequence_T, 3).tolist() == [0, 7, 6, 0, 4, 0, 16]
    assert sums_to_go(value_T, torch.zeros_like(mask_T), sequence_T, 3).tolist() == [0] * 7


def test_sums_to_go_leave_no_rounding_of_other_sequences() -> None:
    """A sequence of zeros after one of odd numbers sums to exactly 0."""
    value_T = torch.tensor([0.1, 0.2, 0.3, 0.7, 0.0, 0.0], dtype=WIDE)
    everything, sequence_T = torch.ones(6, dtype=torch.bool), torch.tensor([0, 0, 0, 0, 1, 1])
    assert sums_to_go(value_T, everything, sequence_T, 2)[4:].tolist() == [0.0, 0.0]


def test_process_advantages_by_hand() -> None:
    """Group 0 has steps 1, 0 and 2 (mean 1, std 1), group 1 two that are equal. Rewards of masked tokens are no steps."""
    nan = math.nan
    step_T = torch.tensor([nan, 1.0, 0.0, 9.0, nan, 2.0, nan, 3.0, 3.0])
    mask_T = torch.tensor([False, True, True, False, True, True, True, True, True])
    sequence_T, group_N = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2]), torch.tensor([0, 0, 1])
    found = process_advantages(step_T, mask_T, sequence_T, group_N, epsilon=0.0)
    assert found.tolist() == pytest.approx([0, -1, -1, 0, 1, 1, 0, 0, 0])
    assert process_advantages(step_T, torch.zeros_like(mask_T), sequence_T, group_N).tolist() == [0] * 9


def test_overlong_punishment_by_hand() -> None:
    lengths = torch.tensor([0.0, 6.0, 7.0, 9.0, 10.0, 99.0])
    assert overlong_punishment(lengths, 10, 4).tolist() == [0, 0, -0.25, -0.75, -1, -1]


# Two episodes of a group: prompt, turn of two tokens, observation, turn of one token; and prompt, turn of two tokens.
TURNS = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 1], dtype=torch.bool)
EPISODE = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1])


def by_turn(rewards: list[float], paid: list[float], **options) -> list[float]:
    one_N = torch.ones(2, dtype=torch.bool)
    given = (
        torch.tensor(rewards, dtype=WIDE),
        torch.tensor(paid, dtype=WIDE),
        one_N,
        TURNS,
        EPISODE,
        torch.zeros(2, dtype=torch.long),
    )
    return turn_advantages(*given, **options).tolist()


def test_a_turn_begins_after_what_was_given_and_with_a_sequence() -> None:
    assert turn_starts(TURNS, EPISODE).tolist() == [False, True, False, False, False, True, False, True, False]
    neighbours = turn_starts(torch.tensor([True, True, True]), torch.tensor([0, 0, 1]))
    assert neighbours.tolist() == [True, False, True], "two sequences never share a turn"


def test_the_credit_of_turns_is_the_one_worked_on_the_page() -> None:
    """Episode 1 is paid 1 for its first turn, 0 for its second and scores 1; episode 2 scores 1: docs/environments.md."""
    root = math.sqrt(0.5)
    found = by_turn([2.0, 1.0], [0, 0, 1.0, 0, 0, 0, 0, 0, 0], epsilon=0.0)
    assert found == pytest.approx([0, root, root, 0, 0, 0, 0, -root, -root])
    found = by_turn([2.0, 1.0], [0, 0, 1.0, 0, 0, 0, 0, 0, 0], scale="none")
    assert found == pytest.approx([0, 0.5, 0.5, 0, 0, 0, 0, -0.5, -0.5])


def test_paid_at_the_end_every_turn_has_the_advantage_of_its_episode() -> None:
    for options in ({}, {"scale": "none"}, {"scale": "none", "baseline": "leave_one_out"}):
        whole = advantages([3.0, 1.0], **options)
        found = by_turn([3.0, 1.0], [0.0] * 9, **options)
        assert found == [0, whole[0], whole[0], 0, 0, whole[0], 0, whole[1], whole[1]]


def test_a_turn_does_not_answer_for_what_was_paid_before_it() -> None:
    """The second turn's advantage does not change with what the first was paid."""
    first, second = (by_turn([p + 1.0, 0.5], [0, 0, p, 0, 0, 0, 0, 0, 0], scale="none") for p in (0.0, 7.0))
    assert first[5] == second[5] == 0.25 and first[1] == 0.25 and second[1] == 3.75


def test_sequences_without_a_turn_vote_with_their_score_and_a_batch_without_any_is_fine() -> None:
    mask_T = torch.tensor([0, 1, 0], dtype=torch.bool)
    given = (torch.tensor([1.0, 0.0]), torch.zeros(3), torch.ones(2, dtype=torch.bool))
    found = turn_advantages(*given, mask_T, torch.tensor([0, 0, 1]), torch.zeros(2, dtype=torch.long), scale="none")
    assert found.tolist() == [0, 0.5, 0]
    found = turn_advantages(*given, ~mask_T & mask_T, torch.tensor([0, 0, 1]), torch.zeros(2, dtype=torch.long))
    assert found.tolist() == [0, 0, 0]


def test_gae_over_turns_by_hand() -> None:
    """Turns paid 1 and 1, V = 1.5 and 0.5 before them, as on the page; then gamma 0.9, lam 0.5: A_1 = 1 - 0.5,
    A_0 = 1 + 0.9 * 0.5 - 1.5 + 0.45 * 0.5. Values within a turn and of observations do not matter."""
    junk = math.nan
    value_T = torch.tensor([junk, 1.5, junk, junk, junk, 0.5, junk, 2.0, junk], dtype=WIDE)
    reward_T = torch.tensor([junk, 0.25, 0.75, junk, junk, 1.0, junk, 0.0, 1.0], dtype=WIDE)
    for gamma, lam, first, second in ((1.0, 1.0, 0.5, 0.5), (0.9, 0.5, 0.175, 0.5)):
        found = turn_generalised_advantages(reward_T, value_T, TURNS, EPISODE, 2, gamma, lam)
        assert found[0].tolist() == pytest.approx([0, first, first, 0, 0, second, 0, -1, -1])
        assert found[1].tolist() == pytest.approx([0, first + 1.5, first + 1.5, 0, 0, second + 0.5, 0, 1, 1])


# --- pass@k, rewards one by one, lambda by length ---------------------------------------------------------------------------


def pass_at_k(rewards: list[float], k: int, valid: list[bool] | None = None, groups: list[int] | None = None) -> list[float]:
    valid_N, group_N = torch.tensor(valid or [True] * len(rewards)), torch.tensor(groups or [0] * len(rewards))
    given = (torch.tensor(rewards, dtype=WIDE), valid_N, group_N)
    return pass_at_k_advantages(*given, k=k, solved=1.0, epsilon=0.0).tolist()


def test_pass_at_k_by_hand() -> None:
    """One of four is right. Of the 6 pairs 3 are wrong: R = sigma = 1/2. The right one's pairs are all right: (1 - 1/2) / (1/2). A
    wrong one is with the right one in 1 of 3: (1/3 - 1/2) / (1/2). What could not be scored has no part."""
    assert pass_at_k([1, 0, 0, 0], 2) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert pass_at_k([1, 9, 0, 0.5, 0], 2, [True, False, True, True, True]) == pytest.approx([1, 0, -1 / 3, -1 / 3, -1 / 3])
    assert pass_at_k([1, 0, 0, 0, 1, 1], 2, groups=[0, 0, 0, 0, 1, 1])[4:] == [0, 0]


def test_pass_at_one_is_the_mean_and_the_populations_std() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0]
    assert pass_at_k(rewards, 1) == pytest.approx(advantages(rewards, ddof=0, epsilon=0.0))


def test_pass_at_k_is_zero_where_every_sample_of_k_is_alike() -> None:
    """Three of four right: each pair has a right one, so that nothing is left to learn. None right, or fewer than k: neither."""
    assert pass_at_k([1, 1, 1, 0], 2) == pass_at_k([0, 0, 0, 0], 2) == [0, 0, 0, 0]
    assert pass_at_k([1, 0], 3) == [0, 0]


@pytest.mark.parametrize("k", [2, 3])
def test_pass_at_k_is_the_mean_over_all_samples_of_k(k: int) -> None:
    """By enumeration: each subset of k has the reward of its best; a response has the mean advantage of its subsets."""
    rewards = [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    subsets = list(itertools.combinations(range(6), k))
    values = np.array([max(rewards[n] for n in s) for s in subsets])
    normal = (values - values.mean()) / values.std()
    expected = [np.mean([v for s, v in zip(subsets, normal, strict=True) if n in s]) for n in range(6)]
    assert pass_at_k(rewards, k) == pytest.approx(expected)


def test_rewards_normalised_one_by_one_by_hand() -> None:
    """Two groups of two. In the first both rewards tell the answers apart, in the second one does. Normalised one by one the first has
    twice the advantage, +-2 c against +-c with c = 1/2 / sqrt(1/2); their std is sqrt(5/2) c. Normalised after they were added, 2
    against 0 and 2 against 1 are the same."""
    part_NK = torch.tensor([[1, 1], [0, 0], [1, 1], [0, 1]], dtype=WIDE)
    given = (torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1]))
    found = part_advantages(part_NK, (1.0, 1.0), *given, epsilon=0.0)
    assert found.tolist() == pytest.approx([2 / 2.5**0.5, -2 / 2.5**0.5, 1 / 2.5**0.5, -1 / 2.5**0.5])
    assert advantages([2, 0, 2, 1], [0, 0, 1, 1], epsilon=0.0) == pytest.approx([0.5**0.5, -(0.5**0.5)] * 2)
    weighed = part_advantages(part_NK, (1.0, 3.0), *given, epsilon=0.0)
    assert weighed.tolist() == pytest.approx([4 / 8.5**0.5, -4 / 8.5**0.5, 1 / 8.5**0.5, -1 / 8.5**0.5])


def test_lambda_by_length_by_hand() -> None:
    assert length_adaptive(torch.tensor([0, 2, 8, 100]), 0.25).tolist() == pytest.approx([0, 0, 0.5, 0.96])


def test_a_lambda_for_each_sequence_is_that_lambda_for_it_alone() -> None:
    mask_T, sequence_T = torch.ones(7, dtype=torch.bool), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    reward_T, value_T = torch.arange(7, dtype=WIDE), torch.arange(7, dtype=WIDE).flip(0)
    found, _ = generalised_advantages(reward_T, value_T, mask_T, sequence_T, 2, 0.9, torch.tensor([0.5, 0.8], dtype=WIDE))
    for number, lam in enumerate((0.5, 0.8)):
        alone, _ = generalised_advantages(reward_T, value_T, mask_T, sequence_T, 2, 0.9, lam)
        assert torch.equal(found[sequence_T == number], alone[sequence_T == number])
