"""Bad inputs: each is refused before the first stage, by `plan` and by `run` with the same line, which names the key or the file and
its row and says what to do. The exit code is 2, and nothing is left behind. The table is tests/bad_inputs_for_tests.py."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from bad_inputs_for_tests import (
    AGREE,
    BEST,
    CASES,
    COMPARE,
    CURVE,
    DPO,
    EVAL,
    GOOD,
    KTO,
    LATE,
    MINE,
    PROMPTS,
    QUESTIONS,
    RL,
    RM,
    SAMPLE,
    SFT,
    VERSUS,
    Case,
    case,
)

from posttrain import cli, config, pipeline
from posttrain.errors import UserError
from posttrain.loop import Loop
from posttrain.models.save import save
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.stages.base import PRINTABLE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The good files, and saved models: one as it should be, one whose tokenizer has no chat template, one with another alphabet."""
    made = tmp_path_factory.mktemp("work")
    for name, alphabet in (("model", PRINTABLE), ("plain", PRINTABLE), ("letters", "abc")):
        tokenizer = character_tokenizer(alphabet)
        model = tiny_model(tokenizer, "nano", 0)
        if name == "plain":
            tokenizer.chat_template = None
        save(model, tokenizer, made / name)
    for name, text in GOOD.items():
        write(made / name, text)
    return made


@pytest.fixture
def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, in which no stage may train; what a test wrote is taken back after it."""

    def trained(self: Loop) -> None:
        raise AssertionError("a stage has run")

    monkeypatch.setattr(Loop, "run", trained)
    monkeypatch.setattr("posttrain.engine.engine.Engine.submit", trained)
    # for speed: one parser for all
    monkeypatch.setattr(cli, "parser", PARSER)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(folder)
    before = contents(folder)
    yield folder
    for name in contents(folder).keys() - before.keys():
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink(missing_ok=True)
    after = contents(folder)
    for name in GOOD:
        if after[name] != before[name]:
            write(folder / name, GOOD[name])


PARSER = cache(cli.parser)


def write(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file with what it holds, but for those of the models."""
    found = (p for p in folder.rglob("*") if p.relative_to(folder).parts[0] not in ("model", "plain", "letters"))
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in found}


def written(one: Case, place: Path) -> list[str]:
    """Write the files of a case; the words of its command."""
    for name, text in one.files.items():
        write(place / name, text)
    if isinstance(one.of, str) and one.of.startswith("posttrain "):
        return one.of.split()[1:]
    text = one.of if isinstance(one.of, str) else yaml.safe_dump({"stages": one.of})
    write(place / "p.yaml", text)
    return ["run", "p.yaml", "threads=1", *one.settings, "--allow-code"]


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.id)
def test_a_bad_input_is_one_line_before_the_first_stage_and_leaves_nothing(
    one: Case, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = written(one, place)
    before = contents(place)
    code = cli.main(words)
    line = capsys.readouterr().err
    assert line.startswith("posttrain: ") and line.count("\n") == 1, line
    for fragment in one.said:
        assert fragment in line
    assert code == 2
    assert contents(place) == before
    if one.plan and words[0] == "run":
        assert cli.main(["plan", *words[1:]]) == 2
        assert capsys.readouterr().err == line
        assert contents(place) == before


def test_the_table_is_long_and_its_names_differ() -> None:
    assert len(CASES) >= 150
    assert len({one.id for one in CASES}) == len(CASES)


def test_the_good_files_and_stages_are_right(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else a case could be refused for another reason than its own."""
    stages = [
        SFT,
        DPO | {"model": "sft"},
        KTO,
        RM,
        RL | {"model": "dpo"},
        EVAL,
        SAMPLE,
        COMPARE,
        MINE,
        VERSUS,
        BEST,
        AGREE,
        CURVE,
        RL | {"name": "asked", "task": PROMPTS},
        RL | {"name": "solved", "task": QUESTIONS, "model": "./model"},
        RL | {"name": "rated", "task": PROMPTS, "reward": {"name": "models", "models": ["rm"]}},
        RL | {"name": "own", "task": PROMPTS | {"reward": "mine.py:styled"}},
        RL | {"name": "given", "task": PROMPTS, "reward": {"name": "function", "reward": "mine.py:short"}},
    ]
    assert cli.main(["plan", *written(case("good", stages), place)[1:]]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("one", LATE, ids=lambda one: one.id)
def test_python_raises_the_same_words(one: Case, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = written(one, place)
    with pytest.raises(UserError) as raised:
        pipeline.start(config.parse("p.yaml", ["threads=1"], allow_code=True))
    assert cli.main(words) == 2
    assert capsys.readouterr().err == f"posttrain: {raised.value}\n"
