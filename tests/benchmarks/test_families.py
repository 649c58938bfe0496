"""The script that finds how each family of transformers is computed, and the table that it writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts_for_tests import load_script

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("family", "way"),
    [("llama", "fast"), ("gpt2", "packed"), ("bloom", "padded"), ("deepseek_v4", "train"), ("bert", "refused")],
)
def test_each_way_is_found_as_the_page_says(family: str, way: str) -> None:
    script = load_script("benchmarks/families.py")
    assert script.tried(family)[0] == way
    rows = {cells[1].strip(): cells[4] for line in table(script) if len(cells := line.split("|")) == 6}
    assert family in re.split(r"[,\s]+", rows[script.WAYS[way][0]])


def test_a_model_whose_samples_are_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the head changes between sampling and the comparison."""
    script = load_script("benchmarks/families.py")
    wrap = script.wrap_model

    def other(model: Any, *given: Any) -> Any:
        policy = wrap(model, *given)
        with torch.no_grad():
            policy.model.lm_head.weight.mul_(1.5)
        return policy

    monkeypatch.setattr(script, "wrap_model", other)
    assert script.tried("llama")[0] == "wrong"


def table(script: Any) -> list[str]:
    return (ROOT / "docs" / "models.md").read_text().split(script.START)[1].split(script.END)[0].splitlines()
