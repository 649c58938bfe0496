"""Formats on disk: the run directory `format-2` was written when the format was new, and every later version must open it.

`python -m tests.runs.test_formats FOLDER` writes such a run anew: do so once for a new format, beside those of older ones.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain import cli, config, pipeline
from posttrain.errors import Interrupted, UserError
from posttrain.models.save import save
from posttrain.models.tiny import SIZES, character_tokenizer, tiny_model
from posttrain.runs import layout
from posttrain.runs.read import Run
from posttrain.train import checkpoint

KEPT = Path(__file__).parent / "format-2"
RECIPE = """
stages:
- {stage: rl, name: rl, model: base, task: {name: arithmetic, level: 1}, steps: 3, prompts: 2, algorithm: {name: grpo, group: 2},
   sampling: {max_new_tokens: 4}, checkpoint_every: 1, evaluate_problems: 2, rollouts_every: 1}
- {stage: evaluate, name: after, model: rl, task: {name: arithmetic, level: 1}, problems: 2, sampling: {max_new_tokens: 4}}
"""


def write_run(folder: Path) -> None:
    """A run that was interrupted after its second step, with the model that it began with."""
    SIZES["test"] = (8, 1, 1, 1, 8)
    tokenizer = character_tokenizer("0123456789+=, ")
    folder.mkdir(parents=True)
    os.chdir(folder)
    save(tiny_model(tokenizer, "test", 0), tokenizer, "base")
    Path("recipe.yaml").write_text(RECIPE)

    def interrupt(loop: Any, row: layout.Row) -> None:
        if row.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    try:
        pipeline.start(config.parse("recipe.yaml", ["out=run"]), interrupt)
    except Interrupted:
        Path("recipe.yaml").unlink()


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kept run, continued to its end by this version."""
    folder = tmp_path_factory.mktemp("formats") / "kept"
    shutil.copytree(KEPT, folder)
    before = Path.cwd()
    os.chdir(folder)  # its model is named by a relative path
    try:
        assert cli.main(["resume", "run"]) == 0
    finally:
        os.chdir(before)
    return folder / "run"


def test_a_kept_run_of_this_format_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(KEPT / "run")]) == 0
    assert capsys.readouterr().out.startswith("rl step 2: 4 rollouts")


def test_a_kept_run_of_this_format_goes_on_from_its_checkpoint(resumed: Path) -> None:
    run = Run(resumed)
    assert [(row.step, row.attempt) for row in run.metrics("rl")] == [(0, 1), (1, 1), (2, 1), (3, 2)]
    assert run.summary is not None and run.summary["attempts"] == 2 and run.summary["stages"]["after"]["problems"] == 2


def test_the_kept_run_is_of_the_present_format() -> None:
    """A new format needs a run of its own here, and this one must still open."""
    assert Run(KEPT / "run").config["format"] == layout.FORMAT
    manifests = [json.loads(path.read_text()) for path in KEPT.rglob("manifest.json")]
    assert {manifest["format"] for manifest in manifests} == {checkpoint.FORMAT}


@pytest.mark.parametrize("words", [["show"], ["resume"], ["export", "x"]])
def test_a_run_of_a_newer_format_is_refused_with_what_to_do(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(KEPT / "run", directory)
    path = directory / layout.CONFIG
    path.write_text(re.sub(r"^format: \d+", "format: 99", path.read_text()))
    assert cli.main([words[0], str(directory), *words[1:]]) == 2
    text = "was written by a newer posttrain (format 99; this one reads up to 2): pip install --upgrade posttrain"
    assert capsys.readouterr().err == f"posttrain: {directory} {text}\n"


def test_a_checkpoint_of_a_newer_format_is_refused_and_stays(tmp_path: Path) -> None:
    """To go on from an older one, or from the start, would end with the newer one removed."""
    folder = tmp_path / "rl"
    shutil.copytree(KEPT / "run" / "checkpoints" / "rl", folder)
    path = folder / "step-2" / checkpoint.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(UserError, match=r"is of format 99, .* pip install --upgrade posttrain, then resume"):
        checkpoint.newest(folder)
    assert [found.name for found in checkpoint.steps(folder)] == ["step-2", "step-1"]


if __name__ == "__main__":
    write_run(Path(sys.argv[1]))
