"""Commands are files of posttrain/cli: each has help with an example, and none is expensive to import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain import catalogue, cli, pipeline
from posttrain.data.formats import FORMATS
from posttrain.errors import Interrupted, Waiting

COMMANDS = catalogue.names("command")
LATER = {"studio"}  # named by the design, not built yet


def test_the_commands_are_those_of_the_design() -> None:
    assert set(COMMANDS) | LATER == {
        "run", "resume", "plan", "eval", "compare", "sample", "show", "list", "advise", "doctor", "probe", "chat", "label",
        "serve", "replay", "export", "push", *LATER,
    }  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_a_summary_and_an_example_that_parses(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    example = text[text.index("example: ") + 9 :]
    assert ended.value.code == 0 and example.startswith(f"posttrain {command}")
    assert cli.parse(example.split()[1:]).command == command


def test_without_a_command_all_of_them_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert all(f"    {command} " in text for command in COMMANDS)


def test_help_imports_neither_torch_nor_numpy_nor_rich() -> None:
    program = (
        "import sys; from posttrain import cli; cli.main([])\n"
        "sys.exit(' '.join(sorted({'torch', 'transformers', 'numpy', 'rich', 'pydantic', 'yaml'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.split() == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("show nowhere", "no run in nowhere"),
        ("plan quickstrat", "did you mean 'quickstart'?"),
        ("run quickstrat", "did you mean 'quickstart'?"),
        ("probe --task arithmetics", "did you mean 'arithmetic'?"),
        ("eval nowhere --task gsm8k,arithmetics", "did you mean 'arithmetic'?"),
        ("eval nowhere --task reasoning_gyms:leg_counting", "did you mean 'reasoning_gym'?"),
    ],
)
def test_a_mistyped_name_is_refused_before_torch_is_imported(words: str, said: str) -> None:
    program = (
        f"import sys; from posttrain import cli; code = cli.main({words.split()!r})\n"
        "sys.exit(code if not {'torch', 'transformers'} & set(sys.modules) else 'too late')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert said in done.stderr and done.returncode == 2


def test_settings_may_stand_after_options() -> None:
    options = cli.parse(["eval", "m", "--task", "t", "problems=3", "--json", "samples=2"])
    assert options.settings == ["problems=3", "samples=2"]


@pytest.mark.parametrize(("word", "said"), [("--steps", "settings are KEY=VALUE"), ("lr=1e-4", "one of a stage is STAGE.KEY")])
def test_a_setting_in_the_words_of_other_programs_is_refused_with_those_of_this_one(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "quickstart", word]) == 2
    assert said in capsys.readouterr().err


def test_an_interrupted_run_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise Interrupted("stopped after step 3 of rl")

    monkeypatch.setattr(pipeline, "run_stages", stop)
    out = tmp_path / "run"
    assert cli.main(["run", "quickstart", f"out={out}"]) == 130
    assert capsys.readouterr().err == f"posttrain: stopped after step 3 of rl; continue with: posttrain resume {out}\n"
    assert cli.main(["run", "quickstart", f"out={out}-2", "--allow-code"]) == 130
    assert capsys.readouterr().err.endswith(f"posttrain resume {out}-2 --allow-code\n"), "the same trust is needed again"


@pytest.mark.parametrize(
    ("error", "said"),
    [(KeyboardInterrupt(), "interrupted; "), (Interrupted("over"), "over; "), (Waiting("label them"), "label them; then ")],
)
def test_the_command_that_goes_on_has_the_option_that_the_run_needs(
    error: BaseException, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(pipeline, "run_stages", stop)
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def pay(response): return float(len(response))\n")
    Path("rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    stage = (
        "{stage: rl, name: rl, model: 'tiny:nano', task: {name: prompts, file: rows.jsonl, reward: length}, evaluate_every: 0}"
    )
    Path("mine.yaml").write_text(f"stages: [{stage}]")
    given = "rl.task.reward=mine.py:pay"  # what is typed is trusted, what a directory names is not
    for out, words, option in (("a", [], ""), ("b", ["--allow-code"], " --allow-code"), ("c", [given], " --allow-code")):
        cli.main(["run", "mine.yaml", f"out={out}", *words])
        told = capsys.readouterr()
        assert f"{said}continue with: posttrain resume {out}{option}\n" in told.out + told.err


def test_an_interrupted_sweep_says_once_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise errors.pop()

    monkeypatch.setattr(pipeline, "run_stages", stop)
    out = tmp_path / "sweep"
    # a second Ctrl-C raises a KeyboardInterrupt
    errors = [KeyboardInterrupt("interrupted"), Interrupted("stopped after step 3 of rl")]
    for words in (["run", "quickstart", "seeds=0,1", f"out={out}"], ["resume", str(out)]):
        said = str(errors[-1])
        assert cli.main(words) == 130
        assert capsys.readouterr().err == f"posttrain: {said}; continue with: posttrain resume {out}\n"


def test_list_shows_a_row_of_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "formats", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["formats"]
    assert [one["name"] for one in found] == [f.name for f in FORMATS]
    assert cli.main(["list", "formats"]) == 0
    text = capsys.readouterr().out
    assert all(f"    {json.dumps(one['example'])}\n" in text and one["note"] in text for one in found)


def test_list_has_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["recipes", "stages", "algorithms", "tasks", "tools", "rewards", "formats"]
    assert {"sft", "rl", "evaluate"} <= {entry["name"] for entry in found["stages"]}
