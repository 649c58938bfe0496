"""The advice: every goal, every combination of data and compute has one, it is true of the algorithms, and its recipe runs."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path

import pytest
import yaml
from material_for_tests import algorithm_class

from posttrain import catalogue, cli, config
from posttrain.commands import advise
from posttrain.errors import UserError

KINDS = [kind for kind in advise.DATA if kind != "nothing"]
HAVE = [have for count in range(len(KINDS) + 1) for have in combinations(KINDS, count)]
EVERYTHING = [advise.advise(goal, have, compute) for goal, have, compute in product(advise.GOALS, HAVE, advise.COMPUTE)]
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


def test_every_combination_has_advice() -> None:
    assert len(EVERYTHING) == 7 * 32 * 3
    for found in EVERYTHING:
        assert found.reasons and found.pitfalls and found.command
        assert bool(found.chain) == bool(found.have) == (found.recipe is not None)
        assert found.signal in (*found.have, "")
        text = "\n".join(advise.lines(found))
        assert all(algorithm in text for _, algorithm in found.chain)


@pytest.mark.parametrize(
    ("goal", "have", "compute", "chain", "models"),
    [
        ("math", "verifier", "laptop", "rl/grpo", "policy"),
        ("math", "demonstrations verifier", "cluster", "sft/sft rl/dapo", "policy"),
        ("code", "verifier comparisons", "gpu", "rl/grpo", "policy"),
        ("chat", "demonstrations comparisons", "gpu", "sft/sft preference/dpo", "policy reference"),
        ("chat", "comparisons", "cluster", "reward_model/reward_model rl/ppo", "policy reference critic reward"),
        ("chat", "feedback", "gpu", "preference/kto", "policy reference"),
        ("quality", "comparisons", "gpu", "reward_model/reward_model rl/rloo", "policy reference reward"),
        ("quality", "verifier", "cluster", "rl/raft rl/dapo", "policy"),
        ("limited", "comparisons", "laptop", "preference/orpo", "policy"),
        ("limited", "demonstrations comparisons", "laptop", "sft/sft preference/simpo", "policy"),
        (
            "safety",
            "comparisons",
            "cluster",
            "reward_model/reward_model rl/ppo",
            "policy reference critic reward reward reward",
        ),
        ("creative", "judge", "gpu", "rl/online_dpo", "policy reference"),
        ("creative", "demonstrations", "gpu", "sft/sft", "policy"),
    ],
)
def test_what_is_advised(goal: str, have: str, compute: str, chain: str, models: str) -> None:
    found = advise.advise(goal, have.split(), compute)
    assert " ".join(f"{stage}/{algorithm}" for stage, algorithm in found.chain) == chain
    assert " ".join(found.models) == models


def test_memory_is_what_plan_counts() -> None:
    """PPO on a GPU: policy and critic at 2 + 4 + 4 + 8 bytes, reference and reward model at 2."""
    assert advise.advise("chat", ["comparisons"], "cluster").bytes_a_parameter == 2 * 18 + 2 * 2
    assert advise.advise("math", ["verifier"], "laptop").bytes_a_parameter == 16


@pytest.mark.parametrize("name", advise.METHODS)
def test_the_models_are_those_that_the_stages_need(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = advise.METHODS[name]
    (tmp_path / "my_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    recipe = advise._recipe("x", method.stages, method, "gpu")
    settings = config.from_config(recipe, "advice.yaml", allow_code=True)
    widest: list[str] = []
    for stage in settings.recipe.stages:
        if type(stage).__name__ == "RewardModelStage":
            continue
        needs = stage.algorithm.roles & {"reference", "critic"}
        rewards = [s.members for s in settings.recipe.stages if type(s).__name__ == "RewardModelStage"]
        models = ["policy", *sorted(needs), *["reward"] * sum(rewards)]
        widest = max(widest, models, key=len)
    assert sorted(widest) == sorted(method.models)


def test_every_recipe_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All different ones are read as `posttrain run` would read them, with a task of the user's."""
    (tmp_path / "my_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    texts = {advise.recipe_text(found) for found in EVERYTHING if found.recipe is not None}
    assert len(texts) > 50
    for text in texts:
        Path("advice.yaml").write_text(text)
        stages = config.parse("advice.yaml", [], allow_code=True).recipe.stages
        assert stages[0].model == "path/to/model"
        assert all(stage.model in ("path/to/model", *(s.name for s in stages)) for stage in stages)


def test_every_name_exists() -> None:
    for method in advise.METHODS.values():
        for stage, algorithm in method.stages:
            assert stage in catalogue.names("stage") and algorithm in catalogue.names("algorithm")
            assert (algorithm_class(algorithm).learns_from == "rollouts") == (stage == "rl")
        assert method.example in catalogue.names("recipe")
    tables = [advise.PICKS, *(goal.picks for goal in advise.GOALS.values())]
    used = {method for picks in tables for methods in picks.values() for method in methods} | {"orpo"}
    assert used == set(advise.METHODS), "a method that nobody is advised"


def test_goals_are_found_by_their_words() -> None:
    titles = ["general chat", "maximum quality", "math and reasoning", "code", "limited compute", "safety", "creative writing"]
    assert [advise.find_goal(title) for title in titles] == list(advise.GOALS)
    with pytest.raises(UserError, match="did you mean 'safety'"):
        advise.advise("saftey")
    with pytest.raises(UserError, match="did you mean 'comparisons'"):
        advise.advise("chat", ["comparison"])
    with pytest.raises(UserError, match="unknown compute 'abacus'"):
        advise.advise("chat", ["comparisons"], "abacus")
    with pytest.raises(UserError, match="leave it out"):
        advise.advise("chat", ["comparisons", "nothing"])


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["advise"]) == 0
    assert "math and reasoning" in capsys.readouterr().out
    assert cli.main(["advise", "general", "chat", "--have", "demonstrations,comparisons", "--compute", "cluster"]) == 0
    said = capsys.readouterr().out
    assert "sft -> reward_model -> rl (ppo)" in said and "4 models in memory" in said and "posttrain run advice.yaml" in said
    assert cli.main(["advise", "math", "--have", "verifier", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chain"] == [["rl", "dr_grpo"]] and found["recipe"]["stages"][0]["algorithm"]["name"] == "dr_grpo"
    assert cli.main(["advise", "math"]) == 0
    assert "write a checker first" in capsys.readouterr().out
    assert cli.main(["advise", "math", "--config"]) == 2
    assert cli.main(["advise", "cooking"]) == 2
    assert capsys.readouterr().err.count("\n") == 2
    assert cli.main(["advise", "math", "--have", "verifier", "--config"]) == 0
    Path("advice.yaml").write_text(capsys.readouterr().out)
    Path("my_task.py").write_text(TASK)
    assert cli.main(["plan", "advice.yaml"]) == 2
    assert "--allow-code" in capsys.readouterr().err
    assert cli.main(["plan", "advice.yaml", "--allow-code", "rl.model=tiny:nano"]) == 0
    assert "32 prompts x 8 samples" in capsys.readouterr().out


ROWS = {
    "demonstrations": lambda n: {"prompt": f"say {n}", "completion": "yes"},
    "comparisons": lambda n: {"prompt": f"say {n}", "chosen": "yes", "rejected": "no"},
    "feedback": lambda n: {"prompt": f"say {n}", "completion": "yes" if n % 2 else "no", "label": bool(n % 2)},
}
CHAINS = [
    ("chat", "demonstrations comparisons", "cluster", ["sft", "reward_model", "ppo"]),
    ("chat", "feedback", "gpu", ["kto"]),
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
