"""Reward model: a scalar score of a response, learned from preferences between responses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.algorithms.base import Algorithm, State
from posttrain.errors import NotNegative
from posttrain.types import Batch, Metric, Outputs, Term, Terms


@dataclass(frozen=True, kw_only=True)
class RewardModel(Algorithm):
    """Bradley-Terry: the probability that a is preferred to b is sigmoid(r_a - r_b), with r the score at the last token of a response.
    The pairs (a, b) of a ranking u of K responses are all those in which a was preferred to b:

        L = sum_u 1/U * 1/|pairs_u| * sum_(a,b) [ -log sigmoid(r_a - r_b - m_ab) + centring * (r_a + r_b)^2 ]

    U counts the rankings of the step that have a pair, so every ranking has the same weight. All K (K - 1) / 2 pairs of a ranking are
    in one step: in separate steps, each response would be learned K - 1 times in an epoch, and overfitted (InstructGPT). A pair is a
    ranking of two. Equally good responses make no pair. Only differences of scores are learned; `centring` (0.01, Eisenstein et al.
    2023, arXiv:2312.09244) keeps their mean near 0. `margin` asks for a distance m_ab = label_a - label_b between the scores (Llama 2,
    arXiv:2307.09288), which is 1 for plain pairs; without it m_ab = 0.
    Use it where people or a judge compare responses, and fresh samples must be scored many times.
    """

    paper = "Ouyang et al. 2022 (InstructGPT), arXiv:2203.02155"
    learns_from = "rankings"
    unit = "ranking"
    trains = "scorer"

    margin: bool = False
    centring: NotNegative = 0.0

    def prepare(self, step: Batch, state: State) -> Batch:
        better_K, worse_K = preferences(step)
        unit_N = torch.tensor(step.unit_N, device=step.reward_N.device)
        names_U, unit_N = torch.unique(unit_N, return_inverse=True)
        pairs_U = torch.bincount(unit_N[better_K], minlength=len(names_U)).double()
        units = (pairs_U > 0).sum().clamp(min=1)
        # the weight of each pair of a ranking
        weight_U = torch.where(pairs_U > 0, 1 / (pairs_U.clamp(min=1) * units), 0.0)
        paired_N = torch.zeros(step.sequences, dtype=torch.bool, device=unit_N.device)
        paired_N[torch.cat([better_K, worse_K])] = True
        mask_T = step.mask_T & paired_N[step.sequence_T]
        return step.replace(mask_T=mask_T, weight_N=weight_U[unit_N].float())

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        score_N = outputs.score_T[torch.tensor(batch.starts[1:], device=outputs.score_T.device) - 1]
        better_K, worse_K = preferences(batch)
        difference_K = score_N[better_K] - score_N[worse_K]
        wanted_K = batch.reward_N[better_K] - batch.reward_N[worse_K] if self.margin else 0.0
        weight_K = batch.weight_N[better_K]
        terms = [Term("preference", -logsigmoid(difference_K - wanted_K), weight_K)]
        if self.centring > 0:
            square_K = (score_N[better_K] + score_N[worse_K]) ** 2
            terms.append(Term("centring", square_K, self.centring * weight_K))
        return Terms(tuple(terms), figures(score_N.detach(), better_K, worse_K))


def preferences(batch: Batch) -> tuple[Tensor, Tensor]:
    """All (better, worse) pairs of sequences within the rankings of a batch. Labels that are equal or missing (NaN) make no pair."""
    unit_N, reward_N = torch.tensor(batch.unit_N, device=batch.reward_N.device), batch.reward_N
    above_NN = (unit_N[:, None] == unit_N[None, :]) & (reward_N[:, None] > reward_N[None, :])
    better_K, worse_K = above_NN.nonzero(as_tuple=True)
    return better_K, worse_K


def figures(score_N: Tensor, better_K: Tensor, worse_K: Tensor) -> tuple[Metric, ...]:
    """The share of pairs in the right order (equal scores count one half), the mean margin, and the mean score."""
    difference_K = score_N[better_K] - score_N[worse_K]
    right_K = (difference_K > 0).double() + 0.5 * (difference_K == 0).double()
    paired = torch.unique(torch.cat([better_K, worse_K]))
    return (
        Metric("accuracy", right_K.sum(), len(better_K)),
        Metric("margin", difference_K.double().sum(), len(better_K)),
        Metric("score", score_N[paired].double().sum(), len(paired)),
    )
