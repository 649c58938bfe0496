"""What words mean: one value or a list, a name or settings, numbers with commas, truths that are names, and TRL's keys."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain import cli, config, config_tree
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ppo import PPO
from posttrain.data.safe_readers import read_yaml
from posttrain.errors import UserError
from posttrain.stages._material import Data
from posttrain.stages.base import Stage
from posttrain.stages.preference import PreferenceStage
from posttrain.stages.rl import RLStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks.arithmetic import Arithmetic

FILE = Data(file="x.jsonl")
FORMS: list[Any] = ["x.jsonl", ["x.jsonl"], [{"file": "x.jsonl"}], {"file": "x.jsonl"}]


def stage(**tree: Any) -> Any:
    return config_tree.from_tree({"name": "s", "model": "m", **tree}, Stage, "stages[0]")


def settings(*words: str, recipe: str = "quickstart") -> Any:
    return config.parse(recipe, words)


def named(made: config.Settings, name: str) -> Any:
    return next(stage for stage in made.recipe.stages if stage.name == name)


@pytest.mark.parametrize("data", FORMS, ids=str)
def test_data_is_a_file_a_list_or_settings_everywhere(data: Any) -> None:
    assert stage(stage="sft", data=data).data == (FILE,)
    assert stage(stage="preference", data=data).data == ("x.jsonl",)
    assert stage(stage="reward_model", data=data).data == ("x.jsonl",)
    assert SFTStage(name="s", model="m", data=data).data == (FILE,)
    assert PreferenceStage(name="p", model="m", data=data).data == ("x.jsonl",)
    assert named(settings(f"sft.data={data!s}"), "sft").data == (FILE,)


def test_files_in_settings_are_paths_in_python_too(tmp_path: Path) -> None:
    from posttrain.api.inputs import Files

    file = tmp_path / "x.jsonl"
    file.write_text("{}")
    assert Files(tmp_path, "sft").paths([{"file": str(file)}], "data") == (str(file),)


def test_text_with_commas_is_a_list_where_the_field_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert stage(stage="preference", data="a.jsonl, b.jsonl").data == ("a.jsonl", "b.jsonl")
    assert stage(stage="sft", data=["a.jsonl", "b.jsonl"]).data == (Data(file="a.jsonl"), Data(file="b.jsonl"))
    Path("a,b.jsonl").write_text("")
    assert stage(stage="preference", data="a,b.jsonl").data == ("a,b.jsonl",), "a file is called so"


def test_algorithms_and_tasks_go_by_their_names_everywhere() -> None:
    written = stage(stage="rl", algorithm="ppo", task="arithmetic")
    assert written == RLStage(name="s", model="m", algorithm="ppo", task="arithmetic")  # type: ignore[arg-type]
    assert (written.algorithm, written.task) == (PPO(), Arithmetic())
    assert stage(stage="rl", task="arithmetic", reward="task").reward.name == "task"
    typed = named(settings("rl.algorithm=ppo", "rl.lam=0.9", "rl.task=arithmetic"), "rl")
    assert (typed.algorithm, typed.task) == (PPO(lam=0.9), Arithmetic())
    with pytest.raises(UserError, match="did you mean 'arithmetic'"):
        stage(stage="rl", task="arithmetik")
    with pytest.raises(UserError, match=r"task jsonl: .*file"):
        RLStage(name="s", model="m", task="jsonl")  # type: ignore[arg-type]


def test_a_yaml_stage_takes_the_keys_of_its_groups_as_the_command_line_does() -> None:
    made = stage(
        stage="rl", task="arithmetic", algorithm="grpo", lr="1e-4", group=4, beta=0.04, reference="other", max_new_tokens=9
    )
    assert made.optimizer.lr == 1e-4 and made.sampling.max_new_tokens == 9
    assert made.algorithm == GRPO(group=4, beta=0.04)
    with pytest.raises(UserError, match="did you mean 'lr'"):
        stage(stage="rl", task="arithmetic", lrr=1)


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("learning_rate", "learning_rate is called lr here"),
        ("num_generations", "num_generations is called group here"),
        ("max_completion_length", "max_completion_length is called max_new_tokens here"),
        ("per_device_train_batch_size", "batch here"),
        ("batch_size", "batch here"),
        ("num_train_epochs", "epochs here"),
        ("max_steps", "max_steps is called steps here"),
        ("max_prompt_length", "a prompt is never cut"),
        ("epsilon", "clip_low and clip_high here"),
        ("gradient_accumulation_steps", "left out here"),
    ],
)
def test_the_names_of_trl_lead_to_ours(name: str, new: str) -> None:
    import posttrain as pt

    tree = {"stage": "rl", "task": "arithmetic", name: 1}
    for call in (
        lambda: settings(f"rl.{name}=1"),
        lambda: stage(**tree),
        lambda: pt.rl("tiny:nano", task="arithmetic", **{name: 1}),
    ):
        with pytest.raises(UserError, match=new):
            call()


def test_a_name_of_trl_that_is_ours_stays_ours() -> None:
    assert named(settings("rl.optimizer.epsilon=1e-7"), "rl").optimizer.epsilon == 1e-7
    assert named(settings("rl.beta=0.5"), "rl").algorithm.beta == 0.5


def test_numbers_may_have_commas_and_several_are_no_number() -> None:
    assert named(settings("rl.steps=1,000"), "rl").steps == 1000
    with pytest.raises(UserError, match=r"rl.optimizer.lr: .*--sweep rl.optimizer.lr=1e-4,3e-4"):
        settings("rl.lr=1e-4,3e-4")


@pytest.mark.parametrize("text", ["no", "on", "true", "null", "1_000", "1e3", "007", "2024-01-01"])
def test_what_is_typed_for_a_text_is_that_text(text: str) -> None:
    assert settings(f"out={text}").out == text
    assert named(settings(f"rl.model={text}"), "rl").model == text


def test_truths_are_truths_where_a_field_is_one(tmp_path: Path) -> None:
    for text, value in (("yes", True), ("no", False), ("true", True), ("off", False)):
        assert named(settings(f"rl.watch_kl={text}"), "rl").watch_kl is value
    file = tmp_path / "a.yaml"
    file.write_text(f"recipe: quickstart\nout: {tmp_path}/no\nrl: {{watch_kl: no, model: no}}\n")
    made = named(config.parse(str(file), [f"out={tmp_path}/no"]), "rl")
    assert made.watch_kl is False and made.model == "no"


RECIPES = """
from neighbour import STEPS
from posttrain.stages.sft import SFTStage
def stage(name="sft", steps=STEPS):
    return SFTStage(name=name, model="tiny:nano", data="x.jsonl", steps=steps)
def listed(): return [stage("a"), stage("b")]
def yielded():
    yield stage("a")
    yield stage("b")
def text(): return "stages"
def needs(size: int): return stage(steps=size)
"""


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("STEPS = 7\n")
    (tmp_path / "mine.py").write_text(RECIPES)
    sys.modules.pop("neighbour", None)
    return tmp_path / "mine.py"


def test_a_recipe_returns_a_stage_or_several_and_imports_its_neighbours(recipes: Path) -> None:
    (alone,) = settings("name=x", recipe=f"{recipes}:stage").recipe.stages
    assert (alone.name, alone.steps) == ("x", 7)
    assert settings("steps=5", recipe=f"{recipes}:stage").recipe.stages[0].steps == 5, "a parameter without a type"
    for name in ("listed", "yielded"):
        assert [s.name for s in settings(recipe=f"{recipes}:{name}").recipe.stages] == ["a", "b"]
    with pytest.raises(UserError, match="a recipe returns a Recipe, a stage or a list of stages, not str"):
        settings(recipe=f"{recipes}:text")
    with pytest.raises(UserError, match=r"needs: give size="):
        settings(recipe=f"{recipes}:needs")


@pytest.mark.parametrize(
    ("code", "said"),
    [("x = 1\nbroken(\n", "line 2: SyntaxError"), ("\n\n1 / 0\n", "line 3: ZeroDivisionError: division by zero"),
     ("import not_there\n", "line 1: ModuleNotFoundError")],
)  # fmt: skip
def test_an_error_in_a_users_file_names_the_file_and_the_line(
    code: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(code)
    assert cli.main(["plan", f"{file}:recipe"]) == 2
    assert f"{file} {said}" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["trueish", "falsehood", "true-model", "TRUEST"])
def test_a_word_that_begins_like_a_truth_is_text(word: str) -> None:
    assert read_yaml(f"a: {word}", "x.yaml") == {"a": word}


@pytest.mark.parametrize("value", ["!!bool perhaps", "!!int x", "!!int ''", "!!timestamp x", "!!float '1:2:'"])
def test_a_tag_that_does_not_fit_its_value_is_one_line(value: str) -> None:
    with pytest.raises(UserError, match=r"x\.yaml is not valid YAML"):
        read_yaml(f"a: {value}", "x.yaml")


@pytest.mark.parametrize("text", ["x #1", "#### ", "12 #x", "x#1"])
def test_a_value_of_the_command_line_is_whole(text: str) -> None:
    """YAML alone would cut a comment off and join lines."""
    assert config_tree.pair(f"out={text}") == ("out", text)
    assert settings(f"out={text}").out == text
    assert config_tree.pair("x=a\nb") == ("x", "a\nb")
    assert config_tree.pair("data=[{file: x}]  # one") == ("data", [{"file": "x"}])
