"""Supervised fine-tuning: maximum likelihood on demonstrations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from posttrain.algorithms.base import Algorithm, State
from posttrain.ops.weights import reduction
from posttrain.types import Batch, Metric, Outputs, Term, Terms


@dataclass(frozen=True, kw_only=True)
class SFT(Algorithm):
    """Minimise the negative log-likelihood of the tokens that carry loss (the assistant's):

        L = - sum_t w_t log pi(y_t | x, y_<t),    w_t = 1 / T over all loss tokens of the step (token_mean)

    Use it to teach a format or a skill from worked examples, and before RL so that some samples already succeed.
    `reduction = "sequence_mean"` gives every example the same weight instead of every token.
    """

    paper = "Ouyang et al. 2022, arXiv:2203.02155"
    learns_from = "demonstrations"

    reduction: Literal["token_mean", "sequence_mean"] = "token_mean"

    def prepare(self, step: Batch, state: State) -> Batch:
        weight_T = reduction(self.reduction, step.mask_T, step.sequence_T, step.sequences)
        return step.replace(weight_T=weight_T)

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        mask_T = batch.mask_T
        loss_T = (-outputs.logprob_T).where(mask_T, 0.0)
        count = mask_T.sum()
        metrics = (
            Metric("nll", loss_T.detach().sum(), count),
            Metric("entropy", outputs.entropy_T.detach().where(mask_T, 0.0).sum(), count),
        )
        return Terms((Term("nll", loss_T, batch.weight_T),), metrics)
