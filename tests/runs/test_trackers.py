"""Trackers are guests: named, optional, and thrown out when they misbehave."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.errors import UserError
from posttrain.runs.layout import Row
from posttrain.runs.read import Run
from posttrain.runs.trackers import Trackers
from posttrain.runs.write import RunWriter


class Recorder:
    def __init__(self, fail_at: int | None = None, fail_close: bool = False) -> None:
        self.rows: list[Row] = []
        self.fail_at, self.fail_close, self.closed = fail_at, fail_close, False

    def log(self, row: Row) -> None:
        if row.step == self.fail_at:
            raise ConnectionError("server \x1b[31mgone")
        self.rows.append(row)

    def close(self) -> None:
        if self.fail_close:
            raise RuntimeError("cannot flush")
        self.closed = True


@pytest.fixture
def writer(tmp_path: Path):
    with RunWriter.create(tmp_path, {}) as writer:
        yield writer


def test_a_tracker_that_raises_is_dropped_with_an_event_and_the_others_go_on(writer: RunWriter) -> None:
    bad, good = Recorder(fail_at=2), Recorder()
    trackers = Trackers({"bad": bad, "good": good}, writer)
    for step in (1, 2, 3):
        trackers.log(writer.metrics("rl", step, {"reward": 0.5}))
    trackers.close()
    assert [row.step for row in bad.rows] == [1]
    assert [row.step for row in good.rows] == [1, 2, 3]
    assert (bad.closed, good.closed) == (False, True)
    (warning,) = [event for event in Run(writer.directory).events() if event.kind == "warning"]
    assert warning.details["tracker"] == "bad"
    assert "ConnectionError" in warning.details["message"]
    assert [row.step for row in Run(writer.directory).metrics()] == [1, 2, 3]


def test_a_tracker_that_hangs_is_dropped_in_bounded_time(writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    hung, freed = [], threading.Event()

    class Hanging(Recorder):
        def log(self, row: Row) -> None:
            hung.append(row.step)
            freed.wait(30)

    monkeypatch.setattr("posttrain.runs.trackers.LOGGING_SECONDS", 0.2)
    good = Recorder()
    trackers = Trackers({"bad": Hanging(), "good": good}, writer)
    began = time.monotonic()
    for step in (1, 2, 3):
        trackers.log(writer.metrics("rl", step, {"reward": 0.5}))
    assert time.monotonic() - began < 5 and hung == [1]
    assert [row.step for row in good.rows] == [1, 2, 3]
    assert "TimeoutError: no answer within 0.2 s" in Run(writer.directory).events()[-1].details["message"]
    freed.set()


def test_a_tracker_that_cannot_close_does_not_spoil_the_end(writer: RunWriter) -> None:
    trackers = Trackers({"bad": Recorder(fail_close=True)}, writer)
    trackers.close()
    assert trackers.active == ()
    assert [event.kind for event in Run(writer.directory).events()] == ["open", "warning"]


def test_stopping_the_run_is_not_a_trackers_failure(writer: RunWriter) -> None:
    class Interrupting(Recorder):
        def log(self, row: Row) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trackers({"x": Interrupting()}, writer).log(writer.metrics("rl", 1, {}))


def test_absent_and_unknown_trackers_are_one_line(writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if not installed
    with pytest.raises(UserError, match=r"pip install 'posttrain\[wandb\]'") as caught:
        Trackers.open(["wandb"], writer, {})
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="did you mean 'tensorboard'"):
        Trackers.open(["tensorbord"], writer, {})


def test_a_tracker_that_cannot_start_is_dropped(writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError("no network")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse))
    trackers = Trackers.open(["wandb"], writer, {})
    assert trackers.active == ()
    assert "no network" in Run(writer.directory).events()[-1].details["message"]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_rows_reach_the_service_by_stage(name: str, writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []
    service = SimpleNamespace(
        log=lambda row: calls.append(("log", row)),
        define_metric=lambda metric, step_metric: calls.append(("axis", metric, step_metric)),
        finish=lambda: calls.append(("finish",)),
    )
    started = {}
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=lambda **settings: started.update(settings) or service))
    trackers = Trackers.open([name], writer, {"seed": 1})
    for step in (1, 2):
        trackers.log(writer.metrics("rl", step, {"reward": 0.5 * step}))
    trackers.close()
    assert (started["name"], started["config"]) == (writer.directory.name, {"seed": 1})
    assert [call for call in calls if call[0] != "axis"] == [
        ("log", {"rl/step": 1, "rl/reward": 0.5}),
        ("log", {"rl/step": 2, "rl/reward": 1.0}),
        ("finish",),
    ]
    assert sum(call[0] == "axis" for call in calls) == (1 if name == "wandb" else 0)


@pytest.mark.peers
def test_tensorboard_files_hold_the_figures(writer: RunWriter) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers.open(["tensorboard"], writer, {})
    for step in (1, 2):
        trackers.log(writer.metrics("rl", step, {"reward": 0.5 * step}))
    trackers.close()
    assert trackers.active == ()
    events = EventAccumulator(str(writer.directory / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("rl/reward")] == [(1, 0.5), (2, 1.0)]
