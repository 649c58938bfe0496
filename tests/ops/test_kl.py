"""KL estimators: values by hand here; their means and gradients by enumeration in tests/laws/test_kl.py."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.ops.kl import KINDS, LIMIT, kl_estimate

LOGPROB, REFERENCE, BEHAVIOUR = math.log(0.5), math.log(0.25), math.log(0.4)


@pytest.mark.parametrize(
    ("kind", "by_hand"),
    [
        ("k1", math.log(2)),
        ("k2", math.log(2) ** 2 / 2),
        ("k3", 0.5 + math.log(2) - 1),  # q/p = 1/2
        ("corrected", 0.5 / 0.4 * (0.5 + math.log(2) - 1)),
    ],
)
def test_values_by_hand(kind: str, by_hand: float) -> None:
    values = [torch.tensor([x], dtype=torch.float64) for x in (LOGPROB, REFERENCE, BEHAVIOUR)]
    assert kl_estimate(kind, *values).tolist() == pytest.approx([by_hand], abs=1e-15)


def test_small_differences_keep_their_digits() -> None:
    """d = 1e-4 in float32: e^d - d - 1 = 5e-9 to half a per cent, where the plain formula gives 0."""
    logprob, reference = torch.tensor([-1.0]), torch.tensor([-1.0 + 1e-4])
    plain = (reference - logprob).exp() - (reference - logprob) - 1
    assert float(plain) == 0.0 or abs(float(plain) / 5e-9 - 1) > 1
    assert float(kl_estimate("k3", torch.zeros(1), torch.tensor([1e-4]))) == pytest.approx(5e-9, rel=5e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("difference", [-1e4, -100.0, -21.0, 0.0, 21.0, 100.0, 1e4])
def test_any_difference_is_finite(kind: str, difference: float) -> None:
    logprob = torch.tensor([0.0], requires_grad=True)
    value = kl_estimate(kind, logprob, torch.tensor([difference]), torch.tensor([0.0]))
    (slope,) = torch.autograd.grad(value.sum(), logprob)
    assert bool(torch.isfinite(value).all()) and bool(torch.isfinite(slope).all())


@pytest.mark.parametrize("kind", ["k2", "k3", "corrected"])
def test_a_token_the_reference_all_but_forbids_is_pulled_back(kind: str) -> None:
    """Far beyond the clamp the loss must still push the policy's log-prob down: that is where the penalty matters most."""
    logprob = torch.tensor([-0.1], dtype=torch.float64, requires_grad=True)
    value = kl_estimate(kind, logprob, torch.tensor([-0.1 - 2 * LIMIT], dtype=torch.float64), logprob.detach())
    (slope,) = torch.autograd.grad(value.sum(), logprob)
    assert float(slope) >= 1 - 1e-12


def test_refusals() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k4': one of k1, k2, k3, corrected"):
        kl_estimate("k4", torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="the corrected estimator needs the behaviour log-probs"):
        kl_estimate("corrected", torch.zeros(1), torch.zeros(1))
