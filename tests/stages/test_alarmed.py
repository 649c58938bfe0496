"""Alarms within a run: what they look at is among the figures, what they say is an event, and is shown at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from posttrain import config, pipeline
from posttrain.algorithms.grpo import GRPO
from posttrain.errors import Interrupted
from posttrain.loop import Loop
from posttrain.monitor.monitor import Monitor
from posttrain.monitor.rules import Alarm
from posttrain.recipes.base import Recipe
from posttrain.runs.read import Run
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.types import Sampling

STAGE = RLStage(
    name="rl", model="tiny:nano", task=Arithmetic(level=1), steps=4, prompts=2, algorithm=GRPO(group=2), sampling=Sampling(6),
    evaluate_every=0, checkpoint_every=2,
)  # fmt: skip


def test_an_alarm_is_an_event_and_is_shown_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, Mapping[str, float]]] = []
    looks: list[int] = []
    whole = Monitor.observe

    def observe(self: Monitor, step: int, figures: Mapping[str, float]) -> list[Alarm]:
        seen.append((step, figures))
        looks.append(self.keywords.steps)
        assert whole(self, step, figures) == []
        return [Alarm("proxy", f"step {step}: the gold fell", False)] if step in (2, 4) else []

    def dying(self: Loop) -> object:
        if self.step == 3:
            raise Interrupted("the plug was pulled")
        return one_step(self)

    one_step = Loop.one_step
    monkeypatch.setattr(Monitor, "observe", observe)
    settings = config.Settings(Recipe((STAGE,)), "test", threads=1, device="cpu", out=str(tmp_path / "run"))
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "one_step", dying)
        with pytest.raises(Interrupted):
            pipeline.start(settings)
    capsys.readouterr()
    pipeline.resume(tmp_path / "run")
    assert [step for step, _ in seen] == [1, 2, 3, 3, 4], "the second attempt goes on from step 2"
    assert looks == [1, 2, 3, 3, 4], "with what the first had seen"
    assert all({"distinct", "keyword", "reward", "entropy", "groups/zero_variance"} <= set(figures) for _, figures in seen)
    events = [event for event in Run(tmp_path / "run").events() if event.kind == "alarm" and event.details["rule"] == "proxy"]
    assert [(e.details["stage"], e.details["step"]) for e in events] == [("rl", 2), ("rl", 4)]
    shown = capsys.readouterr().out
    assert "warning: proxy: step 4" in shown
    assert "alarm:    rl: proxy: step 4: the gold fell" in shown
    assert "rl: proxy: step 4: the gold fell" in json.loads((tmp_path / "run/summary.json").read_text())["alarms"]
