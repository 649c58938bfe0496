"""A user's own algorithm, from a file of theirs, through the command line: it runs, and the configuration that names it needs leave."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from posttrain import cli, config
from posttrain.errors import UserError
from posttrain.runs.read import Run

MINE = '''
from dataclasses import dataclass
from typing import ClassVar
from posttrain.algorithms._policy_gradient import PolicyGradient

@dataclass(frozen=True, kw_only=True)
class Mine(PolicyGradient):
    """Right is good and wrong is bad, whatever the others did: A_i = strength * (r_i - 1/2)."""

    paper: ClassVar[str] = "mine"
    strength: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        self.check(self.strength > 0, f"strength must be positive, not {self.strength}")

    def advantages(self, step, mask_T, state):
        return (self.strength * (step.reward_N - 0.5))[step.sequence_T]
'''
SMALL = """
name: small
stages:
- {stage: rl, name: rl, model: "tiny:nano", task: {name: arithmetic, level: 1}, steps: 2, prompts: 2, evaluate_every: 0,
   sampling: {max_new_tokens: 6}}
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "mine.py"
    path.write_text(MINE)
    return path


def test_a_users_algorithm_runs(mine: Path, tmp_path: Path) -> None:
    directory, recipe = tmp_path / "run", tmp_path / "small.yaml"
    recipe.write_text(SMALL)
    arguments = ["threads=1", f"rl.algorithm={mine}:Mine", "rl.strength=2.5", "rl.group=4", f"out={directory}"]
    assert cli.main(["run", str(recipe), *arguments]) == 0
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["stages"]["rl"]["steps"] == 2
    rows = Run(directory).metrics("rl")
    assert "groups/zero_variance" in rows[-1].figures and rows[-1].figures["loss"] > 0
    saved = next(stage for stage in Run(directory).config["stages"] if stage["name"] == "rl")["algorithm"]
    assert saved["name"] == f"{mine}:Mine" and saved["strength"] == 2.5 and saved["group"] == 4
    with pytest.raises(UserError, match="--allow-code"):
        config.from_config(Run(directory).config, "config.yaml")
    again = config.from_config(Run(directory).config, "config.yaml", allow_code=True)
    algorithm = next(stage for stage in again.recipe.stages if stage.name == "rl").algorithm  # type: ignore[attr-defined]
    assert type(algorithm).__name__ == "Mine" and algorithm.strength == 2.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rl.strength=-1"], "Mine: strength must be positive, not -1"),
        (["rl.strenght=1"], "did you mean 'strength'"),
        (["rl.group=1"], "a group of one is its own baseline"),
    ],
)
def test_its_mistakes_get_one_line_too(
    mine: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "quickstart", f"rl.algorithm={mine}:Mine", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_name_that_is_not_there_is_suggested(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "quickstart", f"rl.algorithm={mine}:Mien"]) == 2
    assert "did you mean 'Mine'" in capsys.readouterr().err
    assert cli.main(["run", "quickstart", f"rl.algorithm={mine.with_name('yours.py')}:Mine"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_settings_of_a_class_without_a_decorator_are_refused(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rl.more=2` would be an unknown key, and without it the class would have its default for ever."""
    mine.write_text(
        f"{mine.read_text()}\n\nclass Bare(Mine):\n    more: float = 1.0\n\n\nclass Renamed(Mine):\n    paper: 'ClassVar' = ''\n"
    )
    assert cli.main(["plan", "quickstart", f"rl.algorithm={mine}:Bare", "rl.more=2"]) == 2
    assert "Bare: write @dataclass(frozen=True) above the class" in capsys.readouterr().err
    assert cli.main(["plan", "quickstart", f"rl.algorithm={mine}:Renamed"]) == 0


def test_a_yaml_file_needs_leave_to_name_one(mine: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "stages:\n- stage: rl\n  name: rl\n  model: tiny:nano\n  task: {name: arithmetic}\n"
        f"  algorithm: {{name: '{mine}:Mine', strength: 2.0}}\n"
    )
    with pytest.raises(UserError, match="--allow-code"):
        config.parse(str(path), [])
    stage = config.parse(str(path), ["rl.strength=3.0"], allow_code=True).recipe.stages[0]
    assert stage.algorithm.strength == 3.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            "def advantages(self, step, mask_T, state): return step.reward_N",
            r"Mine: advantages are a tensor, one for each token, of shape \[\d+\], not \[8\]",
        ),
        (
            "def advantages(self, step, mask_T, state): pass",
            r"Mine: advantages are a tensor, one for each token, of shape \[\d+\], not NoneType",
        ),
        (
            "def advantages(self, step, mask_T, state): return step.reward_N[step.sequence_T].numpy()",
            r"Mine: advantages are a tensor, one for each token, of shape \[\d+\], not ndarray",
        ),
        (
            "def ratio(self, logprob_T, old_T, batch): return (logprob_T - old_T).exp().mean()",
            r"Mine: ratio is a tensor, one for each token, of shape \[\d+\], not \[\]",
        ),
        ("def select(self, groups, state): return groups", "Mine: select returns a Selection, not list"),
        ("def prepare(self, step, state): super().prepare(step, state)", "Mine: prepare returns a Batch, not NoneType"),
        ("def terms(self, outputs, batch): super().terms(outputs, batch)", "Mine: terms returns a Terms, not NoneType"),
        (
            "def surrogate(self, ratio_T, advantage_T, logprob_T, old_T): return -ratio_T * advantage_T",
            "Mine: surrogate returns two tensors: the loss of every token, and where the clip stops it",
        ),
        (
            "def surrogate(self, ratio_T, advantage_T, logprob_T, old_T): return -(ratio_T * advantage_T).mean(), ratio_T > 2",
            r"loss/policy has the shape \[\] and its weights \[\d+\]; give the loss of each unit, not their mean",
        ),
        (
            "def terms(self, outputs, batch):\n"
            "        from posttrain.types import Term, Terms\n"
            "        return Terms((Term('more', outputs.entropy_T.mean(), 0.1),))",
            r"loss/more has the shape \[\] and its weights \[\]; give the loss of each unit, not their mean",
        ),
    ],
)
def test_what_a_method_returns_by_mistake_is_refused(
    method: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mean of a micro-batch is a loss that depends on how the step is cut."""
    mine, recipe = tmp_path / "mine.py", tmp_path / "small.yaml"
    mine.write_text(f"{MINE}\n    {method}\n")
    recipe.write_text(SMALL)
    assert (
        cli.main(["run", str(recipe), "threads=1", f"rl.algorithm={mine}:Mine", "rl.group=4", f"out={tmp_path / 'run'}"]) == 2
    )
    assert re.search(message, capsys.readouterr().err)
