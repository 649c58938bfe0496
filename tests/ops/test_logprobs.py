"""Log-probs and entropies of tokens, against NumPy in float64, finite differences, and a count of the logits alive."""

from __future__ import annotations

import math

import kernels_for_tests  # noqa: F401  kernels run on the CPU too
import numpy as np
import pytest
import torch
from torch import Tensor

from posttrain.ops import logprobs
from posttrain.ops.logprobs import Head, head_logits, token_logprobs

N, H, V = 7, 5, 11
SETTINGS = [  # bias, scale, softcap, temperature
    (False, 1.0, None, 1.0),
    (True, 1.0, None, 0.6),
    (False, 0.25, None, 1.5),
    (False, 1.0, 2.0, 1.0),
    (True, 1.7, 3.0, 0.7),
]


def made(bias: bool, scale: float, softcap: float | None, seed: int = 0) -> tuple[Tensor, Tensor, Head]:
    generator = torch.Generator().manual_seed(seed)
    hidden_NH = torch.randn(N, H, dtype=torch.float64, generator=generator)
    weight_VH = torch.randn(V, H, dtype=torch.float64, generator=generator)
    bias_V = torch.randn(V, dtype=torch.float64, generator=generator) if bias else None
    target_N = torch.randint(0, V, (N,), generator=generator)
    return hidden_NH, target_N, Head(weight_VH, bias_V, scale, softcap)


def numpy_reference(hidden_NH: Tensor, target_N: Tensor, head: Head, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    logits = hidden_NH.numpy() @ head.weight_VH.numpy().T * head.scale
    if head.bias_V is not None:
        logits = logits + head.bias_V.numpy()
    if head.softcap is not None:
        logits = head.softcap * np.tanh(logits / head.softcap)
    logits = logits / temperature
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.log(p[np.arange(len(p)), target_N.numpy()]), -(p * np.log(p)).sum(-1)


@pytest.mark.parametrize(("bias", "scale", "softcap", "temperature"), SETTINGS)
def test_values_equal_an_independent_softmax(bias: bool, scale: float, softcap: float | None, temperature: float) -> None:
    hidden_NH, target_N, head = made(bias, scale, softcap)
    logprob_N, entropy_N = token_logprobs(hidden_NH, target_N, head, temperature)
    expected_logprob, expected_entropy = numpy_reference(hidden_NH, target_N, head, temperature)
    np.testing.assert_allclose(logprob_N.numpy(), expected_logprob, rtol=0, atol=1e-12)
    np.testing.assert_allclose(entropy_N.numpy(), expected_entropy, rtol=0, atol=1e-12)


def test_a_number_by_hand() -> None:
    """Logits log 1, log 2, log 5 at temperature 1: probabilities 1/8, 2/8, 5/8."""
    head = Head(torch.tensor([[math.log(1)], [math.log(2)], [math.log(5)]], dtype=torch.float64))
    logprob_N, entropy_N = token_logprobs(torch.ones(3, 1, dtype=torch.float64), torch.tensor([0, 1, 2]), head)
    assert logprob_N.tolist() == pytest.approx([math.log(1 / 8), math.log(2 / 8), math.log(5 / 8)], abs=1e-15)
    by_hand = (1 / 8) * math.log(8) + (2 / 8) * math.log(4) + (5 / 8) * math.log(8 / 5)
    assert entropy_N.tolist() == pytest.approx([by_hand] * 3, abs=1e-15)


def test_temperature_scales_logits_not_logprobs() -> None:
    """At temperature 1/2, probabilities 1, 2, 5 become 1, 4, 25 over 30."""
    head = Head(torch.tensor([[math.log(1)], [math.log(2)], [math.log(5)]], dtype=torch.float64))
    logprob_N, _ = token_logprobs(torch.ones(3, 1, dtype=torch.float64), torch.tensor([0, 1, 2]), head, temperature=0.5)
    assert logprob_N.exp().tolist() == pytest.approx([1 / 30, 4 / 30, 25 / 30], abs=1e-15)


@pytest.mark.parametrize("rows", [1, 3, N, 100])
@pytest.mark.parametrize(("bias", "scale", "softcap", "temperature"), SETTINGS)
def test_gradients_by_finite_differences(
    bias: bool, scale: float, softcap: float | None, temperature: float, rows: int
) -> None:
    """Finite differences of log-prob and entropy together, over hidden states, weights and bias."""
    hidden_NH, target_N, head = made(bias, scale, softcap)
    inputs = [t.requires_grad_() for t in (hidden_NH, head.weight_VH, head.bias_V) if t is not None]

    def both(hidden: Tensor, weight: Tensor, bias_V: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden, target_N, Head(weight, bias_V, scale, softcap), temperature, chunk_logits=rows * V)

    assert torch.autograd.gradcheck(both, inputs, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk_logits", [1, V, 2 * V + 1, 3 * V, 10**9])
def test_chunks_change_nothing(chunk_logits: int) -> None:
    hidden_NH, target_N, head = made(True, 1.3, 5.0)
    weights = [t.requires_grad_() for t in (hidden_NH, head.weight_VH, head.bias_V) if t is not None]
    whole = token_logprobs(hidden_NH, target_N, head, 0.8)
    parts = token_logprobs(hidden_NH, target_N, head, 0.8, chunk_logits)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)
    by_whole = torch.autograd.grad(whole[0].sum() + 0.3 * whole[1].sum(), weights)
    by_parts = torch.autograd.grad(parts[0].sum() + 0.3 * parts[1].sum(), weights)
    torch.testing.assert_close(by_parts, by_whole, rtol=0, atol=1e-12)


def test_float32_gradient_is_that_of_a_dense_softmax() -> None:
    hidden_NH, target_N, head = made(False, 1.0, None)
    hidden = hidden_NH.float().requires_grad_()
    weight = head.weight_VH.float().requires_grad_()
    logprob_N, entropy_N = token_logprobs(hidden, target_N, Head(weight), 0.7, chunk_logits=2 * V)
    ours = torch.autograd.grad(logprob_N.sum() - 0.2 * entropy_N.sum(), [hidden, weight])
    dense = torch.log_softmax(hidden @ weight.t() / 0.7, -1)
    loss = dense.gather(1, target_N[:, None]).sum() + 0.2 * (dense.exp() * dense).sum()
    torch.testing.assert_close(ours, torch.autograd.grad(loss, [hidden, weight]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [8, 64, 512])
def test_logits_alive_do_not_grow_with_tokens(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward ask for at most a chunk of rows at a time, and nothing of vocabulary size is saved in between."""
    asked: list[int] = []
    saved: list[int] = []

    def counting(hidden_NH: Tensor, head: Head) -> Tensor:
        asked.append(hidden_NH.shape[0])
        return head_logits(hidden_NH, head)

    monkeypatch.setattr(logprobs, "head_logits", counting)
    hidden_NH = torch.randn(tokens, H, requires_grad=True)
    head = Head(torch.randn(V, H, requires_grad=True))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        logprob_N, entropy_N = token_logprobs(hidden_NH, torch.zeros(tokens, dtype=torch.long), head, 1.0, chunk_logits=8 * V)
    (logprob_N.sum() + entropy_N.sum()).backward()
    assert max(asked) == 8
    assert len(asked) == 2 * tokens // 8
    assert max(saved) == max(tokens * H, V * H)


def test_a_chunk_is_at_least_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_NH, target_N, head = made(False, 1.0, None)
    few, _ = token_logprobs(hidden_NH, target_N, head, chunk_logits=1)
    assert torch.equal(few, torch.cat([token_logprobs(hidden_NH[i : i + 1], target_N[i : i + 1], head)[0] for i in range(N)]))


def test_no_tokens_no_trouble() -> None:
    hidden = torch.zeros(0, H, requires_grad=True)
    weight = torch.ones(V, H, requires_grad=True)
    logprob_N, entropy_N = token_logprobs(hidden, torch.zeros(0, dtype=torch.long), Head(weight))
    (logprob_N.sum() + entropy_N.sum()).backward()
    assert logprob_N.shape == (0,) and weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("magnitude", [1e2, 1e4, 1e6])
def test_large_logits_stay_finite(magnitude: float) -> None:
    """One token has all the mass: log-probs are the differences of logits, entropy 0, and no gradient is NaN."""
    weight = (magnitude * torch.eye(3)).requires_grad_()
    hidden = torch.eye(3)[[0, 0, 1]].requires_grad_()
    logprob_N, entropy_N = token_logprobs(hidden, torch.tensor([0, 1, 1]), Head(weight))
    (logprob_N.sum() + entropy_N.sum()).backward()
    assert logprob_N.tolist() == pytest.approx([0.0, -magnitude, 0.0])
    assert entropy_N.tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)
    assert weight.grad is not None and bool(torch.isfinite(weight.grad).all())
    assert hidden.grad is not None and bool(torch.isfinite(hidden.grad).all())


def test_entropy_is_between_zero_and_that_of_the_uniform() -> None:
    """0 <= H <= log V; equal where logits are equal; climbing its gradient raises it."""
    hidden_NH, target_N, head = made(False, 3.0, None)
    _, entropy_N = token_logprobs(hidden_NH, target_N, head)
    assert float(entropy_N.min()) >= 0 and float(entropy_N.max()) <= math.log(V)
    flat_logprob, flat_entropy = token_logprobs(torch.zeros(2, H), torch.tensor([0, 5]), Head(torch.randn(V, H)))
    assert flat_logprob.tolist() == pytest.approx([-math.log(V)] * 2) and flat_entropy.tolist() == pytest.approx(
        [math.log(V)] * 2
    )
    hidden_NH.requires_grad_()
    (slope,) = torch.autograd.grad(token_logprobs(hidden_NH, target_N, head)[1].sum(), hidden_NH)
    _, higher_N = token_logprobs(hidden_NH + 1e-3 * slope, target_N, head)
    assert bool((higher_N > entropy_N).all())


def test_bf16_is_computed_in_float32_and_chunks_do_not_show() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(64, 32, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(40, 32, generator=generator).bfloat16().requires_grad_()
    target = torch.randint(0, 40, (64,), generator=generator)
    grads = []
    for rows in (64, 4):
        logprob_N, entropy_N = token_logprobs(hidden, target, Head(weight), chunk_logits=rows * 40)
        assert logprob_N.dtype == entropy_N.dtype == torch.float32
        grads.append(torch.autograd.grad(logprob_N.sum(), [hidden, weight]))
        assert [g.dtype for g in grads[-1]] == [torch.bfloat16, torch.bfloat16]
    scale = float(grads[0][1].abs().max())
    assert float((grads[0][1] - grads[1][1]).abs().max()) <= 0.01 * scale  # one bf16 digit, not the growth of 16 partial sums
    assert torch.equal(grads[0][0], grads[1][0])


def test_frozen_weights_get_no_gradient_and_cost_none() -> None:
    hidden_NH, target_N, head = made(True, 1.0, None)
    hidden_NH.requires_grad_()
    logprob_N, _ = token_logprobs(hidden_NH, target_N, head)
    logprob_N.sum().backward()
    assert hidden_NH.grad is not None and head.weight_VH.grad is None


def test_a_second_derivative_is_refused() -> None:
    """The backward pass reads saved statistics as constants: differentiating it again would be silently wrong."""
    hidden_NH, target_N, head = made(False, 1.0, None)
    hidden_NH.requires_grad_()
    loss = token_logprobs(hidden_NH, target_N, head)[0].square().sum()
    (slope,) = torch.autograd.grad(loss, hidden_NH, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


@pytest.mark.parametrize("kept", [0, 1, 9])
@pytest.mark.parametrize("far", [1.0, 150.0])
def test_tiles_of_logits_give_the_log_probs_and_gradients_of_whole_rows(
    kept: int, far: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in rows whose target is so unlikely that its logit is no shift for the others."""
    hidden_NH, target_N, head = made(False, 1.0, None)
    hidden_NH[::3] *= far
    found = []
    for tiled in (False, True):
        monkeypatch.setattr(logprobs, "in_tiles", lambda *_, tiled=tiled: tiled)
        monkeypatch.setattr(logprobs, "kept_chunks", lambda *_, tiled=tiled: kept * tiled)
        monkeypatch.setattr(logprobs, "TILE", (2, 4, 2))
        hidden, weight = (t.clone().requires_grad_() for t in (hidden_NH, head.weight_VH))
        logprob_N, entropy_N = token_logprobs(hidden, target_N, Head(weight), 0.7, chunk_logits=2 * V)
        (logprob_N * torch.linspace(-1, 1, N)).sum().backward()
        found.append([logprob_N, entropy_N, hidden.grad, weight.grad])
    assert float(found[0][0].detach().min()) < (-logprobs.SAFE if far > 1 else 0)
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)


def test_what_tiles_keep_is_not_used_where_the_entropy_is_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_NH, target_N, head = made(False, 1.0, None)
    found = []
    for tiled in (False, True):
        monkeypatch.setattr(logprobs, "in_tiles", lambda *_, tiled=tiled: tiled)
        monkeypatch.setattr(logprobs, "kept_chunks", lambda *_, tiled=tiled: 9 * tiled)
        hidden = hidden_NH.clone().requires_grad_()
        logprob_N, entropy_N = token_logprobs(hidden, target_N, head, 0.7)
        found += torch.autograd.grad((logprob_N + 0.3 * entropy_N).sum(), hidden)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
