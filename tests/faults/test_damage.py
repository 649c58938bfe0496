"""A run whose files were damaged, swapped, lost or edited while it was down: resume says what it found and goes on, or says why not."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from posttrain import pipeline
from posttrain.errors import Interrupted, UserError
from posttrain.loop import Loop
from posttrain.runs.read import Run
from posttrain.train.trainer import Trainer
from tests.faults.harness import fingerprint, settings
from tests.faults.test_faults import at_call

STOPPED = 5  # the update of the second stage in which it is asked to stop: steps 1 to 3 have four each
CHECKPOINTS = Path("checkpoints/rl")
SLOW = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run left alone, and one that was stopped in its second stage with checkpoints at steps 1 and 2."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("damage")

    def made(name: str) -> Any:
        whole = settings("pipeline", folder / name)
        first, second = whole.recipe.stages
        return replace(whole, recipe=replace(whole.recipe, stages=(first, replace(second, checkpoint_every=1))))

    pipeline.start(made("alone"))
    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, Trainer, "update", 3 + STOPPED, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Interrupted, match="stopped after step 2 of rl"):
            pipeline.start(made("stopped"))
    return fingerprint(folder / "alone"), folder / "stopped"


@pytest.fixture
def stopped(material: tuple[dict[str, Any], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(material[1], tmp_path / "run"))


@pytest.fixture
def alone(material: tuple[dict[str, Any], Path]) -> dict[str, Any]:
    return material[0]


def resume(directory: Path, *arguments: str) -> dict[str, Any]:
    pipeline.resume(directory, True, arguments)
    return fingerprint(directory)


def refusal(directory: Path, *arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        pipeline.resume(directory, True, arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1  # in safetensors: a weight, not the header
    path.write_bytes(bytes(content))


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def lose(path: Path) -> None:
    path.unlink()


def swap(path: Path) -> None:
    """For the same file of the checkpoint before, which is good in itself."""
    other = path.parent.with_name("step-1") / path.name
    path.write_bytes(other.read_bytes())


@pytest.mark.slow
def test_undamaged_it_is_the_same_run(stopped: Path, alone: dict[str, Any]) -> None:
    assert resume(stopped) == alone
    assert [e for e in Run(stopped).events() if e.kind == "damaged"] == []


@pytest.mark.parametrize(
    ("file", "damage"), [("model.safetensors", flip), SLOW("optimizer.safetensors", swap), SLOW("state.json", cut)]
)
def test_the_checkpoint_before_a_damaged_one_is_used_and_this_is_said(
    file: str, damage: Callable[[Path], None], stopped: Path, alone: dict[str, Any]
) -> None:
    """Some pairs; all of them are shown on checkpoints alone, in tests/train."""
    damage(stopped / CHECKPOINTS / "step-2" / file)
    assert resume(stopped) == alone
    events = Run(stopped).events()
    (said,) = [e.details["text"] for e in events if e.kind == "damaged"]
    assert f"step-2/{file}" in said
    assert [(e.details["stage"], e.details["step"]) for e in events if e.kind == "resume"] == [("rl", 1)]


def test_all_checkpoints_damaged_is_one_line(stopped: Path) -> None:
    for step in (1, 2):
        lose(stopped / CHECKPOINTS / f"step-{step}" / "manifest.json")
    assert f"remove {stopped / CHECKPOINTS} to start the stage again" in refusal(stopped)


@pytest.mark.slow
def test_all_checkpoints_lost_the_stage_begins_again(stopped: Path, alone: dict[str, Any]) -> None:
    shutil.rmtree(stopped / CHECKPOINTS)
    assert resume(stopped) == alone


@pytest.mark.parametrize("damage", [cut, flip])
def test_a_stages_model_that_is_not_what_it_was(damage: Callable[[Path], None], stopped: Path) -> None:
    """One bit of a frozen model is enough: half a run against each of two rewards would be neither."""
    damage(stopped / "stages/reward/model/model.safetensors")
    assert "its input reward has changed" in refusal(stopped)


@pytest.mark.parametrize("who", ["reference", "reward"])
def test_a_frozen_model_from_elsewhere_that_is_not_what_it_was(
    who: str, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model outside of the run has no lineage there; the checkpoint names it by its weights."""
    real = Loop.frozen

    def other(self: Loop) -> dict[str, Any]:
        found = real(self)
        assert len(found["reference"]) == 64 and [len(x) for x in found["reward"]] == [64]
        return found | {who: "0" * 64}

    monkeypatch.setattr(Loop, "frozen", other)
    said = refusal(stopped)
    assert f"the {who} model of rl is not the one that {stopped / CHECKPOINTS / 'step-2'} was made with" in said
    assert "or the device rounds them otherwise" in said and "resume on the earlier kind of device" in said


@pytest.mark.parametrize("damage", [cut, zero])
def test_a_stages_result(damage: Callable[[Path], None], stopped: Path) -> None:
    damage(stopped / "stages/reward/result.json")
    assert "result.json is damaged: it is not valid JSON; remove" in refusal(stopped)


@pytest.mark.parametrize(("damage", "line"), [(zero, "is not valid YAML"), (lose, "no run in")])
def test_the_configuration(damage: Callable[[Path], None], line: str, stopped: Path) -> None:
    damage(stopped / "config.yaml")
    assert line in refusal(stopped)


@pytest.mark.parametrize("name", [SLOW("metrics.jsonl"), "events.jsonl"])
def test_lines_that_make_no_sense_are_left_out(name: str, stopped: Path, alone: dict[str, Any]) -> None:
    path = stopped / name
    lines = path.read_bytes().splitlines(keepends=True)
    nonsense = [b'{"half": \n', b"\xff\xfe\n", b"[1]\n", b'{"kind": 3, "step": "x"}\n']
    path.write_bytes(b"".join([*lines[:3], *nonsense, *lines[3:], b'{"torn']))
    assert resume(stopped) == alone


def test_lines_beyond_the_checkpoint_are_superseded_not_doubled(stopped: Path, alone: dict[str, Any]) -> None:
    """A killed attempt went on to step 3 and wrote nonsense there."""
    row = json.loads((stopped / "metrics.jsonl").read_text().splitlines()[-1])
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row | {"step": 3, "loss": 99.0, "only_here": 1.0}) + "\n")
        file.write(json.dumps(row | {"step": 7, "loss": 99.0}) + "\n")
    assert resume(stopped) == alone
    steps = [row.step for row in Run(stopped).metrics("rl")]
    assert steps == sorted(set(steps)) and max(steps) == 3


# --- settings that changed -------------------------------------------------------------------------------------------------


def test_another_micro_batch_budget_gives_the_same_batches(stopped: Path, alone: dict[str, Any]) -> None:
    found = resume(stopped, "rl.optimizer.token_budget=30", "rl.rollouts_every=1")
    assert yaml.safe_load((stopped / "config.yaml").read_text())["stages"][1]["optimizer"]["token_budget"] == 30
    config = [e for e in Run(stopped).events() if e.kind == "config"][-1]
    assert config.details["changed"] == ["rl.optimizer.token_budget: 400 -> 30"]
    for key, (rows, arrays) in alone["rollouts"].items():
        ours, theirs = found["rollouts"][key]
        assert [row[:4] for row in ours] == [row[:4] for row in rows], "the same prompts, samples, texts and rewards"
        assert theirs["ids"] == arrays["ids"]
    losses = [[float.fromhex(dict(f)["loss"]) for s, step, f in run["figures"] if s == "rl" and step] for run in (alone, found)]
    np.testing.assert_allclose(*losses, atol=1e-5)


@pytest.mark.parametrize("how", ["argument", "file"])
def test_a_change_that_would_make_it_another_run_is_refused(how: str, stopped: Path) -> None:
    arguments: tuple[str, ...] = ("rl.optimizer.lr=0.5",)
    if how == "file":
        tree = yaml.safe_load((stopped / "config.yaml").read_text())
        tree["stages"][1]["optimizer"]["lr"] = 0.5
        (stopped / "config.yaml").write_text(yaml.safe_dump(tree))
        arguments = ()
    before = (stopped / "config.yaml").read_bytes()
    assert "not those that the run began with: rl.optimizer.lr: 0.003 -> 0.5; undo the change, or start" in refusal(
        stopped, *arguments
    )
    assert (stopped / "config.yaml").read_bytes() == before


@pytest.mark.slow
def test_a_stage_that_has_not_begun_may_change(stopped: Path) -> None:
    lines = (stopped / "events.jsonl").read_text().splitlines(keepends=True)
    (stopped / "events.jsonl").write_text(
        "".join(x for x in lines if not ('"stage"' in x and '"rl"' in x and '"config"' not in x))
    )
    shutil.rmtree(stopped / CHECKPOINTS)
    resume(stopped, "rl.steps=1")
    assert [row.step for row in Run(stopped).metrics("rl")][-1] == 1


def test_a_program_in_a_run_directory_is_not_run_unless_trusted(stopped: Path, tmp_path: Path) -> None:
    tree = yaml.safe_load((stopped / "config.yaml").read_text())
    tree["checkpoint_hook"] = ["touch", str(tmp_path / "ran")]
    (stopped / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError, match="checkpoint_hook would run a program; pass --allow-code if you trust it"):
        pipeline.resume(stopped)
    assert not (tmp_path / "ran").exists()
