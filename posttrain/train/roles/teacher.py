"""A frozen model whose whole distribution the policy is to learn."""

from __future__ import annotations

import torch

from posttrain.models.policy import Network, Policy
from posttrain.train.forward import forward
from posttrain.train.memory import activation_bytes, weight_bytes
from posttrain.train.roles.base import Role
from posttrain.types import Batch, Outputs


class Teacher(Role):
    """Hidden states that predict the loss tokens and the head for them, for every micro-batch: `Outputs.predictions["teacher"]`.
    A divergence is computed from them in chunks (ops/kl.py); [T, V] probabilities are never stored."""

    name = "teacher"

    def __init__(self, policy: Policy):
        self.policy, self.frozen = policy, policy.model

    @staticmethod
    def price(policy: Network, tokens: int) -> float:
        """Bytes on the device: its weights, and one layer's activations without gradients."""
        return weight_bytes(policy) + activation_bytes(policy, tokens, checkpointed=True)

    @torch.no_grad()
    def outputs(self, piece: Batch) -> Outputs:
        with self.resident(piece.ids_T.device):
            found = forward(self.policy, piece)
        return Outputs(predictions={self.name: found.predictions["policy"]})
