"""The script that times the host's part of the GPU benchmark's step, tried on a few answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scripts_for_tests import load_script

ROOT = Path(__file__).parents[2]


def test_the_parts_of_a_step_are_timed_and_nothing_stays_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also against another checkout, here the same, whose package is another copy."""
    script, cpu = load_script("benchmarks/host_grpo_step.py"), torch.Tensor.cpu
    case = replace(script.CASES["d"], layers=2, prompts=2, group=4, prompt=5, new=70)
    monkeypatch.setitem(script.CASES, "d", case)
    other = script.of_checkout(ROOT)
    assert other.cuda is not script.cuda
    other.CASES["d"] = other.Case(**{name: getattr(case, name) for name in case.__dataclass_fields__})
    monkeypatch.setattr(script, "of_checkout", lambda folder: other)
    script.main(["--steps", "2", "--budget", "300", "--against", str(ROOT)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["found"]["d"]
    assert "from one micro-batch to the next" in found and min(map(min, found.values())) >= 0
    assert len([name for name in found if name.startswith("*")]) == 5 and {len(one) for one in found.values()} == {3}
    assert torch.Tensor.cpu is cpu and int(torch.tensor(3)) == 3
