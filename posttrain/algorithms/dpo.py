"""Direct preference optimisation: a reward model and its optimal policy in one supervised loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from posttrain.algorithms import _pairs
from posttrain.errors import NotNegative, Positive, Range
from posttrain.ops.preference import sigmoid_loss
from posttrain.types import Batch, Outputs, Term, Terms


@dataclass(frozen=True, kw_only=True)
class DPO(_pairs.PairAlgorithm):
    """Prefer y_w to y_l by as much as a Bradley-Terry reward would, with the policy itself as the reward model:

        r(y) = beta [ log pi(y | x) - log ref(y | x) ],    m = r(y_w) - r(y_l)
        L = sum_pairs w [ -(1 - e) log sigma(m) - e log sigma(-m) - alpha log pi(y_w | x) / |y_w| ],    w = 1 / P

    Its optimum on preferences drawn from a reward is pi* proportional to ref exp(reward / beta), the same as that of RL with a KL
    penalty. `label_smoothing` is e, the share of labels taken to be wrong (conservative DPO); `alpha` adds the length-normalised
    log-likelihood of the preferred response (Pang et al. 2024), against a falling likelihood of both. `labels = "soft"` reads the
    rewards of a pair as those of a Bradley-Terry model, e = sigma(r_l - r_w): for scores in the reward's own units, not for plain
    preferences, whose rewards are just 1 and 0.
    Use it on pairs that people or a judge compared, when a reward model and sampling are too much.
    """

    paper = "Rafailov et al. 2023, arXiv:2305.18290"
    roles = frozenset({"reference"})

    beta: Positive = 0.1
    label_smoothing: Annotated[
        float, Range(ge=0, lt=0.5, text="in [0, 0.5) (at 0.5 labels say nothing)")
    ] = 0.0
    alpha: NotNegative = 0.0  # coefficient of the log-likelihood of the preferred response
    labels: Literal["hard", "soft"] = "hard"

    def mistakes(self) -> Iterator[str]:
        if self.labels == "soft" and self.label_smoothing > 0:
            yield "soft labels have their own smoothing; leave out label_smoothing"

    @property
    def needs_scores(self) -> bool:
        return self.labels == "soft"

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        better_P, worse_P, weight_P = _pairs.pairs_of(batch)
        reward_N = self.beta * _pairs.log_ratios(outputs, batch)
        margin_P = reward_N[better_P] - reward_N[worse_P]
        smoothing = torch.full_like(margin_P, self.label_smoothing).detach()
        if self.labels == "soft":
            wrong_P = torch.sigmoid(batch.reward_N[worse_P] - batch.reward_N[better_P])
            smoothing = wrong_P.where(weight_P > 0, 0.0)
        terms = [Term("preference", sigmoid_loss(margin_P, smoothing), weight_P)]
        if self.alpha > 0:
            nll_P = -_pairs.mean_logprobs(outputs, batch)[better_P]
            terms.append(Term("nll", nll_P, self.alpha * weight_P))
        return Terms(tuple(terms), _pairs.pair_metrics(reward_N, outputs, batch))
