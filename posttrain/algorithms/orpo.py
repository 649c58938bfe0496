"""Odds ratio preference optimisation: supervised fine-tuning plus a preference term, without a reference model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from posttrain.algorithms._pairs import PairAlgorithm, mean_logprobs, pair_metrics, pairs_of
from posttrain.errors import Range
from posttrain.ops.preference import log_odds, sigmoid_loss
from posttrain.types import Batch, Outputs, Term, Terms


@dataclass(frozen=True, kw_only=True)
class ORPO(PairAlgorithm):
    """Maximise the likelihood of the preferred response, and its odds relative to those of the rejected one:

        log p(y) = log pi(y | x) / |y|,    odds(y) = p(y) / (1 - p(y))
        L = sum_pairs w [ -log p(y_w) - lam log sigma( log odds(y_w) - log odds(y_l) ) ],    w = 1 / P

    The likelihood term is a mean over tokens in each pair and over pairs, so a long response weighs no more than a short one.
    Use it to go from a base model to a preferring one in one stage, with one model in memory.
    """

    paper = "Hong et al. 2024, arXiv:2403.07691"

    lam: Annotated[float, Range(gt=0, text="above 0 (without it this is sft)")] = 0.1

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        better_P, worse_P, weight_P = pairs_of(batch)
        logprob_N = mean_logprobs(outputs, batch)
        odds_N = log_odds(logprob_N)
        loss_P = sigmoid_loss(odds_N[better_P] - odds_N[worse_P])
        terms = (
            Term("nll", -logprob_N[better_P], weight_P),
            Term("preference", loss_P, self.lam * weight_P),
        )
        return Terms(terms, pair_metrics(self.lam * logprob_N, outputs, batch))
