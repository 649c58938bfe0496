"""A run's model is handed on whole, with a card of what was measured and without what belongs to this machine alone."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from errno import ENOSPC
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from hub_for_tests import TOKEN, serving
from runs_for_tests import make_run

from posttrain import cli
from posttrain.commands.card import model_card
from posttrain.models.save import save
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.runs.read import Run

WEIGHTS = ["config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a model and adapters; beside them lies what must not be sent."""
    directory = make_run(tmp_path_factory.mktemp("export") / "run")
    summary = json.loads((directory / "summary.json").read_text())
    summary["stages"] = {
        "after": {"model": "rl", "problems": 500, "accuracy": [0.9, 0.87, 0.92], "failed": 3, "contaminated": 2}
    }
    (directory / "summary.json").write_text(json.dumps(summary | {"alarms": ["rl: entropy | low at step 30"]}))
    tokenizer = character_tokenizer("01+=")
    save(tiny_model(tokenizer, "nano", 0), tokenizer, directory / "export")
    (directory / "export" / "notes.pkl").write_bytes(b"a pickle")
    adapter = directory / "export" / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/home/me/base", "r": 4}))
    shutil.copy(directory / "export" / "model.safetensors", adapter / "adapter_model.safetensors")
    return directory


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[str]]]:
    from huggingface_hub import constants

    with serving(tmp_path, tmp_path / "sent") as (address, asked):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield tmp_path / "sent", asked


def metadata(card: str) -> dict[str, object]:
    return dict(yaml.safe_load(card.split("---\n")[1]))


def test_a_model_is_sent_with_its_card_and_nothing_else(
    finished: Path, hub: tuple[Path, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted(finished.rglob("*"))
    assert cli.main(["push", str(finished), "me/tuned", "--license", "mit"]) == 0
    sent = hub[0] / "me" / "tuned"
    assert (sent / "model.safetensors").read_bytes() == (finished / "export" / "model.safetensors").read_bytes()
    assert {path.name for path in sent.iterdir()} - {"visibility"} == {
        *(p.name for p in (finished / "export").glob("*.[js]*")), "README.md"
    }  # fmt: skip
    assert (sent / "visibility").read_text() == "private", "a new repository is private unless it is said otherwise"
    assert metadata((sent / "README.md").read_text())["license"] == "mit"
    out, err = capfd.readouterr()
    assert "me/tuned/commit/" in out and "to send them alone: --adapter" in out
    everything = [out, err, *(path.read_text("latin-1") for path in sent.iterdir())]
    assert not any(TOKEN in text for text in everything) and sorted(finished.rglob("*")) == before


def test_adapters_are_sent_alone_under_the_name_of_their_base(
    finished: Path, hub: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["push", str(finished), "me/adapters", "--adapter"]) == 2
    assert "for /home/me/base, which is not the name of a model on the hub; name it with --base" in capsys.readouterr().err
    assert not hub[1], "nothing was asked of the hub"
    assert cli.main(["push", str(finished), "me/adapters", "--adapter", "--base", "org/base", "--public"]) == 0
    sent = hub[0] / "me" / "adapters"
    names = {path.name for path in sent.iterdir()}
    assert names == {"README.md", "adapter_config.json", "adapter_model.safetensors", "visibility"}
    assert json.loads((sent / "adapter_config.json").read_text()) == {"base_model_name_or_path": "org/base", "r": 4}
    found = metadata((sent / "README.md").read_text())
    assert (found["base_model"], found["library_name"]) == ("org/base", "peft")
    assert (sent / "visibility").read_text() == "public"


def test_without_a_network_the_hub_is_named_in_one_line(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", unreachable)
    assert cli.main(["push", str(finished), "me/tuned"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "check the network, then push again" in error


def test_without_a_token_the_hub_refuses_in_one_line(
    finished: Path, hub: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_another-secret")
    assert cli.main(["push", str(finished), "me/tuned"]) == 2
    error = capsys.readouterr().err
    assert "refuses to write me/tuned: set HF_TOKEN to a token that may write there" in error
    assert len(error.splitlines()) == 1 and "secret" not in error


def test_the_card_has_settings_figures_with_intervals_data_and_limits(finished: Path, tmp_path: Path) -> None:
    assert cli.main(["export", str(finished), str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| after | rl |  | accuracy | 0.9 [0.87, 0.92] | 500 |" in card
    assert "3 responses could not be scored; also trained on: 2 problems." in card and "entropy \\| low at step 30" in card
    assert re.findall("^## (.*)", card, re.M) == ["Training", "Held-out figures", "Data", "Limits", "Licence", "All settings"]
    assert "| rl | rl | sft | grpo | 40 |" in card and "intervals are over problems, not over seeds" in card
    assert "Not stated." in card and "license" not in metadata(card)
    assert all((tmp_path / "out" / name).is_file() for name in WEIGHTS)


def test_the_card_of_a_stage_claims_nothing_of_later_ones(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    summary = json.loads((run / "summary.json").read_text())
    summary["stages"]["before"] = {"model": "sft", "problems": 500, "accuracy": [0.5, 0.47, 0.52]}
    (run / "summary.json").write_text(json.dumps(summary))
    shutil.copytree(run / "export", run / "stages" / "sft" / "model")
    assert cli.main(["export", str(run), str(tmp_path / "out"), "--stage", "sft"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "This is the model of the stage sft." in card and "| before | sft |" in card
    assert "grpo" not in card and "| after | rl |" not in card and "0.9 [" not in card
    assert "| after | rl |" in model_card(Run(run)), "the model that the run exports has all of it"


def test_the_card_of_a_run_that_has_not_ended_claims_no_quiet_training(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    (directory / "summary.json").unlink()
    card = model_card(Run(directory))
    assert "The run had not ended when this card was made" in card and "- Alarm in training: " in card
    assert "No alarm in training" not in card and "0 responses could not be scored" not in card and "Made in 0 s" not in card


def test_a_full_disk_is_named_by_the_place_that_is_written(
    finished: Path, hub: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(ENOSPC, "No space left on device", str(source))

    monkeypatch.setattr(shutil, "copyfile", full)
    assert cli.main(["push", str(finished), "me/full"]) == 2
    error = capsys.readouterr().err
    assert "posttrain-push-" in error and "could not be written" in error and str(finished) not in error


def test_a_card_of_ones_own_is_taken_as_it_is(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.md").write_text("my words")
    assert cli.main(["export", str(finished), str(tmp_path / "out"), "--card", str(tmp_path / "mine.md")]) == 0
    assert (tmp_path / "out" / "README.md").read_text() == "my words"


def test_a_model_with_damaged_weights_is_not_handed_on(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(finished, directory)
    os.truncate(directory / "export" / "model.safetensors", 1000)
    for words in (["export", str(directory), str(tmp_path / "out")], ["push", str(directory), "me/x"]):
        assert cli.main(words) == 2
        assert "model.safetensors is corrupt or cut short" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_card_does_not_name_places_of_this_machine(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    config = yaml.safe_load((directory / "config.yaml").read_text())
    config["stages"][0] |= {"data": [{"file": "/home/me/my rows/rows.jsonl"}], "model": "C:\\Users\\me\\base"}
    config["stages"][2]["reward"] = {"name": "judge", "url": "https://me:secret@host/v1?key=secret"}
    (directory / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    card = model_card(Run(directory))
    assert not re.search(r"/home|Users|secret|my rows", card) and "rows.jsonl" in card and "https://host/v1" in card


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["push", "RUN", "no-organisation"], "'no-organisation' is not the name of a repository, such as org/name"),
        (["push", "RUN", "me/x", "--stage", "rll"], "has no stage 'rll'; it has sft, before, rl, after"),
        (["push", "RUN", "me/x", "--stage", "sft"], "let it end (posttrain resume), or choose another with --stage NAME"),
        (["push", "RUN", "me/x", "--license", "My Licence"], "is not an identifier of the hub, such as apache-2.0"),
        (["push", "RUN", "me/x", "--card", "absent.md"], "--card absent.md: there is no such file"),
        (["export", "RUN", "RUN"], "RUN holds other files, and is left alone"),
        (["export", "RUN", "RUN/export"], "already holds a saved model; give another place, or remove that folder first"),
        (["export", "RUN", "m.gguf"], "convert_hf_to_gguf.py of llama.cpp is not installed; clone llama.cpp and set LLAMA_CPP"),
    ],
)
def test_what_cannot_be_handed_on_is_refused_in_one_line(
    finished: Path, words: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main([word.replace("RUN", str(finished)) for word in words]) == 2
    error = capsys.readouterr().err.replace(str(finished), "RUN")
    assert expected in error and len(error.splitlines()) == 1


CONVERTER = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("model"), parser.add_argument("--outfile"), parser.add_argument("--outtype")
options = parser.parse_args()
json.loads(pathlib.Path(options.model, "config.json").read_text())
if options.outtype == "q8_0":
    raise SystemExit("Model LlamaForCausalLM is not supported")
pathlib.Path(options.outfile).write_bytes(b"GGUF" + options.outtype.encode())
"""


def test_gguf_files_are_written_by_the_converter_that_is_installed(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script with the converter's options stands for llama.cpp."""
    (tmp_path / "convert_hf_to_gguf.py").write_text(CONVERTER)
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    target = tmp_path / "model.gguf"
    assert cli.main(["export", str(finished), str(target)]) == 0 and target.read_bytes() == b"GGUFf16"
    assert cli.main(["export", str(finished), str(target)]) == 2 and "is there already" in capsys.readouterr().err
    assert cli.main(["export", str(finished), str(tmp_path / "other.gguf"), "--type", "q8_0"]) == 2
    error = capsys.readouterr().err
    assert "(exit 1): Model LlamaForCausalLM is not supported" in error and not (tmp_path / "other.gguf").exists()
    assert len(error.splitlines()) == 1 and not list(tmp_path.glob(".other*"))
