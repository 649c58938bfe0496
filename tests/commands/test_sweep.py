"""Sweeps: which arguments make one, its members, what they say together, and what happens when some fail or are stopped."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest

from posttrain import cli
from posttrain.commands import sweep
from posttrain.commands.sweep import Estimate, aggregate, axes, estimate, members
from posttrain.errors import UserError
from posttrain.runs.lock import Lock
from posttrain.runs.read import Run

RECIPE = """
import os
from dataclasses import dataclass
from pathlib import Path
from posttrain.errors import GuardStop, Interrupted
from posttrain.recipes.base import Recipe
from posttrain.stages.base import Stage

@dataclass(frozen=True, kw_only=True)
class Draw(Stage):
    scale: float = 1.0
    def run(self, context):
        log = Path(os.environ["DRAW_LOG"])
        with log.open("a") as file:
            file.write(f"{self.scale} {context.seed}\\n")
        trouble = log.with_name("trouble")
        if trouble.exists() and trouble.read_text() == f"{self.scale} {context.seed}":
            raise {"stop": Interrupted, "guard": GuardStop}[log.with_name("kind").read_text()]("out of luck")
        value = self.scale * context.seed
        return {"accuracy": [value, value, value], "count": context.seed, "seconds": 5.0}

def draws() -> Recipe:
    return Recipe((Draw(name="draw"),))
"""


def test_examples() -> None:
    result = doctest.testmod(sweep, optionflags=doctest.ELLIPSIS)
    assert (result.failed, result.attempted) == (0, 3)


def test_a_comma_is_a_sweep_in_seeds_and_behind_sweep_alone() -> None:
    for argument in (
        "rl.lr=1e-4,3e-4",
        "rl.steps=1,000",
        "trackers=jsonl,wandb",
        "only=a,b",
        "out=a,b",
        "x={a: 1, b: 2}",
        "x=1",
    ):
        assert axes([argument]) == ([argument], {}), argument
    assert axes(["seeds=4"])[1] == {"seed": ["4"]}, "seeds is a sweep, also of one"
    assert axes([], ["x='a,b',c"])[1] == {"x": ["'a,b'", "c"]}
    for bad in ("seeds=", "seeds=1,,2", "seeds=1,1"):
        with pytest.raises(UserError):
            axes([bad])
    for bad in ("lr", "lr=", "=1,2", "out=a,b"):
        with pytest.raises(UserError):
            axes([], [bad])
    with pytest.raises(UserError, match="twice"):
        axes(["rl.lr=1"], ["rl.lr=1,2"])
    with pytest.raises(UserError, match="whole numbers"):
        members(Path("s"), {"seed": ["1", "x"]})


def test_every_combination_has_a_directory_of_its_own() -> None:
    made = members(Path("s"), {"rl.lr": ["1e-6", "3e-6"], "seed": ["0", "1"], "rl.task": ["a/b.py:T", "c"]})
    assert len({member.directory for member in made}) == len(made) == 8
    assert made[0].arguments == ["rl.lr=1e-6", "rl.task=a/b.py:T", "seed=0"]
    assert made[0].directory == "s/rl.lr=1e-6_rl.task=a-b.py-T_seed=0"
    assert [member.seed for member in made[:3]] == [0, 1, 0]
    found = {"x": ["a/b", "a-b", "a:b", "c" * 300, "c" * 301]}
    alike = [Path(member.directory).name for member in members(Path("s"), found)]
    assert alike[0] == "x=a-b" and len(set(alike)) == 5 and max(map(len, alike)) < 200
    assert alike == [Path(member.directory).name for member in members(Path("s"), found)], "a resumed sweep finds them"
    with pytest.raises(UserError, match="seeds=1,01 names a seed twice"):
        members(Path("s"), {"seed": ["1", "01"]})


def test_estimates_by_hand() -> None:
    # mean 4, squared deviations 4 + 0 + 0 + 4 = 8, s = sqrt(8 / 3); t_3 = 3.18245
    found = estimate([2.0, 4.0, 4.0, 6.0])
    half = 3.18245 * (8 / 3) ** 0.5 / 2
    assert found == Estimate(
        4.0, pytest.approx((8 / 3) ** 0.5), pytest.approx(4 - half, abs=1e-5), pytest.approx(4 + half, abs=1e-5), 4
    )
    assert estimate([3.0]) == Estimate(3.0, None, None, None, 1)
    large = estimate([0.0, 1.0] * 50)
    assert large.high == pytest.approx(0.5 + 1.984 * large.deviation / 10, abs=1e-4)  # type: ignore[operator]


def test_an_aggregate_is_per_setting() -> None:
    runs = [((f"lr={lr}",), {"stages": {"after": {"accuracy": [lr * seed, 0, 1]}}}) for lr in (1.0, 2.0) for seed in (1, 3)]
    found = aggregate(runs)
    assert {setting: of["after.accuracy"].mean for setting, of in found.items()} == {"lr=1.0": 2.0, "lr=2.0": 4.0}
    assert found["lr=2.0"]["after.accuracy"].deviation == pytest.approx(8**0.5)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "mine.py").write_text(RECIPE)
    monkeypatch.setenv("DRAW_LOG", str(tmp_path / "log"))
    out = tmp_path / "sweep"
    return [
        "run",
        f"{tmp_path}/mine.py:draws",
        "threads=1",
        "seeds=1,2,6",
        "--sweep=draw.scale=1.0,10.0",
        "device=cpu",
        f"out={out}",
    ]


def test_a_sweep_runs_and_says_what_came_out(tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command) == 0
    assert len((tmp_path / "log").read_text().splitlines()) == 6
    record = json.loads((tmp_path / "sweep/sweep.json").read_text())
    ten = record["aggregate"]["draw.scale=10.0"]
    assert ten["draw.accuracy"]["mean"] == 30 and ten["draw.accuracy"]["count"] == 3 and ten["draw.count"]["mean"] == 3
    assert ten["draw.accuracy"]["deviation"] == pytest.approx(700**0.5), "of 10, 20, 60"
    assert "draw.seconds" not in ten
    table = (tmp_path / "sweep/sweep.md").read_text()
    assert "| draw.scale=10.0 | draw.accuracy | 30 | 26.46 | [-35.72, 95.72] | 3 |" in table
    assert table in capsys.readouterr().out
    assert (tmp_path / "sweep/draw.scale=1.0_seed=2/summary.json").is_file()
    assert cli.main(["resume", str(tmp_path / "sweep")]) == 2, "its recipe is code"
    assert "--allow-code" in capsys.readouterr().err
    assert cli.main(["resume", str(tmp_path / "sweep"), "--allow-code"]) == 0
    assert len((tmp_path / "log").read_text().splitlines()) == 6, "nothing is run twice"
    assert cli.main([*command[:3], "seeds=1,2", *command[4:]]) == 2
    assert "holds another sweep" in capsys.readouterr().err


def test_a_failed_member_stops_no_other(tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trouble").write_text("1.0 2")
    (tmp_path / "kind").write_text("guard")
    assert cli.main(command) == 1
    assert "1 of the sweep's runs failed" in capsys.readouterr().err
    assert len((tmp_path / "log").read_text().splitlines()) == 6
    record = json.loads((tmp_path / "sweep/sweep.json").read_text())
    assert [m["outcome"] for m in record["members"]] == ["done", "failed", "done", "done", "done", "done"]
    assert record["members"][1]["reason"] == "GuardStop: out of luck"
    assert record["aggregate"]["draw.scale=1.0"]["draw.accuracy"]["count"] == 2
    failure = tmp_path / "sweep/draw.scale=1.0_seed=2/failure.txt"
    assert "Traceback" in failure.read_text()
    (tmp_path / "trouble").unlink()
    assert cli.main(command) == 0, "and only that one is run again"
    assert (tmp_path / "log").read_text().splitlines()[6:] == ["1.0 2"]
    assert not failure.exists()


def test_a_stopped_sweep_goes_on(tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trouble").write_text("1.0 6")
    (tmp_path / "kind").write_text("stop")
    assert cli.main(command) == 130
    assert capsys.readouterr().err.endswith(f"posttrain resume {tmp_path / 'sweep'} --allow-code\n"), "its recipe is code"
    assert len((tmp_path / "log").read_text().splitlines()) == 3
    (tmp_path / "trouble").unlink()
    assert cli.main(["resume", str(tmp_path / "sweep"), "--allow-code"]) == 0
    assert (tmp_path / "log").read_text().splitlines()[3:] == ["1.0 6", "10.0 1", "10.0 2", "10.0 6"]


def test_a_sweep_has_no_results_of_two_versions_of_its_recipe(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "trouble").write_text("1.0 6")
    (tmp_path / "kind").write_text("stop")
    once = [*command[:4], *command[5:]]
    assert cli.main(once) == 130
    (tmp_path / "trouble").unlink()
    (tmp_path / "mine.py").write_text(RECIPE.replace("value = self.scale", "value = 2 * self.scale"))
    for _ in range(2):  # the second time nothing has changed
        assert cli.main(["resume", str(tmp_path / "sweep"), "--allow-code"]) == 0
        assert (tmp_path / "log").read_text().splitlines()[3:] == ["1.0 1", "1.0 2", "1.0 6"]
    record = json.loads((tmp_path / "sweep/sweep.json").read_text())
    assert record["aggregate"]["all"]["draw.accuracy"]["mean"] == 6, "of 2, 4 and 12, not 1, 2 and 12"


def test_a_sweep_needs_a_directory_for_itself(tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep").touch()
    assert cli.main(command) == 2
    assert f"cannot write the run directory {tmp_path / 'sweep'}: File exists; choose another" in capsys.readouterr().err
    (tmp_path / "sweep").unlink()
    (tmp_path / "sweep").mkdir()
    lock = Lock(tmp_path / "sweep/lock")
    assert cli.main(command) == 2
    assert f"{tmp_path / 'sweep'} is being written by process" in capsys.readouterr().err
    assert not (tmp_path / "log").exists()
    lock.release()
    assert cli.main(command) == 0


def test_a_mistake_is_found_before_the_first_run(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command[:4], "--sweep=draw.scale=1.0,big", *command[5:]]) == 2
    assert "draw.scale" in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()
    assert cli.main([*command, "only=draw"]) == 2


def test_the_last_held_out_score_of_training_is_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an evaluate stage, the best of several noisy scores was the only result."""
    monkeypatch.chdir(tmp_path)
    task = "{name: jsonl, question: prompt, file: p.jsonl, held_out: 0.4, reward: mine.py:brief}"
    stage = f"{{stage: rl, name: rl, model: tiny:nano, task: {task},"
    more = "steps: 2, prompts: 2, algorithm: {name: grpo, group: 2}, sampling: {max_new_tokens: 4}, evaluate_every: 1}"
    Path("s.yaml").write_text(f"stages:\n- {stage} {more}\n")
    Path("p.jsonl").write_text("".join(f'{{"prompt": "{n}", "answer": ""}}\n' for n in range(6)))
    Path("mine.py").write_text("def brief(response):\n    return -len(response)\n")
    assert cli.main(["run", "s.yaml", "seeds=0,1", "--sweep", "rl.lr=1e-2", "out=o", "--allow-code"]) == 0
    last = [Run(path.parent).metrics("rl")[-1].figures["reward/test"] for path in sorted(Path("o").glob("*/config.yaml"))]
    found = json.loads(Path("o/sweep.json").read_text())["aggregate"]["rl.lr=1e-2"]
    assert len(last) == 2 and found["rl.last.reward/test"]["mean"] == pytest.approx(sum(last) / 2)
    assert "| rl.lr=1e-2 | rl.last.reward/test | " in Path("o/sweep.md").read_text()
