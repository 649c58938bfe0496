"""What `posttrain advise` recommends runs as it stands: whole chains from a user's files, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from posttrain import cli
from posttrain.commands import advise

TASK = """
from dataclasses import dataclass
from posttrain.tasks.base import Task
from posttrain.types import Problem, Score

@dataclass(frozen=True)
class MyTask(Task):
    def problems(self, split, level=None):
        return [Problem(f"{split}/{n}", f"say {n}", "yes") for n in range(8)]
    def score(self, problem, response):
        return Score(response.count("e") / 10)
"""
ROWS = {
    "demonstrations": lambda n: {"prompt": f"say {n}", "completion": "yes"},
    "comparisons": lambda n: {"prompt": f"say {n}", "chosen": "yes", "rejected": "no"},
    "thumbs": lambda n: {"prompt": f"say {n}", "completion": "yes" if n % 2 else "no", "label": bool(n % 2)},
}
CHAINS = [
    ("chat", "demonstrations comparisons", "cluster", ["sft", "reward_model", "ppo"]),
    ("chat", "thumbs", "gpu", ["kto"]),
    ("quality", "demonstrations verifier", "gpu", ["sft", "raft", "dapo"]),
    ("creative", "judge", "gpu", ["online_dpo"]),
]


@pytest.mark.parametrize(("goal", "have", "compute", "algorithms"), CHAINS, ids=lambda value: str(value).replace(" ", "+"))
def test_the_recipe_runs(
    goal: str, have: str, compute: str, algorithms: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_task.py").write_text(TASK)
    for name, row in ROWS.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row(n)) + "\n" for n in range(40)))
    found = advise.advise(goal, have.split(), compute)
    assert [algorithm for _, algorithm in found.chain] == algorithms and found.recipe is not None
    Path("advice.yaml").write_text(advise.recipe_text(found))
    settings = ["threads=1", "out=run"]
    for stage in yaml.safe_load(Path("advice.yaml").read_text())["stages"]:
        short = {"steps": 2, "model": "tiny:nano"} if stage["model"] == "path/to/model" else {"steps": 2}
        rl = {"prompts": 2, "max_new_tokens": 6, "evaluate_every": 0}
        short |= rl if stage["stage"] == "rl" else {"batch": 4}
        short |= {"min_accuracy": 0} if stage["stage"] == "reward_model" else {}
        settings += [f"{stage['name']}.{key}={value}" for key, value in short.items()]
    assert cli.main([*found.command.split()[1:], *settings]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert [summary["stages"][name]["steps"] for name in summary["stages"]] == [2] * len(algorithms)
    assert Path("run/export/model.safetensors").is_file()
