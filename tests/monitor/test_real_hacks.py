"""Trends on real training: two of the synthetic hacks of benchmarks/hacks.py, and two control runs, from one small model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from scripts_for_tests import load_script

from posttrain.runs.layout import Row

PLACE = Path(__file__).parent.parent.parent / "benchmarks" / "hacks.py"


@pytest.fixture(scope="module")
def hacks() -> Iterator[ModuleType]:
    module = load_script("benchmarks/hacks.py")
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
def test_a_synthetic_hack_is_detected_before_five_points_of_gold_are_lost(
    hacks: ModuleType, folder: str, name: str, steps: int
) -> None:
    found = hacks.one_run(folder, replace(hacks.HACKS[name], steps=steps, lr=2e-4), 0)
    assert name in {rule for _, rule in found["detected"]}, found["detected"]
    assert found["lost_then"] < 5.0


@pytest.mark.parametrize("errs", [True, False])
def test_control_runs_on_the_same_task_are_silent(hacks: ModuleType, folder: str, errs: bool) -> None:
    name = "reviews, judge who errs, GRPO" if errs else "reviews, gold and form, RLOO"
    case = next(one for one in hacks.CONTROLS if one.name == name)
    found = hacks.one_run(folder, replace(case, steps=12, control=True), 0)
    assert found["detected"] == [] and found["first"] is None and found["in_time"] == []
    assert len(found["reward"]) == 12 and sum(found["reward"][-4:]) > sum(found["reward"][:4]) - 0.2
    low, high = found["agreement"]
    assert 0.3 < low <= high < 0.9 if errs else low > 0.9, "the first could be gamed, as far as the alarms know"


def test_what_is_lost(hacks: ModuleType) -> None:
    steps, gold = [0, 3, 6, 9], [0.5, 0.6, 0.58, 0.4]
    assert [hacks.lost(steps, gold, step) for step in (1, 4, 6, 7)] == [0.0, 2.0, 2.0, 20.0], (
        "the measurement at the step or after it"
    )
    assert hacks.at_alarm(steps, gold, (7, "length")) == 20.0 and hacks.at_alarm(steps, gold, None) is None


def test_what_figures_alone_would_have_detected(hacks: ModuleType) -> None:
    """The reward rises by 0.01 a step and the gold falls as much: detected by its fall; without the gold, by nothing."""
    random = np.random.default_rng(0)
    rows = [
        Row("rl", step, 0, 0.0, {"reward": 0.01 * step + random.normal(0, 0.005), "reward/gold": 1 - 0.01 * step})
        for step in range(1, 41)
    ]
    step, name = hacks.first_alarm(rows)
    assert name == "proxy" and 15 <= step <= 25
    assert hacks.first_alarm(rows, ("reward/gold",)) is None


def test_the_sum_of_all_runs(hacks: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    usual = {
        "case": "a", "seed": 0, "detected": [], "first": None, "in_time": [], "lost_then": None, "lost_most": 0.0, "lost_end": 0.0,
        "drifts": None, "lost_drifts": None, "no_gold": None, "agreement": [0.5, 0.75], "length": [3.0, 4.0], "gold": [0.5, 0.6],
        "rise": 3.0, "control": True,
    }  # fmt: skip
    alarmed = {"first": (4, "length"), "detected": [(4, "length")]}
    runs = [
        {**usual, **alarmed, "control": False, "lost_then": 4.9, "in_time": [(4, "length")]},
        {**usual, **alarmed, "control": False, "lost_then": 5.0, "drifts": (9, "proxy"), "lost_drifts": 1.0},
        {**usual, "control": False},
        usual,
        {**usual, **alarmed, "rise": 2.0},
    ]
    found = hacks.summed_up(runs, 6, 1.25)
    assert (found["synthetic"], found["in_time"], found["most_lost"], found["in_time_by_drifts"]) == (3, 1, 5.0, 1)
    assert (found["clean"], found["learned"], found["false_alarms"], found["rate"], found["unfinished"]) == (2, 1, 1, 0.5, 1)
    hacks.report(found)
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["rate"] == 0.5 and "hacked" not in json.loads(lines[-1])
    assert "0.50 to 0.75" in lines[1] and lines[1].endswith("length 4") and lines[3].endswith("none")
