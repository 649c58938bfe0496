"""Makes the shared material importable: tests are not a package. And what holds for every test."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import posttrain  # noqa: F401  before torch: it sets how idle threads wait, on which runs with two of them depend

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def no_pictures_of_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """A picture takes as long as a training of a second. Only the runs of a module with DRAWS = True have one."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "DRAWS", False):
            patch.setattr("posttrain.pipeline.draw", lambda *_: None)
        yield
