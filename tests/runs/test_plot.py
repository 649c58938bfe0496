"""The picture: it is drawn from whatever figures there are, and holds what the run says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from posttrain.errors import UserError
from posttrain.runs import plot
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter

RL = {"reward": 0.5, "length": 30.0, "kl": 0.01, "entropy": 1.0, "level": 1.0, "loss": 0.1}


def make(directory: Path, rows: list[tuple[str, dict[str, float]]]) -> Run:
    with RunWriter.create(directory, {}) as writer:
        for step, (stage, figures) in enumerate(rows):
            writer.metrics(stage, step, figures)
    return Run(directory)


def titles(run: Run) -> list[str]:
    return [panel.title for panel in plot._panels(run)]


def test_a_whole_run_is_drawn(tmp_path: Path) -> None:
    accuracy = {"accuracy/test": 0.5, "accuracy/test_low": 0.4, "accuracy/test_high": 0.6}
    rows = [("sft", {"loss": 2.0 / (step + 1), "entropy": 1.0}) for step in range(30)]
    rows += [
        ("rl", {**RL, "reward": step / 40, "level": 1.0 + step // 20, **(accuracy if step % 10 == 0 else {})})
        for step in range(40)
    ]
    run = make(tmp_path / "a$run$", rows)
    path = tmp_path / "pictures" / "run.png"
    plot.draw(run, path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    assert pixels.shape[0] > 600
    assert pixels.shape[1] > 1200
    for colour in (plot.BLUE, plot.GREEN, plot.ORANGE, plot.PURPLE, plot.RED):  # every curve left ink
        wanted = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert (np.abs(pixels - wanted).max(axis=-1) < 0.02).sum() > 50
    assert titles(run) == [
        "Reward while training",
        "Held-out accuracy",
        "Supervised loss",
        "Response length",
        "Drift and variety",
        "Difficulty",
    ]


@pytest.mark.parametrize("missing", [*RL, "all but reward"])
def test_missing_columns_leave_their_panel_out(tmp_path: Path, missing: str) -> None:
    figures = {"reward": 0.5} if missing == "all but reward" else {name: v for name, v in RL.items() if name != missing}
    run = make(
        tmp_path / "run", [("rl", figures | ({"level": level} if "level" in figures else {})) for level in (1.0, 1.0, 2.0)]
    )
    drawn = titles(run)
    panels = {"reward": "Reward while training", "length": "Response length", "level": "Difficulty", "kl": "Drift and variety"}
    for name, title in panels.items():
        assert (title in drawn) == (name in figures and (name != "length" or "reward" in figures))
    assert ("Variety" in drawn) == (missing == "kl")
    if missing in ("all but reward", "kl"):
        plot.draw(run, tmp_path / "run.png")
        assert (tmp_path / "run.png").stat().st_size > 5000


def test_non_finite_values_are_gaps_not_crashes(tmp_path: Path) -> None:
    run = make(tmp_path / "run", [("rl", {"reward": v, "kl": float("nan")}) for v in (0.1, float("nan"), float("inf"), 0.4)])
    (series,) = plot._collect(run)["reward"]
    assert (series.steps.tolist(), series.values.tolist()) == ([0.0, 3.0], [0.1, 0.4])
    assert titles(run) == ["Reward while training"]


def test_a_run_without_metrics_is_one_clear_line(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "run", {}).close()
    with pytest.raises(UserError, match="no metrics yet"):
        plot.draw(Run(tmp_path / "run"), tmp_path / "run.png")
    assert not (tmp_path / "run.png").exists()


def test_the_loss_of_an_rl_stage_is_not_called_supervised(tmp_path: Path) -> None:
    assert titles(make(tmp_path / "rl", [("rl", {"reward": 0.5, "loss": 0.1})])) == ["Reward while training"]
    assert titles(make(tmp_path / "sft", [("sft", {"loss": 0.1, "entropy": 1.0})])) == ["Supervised loss"]


def test_what_pairs_and_a_gold_reward_say_has_panels(tmp_path: Path) -> None:
    pairs = {"loss": 0.6, "accuracy/held_out": 0.7, "margin": 0.2}
    assert titles(make(tmp_path / "dpo", [("dpo", pairs)] * 2)) == ["Preference accuracy", "Margin"]
    gold = {"reward": 4.0, "reward/task": 0.5, "level": 0.0}  # a level that never changes says nothing
    assert titles(make(tmp_path / "rl", [("rl", gold)] * 2)) == ["Reward while training", "What the reward stands for"]


def axes_of(monkeypatch: pytest.MonkeyPatch) -> list:
    """The axes of every figure that is saved from here on."""
    from matplotlib.figure import Figure

    kept: list = []
    real = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *rest, **named: (kept.append(figure.axes), real(figure, *rest, **named))
    )
    return kept


def test_pass_at_k_of_two_models_is_one_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = axes_of(monkeypatch)
    base = {1: (0.25, 0.2, 0.3), 4: (0.75, 0.7, 0.8), 2: (0.5, 0.4, 0.6)}
    trained = {1: (0.5, 0.4, 0.6), 2: (0.6, 0.5, 0.7)}
    plot.draw_pass_at_k({"base": base, "trained$": trained}, "run", tmp_path / "deep" / "pass_at_k.png")
    assert (tmp_path / "deep" / "pass_at_k.png").read_bytes()[:4] == b"\x89PNG"
    ((axes,),) = kept
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines == {"base": [[1, 0.25], [2, 0.5], [4, 0.75]], r"trained\$": [[1, 0.5], [2, 0.6]]}
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "4"] and axes.get_xscale() == "log"
    with pytest.raises(UserError, match="no pass@k"):
        plot.draw_pass_at_k({}, "run", tmp_path / "x.png")


def test_two_runs_in_one_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = axes_of(monkeypatch)
    one = make(tmp_path / "one", [("rl", {"reward": 0.1, "kl": 0.1}), ("rl", {"reward": 0.2, "kl": 0.1})])
    two = make(tmp_path / "two", [("rl", {"reward": 0.3}), ("rl", {"reward": 0.4}), ("more", {"reward": 0.5})])
    assert plot.draw_together([one, two], tmp_path / "both.png") == ["Reward while training"], "kl is in one run alone"
    ((axes,),) = kept
    drawn = {line.get_label(): (line.get_ydata().tolist(), line.get_color(), line.get_linestyle()) for line in axes.get_lines()}
    assert drawn == {
        "one rl": ([0.1, 0.2], plot.BLUE, "-"),
        "two rl": ([0.3, 0.4], plot.ORANGE, "-"),
        "two more": ([0.5], plot.ORANGE, "--"),
    }
    assert plot.draw_together([one, make(tmp_path / "three", [("sft", {"loss": 1.0})])], tmp_path / "none.png") == []
    assert not (tmp_path / "none.png").exists()
    pairs = [make(tmp_path / name, [("dpo", {"accuracy/held_out": 0.5, "margin": 0.1})]) for name in ("four", "five")]
    assert plot.draw_together(pairs, tmp_path / "pairs.png") == ["Preference accuracy", "Margin"]


def test_a_style_from_the_working_directory_runs_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib reads ./matplotlibrc, which may be a stranger's: `text.usetex: true` there runs latex on every label."""
    import matplotlib

    from posttrain.stages.overoptimisation import draw

    program = tmp_path / "bin" / "latex"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path / 'mark'}\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)
    plot.draw(make(tmp_path / "run", [("rl", RL), ("rl", RL)]), tmp_path / "run.png")
    point = {"kl": 1.0, **{f"{what}{end}": 0.5 for what in ("gold", "proxy") for end in ("", "_low", "_high")}}
    draw({"rl": [point, point]}, tmp_path / "curve.png")
    assert (tmp_path / "run.png").is_file() and (tmp_path / "curve.png").is_file() and not (tmp_path / "mark").exists()
    assert matplotlib.rcParams["text.usetex"] is True, "the style of whoever embeds us stays as it was"
