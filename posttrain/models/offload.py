"""Who is on stage, and when: a model that is only asked now and then need not hold the accelerator's memory in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from posttrain.types import Rating, Rollout, Score


@contextmanager
def on_device(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model on `device` within the block, and back where it lives after it, also if the block fails. Nothing moves where it
    lives there."""
    home = next(model.parameters()).device
    if home == device:
        yield
        return
    model.to(device)
    try:
        yield
    finally:
        model.to(home)


class OffloadedRating:
    """A rating whose models come to `device` for each call and go home after it."""

    def __init__(self, rating: Rating, models: Sequence[nn.Module], device: torch.device):
        self.rating, self.models, self.device = rating, tuple(models), device

    def rate(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        with ExitStack() as stage:
            for model in self.models:
                stage.enter_context(on_device(model, self.device))
            return self.rating.rate(rollouts)
