"""The ways to compute a step, between which nothing of what is sampled may depend."""

from __future__ import annotations

import pytest
from families_for_tests import sample_padded
from kernels_for_tests import decode_in_pages

from posttrain.engine import cpu


@pytest.fixture(params=["module", "decoder", "packed", "pages", "batches"])
def every_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """transformers' own module; our decoder, where the family allows it; that with weights laid out for the processor;
    in pages, as on a GPU, by what its kernels say in torch; in batches over transformers' own cache."""
    never = 10**9
    monkeypatch.setattr(cpu, "DECODER_TOKENS", never if request.param in ("module", "batches") else 0)
    monkeypatch.setattr(cpu, "PACKED_TOKENS", 0 if request.param == "packed" else never)
    if request.param == "batches":
        sample_padded(monkeypatch)
    decode_in_pages(monkeypatch, request.param == "pages")
    return request.param
