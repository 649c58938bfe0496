"""Every key of what is shipped, or of a user's file, with its type, default and meaning."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from posttrain import catalogue, cli
from posttrain.algorithms.base import Algorithm
from posttrain.commands.keys import TEXTS, Key, documented, keys_of
from posttrain.rewards._asking import EndpointSettings
from posttrain.stages.base import Stage
from posttrain.tasks.base import Task
from posttrain.tasks.tools.base import Tool

BASES = {"stage": Stage, "algorithm": Algorithm, "task": Task, "tool": Tool}
KINDS = ("stage", "algorithm", "task", "reward", "recipe")


def all_of(keys: Iterable[Key]) -> list[Key]:
    return [one for key in keys for one in (key, *all_of(key.keys))]


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_what_is_shipped_has_a_meaning(kind: str) -> None:
    found = {name: all_of(keys_of(kind, name)) for name in catalogue.names(kind)}
    assert [f"{name}.{key.name}" for name, keys in found.items() for key in keys if not key.meaning] == []


@pytest.mark.parametrize("kind", BASES)
def test_the_keys_are_the_fields_of_the_class(kind: str) -> None:
    for name in catalogue.names(kind):
        fields = dataclasses.fields(catalogue.load(kind, name, BASES[kind]))
        assert {key.name for key in keys_of(kind, name)} == {f.name for f in fields if f.init}, name


@pytest.mark.parametrize("name", catalogue.names("reward"))
def test_the_keys_of_a_reward_are_all_that_it_can_be_given(name: str) -> None:
    module = importlib.import_module(f"posttrain.rewards.{name}")
    listed = {key.name for key in keys_of("reward", name)}
    if name == "judge":
        assert {field.name for field in dataclasses.fields(EndpointSettings)} < listed
    elif name != "compose":
        assert set(inspect.signature(getattr(module, name)).parameters) - set(TEXTS) <= listed


@pytest.mark.parametrize("kind", KINDS)
def test_keys_side_by_side_have_meanings_of_their_own_and_plain_defaults(kind: str) -> None:
    for name in catalogue.names(kind):
        own = keys_of(kind, name)
        for group in [own, *(key.keys for key in all_of(own) if key.keys)]:
            said = [key.meaning for key in group if key.meaning]
            assert [key.name for key in group if said.count(key.meaning) > 1] == [], f"{kind} {name}"
            assert [key.default for key in group if " * " in key.default or "<<" in key.default] == []


def test_one_stage_is_listed_with_the_keys_of_its_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "stages", "sft"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split("  ")[2:] and line.strip().startswith("optimizer.lr: float above 0 = 1e-05") for line in lines)
    assert cli.main(["list", "stages", "sft", "--json"]) == 0
    assert {"name", "type", "default", "meaning", "keys"} <= set(json.loads(capsys.readouterr().out)[0])


def test_all_stages_are_listed_with_their_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "stages"]) == 0
    text = capsys.readouterr().out
    assert text.count("model: str (required)") > 5 and "optimizer.lr" not in text


def test_an_unknown_name_is_one_line_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "stages", "sfd"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_the_help_of_a_recipe_has_its_keys_and_those_of_its_stages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "quickstart", "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for part in ("    size: str = 'nano'", "    seed: int", "keys of rl stages, here rl", "    optimizer.lr: float"):
        assert part in text


def test_the_help_of_a_recipe_of_the_user_needs_none_of_its_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text('def mine(data: str, steps: int = 3):\n    """`data` is a file of chats."""\n    return []\n')
    with pytest.raises(SystemExit):
        cli.main(["run", f"{file}:mine", "--help"])
    text = capsys.readouterr().out
    assert "data: str (required)" in text and "steps: int = 3" in text and "give data=..." in text


def test_a_docstring_is_read_by_its_table_and_by_its_sentences() -> None:
    text = "About it.\n\nbeta, kl   one thing\n           in two lines\nother      another\n\nThe `cut` is here. Not there."
    assert documented(text, "kl") == "one thing in two lines"
    assert documented(text, "cut") == "The `cut` is here"
