"""The benchmark of memory, tried on a tiny model without a GPU: what it plans is what it runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripts_for_tests import load_script


def test_a_model_in_4_bits_makes_a_step_of_grpo_and_one_of_dpo() -> None:
    pytest.importorskip("peft")
    script = load_script("benchmarks/gpu_memory.py")
    setup = script.tiny(script.CASES["qlora7b"])
    setup = replace(setup, case=replace(setup.case, prompts=1, group=4, new=4))
    found = script.run_case("qlora7b", setup, 0.0, "cpu", "")
    assert list(found) == ["qlora7b", "dpo7b"]
    assert found["qlora7b"]["mismatch"] < 1e-5 < found["qlora7b"]["grad_norm"]
    for result in found.values():
        assert 0 < result["plan_gib"] < 0.01 and result["token_budget"] == 8192 and result["step"] > 0
    assert script.planned_gib(["a step", "memory: about 512.0 MiB besides Python"]) == 0.5
