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
from posttrain.stages._check import check_stages

KINDS = [kind for kind in advise.DATA if kind != "nothing"]
HAVE = [have for count in range(len(KINDS) + 1) for have in combinations(KINDS, count)]
EVERYTHING = [advise.advise(goal, have, compute) for goal, have, compute in product(advise.GOALS, HAVE, advise.COMPUTE)]


def test_every_combination_has_advice() -> None:
    assert len(EVERYTHING) == 7 * 32 * 3
    for found in EVERYTHING:
        assert found.reasons and found.pitfalls and found.command
        assert bool(found.chain) == bool(found.have)
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
def test_the_models_are_those_that_the_stages_need(name: str) -> None:
    method = advise.METHODS[name]
    recipe, _ = advise._recipe("chat", method.stages, method, "gpu", ["verifier"])
    settings = config.from_config(recipe, "advice.yaml")
    widest: list[str] = []
    for stage in settings.recipe.stages:
        if type(stage).__name__ in ("RewardModelStage", "ComparisonsStage"):
            continue
        needs = stage.algorithm.roles & {"reference", "critic"}
        rewards = [s.members for s in settings.recipe.stages if type(s).__name__ == "RewardModelStage"]
        models = ["policy", *sorted(needs), *["reward"] * sum(rewards)]
        widest = max(widest, models, key=len)
    assert sorted(widest) == sorted(method.models)


def test_every_recipe_plans_as_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, for every combination of answers: what `plan` and a run check before the first stage refuses nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("posttrain.stages._check.PROMPTS", 4)
    different = {json.dumps(found.recipe["stages"]): found for found in EVERYTHING}
    assert len(different) > 50
    for found in different.values():
        Path("advice.yaml").write_text(advise.recipe_text(found))
        stages = config.parse("advice.yaml", []).recipe.stages
        names = [stage.name for stage in stages]
        check_stages(stages, 0, "cpu", names, names)
        assert not [line for stage in stages for line in stage.warnings()]


def test_textbooks_are_quoted_and_every_difference_has_its_reason() -> None:
    for found in EVERYTHING:
        book = advise.GOALS[found.goal].textbook
        assert f"textbooks say: {book.says}" in "\n".join(advise.lines(found))
        same, needed = found.method in book.methods, book.needs in found.have
        assert found.textbook.endswith("The same here") == same
        assert same or needed == (f"Here {found.method}: " in found.textbook)
    used = {(found.goal, found.method) for found in EVERYTHING if ". Here " in found.textbook}
    assert used == {(name, method) for name, goal in advise.GOALS.items() for method in goal.textbook.differs}


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
    assert found["chain"] == [["rl", "dr_grpo"]] and found["recipe"]["stages"][1]["algorithm"]["name"] == "dr_grpo"
    assert cli.main(["advise", "math"]) == 0
    assert "write a checker first" in capsys.readouterr().out
    assert cli.main(["advise", "cooking"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert cli.main(["advise", "math", "--have", "verifier", "--config"]) == 0
    Path("advice.yaml").write_text(capsys.readouterr().out)
    assert cli.main(["plan", "advice.yaml"]) == 0
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
    """With the user's own files in place of the stages that stand for them, as the comments say."""
    monkeypatch.chdir(tmp_path)
    for name, row in ROWS.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row(n)) + "\n" for n in range(40)))
    found = advise.advise(goal, have.split(), compute)
    assert [algorithm for _, algorithm in found.chain] == algorithms
    trees = [tree for tree in found.recipe["stages"] if tree["name"] not in ("start", *ROWS)]
    for tree in trees:
        tree |= {"model": "tiny:nano"} if tree["model"] == "start" else {}
        if tree["stage"] == "rl":
            tree |= {"prompts": 2, "evaluate_every": 0, "sampling": {"max_new_tokens": 6}}
        else:
            file = "demonstrations" if tree["stage"] == "sft" else tree["data"][0]
            tree |= {"batch": 4, "data": f"{file}.jsonl"}
        tree |= {"min_accuracy": 0} if tree["stage"] == "reward_model" else {}
        tree["steps"] = 2
    Path("advice.yaml").write_text(yaml.safe_dump({"name": "advice", "stages": trees}))
    assert cli.main([*found.command.split()[1:], "threads=1", "out=run"]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert [summary["stages"][name]["steps"] for name in summary["stages"]] == [2] * len(algorithms)
    assert Path("run/export/model.safetensors").is_file()
