"""The frozen model that a policy is to stay near."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from posttrain.models.policy import Network, Policy
from posttrain.ops.kl import kl_estimate
from posttrain.train.forward import forward
from posttrain.train.memory import weight_bytes
from posttrain.train.roles.base import Role
from posttrain.types import Batch, Metric


class Reference(Role):
    """Log-probs of the same tokens at the same temperature. A `watched` one serves the metric `kl` alone."""

    name = "reference"
    columns = ("reference_T",)

    def __init__(self, policy: Policy, watched: bool = False):
        self.policy, self.frozen, self.only_shown = policy, policy.model, watched

    @staticmethod
    def price(policy: Network, resident: bool) -> float:
        """Bytes on the device while the policy trains: none where it lives on the CPU, or is the policy's own frozen weights."""
        return weight_bytes(policy) if resident else 0.0

    def fill(self, piece: Batch) -> Mapping[str, Tensor]:
        return {"reference_T": forward(self.policy, piece).logprob_T}

    def metrics(self, filled: Batch) -> tuple[Metric, ...]:
        """KL over the sampled tokens, where no term of the loss uses it."""
        if not self.only_shown or "reference_T" not in filled.columns:
            return ()
        measured_T = filled.mask_T & ~filled.reference_T.isnan()
        return (Metric("kl", kl_of(filled).where(measured_T, 0.0).sum(), measured_T.sum()),)

    def token_arrays(self, batch: Batch) -> Mapping[str, Tensor]:
        return {"kl": kl_of(batch)} if "reference_T" in batch.columns else {}


def kl_of(batch: Batch) -> Tensor:
    """[T]: KL from the reference at the sampled tokens, by the k3 estimate; NaN in sequences where it was not measured."""
    kl_T = kl_estimate("k3", batch.behaviour_T, batch.reference_T)
    return kl_T.where(batch.mask_T | batch.reference_T.isnan(), 0.0)
