"""A DPO model as a reward model: the implicit reward of whole rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from posttrain.errors import require
from posttrain.models.load import same_vocabulary
from posttrain.models.policy import Policy
from posttrain.ops.weights import sequence_sums
from posttrain.rewards._models import implicit_reward
from posttrain.train.forward import forward
from posttrain.train.pack import micro_batches, pack_groups
from posttrain.types import Batch, Group, Rollout, Score


class ImplicitRating:
    """r(x, y) = beta [ log pi(y | x) - log ref(y | x) ], summed over the tokens that were sampled, under two frozen models.

    `policy` is one that DPO or a relative trained, with `beta` as it was then, and `reference` the one it started from. Both are asked
    at temperature 1, the distribution that their training was about. A log-prob that is not finite is a failure, not a score.
    """

    def __init__(self, policy: Policy, reference: Policy, beta: float, token_budget: int = 8192):
        require(beta > 0, f"implicit reward: beta must be positive, not {beta}")
        advice = "the reference must be the model that the policy was trained from"
        same_vocabulary("implicit reward", policy, reference, advice)
        self.policy, self.reference, self.beta, self.token_budget = (
            policy,
            reference,
            beta,
            token_budget,
        )

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The networks, for a checkpoint to name them by their weights."""
        return (self.policy.model, self.reference.model)

    def rate(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score for each rollout, with both log-probs as its parts."""
        if not rollouts:
            return []
        own, others = (self.logprobs(model, rollouts) for model in (self.policy, self.reference))
        scores = []
        for logprob, reference in zip(own, others, strict=True):
            if not (math.isfinite(logprob) and math.isfinite(reference)):
                scores.append(Score.failed(f"log-probs of {logprob} and {reference}"))
                continue
            value = implicit_reward(logprob, reference, self.beta)
            scores.append(Score(value, parts={"logprob": logprob, "reference": reference}))
        return scores

    def logprobs(self, policy: Policy, rollouts: Sequence[Rollout]) -> list[float]:
        """log p(y | x) of what was sampled in each rollout."""
        batch = pack_groups(
            [Group(rollout.problem, (rollout,)) for rollout in rollouts], 1.0, policy.device
        )
        return sequence_logprobs(policy, batch, self.token_budget)


@torch.no_grad()
def sequence_logprobs(policy: Policy, batch: Batch, token_budget: int) -> list[float]:
    """sum_t log p(y_t | x, y_<t) over the loss tokens of each sequence."""
    policy.model.eval()
    found: list[float] = []
    for piece in micro_batches(batch, token_budget):
        sums_N = sequence_sums(
            forward(policy, piece).logprob_T, piece.mask_T, piece.sequence_T, piece.sequences
        )
        found += sums_N.tolist()
    return found
