"""The proximal policy: the policy at the start of the step."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from posttrain.models.policy import Policy
from posttrain.train.forward import forward
from posttrain.train.roles.base import Role
from posttrain.types import Batch


class Proximal(Role):
    """Log-probs of the policy before the first update of a step. Costs one forward pass, and no second model."""

    name = "proximal"
    columns = ("proximal_T",)

    def __init__(self, policy: Policy):
        self.policy = policy

    def fill(self, piece: Batch) -> Mapping[str, Tensor]:
        return {"proximal_T": forward(self.policy, piece).logprob_T}
