"""The base class of algorithms that select some of their own samples and imitate them (best-of-N, RAFT)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from posttrain.algorithms.base import Algorithm, State
from posttrain.errors import Several
from posttrain.ops.weights import reduction
from posttrain.types import Batch, Metric, Outputs, Term, Terms


@dataclass(frozen=True, kw_only=True)
class Imitation(Algorithm):
    """Maximum likelihood on the rollouts that `select` keeps: L = - sum_t w_t log pi(y_t | x, y_<t)."""

    group: Several = 8
    reduction: Literal["token_mean", "sequence_mean"] = "token_mean"

    def prepare(self, step: Batch, state: State) -> Batch:
        mask_T = step.mask_T & step.valid_N[step.sequence_T]
        weight_T = reduction(self.reduction, mask_T, step.sequence_T, step.sequences)
        return step.replace(mask_T=mask_T, weight_T=weight_T)

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        loss_T = (-outputs.logprob_T).where(batch.mask_T, 0.0)
        metrics = (Metric("nll", loss_T.detach().sum(), batch.mask_T.sum()),)
        return Terms((Term("nll", loss_T, batch.weight_T),), metrics)
