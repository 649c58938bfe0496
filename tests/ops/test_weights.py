"""The reductions as numbers per token, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from posttrain.ops.weights import reduction, sequence_lengths, sequence_means, sequence_sums

# three sequences: 2 loss tokens of 3, none of 2, 1 of 2
MASK = torch.tensor([False, True, True, False, False, False, True])
SEQUENCE = torch.tensor([0, 0, 0, 1, 1, 2, 2])


def weights(kind: str, mask_T: Tensor = MASK, constant: float = 0.0) -> list[float]:
    return reduction(kind, mask_T, SEQUENCE, 3, constant).tolist()


def test_by_hand() -> None:
    """Sequences without loss tokens are not counted as sequences."""
    third, quarter, half, tenth = 1 / 3, 1 / 4, 1 / 2, 1 / 20
    assert weights("token_mean") == pytest.approx([0, third, third, 0, 0, 0, third])
    assert weights("sequence_mean") == pytest.approx([0, quarter, quarter, 0, 0, 0, half])
    assert weights("sequence_sum") == pytest.approx([0, half, half, 0, 0, 0, half])
    assert weights("constant_mean", constant=10) == pytest.approx([0, tenth, tenth, 0, 0, 0, tenth])


def test_lengths_count_loss_tokens() -> None:
    assert sequence_lengths(MASK, SEQUENCE, 3).tolist() == [2.0, 0.0, 1.0]


def test_sums_and_means_of_sequences() -> None:
    """Loss tokens alone; what stands at the others is NaN here, and has no gradient. A sequence without any has 0."""
    value_T = torch.tensor([math.nan, 1.0, 2.0, math.nan, 5.0, math.inf], dtype=torch.float64, requires_grad=True)
    mask_T = torch.tensor([False, True, True, False, True, False])
    sequence_T = torch.tensor([0, 0, 0, 1, 1, 2])
    sums, means = sequence_sums(value_T, mask_T, sequence_T, 3), sequence_means(value_T, mask_T, sequence_T, 3)
    assert sums.tolist() == [3.0, 5.0, 0.0] and means.tolist() == [1.5, 5.0, 0.0]
    (slope,) = torch.autograd.grad(means.sum(), value_T)
    assert slope.tolist() == [0.0, 0.5, 0.5, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean"])
def test_means_add_up_to_one(kind: str) -> None:
    assert sum(weights(kind)) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "sequence_sum", "constant_mean"])
def test_nothing_to_learn_from_weighs_nothing(kind: str) -> None:
    """The denominator is clamped from below, so that an empty step gives 0 and not NaN."""
    assert weights(kind, torch.zeros(7, dtype=torch.bool), constant=5.0) == [0.0] * 7


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown reduction 'mean': token_mean, sequence_mean, sequence_sum or constant_mean"):
        weights("mean")
