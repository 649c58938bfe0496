"""Models that visit a device go home again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from posttrain.models.scorer import OffloadedRating, on_device

HOME, AWAY = torch.device("cpu"), torch.device("cuda:3")  # no tensor is made there


class Traveller(torch.nn.Module):
    """Stands for a model: it knows where it is, and where it has been."""

    def __init__(self) -> None:
        super().__init__()
        self.device, self.seen = HOME, [HOME]

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield self

    def to(self, device: torch.device) -> Traveller:  # type: ignore[override]
        self.device = device
        self.seen.append(device)
        return self


def test_nothing_moves_where_it_lives() -> None:
    model = Traveller()
    with on_device(model, HOME):
        pass
    assert model.seen == [HOME]


def test_it_comes_and_goes_home_even_if_the_block_fails() -> None:
    model = Traveller()

    def fail() -> None:
        with on_device(model, AWAY):
            assert model.device == AWAY
            raise RuntimeError("the judge is out")

    with pytest.raises(RuntimeError, match="the judge is out"):
        fail()
    assert model.seen == [HOME, AWAY, HOME]


def test_a_ratings_models_travel_together() -> None:
    models = [Traveller(), Traveller()]

    class Judge:
        def rate(self, rollouts: Any) -> list[Any]:
            assert [m.device for m in models] == [AWAY, AWAY]
            return list(rollouts)

    assert OffloadedRating(Judge(), models, AWAY).rate(["a"]) == ["a"]  # type: ignore[list-item, comparison-overlap]
    assert all(m.seen == [HOME, AWAY, HOME] for m in models)
