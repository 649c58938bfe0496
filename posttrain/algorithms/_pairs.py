"""Shared by algorithms that learn from pairs: weights of the pairs of a step, sequence log-ratios and metrics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algorithms.base import Algorithm, State
from posttrain.errors import UserError
from posttrain.ops.preference import pair_members
from posttrain.ops.weights import sequence_lengths, sequence_means, sequence_sums
from posttrain.types import Batch, Metric, Outputs


@dataclass(frozen=True, kw_only=True)
class PairAlgorithm(Algorithm):
    """The base class of algorithms that learn from given pairs. A subclass defines the loss of a pair in `terms`."""

    learns_from = "pairs"
    unit = "pair"

    def prepare(self, step: Batch, state: State) -> Batch:
        return prepare_pairs(step, self.name)


def prepare_pairs(step: Batch, name: str) -> Batch:
    """Weights w_u = 1 / P over the P pairs of the step, in `weight_N` of both members.

    A pair whose rewards are equal or missing, or with a member without loss tokens, expresses no preference: it does not count in P,
    and its tokens carry no loss.
    """
    try:
        better_P, worse_P = pair_members(step.unit_N, step.reward_N)
    except ValueError:
        made = "rankings and single examples must be made into pairs first"
        raise UserError(f"{name} learns from pairs; {made}") from None
    length_N = sequence_lengths(step.mask_T, step.sequence_T, step.sequences)
    filled_P = (length_N[better_P] > 0) & (length_N[worse_P] > 0)
    differs_P = filled_P & (step.reward_N[better_P] > step.reward_N[worse_P])
    weight_P = differs_P.float() / differs_P.sum().clamp(min=1)
    weight_N = torch.zeros(step.sequences, device=weight_P.device)
    weight_N = weight_N.index_copy(0, better_P, weight_P).index_copy(0, worse_P, weight_P)
    return step.replace(weight_N=weight_N, mask_T=step.mask_T & (weight_N > 0)[step.sequence_T])


def pairs_of(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """(preferred, rejected, weight): the indices of the two sequences of each pair, and the pair's weight."""
    better_P, worse_P = pair_members(batch.unit_N, batch.reward_N)
    return better_P, worse_P, batch.weight_N[better_P]


def log_ratios(outputs: Outputs, batch: Batch, mean: bool = False) -> Tensor:
    """log pi(y_i | x) - log ref(y_i | x) of each sequence; with `mean`, divided by its length."""
    mask_T, reduce = batch.mask_T, sequence_means if mean else sequence_sums
    difference_T = outputs.logprob_T.where(mask_T, 0.0) - batch.reference_T.where(mask_T, 0.0)
    return reduce(difference_T, mask_T, batch.sequence_T, batch.sequences)


def mean_logprobs(outputs: Outputs, batch: Batch) -> Tensor:
    """log pi(y_i | x) / |y_i| of each sequence."""
    return sequence_means(outputs.logprob_T, batch.mask_T, batch.sequence_T, batch.sequences)


def pair_metrics(reward_N: Tensor, outputs: Outputs, batch: Batch) -> tuple[Metric, ...]:
    """Means over the pairs that count: how often the preferred response has the higher implicit reward (equal counts one half), the
    margin, both rewards, and both log-probs per token, because both may fall while the margin grows."""
    better_P, worse_P, weight_P = pairs_of(batch)
    counted_P, reward_N = weight_P > 0, reward_N.detach()
    margin_P = (reward_N[better_P] - reward_N[worse_P]).where(counted_P, 0.0)
    logprob_N, count = mean_logprobs(outputs, batch).detach(), counted_P.sum()

    def average(name: str, value_P: Tensor) -> Metric:
        return Metric(name, value_P.where(counted_P, 0.0).sum(), count)

    return (
        average("accuracy", (margin_P > 0).double() + 0.5 * (margin_P == 0).double()),
        average("margin", margin_P),
        average("reward/preferred", reward_N[better_P]),
        average("reward/rejected", reward_N[worse_P]),
        average("logprob/preferred", logprob_N[better_P]),
        average("logprob/rejected", logprob_N[worse_P]),
    )
