"""The examples in the docstrings of the pure layers are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("types.py", "errors.py", "catalogue.py", "ops", "algorithms", "rewards", "tasks", "runs", "evals", "data")


def modules_with_examples() -> list[str]:
    files = [path for layer in LAYERS for path in (ROOT / "posttrain" / layer, *(ROOT / "posttrain" / layer).rglob("*.py"))]
    shown = [path for path in files if path.is_file() and ">>> " in path.read_text()]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in shown]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_nouns_have_examples() -> None:
    assert "posttrain.types" in modules_with_examples()
