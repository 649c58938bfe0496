"""Group sequence policy optimisation: ratio and clip apply to whole responses, as the reward does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from posttrain.algorithms._policy_gradient import PolicyGradient, Reduction, Supervision
from posttrain.algorithms.base import Correction, State
from posttrain.ops.policy import sequence_ratio, token_form
from posttrain.types import Batch


@dataclass(frozen=True, kw_only=True)
class GSPO(PolicyGradient):
    """GRPO with one ratio for each response, the geometric mean of its tokens' ratios, so that the clipped unit is the rewarded unit:

        s_i = (pi(y_i | x) / pi_prox(y_i | x))^(1 / |y_i|) = exp( 1 / |y_i| sum_t log rho_it )
        L   = -1 / N sum_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i),    A_i = (r_i - mean(r)) / (std(r) + 1e-4)

    `form = "token"` is GSPO-token (equation 13): s_it = stop(s_i) pi_it / stop(pi_it). Its value and gradient are those above if
    all tokens of a response share an advantage and a weight c. It also works if they do not (`supervision = "process"`, see grpo),
    so it is used in any case where turns are paid or c is by token. The mean log-ratio of a response is far smaller than that of a
    token, hence the small clips, which are the paper's. The rounding of a bfloat16 sampler changes that mean by more than the clip.
    So by default the ratio is to pi_prox, the policy at the start of the step by the trainer's own log-probs (`correction =
    "proximal"`, see _corrections.py; with one update per rollout nothing is clipped). `correction = "none"` takes the ratio to the
    sampler's log-probs. With responses of one token it is GRPO.
    Use it for mixture-of-experts models, whose token ratios are noisy, and for long responses.
    """

    paper = "Zheng et al. 2025, arXiv:2507.18071"

    correction: Correction = "proximal"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    reduction: Reduction = "sequence_mean"
    form: Literal["sequence", "token"] = "sequence"
    supervision: Supervision = "outcome"

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        yield from self.supervision_mistakes(self.supervision)
        if self.reduction != "sequence_mean":
            why = "the loss is one of responses, not of tokens"
            yield f"reduction must be sequence_mean, not {self.reduction!r}: {why}"
        if self.supervision == "process" and self.form != "token":
            yield "supervision=process gives each token its own advantage, which needs form=token"

    def advantages(self, step: Batch, mask_T: Tensor, state: State) -> Tensor:
        return self.group_relative(step, mask_T, self.supervision)

    def ratio(self, logprob_T: Tensor, old_T: Tensor, batch: Batch) -> Tensor:
        mask_T, sequence_T, count = batch.mask_T, batch.sequence_T, batch.sequences
        ratio_T = sequence_ratio(logprob_T, old_T, mask_T, sequence_T, count, mean=True)
        # the gradient of s_i is that of all tokens: an advantage or a weight of one of them would act on the others
        apart = self.correction in ("token", "decoupled") or self.mask_high > 0
        apart = apart or self.form == "token" or "paid_T" in batch.columns
        return token_form(ratio_T, logprob_T) if apart else ratio_T
