"""The script that runs the recipes for real models: rows of its table, settings, interrupts."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from scripts_for_tests import load_script

from posttrain.recipes.gsm8k import gsm8k
from posttrain.recipes.instructgpt import instructgpt
from posttrain.recipes.r1_zero import r1_zero


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/real_models.py")


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


def test_rows_of_a_comparison(script: ModuleType) -> None:
    versus = {"problems": 500, "win_rate": [0.9, 0.87, 0.93], "reward": [0.95, 0.9, 1.0], "reward_against": [0.7, 0.6, 0.8],
              "kl": 12.34, "perplexity": 21.5, "perplexity_against": 20.25}  # fmt: skip
    assert script.rows({"name": "x", "seed": 0, "stages": {"versus_sft": versus}, "curves": {}}) == [
        "| x, seed 0 | versus_sft: win rate, 500 prompts | 50% | 90.0% [87.0, 93.0] |",
        "| x, seed 0 | versus_sft: the annotator's score, KL 12.3 nats | 0.700 | 0.950 |",
        "| x, seed 0 | versus_sft: perplexity of other text | 20.25 | 21.50 |",
    ]


def test_the_arm_is_chosen_by_the_end_of_its_training_reward(script: ModuleType) -> None:
    def arm(name: str, *rewards: float) -> dict[str, object]:
        return {"name": name, "curves": {"rl": {"reward": [[n + 1, r] for n, r in enumerate(rewards)]}}}

    early, late, stopped = arm("early", 0.1, 0.4, 0.4, 0.3), arm("late", 0.1, 0.1, 0.2, 0.35), {"name": "stopped", "curves": {}}
    assert script.choose([early, late, stopped])["name"] == "late"


def test_an_interrupt_leaves_what_there_is(script: ModuleType) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    assert script.attempt(stop).startswith("KeyboardInterrupt")


def test_settings_are_read_by_the_recipes_own_types(script: ModuleType) -> None:
    found = script.arguments(r1_zero, {"steps": "7", "lr": "1e-5", "model": "m"})
    assert found == {"steps": 7, "lr": 1e-5, "model": "m"}
    assert script.arguments(instructgpt, {"strict": "false", "max_kl": "0"}) == {"strict": False, "max_kl": 0.0}
    with pytest.raises(SystemExit, match="true or false"):
        script.arguments(instructgpt, {"strict": "no"})
    with pytest.raises(SystemExit, match="no depth"):
        script.arguments(gsm8k, {"depth": "3"})


def test_intervals_are_over_prompts_and_not_over_the_times_that_they_were_asked(script: ModuleType, tmp_path: Path) -> None:
    """29 prompts that were asked 17 times each are 29."""

    def write(stage: str, times: int) -> None:
        rows = [{"problem": f"{n}/{t}", "question": f"q{n}", "prompt": f"q{n}", "answer": "7", "outcomes": ["correct"],
                 "solved": [stage == "after" or n < 9], "responses": ["\\boxed{7}" if n % 2 else "8"]}
                for t in range(times) for n in range(29)]  # fmt: skip
        (tmp_path / stage).mkdir(exist_ok=True)
        (tmp_path / stage / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    context, found = SimpleNamespace(folder=lambda stage: tmp_path / stage), []
    for times in (1, 17):
        write("before", times)
        write("after", times)
        found.append((script.paired(context, "before", "after"), script.lenient(context, "after")))
    assert found[0] == found[1] and found[0][0]["gained"] == 20
