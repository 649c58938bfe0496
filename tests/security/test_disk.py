"""A disk that is full at any moment: the run stops with one line, and once there is room, resume continues to the bit."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import posttrain as pt
from posttrain import pipeline
from posttrain.errors import UserError
from posttrain.runs.layout import TokenArrays
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.system import files, processes
from posttrain.train import checkpoint
from tests.faults.harness import fingerprint, settings


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """One thread, and a picture that takes no time."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "draw", lambda run, path: files.atomic_write(path, b"a picture"))
        yield
    torch.set_num_threads(threads)


class Disk:
    """Counts writes, and is full from the `full`-th on: for data, for names, and for what others write."""

    def __init__(self, patch: pytest.MonkeyPatch, full: int = 0) -> None:
        self.count, self.full = 0, full
        for owner, name in (
            (os, "fsync"),
            (os, "replace"),
            (processes.os, "write"),
            (files, "open_file"),
            (checkpoint, "save_file"),
            (Path, "mkdir"),
            (Path, "rename"),
            (shutil, "copytree"),
        ):
            patch.setattr(owner, name, self.counted(getattr(owner, name), name))

    def counted(self, inner: Callable[..., Any], name: str) -> Callable[..., Any]:
        def outer(*given: Any, **more: Any) -> Any:
            reading = name == "open_file" and not (given[1:] and given[1] & (os.O_WRONLY | os.O_RDWR))
            if not reading:
                self.count += 1
                if self.full and self.count >= self.full:
                    raise OSError(errno.ENOSPC, "No space left on device")
            return inner(*given, **more)

        return outer


def session(directory: Path) -> None:
    """All that a writer writes."""
    resumed = (directory / "config.yaml").is_file()
    with RunWriter.resume(directory) if resumed else RunWriter.create(directory, {"seed": 0}) as writer:
        done = [row.step for row in Run(directory).metrics()]
        for step in range(1, 4):
            if step not in done:
                writer.rollouts("rl", step, [], arrays=TokenArrays(np.array([0]), {"ids": np.arange(0)}))
                writer.metrics("rl", step, {"loss": float(step)})
        writer.event("done")
        writer.summary({"steps": 3})


def test_a_writer_recovers_from_a_disk_that_is_full_at_every_moment(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        session(tmp_path / "alone")
        moments = disk.count
    assert moments > 15
    for number in range(1, moments + 1):
        directory = tmp_path / f"run-{number}"
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, number)
            with pytest.raises(UserError, match="no space left on the disk") as caught:
                session(directory)
        assert "\n" not in str(caught.value)
        session(directory)
        run = Run(directory)
        assert [row.step for row in run.metrics()] == [1, 2, 3] and run.summary == {"steps": 3}, number
        assert run.rollout_steps("rl") == [1, 2, 3] and not list(directory.rglob("*.tmp")), number


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run that was left alone, and how many moments it has."""
    directory = tmp_path_factory.mktemp("alone") / "run"
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        pipeline.start(settings("sft", directory))
        return directory, disk.count


def go_on(directory: Path) -> None:
    if not (directory / "config.yaml").is_file():
        pipeline.start(settings("sft", directory))
    elif Run(directory).summary is None:
        pipeline.resume(directory)


def whole(directory: Path) -> bool:
    made = (directory / "plot.png").is_file() and (directory / "export" / "config.json").is_file()
    return made and Run(directory).summary is not None


SHARES = [pytest.param(n / 40, marks=[] if n % 5 == 3 else [pytest.mark.slow]) for n in range(41)]


@pytest.mark.parametrize("share", SHARES)
def test_a_run_on_a_full_disk_continues_to_the_bit(share: float, alone: tuple[Path, int], tmp_path: Path) -> None:
    directory, moments = alone
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, max(1, round(share * moments)))
        with pytest.raises(UserError) as caught:
            pipeline.start(settings("sft", tmp_path / "run"))
    assert "\n" not in str(caught.value) and "space" in str(caught.value)
    go_on(tmp_path / "run")
    assert fingerprint(tmp_path / "run") == fingerprint(directory) and whole(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounts a disk, which only root may")
@pytest.mark.parametrize("size", [4, 8, 12, 16, 20, 24, 64, 128, 512, 900, 1300, 1700, 2100, 2500, 2900, 3300, 3700, 4100])
def test_a_small_disk_of_any_size(size: int, alone: tuple[Path, int], tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("cannot mount here")
    try:
        with pytest.raises(UserError, match="space|cannot be saved"):
            pipeline.start(settings("sft", disk / "run"))
        subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
        go_on(disk / "run")
        assert fingerprint(disk / "run") == fingerprint(alone[0]) and whole(disk / "run")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- the end of a run, and what it began with ---------------------------------------------------------------------------


def test_a_kill_after_the_summary_leaves_a_plot(
    alone: tuple[Path, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own, killed by the first line that it would print after the summary."""
    directory = Path(shutil.copytree(alone[0], tmp_path / "run"))
    for name in ("summary.json", "plot.png"):
        (directory / name).unlink()
    pid = os.fork()
    if pid == 0:
        pipeline.conclude = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        try:
            pipeline.resume(directory)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert whole(directory)
    pipeline.resume(directory)
    assert " is complete: its model is in " in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["deleted", "emptied", "garbled", "without settings", "wrong settings"])
@pytest.mark.parametrize("edited", [True, False])
def test_a_run_without_its_events_is_refused(damage: str, edited: bool, alone: tuple[Path, int], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(alone[0], tmp_path / "run"))
    (directory / "summary.json").unlink()
    events = directory / "events.jsonl"
    kept = [line for line in events.read_text().splitlines(keepends=True) if '"config"' not in line]
    texts = {"emptied": "", "garbled": "x\n" * 9, "without settings": "".join(kept)}
    texts["wrong settings"] = "".join(kept) + '{"kind":"config","time":1,"attempt":1,"config":[]}\n'
    events.unlink() if damage == "deleted" else events.write_text(texts[damage])
    tree = yaml.safe_load((directory / "config.yaml").read_text())
    if edited:
        tree["stages"][0]["optimizer"]["lr"] *= 2
        (directory / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError, match="events.jsonl is lost or damaged") as caught:
        pipeline.resume(directory)
    assert "\n" not in str(caught.value)


def test_the_advice_after_a_full_disk_can_be_followed(tmp_path: Path) -> None:
    """Of a run in Python, whose rows are written first: either it can be resumed, or nothing is left and it can start again."""
    rows = [{"prompt": "1+1=", "completion": "2"}] * 4
    advice = set()
    for number in [*range(1, 13), 30, 50]:
        place = tmp_path / f"{number}" / "new" / "run"
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, number)
            with pytest.raises(UserError) as caught:
                pt.sft("tiny:nano", rows, out=place, steps=2, batch=2, threads=1, checkpoint_every=1)
        left = [*(tmp_path / f"{number}").rglob("*")]
        resumable = f"posttrain resume {place}" in str(caught.value)
        advice.add(resumable)
        assert resumable or "start it again" in str(caught.value), (number, caught.value)
        assert (place / "config.yaml").is_file() if resumable else not left, (number, caught.value, left)
    assert advice == {True, False}
