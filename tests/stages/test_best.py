"""The choice of the best model by a figure that may be missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain import cli
from posttrain.runs.read import Run

STAGES = """
threads: 1
stages:
- {{stage: sft, name: sft, model: "tiny:nano", data: [{{file: {file}}}], steps: 2, batch: 2, optimizer: {{warmup: 1}}}}
- {{stage: evaluate, name: after, model: sft, task: {{name: prompts, file: {file}, reward: length, held_out: 4}}, problems: 4,
   sampling: {{max_new_tokens: 4}}}}
- {{stage: best, name: best, models: [sft], measured: [after]}}
"""


def test_a_figure_that_is_missing_after_training_can_be_changed_by_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the command, which keeps what was trained."""
    file, run = tmp_path / "rows.jsonl", tmp_path / "run"
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "stages.yaml").write_text(STAGES.format(file=file))
    assert cli.main(["run", str(tmp_path / "stages.yaml"), f"out={run}"]) == 2
    said = capsys.readouterr()
    command = f"posttrain resume {run} best.figure=reward"
    assert "the result of 'after' has no figure 'accuracy'; it has " in said.err and said.err.endswith(f" kept by: {command}\n")
    assert cli.main(command.split()[1:]) == 0
    assert {row.attempt for row in Run(run).metrics()} == {1}, "nothing was trained again"
    assert json.loads((run / "stages/best/result.json").read_text())["figure"] == "reward"
