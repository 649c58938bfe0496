"""Exit codes and last lines of a process. The codes are those of docs/reliability.md."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from errno import EACCES, EMFILE, ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain import cli, pipeline
from posttrain.errors import GuardStop, Interrupted, UserError
from posttrain.runs.read import Run
from posttrain.train.trainer import Trainer

CODES = {
    UserError("bad"): 2,
    GuardStop("stopped"): 3,
    Interrupted("asked"): 130,
    KeyboardInterrupt(): 130,
    OSError(ENOSPC, "full", "a.png"): 2,
    OSError(EMFILE, "Too many open files"): 2,
    RuntimeError("can't start new thread"): 2,
    PermissionError(EACCES, "denied", "a.jsonl"): 2,
}
SMALL = """
threads: 1
stages:
- {stage: rl, name: rl, model: "tiny:nano", task: {name: arithmetic, level: 1}, steps: 5, prompts: 2, evaluate_every: 0,
   checkpoint_every: 1, sampling: {max_new_tokens: 6}, algorithm: {name: grpo, group: 2, beta: 0.04}}
"""


def raising(error: BaseException) -> Callable[..., Path]:
    def start(*arguments: Any) -> Path:
        raise error

    return start


@pytest.mark.parametrize("error", CODES, ids=lambda e: type(e).__name__)
def test_each_end_has_its_code_and_one_line(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline, "start", raising(error))
    assert cli.main(["run", "quickstart", f"out={tmp_path / 'run'}"]) == CODES[error]
    said = capsys.readouterr().err
    assert said.startswith("posttrain: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evall", "m"], "unknown command 'evall'; did you mean 'eval'?"),
        (["train", "m"], "unknown command 'train'; use: posttrain run RECIPE"),
        (["quickstart"], "unknown command 'quickstart'; use: posttrain run quickstart"),
        (["list", "algoritms"], "unknown kind 'algoritms'; did you mean 'algorithms'?"),
        (["list", "grpo"], "grpo is one of the algorithms: posttrain list algorithms grpo"),
        (["compare", "runs/one"], "the following arguments are required: OTHER"),
        (["list", "recipies", "--json"], "unknown kind 'recipies'; did you mean 'recipes'?"),
        (["run"], "the following arguments are required: recipe; see 'posttrain run --help'"),
        (["eval", "m"], "eval: m is not the model of a run; give a task (--task NAME)"),
        (["doctor", "--jsn"], "unknown argument '--jsn'; see 'posttrain doctor --help'"),
    ],
)
def test_a_mistyped_command_is_one_line_with_the_nearest_name(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith(f"posttrain: {said}")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("rl.lr=-1", "rl.optimizer: lr must be above 0, not -1.0"),
        ("rl.sampling.max_new_tokens=0", "rl.sampling: max_new_tokens must be at least 1, not 0"),
        ("rl.monitor.kl=-1", "rl.monitor: monitor: kl must be above 0"),
        ("rl.task.level=99", "rl.task: arithmetic needs 1 <= min_level <= level <= 18"),
        ("rl.stps=1", "unknown key 'rl.stps': no 'stps'; did you mean 'steps' or"),
        ("rl.steps=0", "rl: steps must be at least 1, not 0"),
        ("rl.evaluate_every=-1", "rl: evaluate_every must be 0 (never) or a number of steps, not -1"),
        ("sft.checkpoint_every=-1", "sft: checkpoint_every must be 0 (never) or a number of steps, not -1"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_stage_it_is_of(
    setting: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "quickstart", setting]) == 2
    assert capsys.readouterr().err.startswith(f"posttrain: {said}")


@pytest.mark.parametrize("place", ["x" * 300, "file/run", "/proc/run"])
def test_a_place_that_cannot_be_made_is_one_line(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "small.yaml").write_text(SMALL)
    assert cli.main(["run", "small.yaml", f"out={place}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("posttrain: cannot write the run directory ") and said.count("\n") == 1


@pytest.mark.parametrize("name", ["{}/a\udcffb", "{}/a\n", "{}/a\x1b[31mb", "{}/a\0b", "-a", "./-a"])
def test_a_name_that_cannot_be_saved_to_or_copied_is_refused_before_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "quickstart", f"out={name.format(tmp_path)}"]) == 2
    line = "the name of a run directory is UTF-8 without control characters and begins with no dash; choose another"
    assert line in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(sys.platform != "linux", reason="names of bytes that are not UTF-8")
def test_a_folder_that_is_not_utf8_is_refused_before_training_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "caf\udce9").mkdir()
    monkeypatch.chdir(tmp_path / "caf\udce9")
    assert cli.main(["run", "quickstart", "out=tuned"]) == 2
    assert "which is not UTF-8; choose another, or rename the folder above it" in capsys.readouterr().err
    assert not [*Path().iterdir()]


def test_a_run_in_the_home_directory_has_its_model_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the shell leaves ~ as it is, as in a YAML file: the run was in a directory of that name, its model elsewhere."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "small.yaml").write_text(SMALL.replace("steps: 5", "steps: 1"))
    assert cli.main(["run", str(tmp_path / "small.yaml"), "out=~/run"]) == 0
    assert (tmp_path / "home/run/export/model.safetensors").is_file()
    assert cli.main(["run", str(tmp_path / "small.yaml"), "out=~nobody-has-this-name/run"]) == 2
    assert "there is no such user; write ./~nobody-has-this-name/run" in capsys.readouterr().err
    assert not [*(tmp_path / "here").iterdir()]


def test_a_line_of_error_keeps_the_spaces_of_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "my  run"]) == 2
    said = capsys.readouterr().err
    assert "my  run" in said and said.count("\n") == 1


def test_a_current_directory_that_was_removed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    # MKL ends a process there at its first product, with a line about a library
    assert cli.main(["sample", str(tmp_path / "model"), "1+1"]) == 2
    assert capsys.readouterr().err == "posttrain: the current directory has been removed; change to another (cd)\n"


def test_a_crash_keeps_its_traceback_and_has_code_1() -> None:
    program = (
        "import sys; from posttrain import catalogue, cli\n"
        "def describe(kind): raise ZeroDivisionError('by nobody')\n"
        "catalogue.describe = describe\n"
        "sys.exit(cli.main(['list']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "ZeroDivisionError: by nobody" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="streams are closed as a POSIX shell does")
def test_closed_streams_are_no_reason_to_fail_nor_are_their_numbers_given_to_files() -> None:
    same = "os.path.samestat(os.fstat(1), os.stat(os.devnull))"
    program = f"import os, sys; from posttrain import cli; code = cli.main(['list']); os.write(9, str({same}).encode()); sys.exit(code)"
    line = '"$0" -c "$1" 9>&1 <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", line, sys.executable, program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "True")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_of_the_output_is_not_blamed_on_the_run() -> None:
    line = '"$0" -m posttrain list {}/dev/full'
    out, both = (
        subprocess.run(["sh", "-c", line.format(to), sys.executable], capture_output=True, text=True, timeout=120, check=False)
        for to in (">", "nothing-of-this-name 2>")
    )
    assert out.returncode == 2 and out.stderr.startswith("posttrain: no space left where the output is redirected to")
    assert both.returncode == 2, "nobody can read the line"


def test_a_run_stopped_by_a_guard_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Through the command line: a loss that is not a number at step 4 of rl, then a resume without the fault."""
    healthy, calls = Trainer.forward_backward, []

    def faulty(self: Trainer, *given: Any) -> Any:
        found = healthy(self, *given)
        calls.append(self.algorithm)
        if self.algorithm.learns_from == "rollouts" and sum(a.learns_from == "rollouts" for a in calls) == 4:
            next(self.optimizer.gradients())[0] = torch.nan
        return found

    monkeypatch.setattr(Trainer, "forward_backward", faulty)
    (tmp_path / "small.yaml").write_text(SMALL)
    assert cli.main(["run", str(tmp_path / "small.yaml"), f"out={tmp_path / 'run'}"]) == 3
    said = capsys.readouterr().err
    assert "rl: nonfinite: step 4: the gradient's norm is nan" in said and "the checkpoint step-3 is intact" in said
    monkeypatch.setattr(Trainer, "forward_backward", healthy)
    assert cli.main(["resume", str(tmp_path / "run"), f"out={tmp_path / 'other'}"]) == 2
    assert "out: a run goes on in its own directory" in capsys.readouterr().err and not (tmp_path / "other").exists()
    assert cli.main(["resume", str(tmp_path / "run")]) == 0
    rows = Run(tmp_path / "run").metrics("rl")
    assert [row.step for row in rows] == [1, 2, 3, 4, 5] and all(row.figures["loss"] == row.figures["loss"] for row in rows)
    alarms = [(e.details["rule"], e.attempt) for e in Run(tmp_path / "run").events() if e.kind == "alarm"]
    assert alarms == [("nonfinite", 1)]


def test_the_codes_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    table = [line.split("|")[1].strip() for line in page[: page.index("## Monitors")].splitlines() if line.startswith("| ")]
    assert table == ["code", "0", "1", "2", "3", "75", "129", "130"]
    assert {str(code) for code in CODES.values()} <= set(table)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("threads=-3", "threads must be a number"), ("device=cudaa", "device must be auto"),
        ("checkpoint_keep=0", "checkpoint_keep must"),
        ("trackers=wanb", "did you mean 'wandb'"), ("size=huge", "unknown tiny model size"),
        ("rl.lr=.inf", "lr must be finite and above 0"),
        ("sft.data=[{file: none.jsonl}]", "none.jsonl"),
    ],
)  # fmt: skip
def test_what_is_refused_at_the_start_leaves_nothing(
    setting: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "notes").mkdir(parents=True)
    (tmp_path / "mine" / "keep").write_text("of the user")
    for out in ("new", "mine"):
        assert cli.main(["run", "quickstart", f"out={out}", "threads=1", setting]) == 2
        assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["keep", "mine", "notes"]  # what was there stays
    assert (tmp_path / "mine" / "keep").read_text() == "of the user"


def test_what_was_learned_is_not_taken_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "small.yaml"
    second = "- {stage: sample, name: none, model: rl, task: {name: arithmetic}, prompts: 2, samples: 1, min_score: 2}"
    recipe.write_text(f"{SMALL}{second}\n")
    assert cli.main(["run", str(recipe), f"out={tmp_path / 'run'}"]) == 2
    assert len(Run(tmp_path / "run").metrics("rl")) == 5


def test_a_run_directory_that_is_removed_while_it_trains_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update, directory = Trainer.update, tmp_path / "run"

    def removes(trainer: Trainer, *given: Any, **more: Any) -> Any:
        shutil.rmtree(directory, ignore_errors=True)
        return update(trainer, *given, **more)

    monkeypatch.setattr(Trainer, "update", removes)
    (tmp_path / "small.yaml").write_text(SMALL)
    assert cli.main(["run", str(tmp_path / "small.yaml"), f"out={directory}"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "was moved or removed while the run was being written" in said
    assert not directory.exists()


def test_a_run_whose_output_is_closed_did_not_end_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`posttrain run ... | head` stops training, which must not look like a run that is done."""
    (tmp_path / "small.yaml").write_text(SMALL)
    monkeypatch.setattr(pipeline, "run_stages", raising(BrokenPipeError()))
    assert cli.main(["run", str(tmp_path / "small.yaml"), f"out={tmp_path / 'my run'}"]) == 130
    more = f"continue with: posttrain resume '{tmp_path / 'my run'}'"
    assert (
        capsys.readouterr().err == f"posttrain: stopped because its output, or a pipe to another process, was closed; {more}\n"
    )
    assert Run(tmp_path / "my run").events()[-1].details == {"error": "Interrupted"}
