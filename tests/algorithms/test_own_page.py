"""The page own-algorithm.md: its file runs from Python, from YAML and on the command line."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml

from posttrain import cli
from posttrain.runs.read import Run

PAGE = Path(__file__).parents[2] / "docs" / "own-algorithm.md"
BLOCK = re.compile(r"^```(?:python|yaml)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_algorithm_of_the_page_runs_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    file, program, stages = BLOCK.findall(PAGE.read_text())
    for name, text in (("median.py", file), ("program.py", program), ("mine.yaml", stages)):
        Path(name).write_text(text)
    run = runpy.run_path("program.py")["run"]
    assert run.metrics[-1]["step"] == 2
    rows = run.rollouts(step=1)
    for start in range(0, len(rows), 4):
        rewards = [row["reward"] for row in rows[start : start + 4]]
        middle = sorted(rewards)[1]  # torch's median of four
        expected = [(r - middle) * (2.0 if r > middle else 1.0) for r in rewards]
        assert [row["advantage"] for row in rows[start : start + 4]] == pytest.approx(expected)
    assert [e for e in Run(run.directory).events() if e.kind == "alarm"] == [], "no setting is without effect"
    assert cli.main(["run", "mine.yaml", "out=no"]) == 2
    assert cli.main(["run", "mine.yaml", "--allow-code", "out=yes", "rl.gain=3", "rl.evaluate_every=0"]) == 0
    settings = yaml.safe_load(Path("yes/config.yaml").read_text())["stages"][0]["algorithm"]
    assert settings["gain"] == 3.0 and settings["name"].endswith("median.py:MedianGRPO")
    assert cli.main(["list", "algorithms", "median.py:MedianGRPO"]) == 0
    sys.modules.pop("median", None)
