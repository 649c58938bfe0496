"""Policy gradients once more, in NumPy float64 and one response at a time: what the algorithms are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from material_for_tests import material, shared_policy

from posttrain.algorithms.base import Algorithm
from posttrain.train.forward import forward
from posttrain.types import Batch, Outputs

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Response:
    """A response that was scored: its reward, and figures of the tokens that carry loss."""

    reward: float
    group: int
    truncated: bool
    at: Array  # where in the batch
    logprob: Array
    behaviour: Array
    reference: Array
    proximal: Array
    steps: Array  # NaN where no step ends

    @property
    def length(self) -> int:
        return len(self.at)

    @property
    def log_ratio(self) -> Array:
        return self.logprob - self.behaviour


def responses(step: Batch, logprob: Array) -> list[Response]:
    mask, sequence = step.mask_T.numpy(), step.sequence_T.numpy()
    found = []
    for n in np.flatnonzero(step.valid_N.numpy()):
        at = np.flatnonzero(mask & (sequence == n))
        given = (step.behaviour_T, *(step.columns.get(name) for name in ("reference_T", "proximal_T", "step_T")))
        arrays = [np.full(len(at), np.nan) if a is None else a.double().numpy()[at] for a in given]
        found.append(
            Response(float(step.reward_N[n]), int(step.group_N[n]), bool(step.truncated_N[n]), at, logprob[at], *arrays)
        )
    return found


def relative(rewards: list[float], members: list[Response], divide: bool = True, epsilon: float = 1e-4) -> list[float]:
    """(r - mean of the group) / (std of the group + epsilon), std with ddof 1; 0 where all are equal."""
    result = []
    for reward, one in zip(rewards, members, strict=True):
        same = np.array([r for r, other in zip(rewards, members, strict=True) if other.group == one.group])
        centred = 0.0 if same.max() == same.min() else reward - same.mean()
        result.append(centred / (same.std(ddof=1) + epsilon) if divide and len(same) > 1 else centred)
    return result


def clipped(ratio: Array, advantage: Array | float, low: float, high: float) -> tuple[Array, Array]:
    """-min(r A, clip(r) A), and its slope by the log of the ratio."""
    inside, outside = ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage
    return -np.minimum(inside, outside), np.where(inside <= outside, -inside, 0.0)


Formula = Callable[[list[Response]], tuple[float, list[Array]]]  # the loss, and its slope by each log-prob of each response


def parity(algorithm: Algorithm, formula: Formula, seed: int, noise: float = 0.4) -> None:
    """Loss and gradient by every log-prob, on a ragged step with failures, tools, truncation and ratios far from 1."""
    step = material(algorithm, seed, noise)
    with torch.no_grad():
        outputs = forward(shared_policy(), step)
    logprob_T = outputs.logprob_T.clone().requires_grad_()
    terms = algorithm.terms(Outputs(logprob_T, outputs.entropy_T), algorithm.prepare(step, {}))
    loss = torch.stack([(t.weight * t.loss).sum() for t in terms.terms]).sum()
    (slope_T,) = torch.autograd.grad(loss, logprob_T)
    members = responses(step, logprob_T.detach().numpy())
    expected, slopes = formula(members)
    expected_T = np.zeros(step.tokens)
    for one, slope in zip(members, slopes, strict=True):
        expected_T[one.at] = slope
    assert float(loss.detach()) == pytest.approx(expected, rel=2e-6, abs=2e-6)  # advantages and weights are float32
    np.testing.assert_allclose(slope_T.numpy(), expected_T, rtol=2e-6, atol=1e-7)
    assert np.abs(expected_T).max() > 1e-3
