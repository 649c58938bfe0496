"""One optimizer step: micro-batches forward and backward, one update."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from posttrain.algorithms.base import Algorithm
from posttrain.errors import GuardStop
from posttrain.models.policy import Policy
from posttrain.train.forward import forward
from posttrain.train.optimizer import Optimization, Optimizer
from posttrain.train.pack import micro_batches, with_loss
from posttrain.types import Batch, Metric


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step did."""

    metrics: tuple[Metric, ...]
    grad_norm: float
    moved: bool


class Trainer:
    """Holds the policy, its optimizer and, where the algorithm needs one, the frozen reference."""

    def __init__(self, policy: Policy, algorithm: Algorithm, settings: Optimization, reference: Policy | None = None):
        self.policy, self.algorithm, self.settings, self.reference = policy, algorithm, settings, reference
        self.optimizer = Optimizer(policy.model, settings)

    @torch.no_grad()
    def fill(self, batch: Batch, watch: bool = False) -> Batch:
        """Add what the algorithm needs of others: the reference's log-probs of the same tokens, at the same temperature.

        `watch` asks for them where a reference is there to be watched only, and the algorithm has no use for it.
        """
        if "reference" not in self.algorithm.needs and not (watch and self.reference is not None):
            return batch
        assert self.reference is not None
        pieces = [forward(self.reference, piece).logprob_T for piece in micro_batches(batch, self.settings.token_budget)]
        return batch.replace(reference_T=torch.cat(pieces))

    def update(self, batch: Batch, rate: float) -> Update:
        """Forward and backward over the micro-batches of a prepared step, then one update.

        A step in which no token carries loss moves nothing, not even the optimizer's moments.
        """
        if not bool(batch.mask_T.any()):
            return Update((Metric("skipped", 1, 1),), 0.0, False)
        self.policy.model.train()
        metrics = [Metric("trained", int(batch.mask_T.sum()), None)]
        for piece in micro_batches(with_loss(batch), self.settings.token_budget):
            metrics.extend(self.forward_backward(piece))
        norm = self.optimizer.step(rate)
        if not math.isfinite(norm):
            raise GuardStop(
                f"the gradient's norm is {norm}: nothing was updated; look at the last rollouts, or lower the learning rate"
            )
        return Update(tuple(metrics), norm, True)

    def forward_backward(self, piece: Batch) -> list[Metric]:
        """Add one micro-batch's gradient; the loss is a plain sum, because the weights are those of the whole step."""
        terms = self.algorithm.terms(forward(self.policy, piece), piece)
        losses = [(term.name, (term.weight * term.loss).sum()) for term in terms.terms]
        total = torch.stack([loss for _, loss in losses]).sum()
        total.backward()
        named = [Metric(f"loss/{name}", loss.detach(), None) for name, loss in losses]
        return [Metric("loss", total.detach(), None), *named, *terms.metrics]
