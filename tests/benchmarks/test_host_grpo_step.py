"""The script that times the host's part of the GPU benchmark's step, tried on a few answers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from scripts_for_tests import load_script


def test_the_parts_of_a_step_are_timed_and_nothing_stays_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, cpu = load_script("benchmarks/host_grpo_step.py"), torch.Tensor.cpu
    monkeypatch.setitem(script.CASES, "d", replace(script.CASES["d"], layers=2, prompts=2, group=4, prompt=5, new=70))
    script.main(["--steps", "2", "--budget", "300"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["milliseconds"]["d"]
    assert "from one micro-batch to the next" in found and min(found.values()) >= 0
    assert len([name for name in found if name.startswith("*")]) == 4
    assert torch.Tensor.cpu is cpu and int(torch.tensor(3)) == 3
