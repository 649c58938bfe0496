"""Pipelines end to end on a CPU: what a run leaves behind, and how it fails."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain import cli, config, pipeline
from posttrain.errors import UserError, many
from posttrain.runs.layout import FORMAT
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.stages._conclusion import chosen

DRAWS = True  # see tests/conftest.py
ARGUMENTS = (
    "threads=1", "sft.steps=8", "sft.batch=4", "sft.checkpoint_every=3", "rl.steps=8", "rl.prompts=2", "rl.group=2", "rl.beta=0.04",
    "rl.checkpoint_every=3", "rl.rollouts_every=1", "rl.evaluate_every=4", "rl.evaluate_problems=4", "before.problems=8",
    "after.problems=8", "sft.data=[{task: {name: arithmetic, level: 2}, counts: {1: 20, 2: 60}}]",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "small"
    assert cli.main(["run", "quickstart", *ARGUMENTS, f"out={directory}"]) == 0
    return directory


def test_a_run_leaves_what_the_design_promises(run: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl", "events.jsonl", "summary.json", "plot.png", "export/model.safetensors"):
        assert (run / name).stat().st_size > 0, name
    summary = json.loads((run / "summary.json").read_text())
    assert summary["before"] is not None and len(summary["after"]) == 3
    assert set(summary["stages"]) == {"sft", "before", "rl", "after"}
    assert summary["versions"]["posttrain"]
    assert [e.details for e in Run(run).events() if e.kind == "alarm"] == [], "no guard fires on a clean run"
    rows = Run(run).metrics("rl")
    assert [row.step for row in rows] == list(range(9))
    assert {"reward", "loss", "kl", "entropy", "length", "grad_norm", "reward/answer", "reward/format"} <= set(rows[1].figures)
    assert {"accuracy/test", "accuracy/test_low", "accuracy/test_high"} <= set(rows[0].figures)


def test_the_problems_shown_at_the_end_say_what_was_solved() -> None:
    """A reward that runs tests says `pass`; one without outcomes solves by its full value."""

    def row(problem: str, outcome: str, **solved: list[bool]) -> dict[str, object]:
        return {"problem": problem, "question": problem, "answer": "", "responses": ["r"], "outcomes": [outcome], **solved}

    before = [row("same", "wrong"), row("code", "fail"), row("praise", "", solved=[False])]
    after = [row("same", "wrong"), row("code", "pass"), row("praise", "", solved=[True])]
    shown = chosen(before, after)
    assert [(a.question, a.before_correct, a.after_correct) for a in shown] == [
        ("code", False, True), ("praise", False, True), ("same", False, False),
    ]  # fmt: skip


def test_the_export_is_a_plain_transformers_model(run: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from posttrain.commands.models import open_policy

    model = AutoModelForCausalLM.from_pretrained(run / "export")
    ids = AutoTokenizer.from_pretrained(run / "export")("12+34=", return_tensors="pt")["input_ids"]
    ours = open_policy(str(run))
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, ours.model(ids).logits, atol=1e-5)


def test_the_resolved_configuration_builds_the_same_settings(run: Path) -> None:
    given = config.parse("quickstart", [*ARGUMENTS])
    assert config.from_config(Run(run).config, "config.yaml").recipe.stages == given.recipe.stages


def test_eval_sample_show_and_plan_speak(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", str(run), "--task", "arithmetic", "problems=20", "task.level=2"]) == 0
    assert "pass@1" in capsys.readouterr().out
    assert cli.main(["eval", str(run), "problems=5", "samples=4", "temperature=1.0", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["task"] == "arithmetic"
    assert set(result["pass_at"]) == {"1", "2", "4"} and set(result["parts"]) == {"answer", "format", "steps"}
    assert cli.main(["sample", str(run), "12+34=", "n=2", "max_new_tokens=5"]) == 0
    assert "[1] " in capsys.readouterr().out
    assert cli.main(["show", str(run)]) == 0
    assert "rl step 8: 4 rollouts" in capsys.readouterr().out
    assert cli.main(["show", str(run), "rl/8/3"]) == 0
    shown = capsys.readouterr().out
    assert "s_0 = <|user|>" in shown and "advantage" in shown and "KL" in shown
    assert cli.main(["plan", "quickstart", *ARGUMENTS]) == 0
    planned = capsys.readouterr().out
    assert "2 prompts x 2 samples = 4 responses" in planned and "memory: about" in planned and "carry loss" in planned


BAD = {
    "run quickstrat": "did you mean 'quickstart'",
    "run quickstart sede=1": "did you mean 'seed'",
    "run quickstart rl.lrr=1": "did you mean 'lr'",
    "run quickstart rll.lr=1": "did you mean 'rl'",
    "run quickstart rl.algorithm=gropo": "did you mean 'grpo'",
    "run quickstart rl.task=arithmetics": "did you mean 'arithmetic'",
    "run quickstart rl.lr=fast": "rl.optimizer.lr",
    "run quickstart rl.lr=-1": "lr must be above 0",
    "run quickstart rl.steps=2.5": "rl.steps",
    "run quickstart rl.group=1": "a group of one is its own baseline",
    "run quickstart rl.top_p=0.9": "top_k and top_p are refused in training",
    "run quickstart rl.temperature=0": "temperature above 0",
    "run quickstart sft.schedule=wavy": "'constant', 'linear' or 'cosine'",
    "run quickstart device=cuda:9": "torch sees no CUDA device",
    "run missing.yaml": "does not exist",
    "resume nowhere": "no run in nowhere",
    "show nowhere": "no run in nowhere",
    "eval nowhere --task arithmetic": "nowhere",
    "sample nowhere hello": "nowhere",
    "eval nowhere --task arithmetics": "did you mean 'arithmetic'",
    "eval nowhere --task arithmetic seed=abc": "eval.seed: input should be a valid integer",
    "eval nowhere --task arithmetic seed=-1": "eval: seed is a whole number, 0 or more",
    "eval nowhere --task arithmetic device=tpu": "eval: device must be auto, cpu",
    "eval nowhere --task arithmetic save=no/such/place": "eval: save=no/such/place: no file can be written there",
    "eval nowhere --task arithmetic save=.": "eval: save=.: no file can be written there",
    "sample nowhere hello n=x": "sample.n: input should be a valid integer",
    "run quickstart seed=-1": "seed is a whole number, 0 or more",
    "run quickstart seeds=-1": "seeds=-1: seeds are whole numbers, 0 or more",
    "run quickstart --fast": "unknown argument '--fast'",
}


@pytest.mark.parametrize("command", BAD)
def test_bad_input_gets_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(command.split()) == 2
    error = capsys.readouterr().err
    assert BAD[command] in error
    assert error.startswith("posttrain: ") and error.count("\n") == 1
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and "device" not in command], "something was left behind"


def test_a_used_directory_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    assert cli.main(["run", "quickstart", *ARGUMENTS, f"out={run}"]) == 2
    error = capsys.readouterr().err
    assert "already holds a run" in error and "it is complete" in error and "posttrain resume" not in error
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("arguments", [[], ["threads=1"]])
def test_a_complete_run_has_nothing_left_to_resume(
    arguments: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(run, tmp_path / "run"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert cli.main(["resume", str(run), *arguments]) == 0
    out, error = capsys.readouterr()
    assert out.startswith(f"{run} is complete: its model is in {run / 'export'}; ") and out.count("\n") == 1 and not error
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_an_edit_that_a_complete_run_would_not_follow_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(run, tmp_path / "run"))
    text = (run / "config.yaml").read_text()
    assert "seed: 0\n" in text
    (run / "config.yaml").write_text(text.replace("seed: 0\n", "seed: 1\n", 1))
    assert cli.main(["resume", str(run)]) == 2
    assert "the settings are not those that the run began with: seed: 0 -> 1" in capsys.readouterr().err


def test_control_c_stops_at_a_step_and_the_run_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    arguments = [a for a in ARGUMENTS if not a.startswith("sft.steps")] + ["sft.steps=100000", f"out={directory}"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "posttrain", "run", "quickstart", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("sft ") and "/100000" in line:
            break
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"posttrain resume {directory}" in error and "stopped after step" in error
    assert list((directory / "checkpoints" / "sft").glob("step-*/manifest.json"))


@pytest.mark.parametrize("arguments", [["resume"], ["run", "quickstart", "again=true"], ["run", "quickstart", "only=sft"]])
def test_a_run_of_another_format_is_not_continued(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the first edition left it: a configuration without a number."""
    directory = tmp_path / "old"
    with RunWriter.create(directory, {"name": "old", "seed": 0, "stages": []}):
        pass
    command = [*arguments, str(directory)] if arguments[0] == "resume" else [*arguments, f"out={directory}"]
    assert cli.main(command) == 2
    assert (
        f"{directory} was written by another version of posttrain (format 1; this one continues 2)" in capsys.readouterr().err
    )
    assert Run(directory).config["name"] == "old", "but it can be read"


def test_a_yaml_file_says_the_same_as_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("recipe: quickstart\nseed: 3\nrl:\n  steps: 7\n  optimizer:\n    lr: 1e-4\n")
    assert config.parse(str(path), ["rl.prompts=5"]) == config.parse(
        "quickstart", ["seed=3", "rl.steps=7", "rl.lr=1e-4", "rl.prompts=5"]
    )
    path.write_text("recipe: quickstart\nrl: [\n")
    with pytest.raises(UserError, match="not valid YAML"):
        config.parse(str(path), [])
    path.write_text("stages:\n- stage: rl\n  name: rl\n  model: x\n  task: {name: arithmetic, levl: 3}\n")
    with pytest.raises(UserError, match="did you mean 'level'"):
        config.parse(str(path), [])


def test_yaml_cannot_name_code_without_leave(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('this must not run')\n")
    path = tmp_path / "mine.yaml"
    path.write_text(f"stages:\n- stage: rl\n  name: rl\n  model: x\n  task: {{name: '{tmp_path}/mine.py:Task'}}\n")
    with pytest.raises(UserError, match="--allow-code"):
        config.parse(str(path), [])


MINE = """
from dataclasses import dataclass
from posttrain.recipes.base import Recipe
from posttrain.stages.evaluate import EvaluateStage
from posttrain.stages.pretrain import PretrainStage
from posttrain.stages._material import Data
from posttrain.tasks.base import Task
from posttrain.tasks.countdown import Countdown
from posttrain.types import Problem, Sampling, Score

@dataclass(frozen=True)
class Echo(Task):
    word: str = "yes"
    def problems(self, split, level=None):
        return [Problem(f"{split}/{n}", f"say {self.word} {n}", self.word) for n in range(4)]
    def score(self, problem, response):
        if problem.id == "test/0":
            raise RuntimeError("the judge is out")
        return Score(float(response == problem.answer))

def mine(steps: int = 2) -> Recipe:
    return Recipe((
        PretrainStage(name="base", model="tiny:nano", data=(Data(task=Countdown(), counts={2: 4}),), steps=steps, batch=2),
        EvaluateStage(name="check", model="base", task=Echo(), problems=4, sampling=Sampling(4, temperature=0.0)),
    ))
"""


def test_a_users_recipe_and_task_run_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    assert cli.main(["run", f"{path}:mine", "steps=3", f"out={tmp_path / 'run'}"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stages"]["base"]["steps"] == 3
    assert summary["stages"]["check"]["failed"] == 1, "a task that raises is a counted failure"
    with pytest.raises(UserError, match="--allow-code"):
        config.from_config(Run(tmp_path / "run").config, "config.yaml")
    assert config.from_config(Run(tmp_path / "run").config, "config.yaml", allow_code=True).recipe.stages[1].name == "check"
    assert cli.main(["run", f"{path}:mime"]) == 2
    assert "did you mean 'mine'" in capsys.readouterr().err


ONE = "{stage: evaluate, name: NAME, model: 'tiny:nano', task: {name: arithmetic}, problems: PROBLEMS}"
TWICE = {
    "the same name": [ONE.replace("NAME", "check").replace("PROBLEMS", str(n)) for n in (2, 3)],
    "a round's name": [ONE.replace("NAME", "check_1"), "{rounds: 2, stages: [" + ONE.replace("NAME", "check") + "]}"],
    "within a round": ["{rounds: 2, stages: [" + ", ".join([ONE.replace("NAME", "check")] * 2) + "]}"],
    "beside others": [ONE.replace("NAME", name) for name in ("a", "check", "b", "check")],
}


@pytest.mark.parametrize("name", TWICE)
def test_two_stages_of_one_name_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first of them would vanish in silence."""
    text = "stages:\n" + "".join(f"- {stage.replace('PROBLEMS', '2')}\n" for stage in TWICE[name])
    (tmp_path / "twice.yaml").write_text(text)
    RunWriter.create(tmp_path / "old", {}).close()
    (tmp_path / "old" / "config.yaml").write_text(f"format: {FORMAT}\n{text}")
    out = f"out={tmp_path / 'run'}"
    for words in (
        ["run", str(tmp_path / "twice.yaml"), out],
        ["plan", str(tmp_path / "twice.yaml")],
        ["resume", str(tmp_path / "old")],
    ):
        assert cli.main(words) == 2
        line = capsys.readouterr().err.strip()
        assert "\n" not in line and "stage names must differ: " in line and "check" in line
    assert not (tmp_path / "run").exists()


def test_a_task_that_raises_before_the_first_stage_leaves_no_run(tmp_path: Path) -> None:
    """Otherwise the corrected command would find its directory taken."""
    (tmp_path / "own.py").write_text(
        "from posttrain.tasks.arithmetic import Arithmetic\n\n"
        "class Own(Arithmetic):\n    def ready(self):\n        raise OSError('no server')\n"
    )
    stage = f"{{stage: rl, model: 'tiny:nano', task: {{name: '{tmp_path}/own.py:Own'}}}}"
    (tmp_path / "own.yaml").write_text(f"stages:\n- {stage}\n")
    with pytest.raises(OSError, match="no server"):
        cli.main(["run", str(tmp_path / "own.yaml"), "--allow-code", f"out={tmp_path / 'new' / 'run'}"])
    assert not (tmp_path / "new").exists()


def test_a_stage_does_not_take_the_name_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "quickstart", "sft.name=rl"]) == 2
    assert "stage names must differ: rl, before, rl, after" in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["-1", "-0.5", "-9223372036854775808", str(2**63), "1.5", "x"])
def test_seeds_that_no_resume_could_take_up_are_refused_at_once(
    seed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "seed.yaml").write_text(f"recipe: quickstart\nseed: {seed}\n")
    RunWriter.create(tmp_path / "old", {}).close()
    (tmp_path / "old" / "config.yaml").write_text(
        f"format: {FORMAT}\nseed: {seed}\nstages:\n- {ONE.replace('NAME', 'x').replace('PROBLEMS', '2')}\n"
    )
    out = f"out={tmp_path / 'run'}"
    mine, old = str(tmp_path / "seed.yaml"), str(tmp_path / "old")
    single, several = f"seed={seed}", (f"seeds=0,{seed}", f"seed=0,{seed}")
    started = [["run", "quickstart", word, out] for word in (single, *several)]
    others = [["eval", "m", "--task", "arithmetic", single], ["sample", "m", "hello", single]]
    for words in (*started, ["run", mine, out], ["resume", old], *others):
        assert cli.main(words) == 2, words
        line = capsys.readouterr().err.strip()
        assert "\n" not in line and "seed" in line and ("whole number" in line or "valid integer" in line), line
    assert not (tmp_path / "run").exists()


def test_the_largest_seed_runs_and_is_taken_up_again(tmp_path: Path) -> None:
    from tests.faults.harness import settings

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "draw", lambda *_: None)  # a picture takes longer than this training
        made = dataclasses.replace(settings("sft", tmp_path / "run"), seed=2**63 - 1)
        pipeline.start(made)
        (tmp_path / "run" / "summary.json").unlink()
        shutil.rmtree(tmp_path / "run" / "stages")
        pipeline.resume(tmp_path / "run")
    assert Run(tmp_path / "run").summary["seed"] == 2**63 - 1  # type: ignore[index]


SHORT = "sampling: {max_new_tokens: 2, temperature: 0.0}"
LEVEL = (
    "{stage: evaluate, name: NAME, model: 'tiny:nano', task: {name: arithmetic, level: LEVEL}, problems: COUNT, " + SHORT + "}"
)


@pytest.mark.parametrize(
    ("counts", "levels", "same"),
    [((4, 6), (3, 3), 4), ((6, 4), (3, 3), 4), ((4, 4), (3, 3), 4), ((4, 4), (3, 2), 0), ((1, 3), (3, 3), 1)],
)
def test_evaluations_of_different_problems_are_compared_on_those_they_share(
    counts: tuple[int, int], levels: tuple[int, int], same: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was found after all training that the numbers differ, and the command crashed."""
    stages = [
        LEVEL.replace("NAME", n).replace("COUNT", str(c)).replace("LEVEL", str(v))
        for n, c, v in zip("ba", counts, levels, strict=True)
    ]
    (tmp_path / "x.yaml").write_text("before: b\nafter: a\nstages:\n" + "".join(f"- {stage}\n" for stage in stages))
    assert cli.main(["run", str(tmp_path / "x.yaml"), f"out={tmp_path / 'run'}", "device=cpu", "threads=1"]) == 0
    said = capsys.readouterr().out
    line = (
        f"of the {many(same, 'problem')} in both evaluations; {sum(counts) - 2 * same} that only one of them has are left out"
    )
    assert (line in said) == (counts != (same, same)) and "Held-out problems" in said


@pytest.mark.parametrize(("key", "name"), [("before", "nowhere"), ("after", "nowhere"), ("before", "sft"), ("after", "rl")])
def test_what_the_summary_compares_is_an_evaluation_of_the_recipe(
    key: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = config.to_config(config.parse("quickstart", list(ARGUMENTS)))
    (tmp_path / "x.yaml").write_text(json.dumps(tree | {key: name}))
    assert cli.main(["run", str(tmp_path / "x.yaml"), f"out={tmp_path / 'run'}"]) == 2
    line = capsys.readouterr().err.strip()
    assert f"unknown evaluate stage in {key}:" in line and "\n" not in line and not (tmp_path / "run").exists()
    assert cli.main(["run", "quickstart", *ARGUMENTS, f"{key}.name=measured", f"out={tmp_path / 'run'}"]) == 2
    assert "unknown evaluate stage" in capsys.readouterr().err and not (tmp_path / "run").exists()
