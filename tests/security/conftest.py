"""Models that hostile copies are made of."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from posttrain.models.save import save
from posttrain.models.tiny import character_tokenizer, tiny_model

TOKENIZER = character_tokenizer("0123456789+= \n")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(TOKENIZER, "nano", 0), TOKENIZER, tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(saved, tmp_path / "model"))
