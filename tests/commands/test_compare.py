"""Two runs side by side: paired differences by hand, settings that differ, one picture, and what is refused."""

from __future__ import annotations

import json
from math import isclose, sqrt
from pathlib import Path
from typing import Any

import pytest

from posttrain import cli
from posttrain.commands.compare import compare_runs, differences, lines
from posttrain.runs.write import RunWriter


def make(
    directory: Path,
    solved: dict[str, list[list[int]]],
    lr: float = 0.1,
    first: int = 0,
    question: str = "q",
    metrics: bool = True,
) -> Path:
    """A run with evaluations of the given names, each a list of problems with the verdict on every sample."""
    stages: list[dict[str, Any]] = [{"stage": "rl", "name": "rl", "optimizer": {"lr": lr}}]
    stages += [{"stage": "evaluate", "name": name} for name in solved]
    with RunWriter.create(directory, {"seed": 0, "after": "", "stages": stages}) as writer:
        for step in range(3 if metrics else 0):
            writer.metrics("rl", step, {"reward": step / 3 + lr, "kl": 0.1 * step, "accuracy/test": 0.5})
    for name, verdicts in solved.items():
        folder = directory / "stages" / name
        folder.mkdir(parents=True)
        rows = [
            {"problem": f"p{n}", "question": f"{question}{n}", "outcomes": ["correct" if v else "wrong" for v in row]}
            for n, row in enumerate(verdicts, first)
        ]
        (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def single(marks: str) -> list[list[int]]:
    return [[int(mark)] for mark in marks]


def test_the_paired_difference_by_hand(tmp_path: Path) -> None:
    # as in the statistics: five better, one worse, two equal
    one = make(tmp_path / "one", {"before": single("00000000"), "after": single("11000000")})
    two = make(tmp_path / "two", {"before": single("00000000"), "after": single("10111110")}, lr=0.2)
    found = compare_runs(one, two, tmp_path / "both.png")
    before, after = found.evaluations
    assert (before.stage, before.paired.p_value, before.paired.difference.value) == ("before", 1.0, 0.0)
    assert (after.paired.wins, after.paired.losses, after.paired.ties) == (5, 1, 2)
    assert after.paired.p_value == 2 * (1 + 6) / 64 and after.paired.difference.value == 0.5
    assert isclose(after.paired.difference.high, 0.4 + 1.96 * sqrt(7 - 16 / 10) / 10)
    assert (after.first.value, after.second.value, after.problems, after.left_out) == (0.25, 0.75, 8, 0)
    assert [(d.key, d.first, d.second) for d in found.settings] == [("rl.optimizer.lr", 0.1, 0.2)]
    assert found.figures == ("Held-out accuracy", "Reward while training", "KL from the start")
    assert (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"
    text = "\n".join(lines(found))
    assert "p = 0.219 (5 better, 1 worse, 2 equal)" in text and "rl.optimizer.lr  0.1 | 0.2" in text


def test_rewards_that_tell_no_right_from_wrong_are_compared_as_they_are(tmp_path: Path) -> None:
    """None of them reaches 1, the reward of a solved problem."""
    for name, values in (("one", [0.25, 0.5, 0.5]), ("two", [0.75, 0.75, 0.5])):
        folder = make(tmp_path / name, {"after": single("000")}) / "stages/after"
        rows = [json.loads(line) | {"outcomes": [None], "solved": [False]} for line in (folder / "problems.jsonl").open()]
        rows = [row | {"values": [value]} for row, value in zip(rows, values, strict=True)]
        (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "result.json").write_text(json.dumps({"verifiable": False}))
    found = compare_runs(tmp_path / "one", tmp_path / "two", tmp_path / "both.png")
    (after,) = found.evaluations
    assert (after.paired.wins, after.paired.losses, after.paired.ties, after.paired.difference.value) == (2, 0, 1, 0.25)
    assert isclose(after.first.value, 1.25 / 3) and isclose(after.second.value, 2 / 3)
    assert "after: mean reward on 3 held-out problems" in str(found)


def test_several_samples_are_shares_and_problems_of_one_run_alone_are_left_out(tmp_path: Path) -> None:
    one = make(tmp_path / "one", {"check": [[1, 0], [0, 0], [1, 1]]})
    two = make(tmp_path / "two", {"check": [[1, 1], [1, 1], [0, 0]]}, first=1, metrics=False)  # p1, p2, p3
    (matched,) = compare_runs(one, two).evaluations
    assert (matched.problems, matched.left_out) == (2, 2)
    assert matched.first.value == 0.5 and matched.second.value == 1.0
    assert compare_runs(one, two).picture == "", "the second has no figures: nothing is drawn, and nothing fails"


def test_evaluations_of_other_names(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one", {"a": single("01"), "b": single("00")}), make(tmp_path / "two", {"c": single("11")})
    (matched,) = compare_runs(one, two, tmp_path / "x.png").evaluations
    assert (matched.stage, matched.other_stage) == ("b", "c"), "the last of each"
    (matched,) = compare_runs(one, two, tmp_path / "x.png", "a:c").evaluations
    assert (matched.stage, matched.paired.wins) == ("a", 1)


def test_a_stage_of_one_run_alone_is_one_line() -> None:
    first = {"seed": 0, "stages": [{"name": "rl", "steps": 1}]}
    second = {"seed": 1, "stages": [{"name": "rl", "steps": 1}, {"name": "more", "steps": 2, "lr": 3}]}
    assert [(d.key, d.first, d.second) for d in differences(first, second)] == [("more", None, "a stage"), ("seed", 0, 1)]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = make(tmp_path / "one", {"e": single("01")}), make(tmp_path / "two", {"e": single("11")})
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", str(one), str(two)]) == 0
    assert "B less A 0.500" in capsys.readouterr().out and (tmp_path / "compare-one-two.png").is_file()
    assert cli.main(["compare", str(one), str(two), "--json", "--out", str(tmp_path / "p.png")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["evaluations"][0]["paired"]["wins"] == 1 and found["picture"] == str(tmp_path / "p.png")
    with pytest.raises(SystemExit):
        cli.main(["compare", "--help"])
    assert "example: posttrain compare runs/quickstart-1 runs/quickstart-2" in capsys.readouterr().out


def test_what_cannot_be_paired_is_said_and_the_rest_shown(tmp_path: Path) -> None:
    one = make(tmp_path / "one", {"e": single("01")})
    other, none = make(tmp_path / "other", {"e": single("01")}, question="r", lr=0.2), make(tmp_path / "none", {}, lr=0.3)
    for run, rate in ((one, 0.8), (other, 0.7), (none, 0.6)):
        (run / "stages" / "rl").mkdir(parents=True)
        (run / "stages" / "rl" / "result.json").write_text(
            json.dumps({"win_rate": [rate, rate - 0.1, rate + 0.1], "data": [1, 2]}, indent=2)
        )
    text = "\n".join(lines(compare_runs(one, other, tmp_path / "a.png")))
    assert "e is about different problems in each, and cannot be compared in pairs" in text
    assert "rl: win rate  A 0.800 [0.700, 0.900]  B 0.700 [0.600, 0.800]" in text and "rl.optimizer.lr  0.1 | 0.2" in text
    text = "\n".join(lines(compare_runs(one, none, tmp_path / "b.png")))
    assert f"{none} has no held-out answers of an evaluate stage" in text and "B 0.600 [0.500, 0.700]" in text


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, none = make(tmp_path / "one", {"e": single("01")}), make(tmp_path / "none", {})
    other, damaged = make(tmp_path / "other", {"e": single("01")}, question="r"), make(tmp_path / "damaged", {"e": single("1")})
    (damaged / "stages" / "e" / "problems.jsonl").write_text('{"problem"\n')
    cases = {
        ("one", "nowhere"): "no run in nowhere",
        ("one", "one"): "are the same run",
        ("one", "none", "--stage", "e"): "unknown evaluation in none: 'e'",
        ("one", "other", "--stage", "e"): "e is about different problems in each: they cannot be compared in pairs",
        ("one", "damaged"): "is damaged",
        ("one", "other", "--stage", "f"): "unknown evaluation in one: 'f'",
    }
    for words, said in cases.items():
        assert cli.main(["compare", *words]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1 and error.startswith("posttrain: ")
    assert not list(tmp_path.glob("*.png")), (one, none, other)


def test_prompts_that_come_again_count_once(tmp_path: Path) -> None:
    """The same prompt in ten problems, answered better each time by the second run: one observation, and no small p-value."""
    one, two = make(tmp_path / "one", {"e": single("0" * 10)}), make(tmp_path / "two", {"e": single("1" * 10)})
    for run in (one, two):
        file = run / "stages" / "e" / "problems.jsonl"
        rows = [{**json.loads(line), "prompt": "same"} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (matched,) = compare_runs(one, two, tmp_path / "x.png").evaluations
    assert matched.problems == 10 and (matched.paired.wins, matched.paired.p_value) == (1, 1.0)
    assert matched.second.low < 0.3


def test_an_interval_without_bounds_is_compared_too(tmp_path: Path) -> None:
    places = [make(tmp_path / name, {"eval": single("10")}) for name in ("one", "two")]
    for place in places:  # as one seed of one problem leaves it
        (place / "stages" / "rl").mkdir(parents=True)
        result = {"win_rate": [0.5, "-inf", "inf"], "levels": ["easy", "middle", "hard"]}
        (place / "stages" / "rl" / "result.json").write_text(json.dumps(result))
    [figure] = compare_runs(*places, tmp_path / "both.png").measured
    assert (figure.figure, str(figure.first)) == ("win_rate", "0.500 [-inf, inf]")
