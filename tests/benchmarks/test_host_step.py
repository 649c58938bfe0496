"""The script that times the host's part of a step, tried on a toy."""

from __future__ import annotations

import json

import pytest
from scripts_for_tests import load_script


def test_the_parts_of_a_step_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    load_script("benchmarks/host_step.py").main(["--tiny", "--steps", "5"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["episodes"] == 32 and 15 < found["length"] <= 40
    assert "after the last answer, with packing" in found["milliseconds"] and min(found["milliseconds"].values()) >= 0
