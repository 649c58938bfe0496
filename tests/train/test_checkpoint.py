"""Checkpoints are complete or absent: every way to damage one is named, and the one before it is used."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from material_for_tests import small_policy

from posttrain.errors import UserError
from posttrain.system import files
from posttrain.train import checkpoint
from posttrain.train.checkpoint import ARRAYS, FILES, MANIFEST, Checkpoint

STATE = {"stage": "rl", "algorithm": {"beta": 0.1}, "source": [1, 2, {"three": None}], "text": "é"}


def made(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    model = {"a.weight": torch.randn(4, 3, generator=generator), "b": torch.randn(2, generator=generator).bfloat16()}
    optimizer = {
        "step.a.weight": torch.tensor(float(step)),
        "exp_avg.a.weight": torch.randn(4, 3, generator=generator).double(),
    }
    return Checkpoint(step, model, optimizer, STATE | {"step": step})


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert (one.step, one.state) == (other.step, other.state)
    for ours, theirs in ((one.model, other.model), (one.optimizer, other.optimizer)):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name])


def test_round_trip(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "deep" / "checkpoints", made(3))
    assert path.name == "step-3" and names(path) == sorted([*FILES, MANIFEST])
    assert names(path.parent) == ["step-3"], "no temporary left"
    assert checkpoint.verify(path) is None
    assert checkpoint.newest(path.parent) == (path, [])
    assert_same(checkpoint.load(path), made(3))


def test_arrays_of_the_state_come_back_and_are_checked(tmp_path: Path) -> None:
    arrays = [np.arange(3, dtype=np.int32), np.array([0.1, -2.5], np.float32), np.empty((0,), np.int64)]
    waiting = {"source": {"finished": [[7, arrays]], "drawn": [[7, 2]]}}
    path = checkpoint.save(tmp_path, Checkpoint(1, {}, {}, waiting))
    assert names(path) == sorted([*FILES, ARRAYS, MANIFEST]) and checkpoint.verify(path) is None
    ((number, found),) = checkpoint.load(path).state["source"]["finished"]
    assert number == 7 and [(a.dtype, a.tolist()) for a in found] == [(a.dtype, a.tolist()) for a in arrays]
    data = bytearray((path / ARRAYS).read_bytes())
    data[-1] ^= 1
    (path / ARRAYS).write_bytes(data)
    assert "damaged" in str(checkpoint.verify(path))
    (path / ARRAYS).unlink()
    assert "missing" in str(checkpoint.verify(path))


def test_nothing_there(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) == (None, [])
    assert checkpoint.newest(tmp_path / "absent") == (None, [])


def test_views_and_strided_tensors_are_saved_whole(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    odd = Checkpoint(1, {"turned": base.t(), "column": torch.arange(12.0).view(3, 4)[:, 1]}, {}, {})
    loaded = checkpoint.load(checkpoint.save(tmp_path, odd))
    assert torch.equal(loaded.model["turned"], base.t()) and torch.equal(loaded.model["column"], base[:, 1])


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def delete(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("damage", [truncate, empty, flip, lengthen, delete])
@pytest.mark.parametrize("file", [*FILES, MANIFEST])
def test_damage_is_named_and_the_one_before_is_used(file: str, damage: Callable[[Path], None], tmp_path: Path) -> None:
    checkpoint.save(tmp_path, made(1))
    newest = checkpoint.save(tmp_path, made(2))
    damage(newest / file)
    path, problems = checkpoint.newest(tmp_path)
    assert path == tmp_path / "step-1"
    assert len(problems) == 1 and "step-2" in problems[0]
    # a flipped bit of the manifest may show as a damaged file instead: something of this checkpoint is named in any case
    assert file in problems[0] or (file == MANIFEST and damage is flip)
    assert_same(checkpoint.load(path), made(1))


def test_every_single_bit_of_a_manifest_matters(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, made(2))
    good = (path / MANIFEST).read_bytes()
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1
        (path / MANIFEST).write_bytes(bytes(bad))
        assert checkpoint.verify(path) is not None, f"byte {at} of {good!r}"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"step": 7}, "says step 7"),
        ({"format": 99}, "is of format 99, this version of posttrain reads 1 and 2"),
        ({"files": {}}, "cannot be read: KeyError"),
        ({"files": None}, "cannot be read: TypeError"),
    ],
)
def test_a_manifest_that_says_something_else(change: dict, problem: str, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, made(2))
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | change))
    found = checkpoint.verify(path)
    assert found is not None and problem in found and str(path) in found


def test_a_checkpoint_under_another_number(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, made(2)).rename(tmp_path / "step-5")
    assert checkpoint.newest(tmp_path) == (None, [f"{tmp_path / 'step-5' / MANIFEST} says step 2"])


def test_all_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        delete(checkpoint.save(tmp_path, made(step)) / "model.safetensors")
    path, problems = checkpoint.newest(tmp_path)
    assert path is None and [("step-2" in p, "step-1" in p) for p in problems] == [(True, False), (False, True)]


def test_retention(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        checkpoint.save(tmp_path, made(step), keep=2)
    assert names(tmp_path) == ["step-15", "step-20"]
    checkpoint.save(tmp_path, made(100), keep=1)
    assert names(tmp_path) == ["step-100"]
    checkpoint.save(tmp_path, made(105), keep=0)
    assert names(tmp_path) == ["step-105"], "the one just written always stays"


@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_that_went_back_does_not_lose_what_it_writes(keep: int, tmp_path: Path) -> None:
    """Step 20 was damaged, so the run resumed from 10. What it saves at 15 must stay, and a resume must find it."""
    checkpoint.save(tmp_path, made(10))
    flip(checkpoint.save(tmp_path, made(20)) / "model.safetensors")
    assert checkpoint.newest(tmp_path)[0] == tmp_path / "step-10"
    checkpoint.save(tmp_path, made(15), keep=keep)
    assert checkpoint.newest(tmp_path) == (tmp_path / "step-15", [])
    assert names(tmp_path) == ["step-10", "step-15"][-keep:]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, made(4))
    other = made(4)
    other.model["a.weight"].zero_()
    path = checkpoint.save(tmp_path, other)
    assert names(tmp_path) == ["step-4"]
    assert not checkpoint.load(path).model["a.weight"].any()


def test_leftovers_of_a_killed_save_are_ignored_and_swept(tmp_path: Path) -> None:
    leftover = tmp_path / ".step-9.tmp"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    assert checkpoint.newest(tmp_path) == (None, [])
    checkpoint.save(tmp_path, made(10))
    assert names(tmp_path) == ["step-10"]


@pytest.mark.parametrize("bytes_allowed", [100, 700])
def test_a_file_that_may_not_be_that_large_is_one_clear_line(bytes_allowed: int, tmp_path: Path) -> None:
    """First the weights do not fit, then the optimizer. What was there stays as it was."""
    checkpoint.save(tmp_path, made(1))
    large = Checkpoint(2, {"a": torch.zeros(8)}, {"m": torch.zeros(10_000)}, STATE)
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_allowed, hard))
    try:
        line = r"a file in .* has reached the largest size allowed here; raise it \(ulimit -f\), then start"
        with pytest.raises(UserError, match=line) as refusal, files.explained(tmp_path):  # as a run has it
            checkpoint.save(tmp_path, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(refusal.value)
    assert names(tmp_path) == ["step-1"], "no temporary left"
    assert checkpoint.newest(tmp_path) == (tmp_path / "step-1", [])


@pytest.mark.parametrize("call", ["save_file", "_write_json", "sync"])
def test_a_failure_at_any_point_leaves_the_old_one(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, made(4))

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files if call == "sync" else checkpoint, call, full)
    with pytest.raises(OSError, match="No space left on device"):
        checkpoint.save(tmp_path, made(4))
    assert names(tmp_path) == ["step-4"]
    assert_same(checkpoint.load(tmp_path / "step-4"), made(4))


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(UserError, match="choose another|put it right"), files.explained(tmp_path):
        checkpoint.save(tmp_path / "file" / "checkpoints", made(1))


def test_a_state_that_is_not_json_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    for bad in (float("nan"), object()):
        with pytest.raises((ValueError, TypeError)):
            checkpoint.save(tmp_path, Checkpoint(1, {"a": torch.zeros(1)}, {}, {"x": bad}))
    assert names(tmp_path) == []


def test_weights_of_a_model_go_out_and_in_bit_for_bit(tmp_path: Path) -> None:
    """Tied matrices once, in place: the parameters stay the same objects, so that engine and optimizer see them."""
    one, other = small_policy(0, torch.float32).model, small_policy(1, torch.float32).model
    tensors = checkpoint.weights(one)
    assert "lm_head.weight" not in tensors and "model.embed_tokens.weight" in tensors
    loaded = checkpoint.load(checkpoint.save(tmp_path, Checkpoint(1, tensors, {}, {})))
    before = {name: (id(p), p.data_ptr()) for name, p in other.named_parameters()}
    checkpoint.restore_weights(other, loaded.model)
    assert before == {name: (id(p), p.data_ptr()) for name, p in other.named_parameters()}
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    assert other.get_output_embeddings().weight is other.get_input_embeddings().weight


def test_another_models_weights_are_refused() -> None:
    model = small_policy(0, torch.float32).model
    tensors = {name: t.clone() for name, t in checkpoint.weights(model).items()}
    with pytest.raises(
        UserError, match=r"the checkpoint is of another model: missing \['model.norm.weight'\], unexpected \[\]"
    ):
        checkpoint.restore_weights(model, {n: t for n, t in tensors.items() if n != "model.norm.weight"})
    tensors["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(UserError, match=r"model.norm.weight is \(3,\), not \(16,\)"):
        checkpoint.restore_weights(model, tensors)
