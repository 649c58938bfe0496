"""The recipes for real models, run whole with a tiny random one: what they leave, and what their script makes of it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from posttrain import config
from posttrain.errors import UserError
from posttrain.recipes.dpo import dpo
from posttrain.recipes.gsm8k import gsm8k
from posttrain.recipes.r1_zero import r1_zero

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("real_models", ROOT / "benchmarks" / "real_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["real_models"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checked(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("real")
    script.check(out)
    return out


def figures(folder: Path, name: str) -> dict:  # type: ignore[type-arg]
    return dict(json.loads((folder / f"{name}.json").read_text()))


def test_gsm8k_measures_before_and_after_and_keeps_its_curves(checked: Path) -> None:
    kept = figures(checked, "gsm8k")
    assert list(kept["stages"]) == ["before", "rl", "after"]
    assert [kept["stages"][s]["problems"] for s in ("before", "after")] == [4, 4]
    curves = kept["curves"]["rl"]
    assert {"reward", "reward/format", "length", "kl", "entropy", "accuracy/test", "generated_per_second"} <= set(curves)
    assert [step for step, _ in curves["reward"]] == [1, 2]
    samples, length, seconds = 4, curves["length"][0][1], dict(map(tuple, curves["seconds/generate"]))[1]
    assert curves["generated_per_second"][0][1] == pytest.approx(samples * length / seconds, rel=1e-3)
    assert kept["paired"]["difference"][0] == pytest.approx((kept["paired"]["gained"] - kept["paired"]["lost"]) / 4)
    assert set(kept["lenient"]["before"]) == {"accuracy", "boxed"}


def test_dpo_is_measured_on_a_quarter_of_the_prompts(checked: Path) -> None:
    result = figures(checked, "dpo")["stages"]["dpo"]
    assert (result["trained_on"], result["held_out"]) == (18, 6)


def test_r1_zero_has_pass_at_k_of_base_and_trained_model(checked: Path) -> None:
    stages = figures(checked, "r1_zero")["stages"]
    assert list(stages) == ["before", "base", "rl", "trained", "after"]
    assert [sorted(stages[s]["pass_at"]) for s in ("base", "trained")] == [["1", "2"]] * 2


def test_only_figures_are_kept_and_drawn(checked: Path) -> None:
    kept = {p.name for p in checked.iterdir()} - {"model"}
    data = {"gsm8k-train.jsonl", "gsm8k-test.jsonl", "pairs.jsonl"}
    assert kept == data | {f"{name}.{ending}" for name in ("gsm8k", "dpo", "r1_zero") for ending in ("json", "png")}
    assert all((checked / f"{name}.png").stat().st_size > 10_000 for name in ("gsm8k", "dpo", "r1_zero"))


def test_rows_of_the_table(script: ModuleType) -> None:
    stage = {"problems": 1000, "accuracy": [0.25, 0.22, 0.28], "pass_at": {"1": [0.25, 0.22, 0.28]}}
    better = stage | {"accuracy": [0.5, 0.47, 0.53]}
    curves = {
        "rl": {"generated_per_second": [[1, 100.0], [2, 300.0], [3, 200.0]], "seconds/total": [[1, 1.0], [2, 4.0], [3, 2.5]]}
    }
    kept = {"name": "x", "seed": 3, "stages": {"before": stage, "after": better}, "curves": curves}
    assert script.rows(kept) == [
        "| x, seed 3 | greedy accuracy, 1000 problems | 25.0% [22.0, 28.0] | 50.0% [47.0, 53.0] |",
        "| x, seed 3 | rl: median tokens generated a second / seconds a step | 200 | 2.50 |",
    ]


def test_settings_are_read_by_the_recipes_own_types(script: ModuleType) -> None:
    found = script.arguments(r1_zero, {"steps": "7", "lr": "1e-5", "model": "m"})
    assert found == {"steps": 7, "lr": 1e-5, "model": "m"}
    with pytest.raises(SystemExit, match="no depth"):
        script.arguments(gsm8k, {"depth": "3"})


def test_sizes() -> None:
    assert [s.name for s in dpo().stages] == ["pretrain", "sft", "comparisons", "dpo", "versus_sft"]
    assert [s.name for s in dpo(model="m", data="d").stages] == ["dpo"]
    assert [s.name for s in r1_zero().stages] == ["pretrain", "base", "rl", "trained"]
    with pytest.raises(UserError, match="go together"):
        dpo(model="m")
    with pytest.raises(UserError, match="beta must be positive"):
        dpo(model="m", data="d", beta=0)
    settings = config.parse("gsm8k", ["model=somewhere", "data=folder", "rl.lr=1e-6", "after.problems=7"])
    before, training, after = settings.recipe.stages
    assert (before.problems, after.problems, training.optimizer.lr, training.task.data) == (1319, 7, 1e-6, "folder")
