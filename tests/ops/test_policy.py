"""The clipped surrogate by hand: both signs of the advantage, both sides of the clip, and log-ratios without limit."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.ops.policy import (
    LIMIT,
    clip_binds,
    clipped_surrogate,
    importance_ratio,
    mismatch_weights,
    near_sequences,
    sequence_ratio,
    token_form,
    weighted_likelihood,
)

WIDE = torch.float64

# ratio, advantage, loss, gradient with respect to the log-prob, whether the clip binds; low 0.2, high 0.3
TABLE = [
    (1.0, 2.0, -2.0, -2.0, False),
    (1.2, 2.0, -2.4, -2.4, False),
    (1.5, 2.0, -2.6, 0.0, True),  # gain above 1 + high is cut
    (0.5, 2.0, -1.0, -1.0, False),  # a good token that became rarer is still pushed up
    (1.0, -2.0, 2.0, 2.0, False),
    (0.9, -2.0, 1.8, 1.8, False),
    (0.5, -2.0, 1.6, 0.0, True),  # gain below 1 - low is cut
    (1.5, -2.0, 3.0, 3.0, False),  # a bad token that became likelier is still pushed down
    (1.5, 0.0, 0.0, 0.0, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "slope", "binds"), TABLE)
def test_surrogate_by_hand(ratio: float, advantage: float, loss: float, slope: float, binds: bool) -> None:
    logprob_T = torch.tensor([math.log(ratio) - 1.0], dtype=WIDE, requires_grad=True)
    advantage_T = torch.tensor([advantage], dtype=WIDE)
    ratio_T = importance_ratio(logprob_T, torch.tensor([-1.0], dtype=WIDE))
    loss_T = clipped_surrogate(ratio_T, advantage_T, 0.2, 0.3)
    (found,) = torch.autograd.grad(loss_T.sum(), logprob_T)
    assert loss_T.item() == pytest.approx(loss, abs=1e-12)
    assert found.item() == pytest.approx(slope, abs=1e-12)
    assert clip_binds(ratio_T, advantage_T, 0.2, 0.3).tolist() == [binds]


def test_ratio_by_hand() -> None:
    ratio_T = importance_ratio(
        torch.tensor([math.log(0.5), -1.0], dtype=WIDE), torch.tensor([math.log(0.25), -1.0], dtype=WIDE)
    )
    assert ratio_T.tolist() == pytest.approx([2.0, 1.0])
    assert ratio_T[1] == 1.0


@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_ratios_are_finite(difference: float, advantage: float) -> None:
    logprob_T = torch.tensor([difference], requires_grad=True)
    ratio_T = importance_ratio(logprob_T, torch.zeros(1))
    loss_T = clipped_surrogate(ratio_T, torch.tensor([advantage]), 0.2, 0.2)
    (slope,) = torch.autograd.grad(loss_T.sum(), logprob_T)
    assert float(ratio_T.detach()) <= math.exp(LIMIT) * 1.001
    assert bool(torch.isfinite(loss_T).all()) and bool(torch.isfinite(slope).all())


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "binds"),
    [
        (5.0, -2.0, 6.0, 0.0, True),  # c = 3: the ratio counts as 3
        (2.0, -2.0, 4.0, 4.0, False),
        (0.5, -2.0, 1.6, 0.0, True),  # the usual clip, as it is
        (5.0, 2.0, -2.6, 0.0, True),  # where A > 0 there is nothing to bound
    ],
)
def test_the_dual_clip_by_hand(ratio: float, advantage: float, loss: float, slope: float, binds: bool) -> None:
    logprob_T = torch.tensor([math.log(ratio)], dtype=WIDE, requires_grad=True)
    given = (importance_ratio(logprob_T, torch.zeros(1)), torch.tensor([advantage], dtype=WIDE), 0.2, 0.3, 3.0)
    loss_T = clipped_surrogate(*given)
    (found,) = torch.autograd.grad(loss_T.sum(), logprob_T)
    assert (float(loss_T.detach()), float(found)) == (pytest.approx(loss), pytest.approx(slope))
    assert clip_binds(*given).tolist() == [binds]


def test_no_upper_clip() -> None:
    loss_T = clipped_surrogate(torch.tensor([7.0]), torch.tensor([1.0]), 0.2, math.inf)
    assert loss_T.tolist() == [-7.0]


# two responses: tokens 1 and 2 of the first carry loss, token 4 of the second; 0 and 3 are prompts
MASK, SEQUENCE = torch.tensor([False, True, True, False, True]), torch.tensor([0, 0, 0, 1, 1])
NEW = torch.tensor([math.nan, math.log(0.5), math.log(0.4), math.inf, math.log(0.9)], dtype=WIDE)
OLD = torch.tensor([1.0, math.log(0.25), math.log(0.2), -math.inf, math.log(0.3)], dtype=WIDE)
FILLED = (NEW.where(MASK, 0.0), OLD.where(MASK, 0.0))


def test_ratios_of_whole_responses_by_hand() -> None:
    """Token ratios 2, 2 and 3: their product is 4 and 3, their geometric mean 2 and 3, at every place of the response."""
    assert sequence_ratio(*FILLED, MASK, SEQUENCE, 2, mean=False).tolist() == pytest.approx([4, 4, 4, 3, 3])
    assert sequence_ratio(*FILLED, MASK, SEQUENCE, 2, mean=True).tolist() == pytest.approx([2, 2, 2, 3, 3])


def test_the_token_form_has_the_ratios_value_and_the_tokens_gradient() -> None:
    logprob_T = FILLED[0].clone().requires_grad_()
    ratio_T = token_form(sequence_ratio(logprob_T, FILLED[1], MASK, SEQUENCE, 2, mean=True), logprob_T)
    (slope,) = torch.autograd.grad((ratio_T * torch.tensor([0.0, 1.0, 5.0, 0.0, 7.0])).sum(), logprob_T)
    assert ratio_T.tolist() == pytest.approx([2, 2, 2, 3, 3])
    assert slope.tolist() == pytest.approx([0, 2, 10, 0, 21])


def test_weighted_likelihood_by_hand() -> None:
    logprob_T = torch.tensor([-1.0, -2.0, -3.0], dtype=WIDE, requires_grad=True)
    ratio_T = torch.tensor([0.1, 1.1, 9.0], dtype=WIDE) * (logprob_T - logprob_T.detach()).exp()
    loss_T = weighted_likelihood(ratio_T, logprob_T, torch.tensor([1.0, -1.0, 2.0], dtype=WIDE), 0.5, 0.25)
    (slope,) = torch.autograd.grad(loss_T.sum(), logprob_T)
    assert loss_T.tolist() == pytest.approx([0.5, -2.2, 7.5])  # weights 0.5, 1.1, 1.25
    assert slope.tolist() == pytest.approx([-0.5, 1.1, -2.5])


@pytest.mark.parametrize(
    ("kind", "cap", "expected"), [("decoupled", 2.5, [2, 2, 3]), ("token", 2.5, [2, 2, 2.5]), ("sequence", 3.5, [3.5, 3.5, 3])]
)
def test_mismatch_weights_by_hand(kind: str, cap: float, expected: list[float]) -> None:
    assert mismatch_weights(kind, NEW, OLD, MASK, SEQUENCE, 2, cap)[MASK].tolist() == pytest.approx(expected)


def test_near_sequences_by_hand() -> None:
    """Log-ratios log 2 + log 2 and log 3, also where the sign is the other."""
    for one, other in ((NEW, OLD), (OLD, NEW)):
        assert near_sequences("mean", one, other, MASK, SEQUENCE, 2, math.log(2) + 1e-9).tolist() == [True, False]
        assert near_sequences("sequence", one, other, MASK, SEQUENCE, 2, math.log(3) + 1e-9).tolist() == [False, True]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="unknown correction 'none'"):
        mismatch_weights("none", NEW, OLD, MASK, SEQUENCE, 2, 1.0)
    with pytest.raises(ValueError, match="unknown kind 'none'"):
        near_sequences("none", NEW, OLD, MASK, SEQUENCE, 2, 1.0)
