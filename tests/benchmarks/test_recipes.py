"""The script that runs every recipe with its toy model: its table, and recipes that stop."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from scripts_for_tests import load_script

import posttrain.recipes


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/recipes.py")


def test_a_table_has_the_change_over_seeds_in_standard_errors(script: ModuleType) -> None:
    row = {"recipe": "dpo", "what": "win rate", "from": 0.5, "low": 0.6, "high": 0.8, "errors": 9.0, "seconds": 7.0}
    rows = [
        {**row, "seed": 0, "to": 0.7},
        {**row, "seed": 1, "to": 0.6},
        {"recipe": "dpo", "seed": 2, "stopped": "TimeoutExpired"},
    ]
    line = script.table(rows)[-1]
    assert line == (
        "| dpo | win rate, % | 0, 1 (1 stopped) | 50.0 | 70.0 [60.0, 80.0], 60.0 [60.0, 80.0] | 9.0, 9.0 | 3.0 | 7, 7 |"
    )


def test_a_recipe_that_fails_does_not_end_the_others(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(sys, "argv", ["recipes.py", str(tmp_path), "--recipes", "dpo,kto", "--seeds", "0"])
    assert script.main() == 1
    assert (tmp_path / "recipes.md").read_text().count("| stopped | 0 |") == 2


def test_every_recipe_with_a_toy_is_run(script: ModuleType) -> None:
    there = {file.stem for file in Path(posttrain.recipes.__file__).parent.glob("[a-z]*.py")} - {"base"}
    assert there - set(script.RECIPES) == {"gsm8k", "math"}  # which need a real model
