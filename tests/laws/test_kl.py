"""Properties of the KL estimators, by enumeration of a vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.ops.kl import KINDS, kl_estimate

WIDE = torch.float64
V = 6
LOGITS = st.lists(st.floats(-3, 3), min_size=V, max_size=V)
quick = settings(max_examples=40, deadline=None)


def softmax(logits: list[float]) -> Tensor:
    return torch.log_softmax(torch.tensor(logits, dtype=WIDE), -1)


def slope_of(loss_of_theta, theta: list[float]) -> Tensor:
    """The gradient of a function of the policy's logits."""
    point = torch.tensor(theta, dtype=WIDE, requires_grad=True)
    (slope,) = torch.autograd.grad(loss_of_theta(torch.log_softmax(point, -1)), point)
    return slope


def expected_slope(kind: str, theta: list[float], reference: Tensor, behaviour: Tensor) -> Tensor:
    """E over x ~ behaviour of the gradient of the estimator used as a loss: the sampling distribution is not differentiated."""
    return slope_of(lambda logp: (behaviour.exp() * kl_estimate(kind, logp, reference, behaviour)).sum(), theta)


@quick
@given(p=st.lists(st.floats(-30, 0), min_size=1, max_size=5), d=st.floats(-50, 50))
def test_signs_of_the_kl_estimators(p: list[float], d: float) -> None:
    logprob_T = torch.tensor(p, dtype=WIDE)
    for kind in ("k2", "k3", "corrected"):
        assert bool((kl_estimate(kind, logprob_T, logprob_T + d, logprob_T) >= 0).all())
    assert torch.equal(torch.sign(kl_estimate("k1", logprob_T, logprob_T + 1, logprob_T)), -torch.ones(len(p), dtype=WIDE))


@pytest.mark.parametrize("dtype", [torch.float32, WIDE])
@pytest.mark.parametrize("kind", KINDS)
def test_kl_estimators_are_exactly_zero_when_the_policies_are_equal(kind: str, dtype: torch.dtype) -> None:
    logprob_T = torch.tensor([-0.1, -3.7, -25.0, 0.0], dtype=dtype)
    assert kl_estimate(kind, logprob_T, logprob_T.clone(), logprob_T).tolist() == [0.0] * 4


@quick
@given(theta=LOGITS, phi=LOGITS)
def test_means_of_the_kl_estimators_are_the_divergence(theta: list[float], phi: list[float]) -> None:
    """k1, k3 and the corrected form have mean KL(p || q) under the policy; k2 has it near p = q, up to third order."""
    p, q = softmax(theta), softmax(phi)
    divergence = float((p.exp() * (p - q)).sum())
    for kind in ("k1", "k3", "corrected"):
        assert float((p.exp() * kl_estimate(kind, p, q, p)).sum()) == pytest.approx(divergence, abs=1e-12)
    near = softmax([t + 1e-3 * f for t, f in zip(theta, phi, strict=True)])
    small = float((p.exp() * (p - near)).sum())
    assert float((p.exp() * kl_estimate("k2", p, near)).sum()) == pytest.approx(small, abs=1e-7)


@quick
@given(theta=LOGITS, phi=LOGITS, mu=LOGITS)
def test_the_corrected_mean_is_the_divergence_off_policy(theta: list[float], phi: list[float], mu: list[float]) -> None:
    p, q, b = softmax(theta), softmax(phi), softmax(mu)
    mean = float((b.exp() * kl_estimate("corrected", p, q, b)).sum())
    assert mean == pytest.approx(float((p.exp() * (p - q)).sum()), abs=1e-12)


@quick
@given(theta=LOGITS, phi=LOGITS)
def test_gradients_of_the_kl_estimators_are_those_documented(theta: list[float], phi: list[float]) -> None:
    """The table of ops/kl.py, line by line, on-policy."""
    p, q = softmax(theta), softmax(phi)
    reverse = slope_of(lambda logp: (logp.exp() * (logp - q)).sum(), theta)
    forward = slope_of(lambda logp: (q.exp() * (q - logp)).sum(), theta)
    documented = {"k1": torch.zeros(V, dtype=WIDE), "k2": reverse, "k3": forward, "corrected": reverse}
    assert documented.keys() == set(KINDS)
    for kind, slope in documented.items():
        torch.testing.assert_close(expected_slope(kind, theta, q, p), slope, rtol=0, atol=1e-11)


@quick
@given(theta=LOGITS, phi=LOGITS)
def test_k1_in_the_reward_has_the_gradient_of_the_divergence(theta: list[float], phi: list[float]) -> None:
    """Detached, and times the score function, k1 has the exact gradient of KL(p || q)."""
    p, q = softmax(theta), softmax(phi)
    reward = kl_estimate("k1", p, q)
    score = slope_of(lambda logp: (p.exp() * reward * logp).sum(), theta)
    torch.testing.assert_close(score, slope_of(lambda logp: (logp.exp() * (logp - q)).sum(), theta), rtol=0, atol=1e-11)


@quick
@given(theta=LOGITS, phi=LOGITS, mu=LOGITS)
def test_the_corrected_estimator_has_the_exact_gradient_off_policy(
    theta: list[float], phi: list[float], mu: list[float]
) -> None:
    q, b = softmax(phi), softmax(mu)
    reverse = slope_of(lambda logp: (logp.exp() * (logp - q)).sum(), theta)
    torch.testing.assert_close(expected_slope("corrected", theta, q, b), reverse, rtol=0, atol=1e-10)


def test_the_gradient_of_k3_is_far_from_that_of_the_divergence() -> None:
    """Why it matters: at this pair of distributions k3's gradient is more than a fifth away from that of KL(p || q)."""
    theta, q = [1.0, 0.0, -1.0, 0.5, 0.0, 0.2], softmax([0.0, 1.0, 0.0, -0.5, 0.3, 0.0])
    reverse = slope_of(lambda logp: (logp.exp() * (logp - q)).sum(), theta)
    k3 = expected_slope("k3", theta, q, softmax(theta))
    assert float((k3 - reverse).norm() / reverse.norm()) > 0.2
