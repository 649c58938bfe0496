"""The ways to compute a step, between which nothing of what is sampled may depend."""

from __future__ import annotations

import pytest
from kernels_for_tests import decode_in_pages

from posttrain.engine import cpu


@pytest.fixture(params=["module", "decoder", "packed", "pages"])
def every_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """transformers' own module; our decoder, where the family allows it; that with weights laid out for the processor;
    in pages, as on a GPU, by what its kernels say in torch."""
    never = 10**9
    monkeypatch.setattr(cpu, "DECODER_TOKENS", never if request.param == "module" else 0)
    monkeypatch.setattr(cpu, "PACKED_TOKENS", 0 if request.param == "packed" else never)
    decode_in_pages(monkeypatch, request.param == "pages")
    return request.param
