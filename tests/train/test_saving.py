"""Saving in the background: what is written is what was there, errors come out, nothing is left running, the hook is a guest."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from events_for_tests import Emitted
from material_for_tests import small_policy

from posttrain.errors import UserError
from posttrain.train import checkpoint, saving
from posttrain.train.checkpoint import Checkpoint
from posttrain.train.saving import Saving, Store, run_hook


@pytest.fixture
def events() -> Emitted:
    return Emitted()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writing waits until the event is set: a disk that takes its time."""
    gate, real = threading.Event(), checkpoint.save_file

    def waits(*arguments: Any) -> None:
        assert gate.wait(20)
        real(*arguments)

    monkeypatch.setattr(checkpoint, "save_file", waits)
    return gate


def made(step: int, value: float = 1.0) -> Checkpoint:
    return Checkpoint(step, {"w": torch.full((4, 3), value)}, {"m": torch.full((2,), value)}, {"stage": "rl", "list": [step]})


def test_what_changes_after_save_returns_does_not_enter_the_file(
    tmp_path: Path, events: Emitted, slow: threading.Event
) -> None:
    store, one = Store(tmp_path, events=events), made(1, 1.0)
    began = time.monotonic()
    store.save(one)
    assert time.monotonic() - began < 5, "the step does not wait for the disk"
    assert not (tmp_path / "step-1").exists()
    one.model["w"].fill_(2.0)
    one.optimizer["m"].fill_(2.0)
    one.state["list"].append("later")
    slow.set()
    store.finish()
    found = checkpoint.load(tmp_path / "step-1")
    assert found.model["w"].eq(1).all() and found.optimizer["m"].eq(1).all() and found.state["list"] == [1]
    (event,) = events.of("checkpoint")
    assert event["step"] == 1 and event["stage"] == "rl" and event["bytes"] == checkpoint.size(tmp_path / "step-1") > 300
    assert event["seconds"] >= 0 and event["waited"] >= 0


def test_synchronous_saving_is_done_when_it_returns(tmp_path: Path, events: Emitted) -> None:
    before = threading.active_count()
    Store(tmp_path, Saving(synchronous=True), events).save(made(1))
    assert checkpoint.verify(tmp_path / "step-1") is None and threading.active_count() <= before


def test_size_and_time_are_a_message_once(tmp_path: Path, events: Emitted) -> None:
    store = Store(tmp_path, Saving(synchronous=True), events)
    store.save(made(1))
    store.save(made(2))
    first, second = events.texts
    assert first.startswith("checkpoint at step 1: 0.0 MB in 0.") and second == ""


def test_what_is_being_written_counts_as_there_for_whoever_names_the_last(
    tmp_path: Path, events: Emitted, slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, events=events)
    store.save(made(1))
    threading.Timer(0.2, slow.set).start()
    assert [path.name for path in store.published()] == ["step-1"]
    monkeypatch.setattr(checkpoint, "save_file", lambda *_: 1 / 0)
    store.save(made(2))
    assert [path.name for path in store.published()] == ["step-1"], "one that failed does not; why, `check` says"
    with pytest.raises(ZeroDivisionError):
        store.check()


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, events: Emitted, slow: threading.Event) -> None:
    store = Store(tmp_path, events=events)
    store.save(made(1))
    threading.Timer(0.3, slow.set).start()
    store.save(made(2))
    assert checkpoint.verify(tmp_path / "step-1") is None, "the first is published before the second begins"
    store.finish()
    assert [row["step"] for row in events.of("checkpoint")] == [1, 2] and events.of("checkpoint")[1]["waited"] >= 0.2


@pytest.mark.parametrize("look", ["check", "save", "finish", "exit"])
def test_an_error_comes_out_where_somebody_looks(
    look: str, tmp_path: Path, events: Emitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = Store(tmp_path, events=events)
    store.save(made(1))
    store.finish()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        store.save(made(2))
        assert store._thread is not None
        store._thread.join(10)
    with pytest.raises(OSError, match="No space left on device"):
        {
            "check": store.check,
            "save": lambda: store.save(made(3)),
            "finish": store.finish,
            "exit": lambda: store.__exit__(None, None, None),
        }[look]()
    assert checkpoint.newest(tmp_path) == (tmp_path / "step-1", []), "the one before is intact"
    store.finish()  # raised once


def test_a_state_that_is_not_json_is_an_error_at_once(tmp_path: Path, events: Emitted) -> None:
    with pytest.raises(ValueError):
        Store(tmp_path, events=events).save(Checkpoint(1, {}, {}, {"x": float("nan")}))


def test_leaving_a_stage_finishes_the_write_and_keeps_the_first_error(
    tmp_path: Path, events: Emitted, slow: threading.Event
) -> None:
    before = threading.active_count()
    threading.Timer(0.2, slow.set).start()

    def fails() -> None:
        with Store(tmp_path, events=events) as store:
            store.save(made(7))
            raise KeyError("the reason")

    with pytest.raises(KeyError, match="the reason"):
        fails()
    assert checkpoint.verify(tmp_path / "step-7") is None and threading.active_count() <= before + 1  # the timer may still end


def test_a_disk_that_hangs_is_an_error_in_bounded_time(
    tmp_path: Path, events: Emitted, slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "LONGEST_WRITE", 0.1)
    store = Store(tmp_path, events=events)
    store.save(made(1))
    with pytest.raises(UserError, match="has been written for 0 s and is not done; look at the disk"):
        store.finish()
    slow.set()
    monkeypatch.setattr(saving, "LONGEST_WRITE", 10.0)
    store.finish()


@pytest.mark.parametrize("damage", ["model.safetensors", "manifest.json"])
def test_nothing_is_removed_while_the_newest_is_not_whole(damage: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, made(1))
    checkpoint.save(tmp_path, made(2))
    (tmp_path / "step-2" / damage).unlink()
    checkpoint.prune(tmp_path, 1, 2)
    assert checkpoint.newest(tmp_path)[0] == tmp_path / "step-1"


def test_a_checkpoint_that_cannot_be_removed_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, made(1))
    checkpoint.save(tmp_path, made(2))
    real = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "step-1":
            raise OSError(errno.EPERM, "Operation not permitted")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    checkpoint.save(tmp_path, made(3), keep=1)
    assert checkpoint.newest(tmp_path) == (tmp_path / "step-3", [])
    assert not (tmp_path / "step-2").exists()


def test_killed_between_the_two_renames_of_a_replacement(tmp_path: Path) -> None:
    """The checkpoint that is being replaced is out of its place for a moment; a reader afterwards puts it back."""
    checkpoint.save(tmp_path, made(4)).rename(tmp_path / ".step-4.old")
    assert checkpoint.newest(tmp_path) == (tmp_path / "step-4", [])


def test_what_an_interrupted_removal_left_is_swept_by_a_resume(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, made(1))
    checkpoint.save(tmp_path, made(2)).rename(tmp_path / ".step-2.gone")
    assert Store(tmp_path).newest() == (tmp_path / "step-1", [])
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_format_one_still_loads(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, made(5))
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 1}))
    assert checkpoint.newest(tmp_path) == (path, []) and checkpoint.load(path).step == 5


def test_a_models_identity_is_its_weights() -> None:
    one, same, other = (small_policy(seed, torch.float32).model for seed in (0, 0, 1))
    assert checkpoint.identity(one) == checkpoint.identity(same) != checkpoint.identity(other)
    before = checkpoint.identity(one.bfloat16())
    with torch.no_grad():
        next(one.parameters()).view(torch.int16).flatten()[3] ^= 1  # the lowest bit of one number
    assert checkpoint.identity(one) != before


def script(tmp_path: Path, body: str) -> tuple[str, ...]:
    file = tmp_path / "hook.py"
    file.write_text(body)
    return (sys.executable, str(file))


def test_the_hook_gets_the_published_checkpoint_and_no_shell(tmp_path: Path, events: Emitted) -> None:
    copy = script(tmp_path, "import shutil, sys\nshutil.copytree(sys.argv[2], sys.argv[1] + '/copied')")
    store = Store(tmp_path / "$(touch evil); c", Saving(hook=(*copy, str(tmp_path))), events)
    store.save(made(1))
    store.finish()
    assert (tmp_path / "copied" / "manifest.json").is_file() and not (tmp_path / "evil").exists()
    assert len(events.of("checkpoint_hook")) == 1 and events.of("warning") == []


def test_the_hook_may_say_where_the_directory_goes(tmp_path: Path, events: Emitted) -> None:
    copy = script(tmp_path, "import shutil, sys\nshutil.copytree(sys.argv[1], sys.argv[2])")
    store = Store(tmp_path / "c", Saving(hook=(*copy, "{}", str(tmp_path / "copied"))), events)
    store.save(made(3))
    store.finish()
    assert checkpoint.size(tmp_path / "copied") == checkpoint.size(tmp_path / "c" / "step-3") and events.of("warning") == []


def test_a_hook_that_fails_is_warned_of_and_counted(tmp_path: Path, events: Emitted) -> None:
    fails = script(tmp_path, "import sys\nsys.stderr.write('first\\nno such bucket\\n')\nsys.exit(7)")
    store = Store(tmp_path / "c", Saving(hook=fails), events)
    for step in (1, 2):
        store.save(made(step))
    store.finish()
    assert [row["failures"] for row in events.of("warning")] == [1, 2]
    assert events.of("warning")[1]["text"] == (
        f"checkpoint_hook failed for step-2 (2 so far): {sys.executable} exited with 7: no such bucket"
    )
    assert checkpoint.newest(tmp_path / "c")[0] is not None


def test_nobody_waits_for_a_hook_and_what_it_copies_stays(tmp_path: Path, events: Emitted) -> None:
    """A slow copy of the first checkpoint: three more are written meanwhile, the newest of which is copied next."""
    go = tmp_path / "go"
    waits = script(
        tmp_path, "import os, sys, time\nwhile not os.path.exists(sys.argv[1]):\n    time.sleep(0.02)\nos.listdir(sys.argv[2])"
    )
    store = Store(tmp_path / "c", Saving(hook=(*waits, str(go)), keep=1), events)
    began = time.monotonic()
    for step in (1, 2, 3, 4):
        store.save(made(step))
    store._written()
    assert time.monotonic() - began < 20 and len(events.of("checkpoint")) == 4
    assert {path.name for path in (tmp_path / "c").iterdir()} >= {"step-1", "step-4"} and events.of("checkpoint_hook") == []
    go.touch()
    store.finish()
    assert [Path(row["checkpoint"]).name for row in events.of("checkpoint_hook")] == ["step-1", "step-4"]
    assert events.of("warning") == [] and store._copying == []


def test_a_hook_that_does_not_exist_or_hangs(tmp_path: Path) -> None:
    assert run_hook(("/no/such/program",), 5.0) == "/no/such/program: No such file or directory"
    mark = tmp_path / "pid"
    hangs = script(
        tmp_path, "import os, sys, time\nif os.fork() == 0:\n    open(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(60)"
    )
    began = time.monotonic()
    assert run_hook((*hangs, str(mark)), 1.0) == f"{sys.executable} took more than 1 s and was ended"
    assert time.monotonic() - began < 10
    time.sleep(0.2)
    if mark.exists() and mark.read_text():  # what it started is gone too, or a zombie that nobody has waited for
        stat = Path("/proc") / mark.read_text() / "stat"
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
    assert os.path.exists(tmp_path)


@pytest.mark.parametrize("bad", [{"keep": 0}, {"hook_seconds": 0.0}])
def test_settings_that_make_no_sense(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        Saving(**bad)
