"""Adds a loss on pretraining text to every update, so that the policy keeps its abilities (InstructGPT's ptx)."""

from __future__ import annotations

from typing import Protocol

from posttrain.algorithms.sft import SFT
from posttrain.train.roles.base import Addition, Role
from posttrain.types import JSON, Batch


class TextSource(Protocol):
    """Draws batches of text. Its position is saved with every checkpoint."""

    def draw(self, together: bool) -> Batch: ...

    def state(self) -> JSON: ...

    def restore(self, state: JSON) -> None: ...


class Pretraining(Role):
    """The negative log-likelihood of a batch of text, times `coefficient`."""

    name = "pretraining"

    def __init__(self, source: TextSource, coefficient: float):
        self.source, self.coefficient = source, coefficient

    def draw(self) -> Addition:
        algorithm = SFT()
        batch = algorithm.prepare(self.source.draw(together=False), {})
        return Addition(algorithm, batch.replace(weight_T=self.coefficient * batch.weight_T))

    def state(self) -> JSON:
        return self.source.state()

    def restore(self, state: JSON) -> None:
        self.source.restore(state)
