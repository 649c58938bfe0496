"""GAE and whitening: numbers by hand, a loop in NumPy, and properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.ops import advantages
from posttrain.ops.advantages import generalised_advantages, last_tokens, whiten

WIDE = torch.float64
quick = settings(max_examples=60, deadline=None)


def wide(*values: float) -> Tensor:
    return torch.tensor(values, dtype=WIDE)


def one_sequence(
    reward: Tensor, value: Tensor, gamma: float, lam: float, mask: list[int] | None = None
) -> tuple[Tensor, Tensor]:
    mask_T = torch.ones(len(reward), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    return generalised_advantages(reward, value, mask_T, torch.zeros(len(reward), dtype=torch.int64), 1, gamma, lam)


def test_by_hand() -> None:
    """r = 0, 0, 1 and V = 0.5, 0.2, 0.4 with gamma 0.9, lam 0.5: deltas 0.9*0.2-0.5, 0.9*0.4-0.2, 1-0.4."""
    advantage_T, return_T = one_sequence(wide(0, 0, 1), wide(0.5, 0.2, 0.4), 0.9, 0.5)
    last = 0.6
    middle = 0.16 + 0.45 * last
    first = -0.32 + 0.45 * middle
    assert advantage_T.tolist() == pytest.approx([first, middle, last])
    assert return_T.tolist() == pytest.approx([first + 0.5, middle + 0.2, last + 0.4])


def test_observations_are_skipped_by_hand() -> None:
    """The token after a tool's answer is the next action: its value is the next state's, as if nothing stood between."""
    junk = math.nan
    advantage_T, return_T = one_sequence(
        wide(junk, 0, junk, junk, 1, junk), wide(junk, 0.5, junk, 9, 0.2, junk), 0.9, 0.5, [0, 1, 0, 0, 1, 0]
    )
    assert advantage_T.tolist() == pytest.approx([0, 0.9 * 0.2 - 0.5 + 0.45 * 0.8, 0, 0, 0.8, 0])
    assert return_T.tolist() == pytest.approx([0, 0.9 * 0.2 + 0.45 * 0.8, 0, 0, 1.0, 0])


def by_loop(
    reward: np.ndarray, value: np.ndarray, mask: np.ndarray, sequence: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """One token at a time, from the end, as the paper has it."""
    advantage, returns = np.zeros(len(reward)), np.zeros(len(reward))
    next_value, next_advantage, owner = 0.0, 0.0, -1
    for t in range(len(reward) - 1, -1, -1):
        if sequence[t] != owner:
            next_value, next_advantage, owner = 0.0, 0.0, sequence[t]
        if mask[t]:
            next_advantage = reward[t] + gamma * next_value - value[t] + gamma * lam * next_advantage
            next_value = value[t]
            advantage[t], returns[t] = next_advantage, next_advantage + value[t]
    return advantage, returns


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6)
SHARE = st.floats(0, 1)


def drawn(lengths: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = np.random.default_rng(seed)
    total = sum(lengths)
    reward, value = generator.normal(size=(2, total))
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return torch.from_numpy(reward), torch.from_numpy(value), torch.from_numpy(generator.random(total) < 0.7), sequence_T


@quick
@given(lengths=LENGTHS, seed=st.integers(0, 99), gamma=SHARE, lam=SHARE)
def test_vectorised_gae_equals_the_loop(lengths: list[int], seed: int, gamma: float, lam: float) -> None:
    reward_T, value_T, mask_T, sequence_T = drawn(lengths, seed)
    ours = generalised_advantages(reward_T, value_T, mask_T, sequence_T, len(lengths), gamma, lam)
    expected = by_loop(reward_T.numpy(), value_T.numpy(), mask_T.numpy(), sequence_T.numpy(), gamma, lam)
    for found, wanted in zip(ours, expected, strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 5, 64, 321])
def test_sums_by_doubling_are_those_by_token(length: int) -> None:
    """What a GPU does in place of a loop over the tokens."""
    delta_NL = torch.from_numpy(np.random.default_rng(0).normal(size=(3, length)))
    for decay in (0.0, 0.95, 1.0, torch.tensor([0.3, 0.99, 1.0], dtype=WIDE)):
        expected = advantages._summed_by_token(delta_NL, decay)
        torch.testing.assert_close(advantages._summed_by_doubling(delta_NL, decay), expected, rtol=1e-12, atol=1e-12)


@quick
@given(seed=st.integers(0, 99), gamma=SHARE)
def test_lambda_0_and_1_are_td_error_and_monte_carlo(seed: int, gamma: float) -> None:
    """lam = 1: the discounted return minus the value. lam = 0: the error of one step. gamma = lam = 0: reward minus value."""
    reward_T, value_T, _, _ = drawn([6], seed)
    later_T = torch.stack([sum(gamma**k * reward_T[t + k] for k in range(6 - t)) for t in range(6)])
    torch.testing.assert_close(one_sequence(reward_T, value_T, gamma, 1.0)[0], later_T - value_T)
    torch.testing.assert_close(one_sequence(reward_T, value_T, gamma, 1.0)[1], later_T)
    following_T = torch.cat([value_T[1:], torch.zeros(1, dtype=WIDE)])
    torch.testing.assert_close(one_sequence(reward_T, value_T, gamma, 0.0)[0], reward_T + gamma * following_T - value_T)
    torch.testing.assert_close(one_sequence(reward_T, value_T, 0.0, 0.0)[0], reward_T - value_T)


@quick
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_packing_changes_nothing(lengths: list[int], seed: int) -> None:
    """Each sequence alone has the same advantages to the last bit, whatever its neighbours."""
    reward_T, value_T, mask_T, sequence_T = drawn(lengths, seed)
    together = generalised_advantages(reward_T, value_T, mask_T, sequence_T, len(lengths), 0.97, 0.9)
    for n in range(len(lengths)):
        own = sequence_T == n
        alone = generalised_advantages(reward_T[own], value_T[own], mask_T[own], sequence_T[own] - n, 1, 0.97, 0.9)
        assert torch.equal(together[0][own], alone[0]) and torch.equal(together[1][own], alone[1])


@pytest.mark.parametrize("junk", [math.nan, math.inf, 1e30])
def test_tokens_without_loss_change_no_gae_output(junk: float) -> None:
    reward_T, value_T, mask_T, sequence_T = drawn([5, 7, 1, 9], 3)
    clean = generalised_advantages(reward_T, value_T, mask_T, sequence_T, 4, 0.99, 0.95)
    dirty = generalised_advantages(reward_T.where(mask_T, junk), value_T.where(mask_T, junk), mask_T, sequence_T, 4, 0.99, 0.95)
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])
    assert not clean[0][~mask_T].any() and not clean[1][~mask_T].any()


def test_no_value_is_bootstrapped_past_the_last_token() -> None:
    """Nothing is bootstrapped after the last token, whether the response stopped or was cut off: one token, r - V."""
    advantage_T, return_T = one_sequence(wide(0, 2.0), wide(0, 0.5), 1.0, 0.95, [0, 1])
    assert advantage_T.tolist() == [0, 1.5] and return_T.tolist() == [0, 2.0]


def test_no_loss_at_all() -> None:
    advantage_T, return_T = one_sequence(wide(1, 1), wide(2, 2), 1.0, 1.0, [0, 0])
    assert not advantage_T.any() and not return_T.any()


def test_float32_is_summed_in_float64() -> None:
    """A thousand steps of 0.1: in float32 the sum from the end would be off by more than 1e-4."""
    reward_T, value_T = torch.full((4000,), 0.1), torch.zeros(4000)
    advantage_T, _ = one_sequence(reward_T, value_T, 1.0, 1.0)
    assert advantage_T.dtype == torch.float32
    assert float(advantage_T[0]) == pytest.approx(4000 * float(np.float32(0.1)), rel=1e-7)


def test_last_tokens_by_hand() -> None:
    mask_T = torch.tensor([0, 1, 1, 0, 0, 0, 1, 0, 1, 0], dtype=torch.bool)
    sequence_T = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2, 2])
    where, whose = last_tokens(mask_T, sequence_T, 3)
    assert where.tolist() == [2, 8] and whose.tolist() == [0, 2]  # the second has no loss


def test_whitening_by_hand() -> None:
    """1, 2, 6 over the mask: mean 3, variance (4 + 1 + 9) / 3 = 14 / 3."""
    values, mask_T = wide(1, 99, 2, 6), torch.tensor([True, False, True, True])
    scale = math.sqrt(3 / 14)
    assert whiten(values, mask_T, epsilon=0.0).tolist() == pytest.approx([-2 * scale, 0, -scale, 3 * scale])


def test_whitening_that_keeps_the_mean_by_hand() -> None:
    """1, 5, 3, 3 over the mask: mean 3, variance (4 + 4 + 0 + 0) / 4 = 2, so 3 -+ 2 / sqrt(2) and 3 twice. The mean stays 3, as in the
    code of Ziegler et al. (`whitened += mean`); dividing the values as they are would make it 3 / sqrt(2)."""
    values, mask_T = wide(1, 5, -40, 3, 3), torch.tensor([True, True, False, True, True])
    found = whiten(values, mask_T, shift=False, epsilon=0.0)
    assert found.tolist() == pytest.approx([3 - math.sqrt(2), 3 + math.sqrt(2), 0, 3, 3])
    assert float(found[mask_T].mean()) == pytest.approx(3.0)
    assert whiten(wide(1, 5), mask_T[:2], shift=False, epsilon=0.0).tolist() == pytest.approx([2, 4])


@quick
@given(values=st.lists(st.floats(-100, 100), min_size=2, max_size=20), junk=st.sampled_from([math.nan, math.inf, -5.0]))
def test_whitening_gives_mean_0_and_variance_1_over_the_mask_alone(values: list[float], junk: float) -> None:
    value_T = torch.tensor([*values, junk], dtype=WIDE)
    mask_T = torch.arange(len(value_T)) < len(values)
    found = whiten(value_T, mask_T, epsilon=0.0)
    assert float(found[-1]) == 0.0
    spread = max(values) - min(values)
    if spread > 1e-3:
        assert float(found[:-1].mean()) == pytest.approx(0.0, abs=1e-9)
        assert float(found[:-1].var(correction=0)) == pytest.approx(1.0, abs=1e-9)
    elif spread == 0:
        assert not found.any()


@pytest.mark.parametrize(("value", "count"), [(0.7, 7), (0.1, 8), (0.3, 12), (5.0, 1)])
def test_equal_values_are_not_blown_up(value: float, count: int) -> None:
    """Their variance in float32 need not be 0; scaled by it they would be noise, or the value times 1e4."""
    value_T, mask_T = torch.full((count,), value), torch.ones(count, dtype=torch.bool)
    assert whiten(value_T, mask_T).tolist() == [0.0] * count
    assert torch.equal(whiten(value_T, mask_T, shift=False), value_T)
    assert whiten(value_T, ~mask_T).tolist() == [0.0] * count
