"""The critic: a scorer, with its own optimizer, that learns the value of each state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from posttrain.models.policy import Network
from posttrain.models.scorer import Scorer
from posttrain.train.forward import scores
from posttrain.train.memory import activation_bytes, learning_bytes, weight_bytes
from posttrain.train.optimizer import Learner, Optimization
from posttrain.train.roles.base import Role
from posttrain.types import Batch, Outputs


class Critic(Role):
    """Fills the column of values before the update, and returns values with gradient for every micro-batch."""

    name = "critic"
    columns = ("value_T",)

    def __init__(self, scorer: Scorer, settings: Optimization):
        self.scorer = scorer
        self.learner = Learner(self.name, scorer, settings, prefix="critic.")

    @staticmethod
    def price(
        policy: Network,
        tokens: int,
        settings: Optimization,
        checkpointed: bool,
        adapters: int | None,
        own_body: bool,
    ) -> float:
        """Bytes of a critic of the policy's size, with the activations of `tokens` tokens. `adapters` is the number of LoRA weights;
        `own_body` says that the frozen body is not shared with the policy."""
        count = policy.trainable if adapters is None else adapters
        weights = weight_bytes(policy) if adapters is None or own_body else 0.0
        added = 0.0 if adapters is None else float(policy.dtype.itemsize * count)
        learning = sum(learning_bytes(policy, count, settings.moment_bytes).values())
        return weights + added + learning + activation_bytes(policy, tokens, checkpointed)

    def fill(self, piece: Batch) -> Mapping[str, Tensor]:
        return {"value_T": values(self.scorer, piece)}

    def outputs(self, piece: Batch) -> Outputs:
        return Outputs(value_T=values(self.scorer, piece))

    def token_arrays(self, batch: Batch) -> Mapping[str, Tensor]:
        return {"value": batch.value_T}


def values(critic: Scorer, batch: Batch) -> Tensor:
    """[T]: the critic's value of the state before each loss token, 0 elsewhere."""
    score_T = scores(critic, batch)
    return torch.cat([score_T.new_zeros(1), score_T[:-1]]).where(batch.mask_T, 0.0)
