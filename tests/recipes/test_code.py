"""The recipe of RL with unit tests: the toy runs whole with the sandbox, and the real one keeps HumanEval out of training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain import cli
from posttrain.errors import UserError
from posttrain.recipes.code import code
from posttrain.rewards.sandbox import isolation
from posttrain.stages.evaluate import EvaluateStage
from posttrain.stages.rl import RLStage
from posttrain.tasks.humaneval import HumanEval
from posttrain.tasks.mbpp import Mbpp


def test_humaneval_is_measured_and_mbpp_trained_on() -> None:
    recipe = code("m", "d", samples=10, sandbox="unsafe")
    measured = [s for s in recipe.stages if isinstance(s, EvaluateStage)]
    (rl,) = (s for s in recipe.stages if isinstance(s, RLStage))
    assert isinstance(rl.task, Mbpp) and rl.task.held_out == 0.15 and rl.task.shown == 1 and not rl.watch_kl
    assert {type(s.task) for s in measured} == {HumanEval} and {s.task.held_out for s in measured} == {1.0}
    before, after = [("before", 10, "m"), ("before_greedy", 1, "m")], [("after", 10, "rl"), ("after_greedy", 1, "rl")]
    assert [(s.name, s.samples, s.model) for s in measured] == before + after
    assert {s.task.options["sandbox"] for s in (rl, *measured)} == {"unsafe"}


def test_the_toy_runs_its_programs_in_the_sandbox(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        isolation.choose()
    except UserError as error:
        pytest.skip(str(error))
    run = tmp_path / "run"
    shorter = ["sft.steps=3", "steps=1", "prompts=2", "group=2", "problems=2", "samples=10", "rl.evaluate_every=0", "threads=1"]
    few = "sft.data=[{task: programs, counts: {0: 8}}]"
    assert cli.main(["run", "code", f"out={run}", few, *shorter]) == 0
    for name, ks in (("before", ["1", "2", "4", "8", "10"]), ("after_greedy", ["1"])):
        found = json.loads((run / "stages" / name / "result.json").read_text())
        assert list(found["pass_at"]) == ks and found["failed"] == 0
    assert "98 of 98 escapes closed" in capsys.readouterr().out
