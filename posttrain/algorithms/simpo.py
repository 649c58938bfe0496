"""Simple preference optimisation: the mean log-prob itself is the reward, with a target margin and no reference."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.algorithms._pairs import PairAlgorithm, mean_logprobs, pair_metrics, pairs_of
from posttrain.errors import NotNegative, Positive
from posttrain.ops.preference import sigmoid_loss
from posttrain.types import Batch, Outputs, Term, Terms


@dataclass(frozen=True, kw_only=True)
class SimPO(PairAlgorithm):
    """Make the preferred response likelier per token than the other, by a margin:

        r(y) = beta log pi(y | x) / |y|
        L = - sum_pairs w log sigma( r(y_w) - r(y_l) - gamma ),    w = 1 / P

    The reward is the length-normalised likelihood that also guides decoding, so longer responses gain nothing. Without a reference
    model, only a small learning rate keeps the policy near its start.
    Use it on pairs sampled from the model itself and ranked by a reward model, where memory for a reference is short.
    """

    paper = "Meng et al. 2024, arXiv:2405.14734"

    beta: Positive = 2.0
    gamma: NotNegative = 1.0

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        better_P, worse_P, weight_P = pairs_of(batch)
        reward_N = self.beta * mean_logprobs(outputs, batch)
        loss_P = sigmoid_loss(reward_N[better_P] - reward_N[worse_P] - self.gamma)
        metrics = pair_metrics(reward_N, outputs, batch)
        return Terms((Term("preference", loss_P, weight_P),), metrics)
