"""A file or folder is the old one or the new one, whatever goes wrong while it is written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from posttrain.errors import UserError
from posttrain.system import files
from posttrain.system.files import atomic_folder, atomic_write


def fail(*arguments: object, **_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["os.fsync", "os.replace"])
def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "result.json"
    atomic_write(path, "é")
    assert path.read_bytes() == "é".encode()
    monkeypatch.setattr(call, fail)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, b"new")
    assert os.listdir(tmp_path) == ["result.json"] and path.read_text("utf-8") == "é"


def test_only_a_durable_file_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    atomic_write(tmp_path / "a", b"1", durable=False)
    assert synced == []
    atomic_write(tmp_path / "a", b"2")
    assert len(synced) == 2, "the file, and the folder that lists it"


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("moment", ["block", "sync", "rename"])
def test_a_folder_that_cannot_be_written_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, existing: bool
) -> None:
    target = tmp_path / "model"
    if existing:
        target.mkdir()
        (target / "weights").write_text("old")
    rename = Path.rename

    def rename_or_fail(path: Path, to: Path) -> Path:
        return fail() if path.name.endswith(".tmp") else rename(path, to)  # type: ignore[func-returns-value, return-value]

    def write() -> None:
        with atomic_folder(target) as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / "weights").write_text("new")
            if moment == "block":
                fail()
            elif moment == "sync":
                monkeypatch.setattr(files, "sync", fail)
            else:
                monkeypatch.setattr(Path, "rename", rename_or_fail)

    with pytest.raises(OSError, match="No space left"):
        write()
    monkeypatch.undo()
    assert os.listdir(tmp_path) == (["model"] if existing else [])
    assert not existing or (target / "weights").read_text() == "old"


def test_a_folder_replaces_another_and_all_of_it_is_synced_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, synced, sync = tmp_path / "model", [], files.sync
    target.mkdir()
    (target / "old").write_text("")

    def watch(path: Path) -> None:
        synced.append((path.name, (target / "old").exists()))
        sync(path)

    monkeypatch.setattr(files, "sync", watch)
    with atomic_folder(target, ".7") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_text("new")
    assert synced == [("weights", True), ("inner", True), (".model.7.tmp", True), (tmp_path.name, False)]
    assert os.listdir(tmp_path) == ["model"] and os.listdir(target) == ["inner"]


@pytest.mark.parametrize(
    ("begun", "file", "said"),
    [
        (False, "run/lock", "cannot write the run directory {run}: Permission denied; choose another"),
        (False, "", "cannot write the run directory {run}: Permission denied; choose another"),
        (False, "data.jsonl", "{file}: Permission denied; put it right, then start it again"),
        (True, "data.jsonl", "{file}: Permission denied; put it right, then continue with: posttrain resume {run}"),
        (True, "run/metrics.jsonl", "{file}: Permission denied; put it right, then continue with: posttrain resume {run}"),
    ],
)
def test_a_refusal_names_the_file_that_it_is_about(begun: bool, file: str, said: str, tmp_path: Path) -> None:
    """A data set that may not be read is not a run directory that cannot be written."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("{}\n" if begun else "")
    with pytest.raises(UserError) as error, files.explained(run):
        raise (
            PermissionError(errno.EACCES, "Permission denied", str(tmp_path / file))
            if file
            else PermissionError(errno.EACCES, "no")
        )
    assert str(error.value) == said.format(run=run, file=tmp_path / file)


def test_a_run_with_a_function_of_a_program_is_continued_by_its_call(tmp_path: Path) -> None:
    """`posttrain resume` would refuse it: no directory holds the function."""
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "config.yaml").write_text("format: 2\nreward: python:right (mine.py line 3)\n")
    with pytest.raises(UserError) as error, files.explained(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    how = "continue with: the same call with its out= and again=True"
    assert str(error.value) == f"no space left on the disk of {tmp_path}; free some, then {how}"


@pytest.mark.parametrize("name", ["metrics.jsonl", "stages/sft/result.json", "checkpoints/rl/step-2/manifest.json"])
def test_a_run_has_begun_if_it_left_anything_to_go_on_from(name: str, tmp_path: Path) -> None:
    """One that has not is taken back where it fails: a lost metrics.jsonl must not cost its checkpoints."""
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
    assert not files.begun(tmp_path) and not files.begun(tmp_path / "none")
    (tmp_path / name).write_text("{}\n")
    assert files.begun(tmp_path)
