"""Importance-sampling corrections for samples of another policy than the one that is trained, and the reuse of samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from posttrain.algorithms.base import Correction, Reuse
from posttrain.errors import Count, Positive
from posttrain.ops.kl import kl_estimate
from posttrain.ops.policy import mismatch_weights, near_sequences
from posttrain.types import Batch, Metric

DEFAULT_CAP = 2.0
Drop = Literal["none", "mean", "sequence"]


def ratio_range(ratio_T: Tensor) -> list[Metric]:
    """The smallest and the largest importance ratio. It is 1 at masked tokens."""
    still_T = ratio_T.detach()
    return [
        Metric("ratio/min", still_T.min(), None, smallest=True),
        Metric("ratio/max", still_T.max(), None, largest=True),
    ]


def step_kl(batch: Batch, mask_T: Tensor) -> Tensor:
    """[T]: log mu - log pi_ref of the sampled tokens, the k1 estimate of the KL to the reference; 0 outside `mask_T`."""
    both = (log_T.where(mask_T, 0.0) for log_T in (batch.behaviour_T, batch.reference_T))
    return kl_estimate("k1", *both)


@dataclass(frozen=True, kw_only=True)
class ReusedSamples:
    """Settings of algorithms that may reuse samples, or learn from samples of another policy. The loss of token t of response i is
    c_it l(rho_it, A_it). The sampler's policy mu may differ from the policy pi_prox at the start of the step (another engine, other
    rounding, stale weights):

        correction = none         rho = pi / mu,         c = 1
        correction = proximal     rho = pi / pi_prox,    c = 1
        correction = decoupled    rho = pi / pi_prox,    c_it = pi_prox / mu
        correction = token        rho = pi / pi_prox,    c_it = min(pi_prox / mu, cap)
        correction = sequence     rho = pi / pi_prox,    c_it = min(prod_t pi_prox / mu, cap)

    c_i = 0 for a response whose |sum_t log pi_prox / mu| (drop=sequence), or that sum divided by its length (drop=mean), exceeds
    `bound`. c_it = 0 for a token whose pi_prox / mu is not in [mask_low, mask_high] (mask_high = 0: no such mask). Denominators do
    not change. correction = decoupled with mask_low = 0.5 and mask_high = 5 is IcePop (Ling team 2025, arXiv:2510.18855).

    `proximal` is for a sampler that has the policy's own weights but rounds differently. Its log-probs differ from the trainer's by
    noise, which a ratio of whole responses adds up over all their tokens. To drop c is right in this case only; with stale weights it
    is biased. With one update per rollout, pi_prox is the policy that is trained, whatever the correction: rho is exactly 1, nothing
    is clipped and no extra pass is needed. With more updates, pi_prox costs one forward pass over the rollouts.
    """

    # the largest ratio that counts where the advantage is negative; 0: no bound
    dual_clip: float = 0.0
    correction: Correction = "none"
    cap: Positive = DEFAULT_CAP
    drop: Drop = "none"
    bound: float = 0.0
    mask_low: float = 0.0  # tokens with a smaller ratio to the sampler are masked
    mask_high: float = 0.0  # tokens with a larger ratio to the sampler are masked; 0: no mask
    epochs: Count = 1  # passes over a batch of rollouts
    mini_batches: Count = 1  # optimizer steps a pass

    def mistakes(self) -> Iterator[str]:
        """Settings that contradict each other, or have no effect."""
        if self.dual_clip and not self.dual_clip > 1:  # else negative advantages have no gradient
            yield f"dual_clip must be above 1 (3 in the paper; 0: none), not {self.dual_clip}"
        if self.correction not in ("token", "sequence") and self.cap != DEFAULT_CAP:
            yield "cap cuts the weights of correction=token and sequence; there are none"
        if not (self.bound > 0 if self.drop != "none" else self.bound == 0):
            yield "drop=mean or sequence and a bound above 0 go together"
        low, high = self.mask_low, self.mask_high
        if (low or high) and not 0 <= low < 1 < high:
            yield f"mask_low must lie in [0, 1) and mask_high above 1 (both 0: no mask), not {low} and {high}"

    @property
    def reuse(self) -> Reuse:
        return Reuse(epochs=self.epochs, mini_batches=self.mini_batches)

    def corrected(self, correction: Correction) -> Self:
        keeps = correction == "none" or self.weighs_samples
        return self if keeps else replace(self, correction=correction)

    @property
    def weighs_samples(self) -> bool:
        """Whether any c may differ from 1."""
        left_out = self.drop != "none" or self.mask_high > 0
        return self.correction not in ("none", "proximal") or left_out

    @property
    def correction_roles(self) -> frozenset[str]:
        """`proximal`, if the log-probs of the policy at the start of the step are needed."""
        needed = self.weighs_samples or self.correction == "proximal"
        return frozenset({"proximal"}) if needed and not self.reuse.once else frozenset()

    def start_logprobs(self, logprob_T: Tensor, batch: Batch) -> Tensor:
        """[T]: log pi_prox, the log-probs of the policy at the start of the step."""
        return logprob_T.detach() if self.reuse.once else batch.proximal_T

    def old_logprobs(self, logprob_T: Tensor, batch: Batch) -> Tensor:
        """[T]: the log-probs in the denominator of the ratio, 0 outside the mask."""
        none = self.correction == "none"
        old_T = batch.behaviour_T if none else self.start_logprobs(logprob_T, batch)
        return old_T.where(batch.mask_T, 0.0)

    def corrected_loss(
        self, policy_T: Tensor, logprob_T: Tensor, batch: Batch
    ) -> tuple[Tensor, list[Metric]]:
        """c_it l_it and the metrics of c, or l_it unchanged if nothing is corrected."""
        if not self.weighs_samples:
            return policy_T, []
        factor_T, metrics = self.correction_factors(self.start_logprobs(logprob_T, batch), batch)
        return factor_T * policy_T, metrics

    def correction_factors(self, start_T: Tensor, batch: Batch) -> tuple[Tensor, list[Metric]]:
        """c_it, without gradient: the importance weight of a token; 0 if it is masked or its response is dropped."""
        mask_T, sequence_T = batch.mask_T, batch.sequence_T
        given = (start_T, batch.behaviour_T, mask_T, sequence_T, batch.sequences)
        factor_T, metrics = torch.ones_like(batch.behaviour_T), []
        if self.correction not in ("none", "proximal"):
            factor_T = mismatch_weights(self.correction, *given, self.cap)
            metrics.append(Metric("correction", factor_T.where(mask_T, 0.0).sum(), mask_T.sum()))
        if self.drop != "none":
            near_N = near_sequences(self.drop, *given, self.bound)
            metrics.append(Metric("dropped", (~near_N).sum(), batch.sequences))
            factor_T = factor_T.where(near_N[sequence_T], 0.0)
        if self.mask_high:
            ratio_T = mismatch_weights("decoupled", *given, self.cap)
            far_T = (ratio_T < self.mask_low) | (ratio_T > self.mask_high)
            metrics.append(Metric("masked", (far_T & mask_T).sum(), mask_T.sum()))
            factor_T = factor_T.where(~far_T, 0.0)
        return factor_T, metrics
