"""What all runs of these tests go without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_picture() -> Iterator[None]:
    """The picture at the end of a run takes as long as the training of these models; tests/runs/test_plot.py looks at it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posttrain.pipeline.draw", lambda *_: None)
        yield
