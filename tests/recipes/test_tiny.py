"""One recipe from the command line to its figure, a good deal shorter than the shipped one: it moves what it is meant to move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain import cli, config
from posttrain.errors import UserError


def test_best_of_n_pleases_the_annotator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    once = "pretrain.data=[{task: {name: reviews, mood: any}, counts: {0: 4800}}]"  # as many as 150 steps of 32 read
    shorter = ["pretrain.steps=150", once, "sft.steps=30", "rl.steps=12", "versus_sft.problems=300"]
    assert cli.main(["run", "best_of_n", f"out={run}", "threads=1", *shorter]) == 0
    found = json.loads((run / "stages" / "versus_sft" / "result.json").read_text())
    value, low, _ = found["win_rate"]
    assert value > 0.55 and low > 0.5, "by at least two standard errors"
    assert 1 < found["kl"] < 20 and f"rl wins {value:.3f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["r1_zero", "steps=0"], ["dpo", "steps=0"], ["instructgpt", "lr=0"], ["r1_zero", "samples=0"]]
)
def test_nothing_is_not_taken_for_the_default(words: list[str]) -> None:
    with pytest.raises(UserError, match="must be"):
        config.parse(words[0], words[1:])
