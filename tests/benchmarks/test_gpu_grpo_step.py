"""The brief step of the GPU benchmark, in pages on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels_for_tests import decode_in_pages
from material_for_tests import small_policy
from scripts_for_tests import load_script


def test_a_brief_step_reports_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("benchmarks/gpu_grpo_step.py")
    decode_in_pages(monkeypatch)
    case = replace(script.CASES["a"], vocabulary=2000, prompts=2, group=2, prompt=5, new=6)
    monkeypatch.setitem(script.CASES, "a", case)
    monkeypatch.setattr(script, "make_policy", lambda case: small_policy(dtype=torch.float32, vocab_size=2000))
    monkeypatch.setattr(script, "settle", lambda: None)
    found = script.run_brief("a", 64)
    assert found["copies_gib"] * 2**30 == 4 * 2 * 16 * (16 + 8 + 8 + 24 + 24), "q, k, v, gate and up of two layers"
    assert found["cache_gib"] > 0
