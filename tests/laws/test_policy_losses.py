"""Properties of policy losses, for every algorithm of the catalogue to which they apply."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from material_for_tests import (
    CASES,
    ONLINE,
    POLICIES,
    gradients,
    material,
    predictions,
    shared_policy,
    small_policy,
    trainer_for,
)
from torch import Tensor

from posttrain.algorithms.base import Algorithm
from posttrain.ops.policy import clip_binds, clipped_surrogate, importance_ratio
from posttrain.ops.weights import reduction
from posttrain.train.forward import forward
from posttrain.train.optimizer import Optimization
from posttrain.types import Batch, Outputs, Terms

WIDE = torch.float64
quick = settings(max_examples=60, deadline=None)


def total(terms: Terms, name: str | None = None) -> Tensor:
    return torch.stack([(t.weight * t.loss).sum() for t in terms.terms if name in (None, t.name)]).sum()


def outputs_of(algorithm: Algorithm, batch: Batch) -> Outputs:
    with torch.no_grad():
        found = forward(shared_policy(), batch)
    leaves = (found.logprob_T.clone().requires_grad_(), found.entropy_T.clone().requires_grad_())
    return Outputs(*leaves, predictions(algorithm, batch), value_T=batch.columns.get("value_T"))


@pytest.mark.proves("policy gradient")
@pytest.mark.parametrize("algorithm", ONLINE)
def test_a_fresh_policy_follows_the_policy_gradient(algorithm: Algorithm) -> None:
    """Log-probs equal to those sampled with: ratio 1, nothing clipped, and the gradient is -sum w A grad log p (REINFORCE)."""
    prepared = algorithm.prepare(material(algorithm, noise=0.0), {})
    outputs = outputs_of(algorithm, prepared)
    ratio_T = importance_ratio(outputs.logprob_T.where(prepared.mask_T, 0.0), prepared.behaviour_T.where(prepared.mask_T, 0.0))
    torch.testing.assert_close(ratio_T, torch.ones_like(ratio_T), rtol=0, atol=1e-14)
    terms = algorithm.terms(outputs, prepared)
    metrics = {m.name: m.value for m in terms.metrics}
    assert metrics.get("clip_fraction", 0.0) == 0.0
    (slope,) = torch.autograd.grad(total(terms, "policy"), outputs.logprob_T)
    assert prepared.weight_T is not None and prepared.advantage_T is not None
    by_hand = (-prepared.weight_T.to(WIDE) * prepared.advantage_T).where(prepared.mask_T, 0.0)
    torch.testing.assert_close(slope, by_hand, rtol=0, atol=1e-14)


@pytest.mark.parametrize("algorithm", [c for c in ONLINE if "reference" in c.values[0].roles])
def test_a_policy_that_is_its_reference_pays_no_kl(algorithm: Algorithm) -> None:
    step = material(algorithm, noise=0.0)
    outputs = outputs_of(algorithm, step)
    prepared = algorithm.prepare(step.replace(reference_T=outputs.logprob_T.detach()), {})
    terms = algorithm.terms(outputs, prepared)
    assert {m.name: m.value for m in terms.metrics}["kl"] == 0.0
    if not any(t.name == "kl" for t in terms.terms):
        return  # it is in the reward
    assert float(total(terms, "kl").detach()) == 0.0
    (slope,) = torch.autograd.grad(total(terms, "kl"), outputs.logprob_T)
    assert not slope.any()


@quick
@given(ratio=st.floats(0.01, 10), advantage=st.floats(-5, 5), low=st.floats(0.05, 0.5), high=st.floats(0.05, 0.5))
def test_the_clip_stops_the_gradient_beyond_its_bounds(ratio: float, advantage: float, low: float, high: float) -> None:
    logprob_T = torch.tensor([math.log(ratio)], dtype=WIDE, requires_grad=True)
    advantage_T = torch.tensor([advantage], dtype=WIDE)
    ratio_T = importance_ratio(logprob_T, torch.zeros(1, dtype=WIDE))
    (slope,) = torch.autograd.grad(clipped_surrogate(ratio_T, advantage_T, low, high).sum(), logprob_T)
    found = float(ratio_T.detach())
    stopped = (advantage > 0 and found > 1 + high) or (advantage < 0 and found < 1 - low)
    assert clip_binds(ratio_T, advantage_T, low, high).tolist() == [stopped]
    assert float(slope) == pytest.approx(0.0 if stopped else -advantage * found, abs=1e-12)


@quick
@given(ratios=st.lists(st.floats(0.01, 10), min_size=1, max_size=6), advantage=st.floats(-5, 5), epsilon=st.floats(0.05, 0.5))
def test_equal_clips_are_the_symmetric_clip(ratios: list[float], advantage: float, epsilon: float) -> None:
    expected = [-min(r * advantage, min(max(r, 1 - epsilon), 1 + epsilon) * advantage) for r in ratios]
    advantage_T = torch.full((len(ratios),), advantage, dtype=WIDE)
    ours = clipped_surrogate(torch.tensor(ratios, dtype=WIDE), advantage_T, epsilon, epsilon)
    assert ours.tolist() == pytest.approx(expected, abs=1e-12)


@quick
@given(length=st.integers(1, 6), count=st.integers(1, 6))
def test_token_mean_is_sequence_mean_at_equal_lengths(length: int, count: int) -> None:
    mask_T = torch.ones(length * count, dtype=torch.bool)
    sequence_T = torch.repeat_interleave(torch.arange(count), length)
    ours = [reduction(kind, mask_T, sequence_T, count, length) for kind in ("token_mean", "sequence_mean", "constant_mean")]
    torch.testing.assert_close(ours[0], ours[1])
    torch.testing.assert_close(ours[0], ours[2])


@quick
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6))
def test_token_mean_and_sequence_mean_differ_by_the_length_factor(lengths: list[int]) -> None:
    """sequence_mean / token_mean = T / (N len_i): below 1 for sequences longer than the mean."""
    mask_T = torch.ones(sum(lengths), dtype=torch.bool)
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    by_token = reduction("token_mean", mask_T, sequence_T, len(lengths))
    by_sequence = reduction("sequence_mean", mask_T, sequence_T, len(lengths))
    factor_N = torch.tensor([sum(lengths) / (len(lengths) * length) for length in lengths])
    torch.testing.assert_close(by_sequence / by_token, factor_N[sequence_T])


@pytest.mark.parametrize("factor", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("algorithm", ONLINE)
def test_the_policy_loss_is_linear_in_the_advantages(algorithm: Algorithm, factor: float) -> None:
    prepared = algorithm.prepare(material(algorithm, noise=0.5), {})
    assert prepared.advantage_T is not None
    outputs = outputs_of(algorithm, prepared)
    one = total(algorithm.terms(outputs, prepared), "policy")
    other = total(algorithm.terms(outputs, prepared.replace(advantage_T=factor * prepared.advantage_T)), "policy")
    # a ratio of 1 throughout makes the loss a sum that cancels to nearly 0: there the float32 weights are what is left
    near = 1e-7 if getattr(algorithm, "correction", "none") == "proximal" else 1e-9
    assert float(other.detach()) == pytest.approx(factor * float(one.detach()), rel=1e-6, abs=near)


@pytest.mark.proves("extremes")
@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("algorithm", ONLINE)
def test_zero_advantage_gives_zero_gradient_even_if_the_ratio_overflows(algorithm: Algorithm, difference: float) -> None:
    prepared = algorithm.prepare(material(algorithm), {})
    assert prepared.advantage_T is not None
    prepared = prepared.replace(advantage_T=torch.zeros_like(prepared.advantage_T))
    outputs = outputs_of(algorithm, prepared)
    behaviour_T = outputs.logprob_T.detach() - difference
    policy = total(algorithm.terms(outputs, prepared.replace(behaviour_T=behaviour_T)), "policy")
    (slope,) = torch.autograd.grad(policy, outputs.logprob_T)
    assert float(policy.detach()) == 0.0 and not slope.any()


JUNK = [-1e4, -100.0, 0.0, 100.0, 1e4, math.nan, -math.inf, math.inf]


@pytest.mark.proves("masks")
@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("algorithm", POLICIES)
def test_values_at_masked_positions_change_no_loss_metric_or_gradient(algorithm: Algorithm, junk: float) -> None:
    """Not one bit of a loss, a metric or a gradient; multiplying by the mask would make NaN of it."""
    prepared = algorithm.prepare(material(algorithm), {})
    hidden_T = ~prepared.mask_T
    assert bool(hidden_T.any())

    with torch.no_grad():
        clean = forward(shared_policy(), prepared)

    def soiled(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.where(hidden_T, junk, values)

    def answer(batch: Batch, dirty: bool) -> tuple[Any, ...]:
        tensors = [soiled(t) if dirty else t for t in (clean.logprob_T, clean.entropy_T)]
        leaves = [t.clone().requires_grad_() for t in tensors if t is not None]
        made = Outputs(*leaves, predictions(algorithm, batch), value_T=batch.columns.get("value_T"))
        terms = algorithm.terms(made, batch)
        loss = total(terms)
        slopes = torch.autograd.grad(loss, leaves, allow_unused=True)
        return loss.detach(), *slopes, *(m.total.detach() for m in terms.metrics if isinstance(m.total, Tensor))

    dirty = prepared.replace(
        behaviour_T=soiled(prepared.behaviour_T),
        reference_T=soiled(prepared.columns.get("reference_T")),
        value_T=soiled(prepared.columns.get("value_T")),
        teacher_T=soiled(prepared.columns.get("teacher_T")),
    )
    for one, other in zip(answer(prepared, False), answer(dirty, True), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.proves("extremes")
@pytest.mark.parametrize("dtype", [torch.float32, WIDE])
@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("algorithm", POLICIES)
def test_no_log_ratio_gives_nan(algorithm: Algorithm, difference: float, dtype: torch.dtype) -> None:
    """At positions that do carry loss, with advantages of both signs."""
    prepared = algorithm.prepare(material(algorithm), {})
    logprob_T = torch.full((prepared.tokens,), -1.0, dtype=dtype, requires_grad=True)
    shifted = torch.full((prepared.tokens,), -1.0 - difference, dtype=dtype)
    reference_T = shifted if "reference_T" in prepared.columns else None
    teacher_T = shifted if "teacher_T" in prepared.columns else None
    batch = prepared.replace(behaviour_T=shifted, reference_T=reference_T, teacher_T=teacher_T)
    one_T, value_T = torch.ones_like(logprob_T), prepared.columns.get("value_T")
    loss = total(algorithm.terms(Outputs(logprob_T, one_T, predictions(algorithm, batch), value_T=value_T), batch))
    (slope,) = torch.autograd.grad(loss, logprob_T, materialize_grads=True)
    assert bool(torch.isfinite(loss)) and bool(torch.isfinite(slope).all())


@contextmanager
def constants(kept: list[Tensor]) -> Iterator[None]:
    """What an algorithm stops the gradient of is a constant of its loss: noted down the first time, given back from then on."""
    stop, first, given = Tensor.detach, not kept, iter(list(kept))

    def detach(tensor: Tensor) -> Tensor:
        if not first:
            return next(given)
        kept.append(stop(tensor).clone())
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "detach", detach)
        yield


@pytest.mark.proves("slope")
@pytest.mark.parametrize("algorithm", POLICIES)
def test_gradients_of_the_terms_equal_finite_differences(algorithm: Algorithm) -> None:
    """Every term as a function of every log-prob and entropy, in float64."""
    prepared = algorithm.prepare(material(algorithm, noise=0.3), {})
    outputs = outputs_of(algorithm, prepared)
    kept: list[Tensor] = []
    others = outputs.predictions

    def loss(logprob_T: Tensor, entropy_T: Tensor) -> Tensor:
        with constants(kept):
            made = Outputs(logprob_T, entropy_T, others, value_T=prepared.columns.get("value_T"))
            value = total(algorithm.terms(made, prepared))
        return value + 0.0 * entropy_T.sum()  # an algorithm need not use the entropy

    loss(outputs.logprob_T, outputs.entropy_T)
    assert torch.autograd.gradcheck(loss, (outputs.logprob_T, outputs.entropy_T), eps=1e-6, atol=1e-6)


@pytest.mark.proves("slope")
@pytest.mark.parametrize("algorithm", CASES)
def test_gradients_of_the_weights_equal_finite_differences(algorithm: Algorithm) -> None:
    """From the weights to the loss: the slope along a random direction, to 1e-6."""
    policy = small_policy()
    prepared = algorithm.prepare(material(algorithm, noise=0.3), {})
    _, found = gradients(algorithm, prepared, policy=policy)
    trainer = trainer_for(algorithm, policy, Optimization())
    weights = trainer.weights()  # the critic's too, where there is one
    generator = torch.Generator().manual_seed(3)
    direction = {n: torch.randn(p.shape, dtype=WIDE, generator=generator) for n, p in weights.items()}
    kept: list[Tensor] = []

    def loss_at(distance: float) -> float:
        with torch.no_grad():
            for name, parameter in weights.items():
                parameter += distance * direction[name]
            outputs = trainer.outputs(prepared)
            with constants(kept):
                value = float(total(algorithm.terms(outputs, prepared)))
            for name, parameter in weights.items():
                parameter -= distance * direction[name]
        return value

    loss_at(0.0)
    step = 1e-6
    measured = (loss_at(step) - loss_at(-step)) / (2 * step)
    analytic = float(sum((found[name] * direction[name]).sum() for name in found))
    assert abs(analytic) > 1e-3
    assert measured == pytest.approx(analytic, rel=1e-6, abs=1e-7)
