"""What goes wrong around a run: signals, full and read-only disks, rewards and trackers that fail, a clock that jumps. The run goes on,
or stops in bounded time with one clear line; no process is left behind, and what was saved is there."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from children_for_tests import descendants, no_child_left, running

from posttrain import cli, pipeline
from posttrain.data import safe_readers
from posttrain.errors import Interrupted, UserError
from posttrain.models.save import save
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.runs.read import Run
from posttrain.runs.trackers import KINDS as TRACKERS
from posttrain.runs.write import RunWriter
from posttrain.train import checkpoint
from posttrain.train.trainer import Trainer
from tests.faults.harness import fingerprint, settings

LARGEST = 300_000  # bytes that a file may have, where there is a limit: less than the weights of these models

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and mounts as Linux has them")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    threads = set(threading.enumerate())
    with no_child_left():
        yield

    def left() -> set[threading.Thread | None]:
        return set(threading.enumerate()) - threads - {safe_readers._renderer.clock}  # kept for the next template

    deadline = time.monotonic() + 5  # a timer that was cancelled ends by itself
    while left() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A small file system of its own, where the user may mount one."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount(options: str) -> Path:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True).returncode:
            pytest.skip("mounting a file system needs more rights")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True)


def run(kind: str, directory: Path, **changes: Any) -> Path:
    """A tiny run; `changes` are of its last stage's task or steps, or of the settings."""
    made = settings(kind, directory)
    *before, last = made.recipe.stages
    last = replace(last, steps=changes.pop("steps", last.steps))
    if "task" in changes:
        last = replace(last, task=replace(last.task, **changes.pop("task")))
    return pipeline.start(replace(made, recipe=replace(made.recipe, stages=(*before, last)), **changes))


def at_call(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, action: Callable[[], object]) -> None:
    """Do something just before call `number` of a function."""
    inner, calls = getattr(owner, name), [0]

    def outer(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            action()
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, name, outer)


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.set_num_threads(1)
    return fingerprint(run("dapo", tmp_path_factory.mktemp("alone") / "run"))


# --- signals ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_the_command_with_130_and_a_line_that_says_how_to_go_on(
    by: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_call(monkeypatch, Trainer, "update", 3, lambda: os.kill(os.getpid(), by))
    monkeypatch.setattr("posttrain.config.parse", lambda *_: settings("sft", tmp_path / "run"))
    assert cli.main(["run", "quickstart"]) == 130
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1] == f"posttrain: stopped after step 3 of sft; continue with: posttrain resume {tmp_path / 'run'}"
    assert checkpoint.newest(tmp_path / "run/checkpoints/sft") == (tmp_path / "run/checkpoints/sft/step-3", [])
    assert cli.main(["resume", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize("moment", ["check_stages", "run_stages", "_export", "_summary"])
def test_a_signal_outside_of_training_ends_the_command_at_once(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would go on to the next step otherwise, which there may not be, or be ended by SIGTERM without a word."""
    at_call(monkeypatch, pipeline, moment, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr("posttrain.config.parse", lambda *_: settings("sft", tmp_path / "run"))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert cli.main(["run", "quickstart"]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == f"posttrain: interrupted; continue with: posttrain resume {tmp_path / 'run'}\n"
    assert cli.main(["resume", str(tmp_path / "run")]) == 0


@pytest.fixture
def hangup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
def test_a_closed_terminal_ends_the_command_with_129_and_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def twice() -> None:  # by the kernel and by the shell
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)

    at_call(monkeypatch, Trainer, "update", 3, twice)
    monkeypatch.setattr("posttrain.config.parse", lambda *_: settings("sft", tmp_path / "run"))
    assert cli.main(["run", "quickstart"]) == 129
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1] == f"posttrain: stopped after step 3 of sft; continue with: posttrain resume {tmp_path / 'run'}"
    assert checkpoint.newest(tmp_path / "run/checkpoints/sft") == (tmp_path / "run/checkpoints/sft/step-3", [])
    assert Run(tmp_path / "run").events()[-1].details == {"error": "Interrupted"}


@pytest.mark.usefixtures("hangup")
def test_a_terminal_closed_before_training_ends_the_command_with_129(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_call(monkeypatch, pipeline, "run_stages", 1, lambda: os.kill(os.getpid(), signal.SIGHUP))
    monkeypatch.setattr("posttrain.config.parse", lambda *_: settings("sft", tmp_path / "run"))
    assert cli.main(["run", "quickstart"]) == 129
    more = f"continue with: posttrain resume {tmp_path / 'run'}"
    assert capsys.readouterr().err == f"posttrain: stopped because its terminal was closed; {more}\n"


@pytest.mark.usefixtures("hangup")
def test_nohup_goes_on_after_its_terminal_was_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    at_call(monkeypatch, Trainer, "update", 3, lambda: os.kill(os.getpid(), signal.SIGHUP))
    assert Run(run("sft", tmp_path / "run")).metrics()[-1].step > 3


def test_a_second_signal_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    at_call(monkeypatch, Trainer, "update", 4, twice)
    with pytest.raises(KeyboardInterrupt):
        run("sft", tmp_path / "run")
    assert Run(tmp_path / "run").metrics()[-1].step == 3
    assert checkpoint.newest(tmp_path / "run/checkpoints/sft")[0] == tmp_path / "run/checkpoints/sft/step-2", (
        "the write in the background was finished"
    )


def test_killed_while_a_reward_hangs_nobody_is_left_and_the_run_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, directory = tmp_path / "orders", tmp_path / "run"
    monkeypatch.setenv("LETTERS_ORDERS", str(orders))
    orders.write_text("hang")
    context = multiprocessing.get_context("fork")
    process = context.Process(target=run, args=("dapo", directory), kwargs={"task": {"limit": 60.0}, "steps": 2})
    process.start()
    deadline = time.monotonic() + 60
    while orders.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = descendants(process.pid or 0)
    assert len(workers) > 1, "the fork server, and a worker that is at it"
    process.kill()
    process.join(10)
    process.close()
    deadline = time.monotonic() + 5
    while any(running(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(running(worker) for worker in workers)
    pipeline.resume(directory, allow_code=True)
    assert Run(directory).summary is not None


# --- disks -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sft", pytest.param("dapo", marks=pytest.mark.slow)])
def test_a_disk_that_fills_up_stops_the_run_which_goes_on_later(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        at_call(patch, checkpoint, "save_file", 4, full)  # the optimizer of the second checkpoint
        with pytest.raises(UserError, match="no space left on .*; free some, then continue with: posttrain resume ") as stop:
            run(kind, tmp_path / "run")
    assert "\n" not in str(stop.value)
    (folder,) = (tmp_path / "run/checkpoints").iterdir()
    assert checkpoint.newest(folder) == (folder / "step-2", [])
    pipeline.resume(tmp_path / "run", allow_code=True)
    assert fingerprint(tmp_path / "run") == fingerprint(run(kind, tmp_path / "alone"))


def test_a_disk_that_is_really_full(mounted: Callable[[str], Path]) -> None:
    disk = mounted("size=3m")
    ballast = disk / "ballast"
    ballast.write_bytes(b"x" * 2_200_000)
    with pytest.raises(UserError, match="space|cannot write|cannot be saved"):
        run("sft", disk / "run")
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
    pipeline.resume(disk / "run")
    assert Run(disk / "run").metrics()[-1].step == 6


def test_a_read_only_disk_is_one_line_before_anything_is_trained(mounted: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match="cannot write the run directory .*: Read-only file system; choose another"):
        run("sft", mounted("ro") / "run")


def save_a_model(folder: Path) -> None:
    tokenizer = character_tokenizer("0123456789+= ")
    save(tiny_model(tokenizer, "mini", 0), tokenizer, folder)


def write_much(folder: Path) -> None:
    with RunWriter.create(folder, {}) as writer:
        writer.metrics("rl", 1, {"loss": 0.5})
        writer.event("message", {"text": "x" * 2 * LARGEST})


@pytest.mark.parametrize(
    ("write", "line"),
    [
        (
            partial(run, "sft"),
            "has reached the largest size allowed here; raise it .ulimit -f., then continue with: posttrain resume ",
        ),
        (save_a_model, "a file may not be that large here .ulimit -f.: .* could not be written"),
        (write_much, "has reached the largest size allowed here; raise it .ulimit -f., then continue with: posttrain resume "),
    ],
    ids=["checkpoint", "model", "line"],
)
def test_a_limit_on_the_size_of_files_is_one_line(write: Callable[[Path], Any], line: str, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, before[1]))
    try:
        with pytest.raises(UserError, match=line) as stop:
            write(tmp_path / "place")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(stop.value)


@pytest.mark.slow
def test_a_disk_that_becomes_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    at_call(monkeypatch, checkpoint, "save_file", 3, refuse)
    with pytest.raises(UserError, match="Read-only file system"):
        run("sft", tmp_path / "run")
    assert checkpoint.newest(tmp_path / "run/checkpoints/sft") == (tmp_path / "run/checkpoints/sft/step-2", [])


# --- rewards ---------------------------------------------------------------------------------------------------------------


def test_a_reward_worker_that_is_killed_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_alone: dict[str, Any]
) -> None:
    monkeypatch.setenv("LETTERS_ORDERS", str(tmp_path / "orders"))
    at_call(monkeypatch, Trainer, "update", 1, lambda: (tmp_path / "orders").write_text("die"))
    found = fingerprint(run("dapo", tmp_path / "run"))
    assert not (tmp_path / "orders").exists(), "it was killed"
    assert found == left_alone


@pytest.mark.parametrize("order", ["hang", pytest.param("raise", marks=pytest.mark.slow)])
def test_a_reward_that_fails_costs_its_limit_and_is_counted(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LETTERS_ORDERS", str(tmp_path / "orders"))
    at_call(monkeypatch, Trainer, "update", 1, lambda: (tmp_path / "orders").write_text(order))
    began = time.monotonic()
    run("dapo", tmp_path / "run", task={"limit": 5.0}, steps=2)
    assert time.monotonic() - began < 60
    assert sum(row.figures["failed"] > 0 for row in Run(tmp_path / "run").metrics("rl") if "failed" in row.figures) == 1


# --- trackers and the clock ------------------------------------------------------------------------------------------------


class Failing:
    """A service that breaks after two rows, and cannot even be closed."""

    def __init__(self, directory: Path, config: object) -> None:
        self.rows = 0

    def log(self, row: object) -> None:
        self.rows += 1
        if self.rows > 2:
            raise ConnectionError("the server is gone")

    def close(self) -> None:
        raise ConnectionError("still gone")


def test_a_tracker_that_fails_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "failing", Failing)  # type: ignore[arg-type]
    monkeypatch.setattr("posttrain.runs.trackers._require_installed", lambda name: None)
    run("sft", tmp_path / "run", trackers=("failing",))
    found = Run(tmp_path / "run")
    (warning,) = [event for event in found.events() if event.kind == "warning"]
    assert "tracker failing failed and is off for the rest of the run: ConnectionError" in warning.details["text"]
    assert [row.step for row in found.metrics()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("jump", [-7200.0, pytest.param(86400.0 * 365, marks=pytest.mark.slow)])
def test_the_clock_jumps(jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_alone: dict[str, Any]) -> None:
    """Back by two hours, or on by a year, in the middle: nothing waits, nothing times out, no duration is absurd."""
    real, shift = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])
    at_call(monkeypatch, Trainer, "update", 3, lambda: shift.__setitem__(0, jump))
    began = time.monotonic()
    run("dapo", tmp_path / "run")
    assert time.monotonic() - began < 60
    assert fingerprint(tmp_path / "run") == left_alone
    found = Run(tmp_path / "run")
    assert found.summary is not None
    assert 0 <= found.summary["seconds"] < 600 and 0 <= found.summary["stages"]["rl"]["seconds"] < 600
    assert all(0 <= row.figures.get("seconds/total", 0) < 600 for row in found.metrics())


@pytest.mark.slow
def test_interrupted_is_what_a_signal_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_call(monkeypatch, Trainer, "update", 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="stopped after step 1 of reward"):
        run("pipeline", tmp_path / "run")
