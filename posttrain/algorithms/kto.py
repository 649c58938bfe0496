"""Kahneman-Tversky optimisation: learns from single responses labelled good or bad, without pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from posttrain.algorithms._pairs import log_ratios
from posttrain.algorithms.base import Algorithm, State
from posttrain.errors import NotNegative, Positive
from posttrain.ops.preference import kto_loss
from posttrain.ops.weights import sequence_lengths, sequence_sums
from posttrain.types import Batch, Metric, Outputs, Term, Terms


@dataclass(frozen=True, kw_only=True)
class KTO(Algorithm):
    """Move the log-ratio of good responses above a baseline z, and that of bad ones below it, each with diminishing returns:

        r = log pi(y | x) - log ref(y | x),    z = max(0, mean of r over mismatched examples)
        L = sum_i w_i lambda_i sigma(-beta s_i (r_i - z)),    s_i = 1 if good else -1,    w_i = 1 / N

    z estimates KL(pi || ref), without gradient, on mismatched examples: prompts with the responses of other prompts. They have no
    label (NaN), carry no loss and serve for z alone. z is one number for the whole step, from the policy at the start of the step;
    a step without mismatched examples has z = 0. `desirable` and `undesirable` are lambda of good and bad: the paper keeps
    desirable * (number good) / (undesirable * (number bad)) between 1 and 4/3.
    Use it where people press thumbs up or down, or where good and bad are far from balanced.
    """

    paper = "Ethayarajh et al. 2024, arXiv:2402.01306"
    learns_from = "labels"
    roles = frozenset({"reference", "proximal"})

    beta: Positive = 0.1
    desirable: NotNegative = 1.0
    undesirable: NotNegative = 1.0

    def mistakes(self) -> Iterator[str]:
        if self.desirable == self.undesirable == 0:
            yield "desirable and undesirable cannot both be 0"

    def prepare(self, step: Batch, state: State) -> Batch:
        length_N = sequence_lengths(step.mask_T, step.sequence_T, step.sequences)
        labelled_N, filled_N = torch.isfinite(step.reward_N), length_N > 0
        start_T = step.proximal_T.where(step.mask_T, 0.0) - step.reference_T.where(step.mask_T, 0.0)
        ratio_N = sequence_sums(start_T, step.mask_T, step.sequence_T, step.sequences)
        mismatched_N = ~labelled_N & filled_N
        mean = ratio_N.where(mismatched_N, 0.0).sum() / mismatched_N.sum().clamp(min=1)
        voting_N = labelled_N & filled_N
        return step.replace(
            mask_T=step.mask_T & labelled_N[step.sequence_T],
            weight_N=voting_N.float() / voting_N.sum().clamp(min=1),
            baseline_N=mean.detach().clamp(min=0.0).expand(step.sequences),
        )

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        ratio_N, counted_N = log_ratios(outputs, batch), batch.weight_N > 0
        good_N, base_N = batch.reward_N > 0.5, batch.baseline_N
        loss_N = kto_loss(ratio_N, good_N, base_N, self.beta, self.desirable, self.undesirable)
        reward_N = self.beta * ratio_N.detach()
        above_N = (ratio_N.detach() > batch.baseline_N) == good_N
        metrics = [
            Metric("kl", batch.baseline_N.where(counted_N, 0.0).sum(), counted_N.sum()),
            Metric("accuracy", (above_N & counted_N).sum(), counted_N.sum()),
        ]
        for name, kind_N in (("desirable", good_N), ("undesirable", ~good_N)):
            side_N = kind_N & counted_N
            sum_ = reward_N.where(side_N, 0.0).sum()
            metrics.append(Metric(f"reward/{name}", sum_, side_N.sum()))
        return Terms((Term("preference", loss_N, batch.weight_N),), tuple(metrics))
