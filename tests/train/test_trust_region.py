"""TRPO's step: numbers by hand, the trust region, what it does not depend on, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from posttrain.errors import UserError
from posttrain.train import trust_region
from posttrain.train.trust_region import TrustRegion, TrustStep, conjugate_gradients, trust_region_step

WIDE = torch.float64


class Arms(nn.Module):
    """A policy of one state: log-probs of scale * theta."""

    def __init__(self, theta: list[float], scale: float = 1.0):
        super().__init__()
        self.theta, self.scale = nn.Parameter(torch.tensor(theta, dtype=WIDE) / scale), scale

    @property
    def logprobs(self) -> Tensor:
        return (self.scale * self.theta).log_softmax(0)


def step(policy: Arms, advantages: list[float], settings: TrustRegion) -> TrustStep:
    """With the exact surrogate: the mean over the arms as the policy before drew them."""
    advantage_V, old_V = torch.tensor(advantages, dtype=WIDE), policy.logprobs.detach()

    def objective() -> tuple[Tensor, Tensor]:
        ratio_V = (policy.logprobs - old_V).exp()
        return -(old_V.exp() * ratio_V * advantage_V).sum(), policy.logprobs[None]

    return trust_region_step(policy, objective, settings)


def test_a_step_by_hand() -> None:
    """Two arms of 1/2 with A = 1 and -1: g = (-1/2, 1/2), F = [[1, -1], [-1, 1]] / 4, so x = F^-1 g = (-1, 1) and x^T F x = 1. With
    delta = 0.02 the step is sqrt(0.04) = 0.2 of it, and the KL after it -1/2 log(4 p (1 - p)) with p = sigmoid(0.4)."""
    policy = Arms([0.0, 0.0])
    found = step(policy, [1.0, -1.0], TrustRegion(delta=0.02, damping=0.0))
    assert policy.theta.tolist() == pytest.approx([0.2, -0.2])
    p = 1 / (1 + math.exp(-0.4))
    assert (found.fraction, found.kl) == (1.0, pytest.approx(-0.5 * math.log(4 * p * (1 - p))))
    assert found.improvement == pytest.approx(2 * p - 1) and found.kl < 0.02


def test_conjugate_gradients_solve_in_as_many_iterations_as_dimensions() -> None:
    """4 x + y = 1, x + 3 y = 2: x = 1/11, y = 7/11 (the textbook's example)."""
    matrix = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=WIDE)
    found = conjugate_gradients(lambda v: matrix @ v, torch.tensor([1.0, 2.0], dtype=WIDE), 2)
    assert found.tolist() == pytest.approx([1 / 11, 7 / 11])


@pytest.mark.parametrize("delta", [0.001, 0.1, 2.0])
@pytest.mark.parametrize("start", [[0.0, 0.0, 0.0], [4.0, 0.0, -3.0]])
def test_no_step_leaves_the_trust_region_or_makes_the_loss_worse(start: list[float], delta: float) -> None:
    """From a policy that is nearly sure of a bad arm the first proposal goes too far, and is halved."""
    policy = Arms(start)
    before = policy.logprobs.detach()
    found = step(policy, [-1.0, 1.0, 0.5], TrustRegion(delta=delta, damping=1e-6))
    kl = float((before.exp() * (before - policy.logprobs.detach())).sum())
    assert found.kl == pytest.approx(kl) and 0 < kl <= delta and found.improvement > 0
    assert (found.fraction < 1) == (start[0] == 4.0)


def test_the_step_does_not_depend_on_how_the_policy_is_parametrised() -> None:
    """Logits that are 5 times the weights end at the same probabilities; a gradient step would go 25 times as far."""
    ends = []
    for scale in (1.0, 5.0):
        policy = Arms([1.0, 0.0, -1.0], scale)
        step(policy, [0.0, 1.0, -1.0], TrustRegion(delta=0.05, damping=0.0))
        ends.append(policy.logprobs.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-9)


def test_where_nothing_can_be_gained_nothing_moves() -> None:
    policy = Arms([0.3, -0.3])
    assert step(policy, [1.0, 1.0], TrustRegion()) == TrustStep(0.0, 0.0, 0.0)
    assert policy.theta.tolist() == [0.3, -0.3]


def test_a_step_that_never_gains_is_given_up_and_undone() -> None:
    """A loss whose value is not what its gradient says: every try is refused, and the weights are those of before."""
    policy, calls = Arms([0.3, -0.3]), []

    def objective() -> tuple[Tensor, Tensor]:
        calls.append(1)
        return policy.logprobs[0] + len(calls), policy.logprobs[None]

    assert trust_region_step(policy, objective, TrustRegion(halvings=4)).fraction == 0.0
    assert policy.theta.tolist() == [0.3, -0.3] and len(calls) == 5


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="delta must be above 0"):
        TrustRegion(delta=0.0)
    monkeypatch.setattr(trust_region, "MAX_WEIGHTS", 1)
    with pytest.raises(UserError, match="^a trust-region step of 2 weights: it is for at most 1; use ppo"):
        step(Arms([0.0, 0.0]), [1.0, -1.0], TrustRegion())
