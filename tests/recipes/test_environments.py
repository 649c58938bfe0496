"""The recipes of environments, each a good deal shorter than the shipped one: they run as one command and say what they should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain import cli, config
from posttrain.algorithms.ppo import PPO
from posttrain.stages.rl import RLStage
from posttrain.tasks.guess import Guess
from posttrain.tasks.tictactoe import TicTacToe

SHORT = ["sft.steps=2", "rl.steps=1", "rl.prompts=2", "rl.algorithm.group=2", "rl.evaluate_every=0", "threads=1"]


def short(recipe: str, *words: str) -> list[str]:
    few = f"sft.data=[{{task: {recipe}, counts: {{0: 8}}}}]"
    return ["run", recipe, *SHORT, few, "before.problems=6", "after.problems=6", *words]


def stage(recipe: str, name: str, *words: str) -> Any:
    return next(stage for stage in config.parse(recipe, list(words)).recipe.stages if stage.name == name)


@pytest.mark.parametrize(
    ("recipe", "words", "parts"),
    [
        ("guess", (), set()),
        ("guess", ("pay=end", "algorithm=ppo"), set()),
        ("shop", (), set()),
        ("solver_critic", (), {"solver", "critic"}),
        ("tictactoe", ("before_random.problems=6", "after_random.problems=6"), set()),
    ],
)
def test_a_recipe_of_an_environment_is_one_command(
    recipe: str, words: tuple[str, ...], parts: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert cli.main([*short(recipe, *words), f"out={run}"]) == 0
    for name in ("before", "after"):
        found = json.loads((run / "stages" / name / "result.json").read_text())
        assert 0 <= found["accuracy"][0] <= 1 and set(found["parts"]) >= parts and not found["failed"]
    said = capsys.readouterr().out
    assert all(f"{part} right" in said for part in parts) and f"posttrain run {recipe} seed=1" in said


def test_episodes_of_guess_are_paid_as_asked_and_learned_from_by_either_algorithm() -> None:
    for pay in ("turn", "end"):
        assert {stage("guess", name, f"pay={pay}").task for name in ("before", "rl", "after")} == {Guess(numbers=20, pay=pay)}
    ppo = stage("guess", "rl", "algorithm=ppo")
    assert isinstance(ppo, RLStage) and isinstance(ppo.algorithm, PPO) and ppo.critic_optimizer is not None
    assert 2 * ppo.prompts == stage("guess", "rl").prompts, "it uses what it samples four times"


def test_self_play_is_measured_against_programs() -> None:
    assert stage("tictactoe", "rl").task == TicTacToe("self")
    assert [stage("tictactoe", f"after{end}").task for end in ("", "_random")] == [TicTacToe("best"), TicTacToe("random")]
