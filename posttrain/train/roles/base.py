"""Roles: the models and data that an algorithm needs besides the model it trains (reference, critic, teacher, ...). Each role is one
file here. The trainer and the loop use this base class only. The stage builds exactly the roles that `Algorithm.roles` names."""

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
    """A prepared batch from another source whose loss is added to an update."""

    algorithm: Algorithm
    batch: Batch


class Role:
    """A role fills columns once a step (`fill`), returns outputs for every micro-batch (`outputs`), or adds a batch of its own to every
    update (`draw`). The trainer cuts the batch for `fill` to its token budget, and repeats the call if memory runs out."""

    name: ClassVar[str]
    columns: tuple[str, ...] = ()  # the columns that `fill` returns
    learner: Learner | None = None  # its model and optimizer, if it is trained
    # its frozen model; checkpoints contain a checksum of its weights, not the weights
    frozen: nn.Module | None = None
    only_shown: bool = False  # fill only in steps whose rollouts are written

    def resident(self, device: torch.device) -> AbstractContextManager[None]:
        """Keep the frozen model on `device` while the role works. It may be offloaded in between."""
        return nullcontext() if self.frozen is None else on_device(self.frozen, device)

    def read(self, groups: Sequence[Group]) -> None:
        """Receive the groups of a step before its batch. The batch's `rollout_N` are indices of their rollouts."""

    def fill(self, piece: Batch) -> Mapping[str, Tensor]:
        """The columns of one micro-batch, without gradient, before the update."""
        return {}

    def outputs(self, piece: Batch) -> Outputs:
        """Outputs for one micro-batch, with gradients, in addition to those of the trained model."""
        return Outputs()

    def draw(self) -> Addition | None:
        """A batch to add to the next update, or None."""
        return None

    def after_step(self, step: int) -> None:
        """Called after all updates of a step; steps count from 1."""

    def metrics(self, filled: Batch) -> tuple[Metric, ...]:
        """Metrics of a filled step."""
        return ()

    def token_arrays(self, batch: Batch) -> Mapping[str, Tensor]:
        """[T] arrays to write for each token, by the name that viewers show."""
        return {}

    def state(self) -> JSON:
        """The state that a resumed run needs besides the learner."""
        return None

    def restore(self, state: JSON) -> None:
        """Restore what `state` returned."""
