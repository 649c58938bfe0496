"""The examples in the documentation are executed as they stand."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

DOCS = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_examples_are_true(path: Path) -> None:
    failed, _ = doctest.testfile(str(path), module_relative=False)
    assert failed == 0


def test_there_are_examples() -> None:
    assert doctest.testfile(str(next(p for p in DOCS if p.name == "mdp.md")), module_relative=False).attempted > 10
