"""The one channel of messages: who emits, who subscribes, what a terminal shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from events_for_tests import Emitted

from posttrain.events import Event, Events
from posttrain.models.layers import report_plain_path
from posttrain.runs.read import Run
from posttrain.runs.trackers import Trackers
from posttrain.runs.write import RunWriter
from posttrain.stages.base import Context, load_policy


def test_a_message_is_shown_and_every_event_is_delivered() -> None:
    shown: list[Event] = []
    delivered: list[Event] = []
    events = Events(shown.append)
    events.subscribe(delivered.append)
    events.emit("checkpoint", stage="rl", step=3, data={"bytes": 5})
    events.emit("memory", "token_budget is halved", "warning", stage="rl", step=4)
    assert delivered == [
        Event("checkpoint", stage="rl", step=3, data={"bytes": 5}),
        Event("memory", "token_budget is halved", "warning", "rl", 4),
    ]
    assert shown == delivered[1:], "an event without a text is for the run directory alone"


def test_an_event_is_where_the_run_is_unless_it_names_a_place() -> None:
    events = Emitted()
    with events.at("rl", 7):
        events.emit("curriculum", "level 2 opens")
        events.emit("checkpoint", stage="sft", step=2)
        events.emit("stage", stage="sft")
    events.emit("message", "done")
    assert [(e.stage, e.step) for e in events.all] == [("rl", 7), ("sft", 2), ("sft", None), ("", None)]


def test_a_panel_shows_messages_while_it_is_open() -> None:
    terminal: list[Event] = []
    panel: list[Event] = []
    events = Events(terminal.append)
    with events.shown_by(panel.append):
        events.emit("message", "one")
    events.emit("message", "two")
    assert [e.text for e in panel] == ["one"] and [e.text for e in terminal] == ["two"]


def test_without_a_console_messages_go_to_stderr_and_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    Events().emit("message", "model said \x1b]0;title\x07\nforged line", "warning", stage="rl")
    assert capsys.readouterr() == ("", "rl: warning: model said \\x1b]0;title\\x07\\nforged line\n")


def test_the_run_directory_stores_place_text_level_and_data(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer, writer.events.shown_by(lambda event: None):
        writer.events.emit("alarm", "kl: step 3: far", "stop", stage="rl", step=3, data={"rule": "kl"})
        writer.events.emit("stage", stage="rl")
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()][1:]
    for row in rows:
        del row["time"]
    assert rows == [
        {"kind": "alarm", "attempt": 1, "stage": "rl", "step": 3, "text": "kl: step 3: far", "level": "stop", "rule": "kl"},
        {"kind": "stage", "attempt": 1, "stage": "rl"},
    ]
    assert Run(tmp_path).events()[1].details["rule"] == "kl"


def test_trackers_mark_the_alarms_of_a_step(tmp_path: Path) -> None:
    rows = []

    class Recorder:
        def log(self, row: object) -> None:
            rows.append(row)

        def close(self) -> None: ...

    with RunWriter.create(tmp_path, {}) as writer, writer.events.shown_by(lambda event: None):
        Trackers({"one": Recorder()}, writer)
        writer.events.emit("alarm", "kl: far", "warning", stage="rl", step=3, data={"rule": "kl"})
        writer.events.emit("alarm", "length: long", "warning", stage="versus", data={"rule": "length"})
        writer.events.emit("memory", "halved", stage="rl", step=3)
    assert [(row.stage, row.step, dict(row.figures)) for row in rows] == [("rl", 3, {"alarm/kl": 1.0})]


def test_messages_about_a_model_go_to_the_run_that_loaded_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        policy = load_policy("tiny:nano", Context(writer, seed=0), "ab")
        report_plain_path(policy, "training", "a reason")
        report_plain_path(policy, "training", "a reason")
    (event,) = [event for event in Run(tmp_path).events() if event.kind == "message"]
    assert event.details["level"] == "warning" and "takes the plain pass" in event.details["text"]
    assert capsys.readouterr().out == f"warning: {event.details['text']}\n", "once"
