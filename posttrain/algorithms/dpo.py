"""Direct preference optimisation: a reward model and its optimal policy in one supervised loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from posttrain.algorithms import _pairs
from posttrain.errors import NotNegative, Positive, Range
from posttrain.ops import preference
from posttrain.types import Batch, Outputs, Term, Terms


@dataclass(frozen=True, kw_only=True)
class DPO(_pairs.PairAlgorithm):
    """Fit a Bradley-Terry model of preferences whose reward is the log-ratio of the policy to the reference:

        r(y) = beta [ log pi(y | x) - log ref(y | x) ],    m = r(y_w) - r(y_l)
        L = sum_pairs w [ -(1 - e) log sigma(m) - e log sigma(-m) - alpha log pi(y_w | x) / |y_w| ],    w = 1 / P

    Its optimum on preferences drawn from a reward is pi* proportional to ref exp(reward / beta), the same as that of RL with a KL
    penalty. `label_smoothing` is e, the share of labels taken to be wrong (conservative DPO); `alpha` adds the length-normalised
    log-likelihood of the preferred response (Pang et al. 2024), against a falling likelihood of both. `labels = "soft"` reads the
    rewards of a pair as those of a Bradley-Terry model, e = sigma(r_l - r_w): for scores in the reward's own units, not for plain
    preferences, whose rewards are just 1 and 0.

    `form` selects another loss of a pair, in place of the two terms with log sigma:

        robust      [ -(1 - e) log sigma(m) + e log sigma(-m) ] / (1 - 2 e)    unbiased where a share e of the labels is exchanged
                    (Chowdhury et al. 2024, arXiv:2403.00409); conservative DPO instead learns that preferences are that weak
        hinge       max(0, 1 - m)    the calibration of SLiC-HF (Zhao et al. 2023, arXiv:2305.10425) on ratios to the reference, as in
                    Liu et al. 2023, arXiv:2309.06657; `alpha` is its regularisation. Pairs with a margin of 1 or more have no gradient
        apo_zero    1 - sigma(r(y_w)) + sigma(r(y_l))    anchored (D'Oosterlinck et al. 2024, arXiv:2408.06266): y_w becomes likelier
                    and y_l less likely than before, for preferred responses that are better than what the model writes
        apo_down    sigma(r(y_w)) + 1 - sigma(m)    both become less likely, y_l more so: for a model that writes better ones than y_w

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
    form: Literal["sigmoid", "robust", "hinge", "apo_zero", "apo_down"] = "sigmoid"

    def mistakes(self) -> Iterator[str]:
        if self.form == "robust" and self.label_smoothing == 0:
            yield "form=robust needs the share of wrong labels as label_smoothing, above 0"
        if self.form not in ("sigmoid", "robust") and self.label_smoothing > 0:
            yield f"form={self.form} has no label_smoothing; sigmoid and robust have"
        if self.form != "sigmoid" and self.labels == "soft":
            yield f"form={self.form} has no soft labels; sigmoid has"
        if self.labels == "soft" and self.label_smoothing > 0:
            yield "soft labels have their own smoothing; leave out label_smoothing"

    @property
    def needs_scores(self) -> bool:
        return self.labels == "soft"

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        better_P, worse_P, weight_P = _pairs.pairs_of(batch)
        reward_N = self.beta * _pairs.log_ratios(outputs, batch)
        better, worse = reward_N[better_P], reward_N[worse_P]
        smoothing = torch.full_like(better, self.label_smoothing).detach()
        if self.labels == "soft":
            wrong_P = torch.sigmoid(batch.reward_N[worse_P] - batch.reward_N[better_P])
            smoothing = wrong_P.where(weight_P > 0, 0.0)
        terms = [Term("preference", self.pair_loss(better, worse, smoothing), weight_P)]
        if self.alpha > 0:
            nll_P = -_pairs.mean_logprobs(outputs, batch)[better_P]
            terms.append(Term("nll", nll_P, self.alpha * weight_P))
        return Terms(tuple(terms), _pairs.pair_metrics(reward_N, outputs, batch))

    def pair_loss(self, better_P: Tensor, worse_P: Tensor, smoothing_P: Tensor) -> Tensor:
        """The loss of each pair, from the implicit rewards of its members."""
        match self.form:
            case "sigmoid":
                return preference.sigmoid_loss(better_P - worse_P, smoothing_P)
            case "robust":
                return preference.robust_loss(better_P - worse_P, smoothing_P)
            case "hinge":
                return preference.hinge_loss(better_P - worse_P)
            case "apo_zero":
                return preference.apo_zero_loss(better_P, worse_P)
            case "apo_down":
                return preference.apo_down_loss(better_P, worse_P)
