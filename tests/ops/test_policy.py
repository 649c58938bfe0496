"""The clipped surrogate by hand: both signs of the advantage, both sides of the clip, and log-ratios without limit."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.ops.policy import LIMIT, clip_binds, clipped_surrogate, importance_ratio

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


def test_no_upper_clip() -> None:
    loss_T = clipped_surrogate(torch.tensor([7.0]), torch.tensor([1.0]), 0.2, math.inf)
    assert loss_T.tolist() == [-7.0]
