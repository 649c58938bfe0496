"""Models that are on the device only while they are asked: a reward model need not hold the GPU's memory between two calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from posttrain.types import Rating, Rollout, Score


@contextmanager
def on_device(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Move the model to `device` for the block, and back after it, also if the block fails."""
    before = next(model.parameters()).device
    if before == device:
        yield
        return
    model.to(device)
    try:
        yield
    finally:
        model.to(before)


class OffloadedRating:
    """A rating whose models are moved to `device` for each call and back after it."""

    def __init__(self, rating: Rating, models: Sequence[nn.Module], device: torch.device):
        self.rating, self.models, self.device = rating, tuple(models), device

    def rate(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        with ExitStack() as moved:
            for model in self.models:
                moved.enter_context(on_device(model, self.device))
            return self.rating.rate(rollouts)
