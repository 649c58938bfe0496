"""Alarms on real training: two of the planted hacks of benchmarks/hacks.py, and two honest runs, from one small model."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

PLACE = Path(__file__).parent.parent.parent / "benchmarks" / "hacks.py"


@pytest.fixture(scope="module")
def hacks() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("hacks", PLACE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hacks"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)
    del sys.modules["hacks"]


@pytest.fixture(scope="module")
def folder(hacks: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("hacks")
    hacks.HELD_OUT, hacks.EVERY, hacks.SHORT = 200, 5, 0.5  # half the pretraining
    hacks.make_base(str(place), "reviews", 0)
    return str(place)


@pytest.mark.parametrize(("name", "steps"), [("repetition", 10), ("keyword", 16)])
def test_a_planted_hack_is_heard_before_five_points_of_gold_are_lost(
    hacks: ModuleType, folder: str, name: str, steps: int
) -> None:
    found = hacks.one_run(folder, replace(hacks.HACKS[name], steps=steps, lr=2e-4), 0)
    assert name in {heard for _, heard in found["heard"]}, found["heard"]
    assert found["lost_then"] < 5.0


@pytest.mark.parametrize("case", [1, 3])
def test_honest_runs_on_the_same_task_are_left_in_peace(hacks: ModuleType, folder: str, case: int) -> None:
    found = hacks.one_run(folder, replace(hacks.HONEST[case], steps=12), 0)
    assert found["heard"] == [] and found["first"] is None
    assert len(found["reward"]) == 12 and found["reward"][-1] > found["reward"][0] - 0.05


def test_what_is_lost(hacks: ModuleType) -> None:
    steps, gold = [0, 3, 6, 9], [0.5, 0.6, 0.58, 0.4]
    assert [hacks.lost(steps, gold, step) for step in (1, 4, 6, 7)] == [0.0, 2.0, 2.0, 20.0], (
        "the measurement at the step or after it"
    )
