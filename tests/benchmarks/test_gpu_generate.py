"""Lognormal lengths in steps of the GPU benchmark, in pages on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels_for_tests import decode_in_pages
from material_for_tests import small_policy
from scripts_for_tests import load_script

from posttrain.collect import generate_groups


@pytest.mark.parametrize(("staleness", "keep"), [(0, False), (1, False), (1, True)])
def test_steps_that_do_not_wait_for_the_longest_answers_lose_nothing(
    staleness: int, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("benchmarks/gpu_generate.py")
    decode_in_pages(monkeypatch)
    case = replace(script.CASES["a"], vocabulary=2000, prompts=3, group=2, prompt=5, new=6)
    engine = script.Engine(small_policy(dtype=torch.float32, vocab_size=2000), max_rows=case.rows, processes=1)
    list(generate_groups(engine, script.make_requests(case, 0)))
    found = script.run_ahead(engine, case, staleness, keep, counted=2, mean=8, longest=40)
    steps = 4 + 2 * staleness
    offered = sum(script.lognormal_lengths(case, 8, 40, seed).sum() for seed in range(steps))
    assert sum(tokens for tokens, _ in found["steps"]) == offered, "trained and offered lengths agree"
    assert len(found["steps"]) == steps and found["counted"] == 2
    assert (found["recomputed"] > 0) == (staleness > 0 and not keep), "what is in flight goes on after a publish"
