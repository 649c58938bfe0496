"""What a process may take of a GPU: a limit counts as the GPU's size, everywhere that memory decides."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from posttrain.ops import logprobs
from posttrain.ops.device import MARGIN, device_bytes, free_bytes, sent
from posttrain.train.memory import at_hand

GPU, GIB = torch.device("cuda"), 2.0**30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """One of 80 GiB, of which others have 10; this process holds 8 and uses 6."""
    state = {"fraction": 1.0}
    found = {
        "is_available": lambda: True,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=80 * GIB),
        "get_per_process_memory_fraction": lambda index: state["fraction"],
        "memory_reserved": lambda device: 8 * GIB,
        "memory_allocated": lambda device: 6 * GIB,
        "mem_get_info": lambda device: (62 * GIB, 80 * GIB),
    }
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return state


def test_without_a_limit_it_is_what_the_gpu_has(gpu: dict[str, float]) -> None:
    assert device_bytes(GPU) == 80 * GIB and free_bytes(GPU) == 64 * GIB
    assert at_hand(GPU) == (64 - MARGIN * 80) * GIB
    assert logprobs.chunk_size(GPU) == logprobs.CHUNK_LOGITS_CUDA and logprobs.kept_room(GPU) == logprobs.KEPT * 80 * GIB


def test_a_limit_is_the_size_of_the_gpu(gpu: dict[str, float]) -> None:
    gpu["fraction"] = 0.25
    assert device_bytes(GPU) == 20 * GIB and free_bytes(GPU) == 14 * GIB
    assert at_hand(GPU) == (14 - MARGIN * 20) * GIB
    assert logprobs.chunk_size(GPU) == 0.025 * 20 * GIB / 4 and logprobs.kept_room(GPU) == logprobs.KEPT * 20 * GIB
    gpu["fraction"] = 0.05  # less than is used already
    assert at_hand(GPU) == 0.0


def test_on_a_gpu_that_others_fill_half_of_what_is_free_may_be_used(
    gpu: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small model needs little: the margin of a large GPU would leave it nothing."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 * GIB, 80 * GIB))
    assert free_bytes(GPU) == 3 * GIB and MARGIN * 80 > 3
    assert at_hand(GPU) == 1.5 * GIB


def test_what_is_sent_to_a_gpu_comes_from_pinned_memory_and_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: done.append("pinned") or tensor)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda tensor, device, non_blocking: done.append((device.type, non_blocking)) or tensor
    )
    for device in (GPU, torch.device("cpu")):
        sent(torch.arange(3), device)
    assert done == ["pinned", ("cuda", True), ("cpu", True)]
