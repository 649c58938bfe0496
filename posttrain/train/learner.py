"""A model that learns, with its optimizer and its place in checkpoints."""

from __future__ import annotations

from torch import Tensor

from posttrain.models.policy import Policy
from posttrain.models.scorer import Scorer
from posttrain.train import checkpoint
from posttrain.train.optimizer import Optimization, Optimizer


class Learner:
    """`name` is what messages, metrics and `Batch.resting` call it; `prefix` what its tensors' names begin with in a checkpoint."""

    def __init__(
        self, name: str, network: Policy | Scorer, settings: Optimization, prefix: str = ""
    ):
        self.name, self.network, self.settings, self.prefix = name, network, settings, prefix
        self.optimizer = Optimizer(network.model, settings)

    @property
    def state_bytes(self) -> float:
        """Of gradients and moments."""
        count = sum(p.numel() for p in self.optimizer.parameters.values())
        return (4 + self.settings.moment_bytes) * count

    def weights(self) -> dict[str, Tensor]:
        """Everything that learns, by its name in a checkpoint."""
        return self._named(checkpoint.weights(self.network.model))

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state, by its name in a checkpoint."""
        return self._named(self.optimizer.state())

    def restore(self, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> None:
        """Put back what `weights` and `moments` gave, under their own names, bit for bit."""
        checkpoint.restore_weights(self.network.model, weights)
        self.optimizer.restore(moments)

    def _named(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {self.prefix + name: tensor for name, tensor in tensors.items()}
