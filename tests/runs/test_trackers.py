"""Trackers are named, optional, and dropped when they fail."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
    assert "ConnectionError" in warning.details["text"]
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
    assert "TimeoutError: no answer within 0.2 s" in Run(writer.directory).events()[-1].details["text"]
    freed.set()


def test_a_tracker_that_cannot_close_does_not_spoil_the_end(writer: RunWriter) -> None:
    trackers = Trackers({"bad": Recorder(fail_close=True)}, writer)
    trackers.close()
    assert trackers.active == {}
    assert [event.kind for event in Run(writer.directory).events()] == ["open", "warning"]


def test_stopping_the_run_is_not_a_trackers_failure(writer: RunWriter) -> None:
    class Interrupting(Recorder):
        def log(self, row: Row) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trackers({"x": Interrupting()}, writer).log(writer.metrics("rl", 1, {}))


def test_absent_and_unknown_trackers_are_one_line(writer: RunWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if not installed
    with pytest.raises(UserError, match=r"pip install 'posttrain\[wandb\]'") as caught:
        Trackers.open(["wandb"], writer, {})
    assert "\n" not in str(caught.value)
    (tmp_path / "wandb" / "run-1").mkdir(parents=True)  # of runs elsewhere: Python takes any folder for a package
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(
        UserError, match=r"not installed \(\./wandb is a folder of files, not the package\); pip install 'posttrain\[wandb\]'"
    ):
        Trackers.open(["wandb"], writer, {})
    monkeypatch.delitem(sys.modules, "wandb")
    with pytest.raises(UserError, match="did you mean 'tensorboard'"):
        Trackers.open(["tensorbord"], writer, {})


def test_a_tracker_that_cannot_start_is_dropped(writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError("no network")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse))
    trackers = Trackers.open(["wandb"], writer, {})
    assert trackers.active == {}
    assert "no network" in Run(writer.directory).events()[-1].details["text"]


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


class Service:
    """Stands for wandb or trackio: keeps how each run was opened, and its rows."""

    def __init__(self) -> None:
        self.opened: list[dict[str, Any]] = []
        self.rows: list[dict[str, float]] = []

    def init(self, **settings: Any) -> Any:
        self.opened.append(settings)
        taken = settings.get("resume") == "never" and sum(s["name"] == settings["name"] for s in self.opened) > 1
        return SimpleNamespace(
            name="another-name" if taken else settings["name"],
            log=self.rows.append,
            define_metric=lambda *_, **__: None,
            finish=lambda: None,
        )


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Service:
    for variable in ("WANDB_PROJECT", "WANDB_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    made = Service()
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, made)
    return made


def attempts(tracker: str, directory: Path, *steps: range, stage: str = "rl") -> None:
    """A run of several attempts, each of which does some steps."""
    for number, some in enumerate(steps):
        with RunWriter.create(directory, {}) if number == 0 else RunWriter.resume(directory) as writer:
            trackers = Trackers.open([tracker], writer, {"threads": number})
            for step in some:
                trackers.log(writer.metrics(stage, step, {"reward": float(step)}))
            trackers.close()


@pytest.mark.parametrize("settings", ["none", "variable", "folder", "user"])
def test_the_project_of_wandb_is_the_users(
    settings: str, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if settings == "variable":
        monkeypatch.setenv("WANDB_PROJECT", "mine")
    elif settings != "none":
        folder = tmp_path / ("wandb" if settings == "folder" else "none")
        folder.mkdir()
        (folder / "settings").write_text("[default]\nentity = me\nproject = mine\n")
    attempts("wandb", tmp_path / "run", range(1), range(1))
    assert [s.get("project") for s in service.opened] == (["posttrain"] * 2 if settings == "none" else [None] * 2), (
        "W&B knows it"
    )


def test_a_resumed_run_is_one_run_of_wandb(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts("wandb", tmp_path / "a" / "run", range(1, 4), range(3, 6), range(6, 8))
    ids = [s["id"] for s in service.opened]
    assert len(set(ids)) == 1 and {s["resume"] for s in service.opened} == {"allow"}
    assert json.loads((tmp_path / "a" / "run" / "trackers.json").read_text()) == {"wandb": ids[0]}
    attempts("wandb", tmp_path / "b" / "run", range(1))
    assert service.opened[-1]["id"] != ids[0], "another directory is another run"
    monkeypatch.setenv("WANDB_RUN_ID", "chosen")
    attempts("wandb", tmp_path / "c", range(1), range(1))
    assert [s["id"] for s in service.opened[-2:]] == ["chosen", "chosen"]


def test_a_resumed_run_is_one_run_of_trackio(service: Service, tmp_path: Path) -> None:
    for parent in ("a", "b"):
        attempts("trackio", tmp_path / parent / "rl.lr=1e-4_seed=1", range(1), range(1))
    assert [(s["name"], s["resume"]) for s in service.opened] == [
        ("rl.lr=1e-4_seed=1", "never"), ("rl.lr=1e-4_seed=1", "allow"), ("rl.lr=1e-4_seed=1", "never"), ("another-name", "allow"),
    ], "a second directory of the same name does not write into the first one's run"  # fmt: skip


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_no_row_is_sent_twice(tracker: str, service: Service, tmp_path: Path) -> None:
    attempts(tracker, tmp_path / "on", range(1, 6), range(4, 8))
    assert [row["rl/step"] for row in service.rows] == [1, 2, 3, 4, 5, 6, 7], "the checkpoint was that of step 3"
    service.rows.clear()
    attempts(tracker, tmp_path / "anew", range(1, 3), range(1, 5))
    assert [row["rl/step"] for row in service.rows] == [1, 2, 1, 2, 3, 4], "a stage that begins anew has other figures"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"wandb": 3}', '{"wandb": "../x?"}', '{"wandb": "a\\nb"}', "[" * 99999])
def test_a_record_that_says_nothing_is_passed_over(text: str, service: Service, tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", {}) as writer:
        (tmp_path / "run" / "trackers.json").write_text(text)
        Trackers.open(["wandb"], writer, {}).close()
    assert re.fullmatch("[0-9a-f]{32}", service.opened[0]["id"])


def test_trackers_are_closed_however_a_run_ends(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain import pipeline
    from tests.faults.harness import settings

    closed: list[str] = []
    monkeypatch.setattr(Trackers, "close", lambda self: closed.append("closed"))
    monkeypatch.setattr(pipeline, "run_stages", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pipeline.start(dataclasses.replace(settings("sft", tmp_path / "run"), trackers=("wandb",)))
    assert closed == ["closed"]


def test_tensorboard_has_a_scalar_for_each_stage_and_figure(writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torch's SummaryWriter, which needs the tensorboard package; a stand-in takes its place here."""
    calls: list[tuple[Any, ...]] = []

    class SummaryWriter:
        def __init__(self, log_dir: str) -> None:
            calls.append(("open", Path(log_dir).name))

        def add_scalar(self, tag: str, scalar_value: float, global_step: int, walltime: float) -> None:
            calls.append((tag, scalar_value, global_step))

        def close(self) -> None:
            calls.append(("close",))

    monkeypatch.setitem(sys.modules, "tensorboard", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    trackers = Trackers.open(["tensorboard"], writer, {})
    trackers.log(writer.metrics("rl", 1, {"reward": 0.5}))
    trackers.close()
    assert calls == [("open", "tensorboard"), ("rl/reward", 0.5, 1), ("close",)]


@pytest.mark.peers
def test_tensorboard_files_hold_the_figures(writer: RunWriter) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers.open(["tensorboard"], writer, {})
    for step in (1, 2):
        trackers.log(writer.metrics("rl", step, {"reward": 0.5 * step}))
    trackers.close()
    assert trackers.active == {}
    events = EventAccumulator(str(writer.directory / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("rl/reward")] == [(1, 0.5), (2, 1.0)]


@pytest.mark.peers
def test_tensorboard_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    attempts("tensorboard", tmp_path / "run", range(1, 6), range(4, 8))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("rl/reward")] == [1, 2, 3, 4, 5, 6, 7]
