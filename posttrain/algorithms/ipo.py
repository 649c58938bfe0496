"""Identity preference optimisation: regresses the margin to a target instead of increasing it without bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from posttrain.algorithms._pairs import PairAlgorithm, log_ratios, pair_metrics, pairs_of
from posttrain.errors import Positive
from posttrain.ops.preference import ipo_loss
from posttrain.types import Batch, Outputs, Term, Terms


@dataclass(frozen=True, kw_only=True)
class IPO(PairAlgorithm):
    """Regress the difference of two log-ratios to a margin that tau sets:

        h = s(y_w) - s(y_l),    s(y) = [ log pi(y | x) - log ref(y | x) ] / |y|
        L = sum_pairs w (h - 1 / (2 tau))^2,    w = 1 / P

    The paper writes s without |y|, but its reported results divide by |y|, as its authors told the authors of TRL: with a sum, the
    effect of tau depends on the length. So `length = "mean"` is the default. `length = "sum"` is the equation as printed, whose optimum
    on an enumerable problem is known. If all labels agree, DPO drives margins to infinity, and IPO stops at 1 / (2 tau).
    Use it where preferences are nearly deterministic and DPO overfits.
    """

    paper = "Azar et al. 2023, arXiv:2310.12036"
    roles = frozenset({"reference"})

    tau: Positive = 0.1
    length: Literal["mean", "sum"] = "mean"

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        better_P, worse_P, weight_P = pairs_of(batch)
        ratio_N = log_ratios(outputs, batch, mean=self.length == "mean")
        loss_P = ipo_loss(ratio_N[better_P] - ratio_N[worse_P], self.tau)
        metrics = pair_metrics(self.tau * ratio_N, outputs, batch)
        return Terms((Term("preference", loss_P, weight_P),), metrics)
