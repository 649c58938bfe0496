"""The deterministic mode: asked for on a GPU, it is set for the whole process; on a CPU nothing is to be done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain import config, pipeline
from posttrain.train import torch_settings


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *given: found.append(given))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    return found


def test_on_a_gpu_every_kernel_runs_in_one_order(asked: list[tuple[Any, ...]]) -> None:
    torch_settings.use_deterministic_kernels("cuda:0")
    assert asked == [(True,)], "as errors: warnings would leave flash attention as it is"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and not torch.backends.cudnn.benchmark


def test_on_a_cpu_nothing_is_to_be_done(asked: list[tuple[Any, ...]]) -> None:
    torch_settings.use_deterministic_kernels("cpu")
    assert asked == [] and "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_the_setting_reaches_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []
    monkeypatch.setattr(pipeline, "use_deterministic_kernels", seen.append)
    monkeypatch.setattr(pipeline, "run_stages", lambda *given: None)
    for number, words in enumerate(([], ["deterministic=true"])):
        settings = config.parse("quickstart", [*words, "device=cpu", f"out={tmp_path / str(number)}"])
        pipeline.start(settings)
        assert config.from_config(config.to_config(settings), "x").deterministic == bool(words)
    assert seen == ["cpu"]
