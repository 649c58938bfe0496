"""The page own-algorithm.md: its file runs from Python, from YAML and on the command line."""

from __future__ import annotations

import math
import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml

import posttrain as pt
from posttrain import cli
from posttrain.runs.read import Run

PAGE = Path(__file__).parents[2] / "docs" / "own-algorithm.md"
BLOCK = re.compile(r"^```(?:python|yaml)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_algorithm_of_the_page_runs_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    file, program, stages, *_ = BLOCK.findall(PAGE.read_text())
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


def test_the_loss_on_pairs_of_the_page_is_its_target_squared_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, _, _, squared, *_ = BLOCK.findall(PAGE.read_text())
    Path("squared.py").write_text(squared)
    pairs = [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": "no"} for n in range(4)]
    settings = {"steps": 2, "batch": 4, "held_out": 0, "lr": 1e-3, "warmup": 0}
    run = pt.preference("tiny:nano", pairs, algorithm="squared.py:SquaredDPO", target=2.0, **settings).train()
    first, second = run.metrics
    assert first["loss"] == pytest.approx(4.0) and second["loss"] < 3.99  # the policy is its reference, so that all r are 0


def test_the_schedule_of_the_page_changes_beta_after_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    *_, fading, _, _ = BLOCK.findall(PAGE.read_text())
    Path("fading.py").write_text(fading)
    settings = {"steps": 3, "batch": 4, "max_new_tokens": 4, "held_out": 0}
    run = pt.rl("tiny:nano", ["1", "2", "3", "4"], len, algorithm="fading.py:FadingPPO", fade=0.5, beta=0.4, **settings).train()
    assert [row["beta"] for row in run.metrics if "beta" in row] == pytest.approx([0.4, 0.2, 0.1])
    assert [e for e in Run(run.directory).events() if e.kind == "alarm" and "fade" in str(e)] == []


def test_the_term_of_the_page_acts_on_responses_without_an_advantage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rewards are equal here, so that the term is the whole loss. Masked with their advantages, it would be 0."""
    monkeypatch.chdir(tmp_path)
    *_, curious, _ = BLOCK.findall(PAGE.read_text())
    Path("curious.py").write_text(curious)
    settings = {"steps": 1, "batch": 2, "max_new_tokens": 4, "held_out": 0, "group": 2, "beta": 0.0, "bonus": 0.5}
    run = pt.rl("tiny:nano", ["1", "2"], lambda response: 1.0, algorithm="curious.py:CuriousGRPO", **settings).train()
    last = run.metrics[-1]
    # a model of random weights is nearly uniform over its tokens
    uniform = math.log(len(run.tokenizer)) ** 2
    assert last["loss/bonus"] == pytest.approx(-0.5 * uniform, rel=0.1) and last["updates"] == 1 and last["grad_norm"] > 0


def test_the_controller_of_the_page_raises_its_term_while_the_entropy_is_low(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    *_, steady = BLOCK.findall(PAGE.read_text())
    Path("steady.py").write_text(steady)
    settings = {
        "steps": 3,
        "batch": 4,
        "max_new_tokens": 4,
        "held_out": 0,
        "group": 2,
        "beta": 0.0,
        "rise": 0.1,
        "target": 20.0,
    }
    run = pt.rl("tiny:nano", ["1", "2", "3", "4"], len, algorithm="steady.py:SteadyGRPO", **settings).train()
    uniform = math.log(len(run.tokenizer))
    assert [row["loss/steady"] for row in run.metrics[-3:]] == pytest.approx([0.0, -0.1 * uniform, -0.2 * uniform], rel=0.1)
    assert [e for e in Run(run.directory).events() if e.kind == "alarm"] == []
