"""Every script of examples/ runs, with a tiny model and few steps, and is as short as its table says."""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripts_for_tests import load_script

import posttrain as pt

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = (EXAMPLES / "README.md").read_text()
SMALL = ("steps=2", "batch=2", "max_new_tokens=8", "device=cpu", "threads=1")
TASK = "task={name: gsm8k, data: problems}"
Script = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems in the form of GSM8K, pairs, prompts, and a model that can be loaded."""
    place = tmp_path_factory.mktemp("examples")
    rows = [
        (f"Tom has {n} apples and finds {n + 1}. How many?", f"{n}+{n + 1} = {2 * n + 1}\n#### {2 * n + 1}") for n in range(24)
    ]
    questions = [{"question": asked, "answer": said} for asked, said in rows]
    pairs = [{"prompt": asked, "chosen": said, "rejected": "no"} for asked, said in rows]
    files = {"problems/train": questions[:16], "problems/test": questions[16:], "pairs": pairs, "others": pairs[:5]}
    for name, own in {**files, "prompts": [{"prompt": asked} for asked, _ in rows]}.items():
        path = place / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in own))
    data = str(place / "prompts.jsonl")
    pt.grpo("tiny:nano", data, len, steps=1, batch=1, max_new_tokens=2, out=place / "start", device="cpu", threads=1)
    return place


@pytest.fixture
def script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Runs a script as `python examples/NAME.py ...` does, and returns its names."""
    monkeypatch.chdir(folder)

    def run(name: str, *words: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [name, *words])
        return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    return run


def test_a_reward_model_is_trained_and_evaluated_and_ppo_uses_it_with_three_other_models(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("steps=2", "device=cpu", "threads=1", "model=start")
    rm = script("reward_model", "data=pairs.jsonl", "validation=others.jsonl", *few, "out=runs/reward_model-1")["run"]
    assert rm.result["held_out"] == 2 and "accuracy on others.jsonl: [" in capsys.readouterr().out
    own = rm.evaluate(data="others.jsonl")
    right = [rm.score(row["prompt"], row["chosen"]) > rm.score(row["prompt"], row["rejected"]) for row in rows_of("others")]
    assert own["pairs"] == 5 and own["accuracy"][0] == pytest.approx(sum(right) / 5)
    with pytest.raises(pt.UserError, match="has trained a language model, not a reward model"):
        pt.evaluate(pt.load("start"), data="others.jsonl")
    run = script("ppo", "prompts=prompts.jsonl", *SMALL, "model=start")["run"]
    stage = run._reader().config["stages"][0]
    assert stage["critic"] == "runs/reward_model-1" == stage["reward"]["models"][0] and stage["reference"] == "start"
    assert [row["step"] for row in run.metrics][-2:] == [1, 2] and run.metrics[-1]["loss/value"] > 0
    printed = capsys.readouterr().out
    assert "'loss/policy': " in printed and "None" not in printed


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()]


def test_grpo_with_a_function_step_by_step(script: Script) -> None:
    found = script("grpo", TASK, "model=tiny:nano", *SMALL, "lr=1e-3")
    algorithm = found["run"]._reader().config["stages"][0]["algorithm"]
    assert (algorithm["group"], algorithm["beta"], algorithm["clip_low"]) == (8, 0.04, 0.2)
    judged = [found["reward"]("", text, "5") for text in (r"\boxed{4} no, \boxed{5}", r"\boxed{5} or \boxed{6}", "5", "")]
    assert judged == [1, 0, 0, 0] and len(found["run"].metrics) == 3


def test_rules_pay_08_01_01_and_the_probe_finds_nothing(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    found = script("rule_reward", TASK, "model=tiny:nano", *SMALL)
    assert "nothing pays that should not" in capsys.readouterr().out
    texts = (r"\boxed{5}", "it is\nFinal answer: 5", "5", "Step 1: add\nStep 2: carry\nThen it is \\boxed{5}")
    weights = found["weights"].items()
    paid = [sum(weight * found["reward"][name]("", text, "5").value for name, weight in weights) for text in texts]
    assert paid == pytest.approx([0.9, 0.87, 0.03, 1.0])
    assert found["run"].metrics[-1]["reward/format"] == pytest.approx(0.3)


def test_outcome_and_process_rewards(script: Script) -> None:
    run = script("outcome_reward", TASK, "model=tiny:nano", *SMALL)["run"]
    assert {row["reward"] for row in run.rollouts(1)} <= {0.0, 1.0}
    found = script("process_reward", TASK, "model=tiny:nano", *SMALL)
    score = found["process"]("3 boxes of 4 pens, 5 are lost.", "3*4 = 12\n12-5 = 8\n\\boxed{7}", "7")
    assert [value for _, value in score.steps] == [-0.5, 1.0] and score.value == 0.25
    assert found["run"]._reader().config["stages"][0]["algorithm"]["supervision"] == "process"


def test_rounds_go_on_from_the_model_of_the_last(script: Script) -> None:
    small = [f"train.{word}" for word in ("steps=1", *SMALL[1:], "evaluate_every=0")]
    found = script("rounds", TASK, "model=start", "rounds=2", *small, "test.problems=2", "test.max_new_tokens=4")
    assert len(found["scores"]) == 3
    stages = [pt.load(f"runs/rounds/{n}")._reader().config["stages"][0]["model"] for n in (1, 2)]
    assert stages == ["start", "runs/rounds/1/export"] and not Path("runs/rounds/3").exists()


def test_the_first_hour(script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script("first_hour", "steps=1", f"folder={tmp_path / 'hour'}")
    for run in ("pipeline", "grpo"):
        export = tmp_path / "hour" / run / "export"
        assert (export / "model.safetensors").is_file() and (export / "adapter" / "adapter_model.safetensors").is_file()
    printed = capsys.readouterr().out
    assert "nothing pays that should not" in printed and "alarm" not in printed
    assert printed.rstrip().splitlines()[-1].startswith("<|user|>What is 3+4?<|end|><|assistant|>")


def test_settings_of_a_script_are_words_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py", "lr=1e-4", "train.steps=3", "name=x", "algorithm.group=4", "out=no"])
    defaults = {"steps": 5, "out": "", "train": {"steps": 1, "batch": 2}}
    found = pt.arguments(**defaults)
    assert found == {"steps": 5, "lr": 1e-4, "train": {"steps": 3, "batch": 2}, "name": "x", "algorithm.group": 4, "out": "no"}
    assert defaults["train"]["steps"] == 1, "the defaults are not changed"
    monkeypatch.setattr(sys, "argv", ["mine.py", "steps"])
    with pytest.raises(pt.UserError, match="'steps' is not key=value"):
        pt.arguments(**defaults)
    monkeypatch.setattr(sys, "argv", ["mine.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        pt.arguments(**defaults)
    assert ended.value.code == 0 and "steps=5\n" in capsys.readouterr().out


def lines_of(path: Path) -> int:
    text = path.read_text()
    return int(load_script("tests/test_architecture.py").code_lines(text, ast.parse(text)))


def test_the_table_says_how_long_scripts_are_and_none_is_longer_than_the_textbooks_code() -> None:
    rows = re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|.*\| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert [(name, int(own)) for name, own, _ in rows] == [(name, lines_of(EXAMPLES / name)) for name, _, _ in rows]
    assert len(rows) == 7 and all(int(own) <= int(theirs) for _, own, theirs in rows)
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(re.findall(r"\]\((\w+\.py)\)", PAGE))


def test_the_readme_begins_with_ten_lines_that_run_then_two_commands_and_fits_a_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text()
    first, _, _ = readme.partition("\n## ")
    blocks = re.findall(r"```(\w*)\n(.*?)```", first, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "sh"] and len(first.splitlines()) <= 50
    assert [line.split()[:2] for line in blocks[1][1].splitlines()] == [["make", "demo"], ["make", "test"]]
    program = blocks[0][1]
    assert len([line for line in program.splitlines() if line.strip()]) <= 10
    assert {"It is", "It is not"} <= set(re.findall(r"\*\*(.*?)\*\*", first))
    small = 'steps=1, batch=1, max_new_tokens=4, evaluate_problems=2, device="cpu", threads=1'
    monkeypatch.chdir(tmp_path)
    Path("readme.py").write_text(
        program.replace("Qwen/Qwen2.5-0.5B-Instruct", str(folder / "start")).replace("steps=100", small)
    )
    found = runpy.run_path("readme.py")
    assert len(found["sums"]) == 400 and (tmp_path / "mine" / "config.json").is_file()
