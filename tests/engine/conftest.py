"""The engine has more than one way through a model; what it promises holds on each of them."""

from __future__ import annotations

import pytest

from posttrain.engine import engine, packed_linear, pager


@pytest.fixture(params=["module", "decoder", "packed", "pages"])
def every_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """transformers' own module; our decoder, where the family allows it; that with weights laid out for the processor;
    in pages, as on a GPU, by what its kernels say in torch."""
    never = 10**9
    monkeypatch.setattr(engine, "DECODER_TOKENS", never if request.param == "module" else 0)
    monkeypatch.setattr(engine, "PACKED_TOKENS", 0 if request.param == "packed" else never)
    monkeypatch.setattr(packed_linear, "SMALLEST", 0)
    monkeypatch.setattr(pager, "DEVICES", {"cpu"} if request.param == "pages" else set())
    return request.param
