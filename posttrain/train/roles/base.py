"""Roles: what an algorithm asks for besides the model that it trains. A role is one file here; the trainer and the loop know this
class alone. The stage builds exactly the roles that `Algorithm.roles` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from posttrain.algorithms.base import Algorithm
from posttrain.models.scorer import on_device
from posttrain.train.optimizer import Learner
from posttrain.types import JSON, Batch, Group, Metric, Outputs


@dataclass(frozen=True, slots=True, eq=False)
class Addition:
    """A prepared batch of another source, whose loss is added to an update."""

    algorithm: Algorithm
    batch: Batch


class Role:
    """A role fills columns once a step (`fill`), or gives outputs for every micro-batch (`outputs`), or adds a batch of its own to
    every update (`draw`). The trainer cuts what `fill` sees to its token budget, and does it again where memory runs out."""

    name: ClassVar[str]
    columns: tuple[str, ...] = ()  # what `fill` fills
    learner: Learner | None = None  # where it learns too
    # where it does not: its weights are in no checkpoint, and are checked
    frozen: nn.Module | None = None
    only_shown: bool = False  # fill only in steps whose rollouts are written down

    def resident(self, device: torch.device) -> AbstractContextManager[None]:
        """Have the frozen model on `device` while the role works; it may live elsewhere between."""
        return nullcontext() if self.frozen is None else on_device(self.frozen, device)

    def read(self, groups: Sequence[Group]) -> None:
        """See the groups of a step before its batch, whose `rollout_N` counts their rollouts in order."""

    def fill(self, piece: Batch) -> Mapping[str, Tensor]:
        """The columns of one micro-batch, without gradient, before anything moves."""
        return {}

    def outputs(self, piece: Batch) -> Outputs:
        """What the algorithm sees of one micro-batch, with gradients, besides the outputs of the model that it trains."""
        return Outputs()

    def draw(self) -> Addition | None:
        """What is added to the next update."""
        return None

    def after_step(self, step: int) -> None:
        """What it does once all the updates of a step are made; steps are counted from 1."""

    def metrics(self, filled: Batch) -> tuple[Metric, ...]:
        """Metrics of a filled step."""
        return ()

    def token_arrays(self, batch: Batch) -> Mapping[str, Tensor]:
        """[T] each: what is written down of each token, by the name that viewers know."""
        return {}

    def state(self) -> JSON:
        """What a resumed run needs besides the learner."""
        return None

    def restore(self, state: JSON) -> None:
        """Put back what `state` gave."""
