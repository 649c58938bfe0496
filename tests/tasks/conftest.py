"""What tests of several tasks need: a sandbox for programs, and a data set in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import UserError
from posttrain.rewards.sandbox import isolation

DataSet = Callable[[Mapping[str, Sequence[Mapping[str, Any]]]], str]


@pytest.fixture(scope="module")
def sandbox() -> None:
    try:
        isolation.choose()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSet:
    """Writes the rows of each split, and says where they are."""
    datasets = pytest.importorskip("datasets", reason="needs the package datasets: pip install 'posttrain[data]'")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def write(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
        folder = tmp_path / "set"
        folder.mkdir()
        for name, rows in parts.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(folder)

    return write
