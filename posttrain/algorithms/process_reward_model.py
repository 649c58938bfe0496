"""Process reward model: the probability that each step of a solution is right, learned from labels of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.algorithms.base import Algorithm, State
from posttrain.ops.weights import reduction
from posttrain.types import Batch, Metric, Outputs, Term, Terms


@dataclass(frozen=True, kw_only=True)
class ProcessRewardModel(Algorithm):
    """With s_t the score at the token that ends a step and y_t in [0, 1] the step's label, binary cross-entropy:

        L = - sum_t w_t [ y_t log sigmoid(s_t) + (1 - y_t) log(1 - sigmoid(s_t)) ],    w_t = 1 / (labelled steps of the step)

    A label comes from people (0 or 1), or is the share of Monte-Carlo completions from that step that solve the problem (Wang et al.
    2023, arXiv:2312.08935). Steps without a label carry no loss. `reduction = "sequence_mean"` gives every solution the same weight
    instead of every step. Use it where the way matters, to rank solutions or reward each step.
    """

    paper = "Lightman et al. 2023, arXiv:2305.20050"
    learns_from = "step_labels"
    trains = "scorer"

    reduction: Literal["token_mean", "sequence_mean"] = "token_mean"

    def prepare(self, step: Batch, state: State) -> Batch:
        self.check("step_T" in step.columns, "these examples have no labels of steps")
        labelled_T = step.mask_T & ~step.step_T.isnan()
        label_M = step.step_T[labelled_T]
        bad = label_M[(label_M < 0) | (label_M > 1)]
        self.check(not len(bad), f"a label lies in [0, 1], not {bad[:1].tolist()}")
        weight_T = reduction(self.reduction, labelled_T, step.sequence_T, step.sequences)
        return step.replace(mask_T=labelled_T, weight_T=weight_T)

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        # fill masked positions before any arithmetic: labels are NaN where no step ends
        mask_T = batch.mask_T
        score_T, label_T = outputs.score_T.where(mask_T, 0.0), batch.step_T.where(mask_T, 0.0)
        gain_T = label_T * logsigmoid(score_T) + (1 - label_T) * logsigmoid(-score_T)
        term = Term("step", -gain_T.where(mask_T, 0.0), batch.weight_T)
        return Terms((term,), figures(score_T.detach(), label_T, batch))


def figures(score_T: Tensor, label_T: Tensor, batch: Batch) -> tuple[Metric, ...]:
    """The share of steps judged as labelled (right means above one half), and the share of solutions whose first wrong step (or that
    there is none) is found."""
    said_T, true_T = batch.mask_T & (score_T <= 0), batch.mask_T & (label_T < 0.5)
    agree_T = batch.mask_T & (said_T == true_T)
    labelled_N = per_sequence(batch.mask_T, batch) < batch.tokens
    same_N = labelled_N & (per_sequence(said_T, batch) == per_sequence(true_T, batch))
    count = batch.mask_T.sum()
    return (
        Metric("accuracy", agree_T.sum(), count),
        Metric("accuracy/first_error", same_N.sum(), labelled_N.sum()),
        Metric("score", score_T.double().sum(), count),
    )


def per_sequence(flag_T: Tensor, batch: Batch) -> Tensor:
    """The position of the first flag of each sequence, or the number of tokens if it has none."""
    place_T = torch.arange(batch.tokens, device=flag_T.device).where(flag_T, batch.tokens)
    none_N = torch.full((batch.sequences,), batch.tokens, device=flag_T.device)
    return none_N.scatter_reduce(0, batch.sequence_T, place_T, "amin")
