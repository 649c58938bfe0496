"""The reader: the attempt that counts, torn lines, and runs that are not quite right."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import posttrain as pt
from posttrain.errors import UserError
from posttrain.runs.layout import TokenArrays, rollout_file
from posttrain.runs.read import Run
from posttrain.runs.tokens import spell
from posttrain.runs.write import RunWriter
from posttrain.types import Problem, Rollout, Score, Segment


def rollout(text: str) -> Rollout:
    segment = Segment(np.array([5, 6]), text, True, np.zeros(2, np.float32), versions=np.full(2, 1, np.int32), finish="length")
    return Rollout(Problem("p", "1+1", "2"), 0, (segment,), Score(0.0, outcome="wrong"))


def rewards(run: Run, stage: str = "rl") -> dict[int, float]:
    return {row.step: row.figures["reward"] for row in run.metrics(stage)}


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    figures = {"reward": 0.5, "loss": float("nan"), "low": -float("inf"), "high": float("inf")}
    with RunWriter.create(tmp_path / "run", {"seed": 3, "rate": 1e-5}) as writer:
        writer.metrics("rl", 1, figures)
        writer.event("alarm", {"message": "entropy fell", "value": 0.1})
        writer.rollouts("rl", 1, [rollout("= 2")], [float("nan")], TokenArrays(np.array([0, 2]), {"ids": np.array([5, 6])}))
        writer.summary({"after": {"value": 0.75}})
    run = Run(tmp_path / "run")
    assert (run.name, run.config, run.summary) == ("run", {"seed": 3, "rate": 1e-5}, {"after": {"value": 0.75}})
    (row,) = run.metrics()
    assert (row.stage, row.step, row.attempt) == ("rl", 1, 1)
    assert math.isnan(row.figures["loss"])
    assert (row.figures["reward"], row.figures["low"], row.figures["high"]) == (0.5, -math.inf, math.inf)
    alarm = run.events()[-1]
    assert (alarm.kind, alarm.attempt, dict(alarm.details)) == ("alarm", 1, {"message": "entropy fell", "value": 0.1})
    (read,) = run.rollouts("rl", 1)
    assert (read.response, read.reward, read.finish, read.length, read.version) == ("= 2", 0.0, "length", 2, 1)
    assert read.advantage is not None
    assert math.isnan(read.advantage)
    arrays = run.arrays("rl", 1)
    assert arrays is not None
    assert arrays.sequence(0)["ids"].tolist() == [5, 6]
    assert run.rollout_steps("rl") == [1]
    assert (run.rollouts("rl", 2), run.arrays("rl", 2), run.rollout_steps("other")) == ([], None, [])


def test_a_later_attempt_supersedes_what_lay_beyond_its_start(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        for step in range(1, 8):
            writer.metrics("rl", step, {"reward": 0.1 * step, "old": 1.0})
            writer.rollouts("rl", step, [rollout("old")])
    with RunWriter.resume(tmp_path) as writer:  # its checkpoint was of step 4
        writer.resumed("rl", 4)
        writer.metrics("rl", 5, {"reward": 5.0})
        writer.rollouts("rl", 5, [rollout("new")])
    run = Run(tmp_path)
    assert rewards(run) == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4, 5: 5.0})
    assert "old" not in run.metrics()[-1].figures
    assert run.rollout_steps("rl") == [1, 2, 3, 4, 5]
    assert [row.response for row in run.rollouts("rl", 5)] == ["new"]
    assert run.rollouts("rl", 6) == []
    steps, values = run.column("old", "rl")
    assert (steps.tolist(), values.tolist()) == ([1, 2, 3, 4], [1.0] * 4)


def test_going_back_to_an_earlier_stage_drops_the_later_ones(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        for step in (1, 2, 3):
            writer.metrics("sft", step, {"reward": float(step)})
        for step in (1, 2):
            writer.metrics("rl", step, {"reward": float(step)})
    with RunWriter.resume(tmp_path) as writer:
        writer.resumed("sft", 2)
        writer.metrics("sft", 3, {"reward": 33.0})
        writer.metrics("rl", 1, {"reward": 11.0})
    run = Run(tmp_path)
    assert rewards(run, "sft") == {1: 1.0, 2: 2.0, 3: 33.0}
    assert rewards(run) == {1: 11.0}
    assert run.stages() == ["sft", "rl"]


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_stage_that_went_on_keeps_its_steps_though_an_earlier_one_ran_again(attempts: int, tmp_path: Path) -> None:
    """As after the removal of stages/sft: sft ends as before, so that rl goes on from its checkpoint of step 2."""
    with RunWriter.create(tmp_path, {}) as writer:
        writer.metrics("sft", 1, {"reward": 1.0})
        for step in (1, 2, 3):
            writer.metrics("rl", step, {"reward": float(step)})
            writer.rollouts("rl", step, [rollout("old")])
    for attempt in range(attempts):  # the first of two is killed between the stages
        with RunWriter.resume(tmp_path) as writer:
            if attempt == 0:
                writer.resumed("sft", -1)
                writer.metrics("sft", 1, {"reward": 1.0})
            if attempt == attempts - 1:
                writer.resumed("rl", 2)
                writer.metrics("rl", 3, {"reward": 33.0})
    assert rewards(Run(tmp_path)) == {1: 1.0, 2: 2.0, 3: 33.0}
    assert Run(tmp_path).rollout_steps("rl") == [1, 2]


def test_resuming_a_later_stage_keeps_the_earlier_ones(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        writer.metrics("sft", 100, {"reward": 1.0})
        writer.metrics("rl", 1, {"reward": 0.1})
    with RunWriter.resume(tmp_path) as writer:
        writer.resumed("rl", 0)
        writer.metrics("rl", 1, {"reward": 0.2})
    assert rewards(Run(tmp_path), "sft") == {100: 1.0}
    assert rewards(Run(tmp_path)) == {1: 0.2}


def test_three_attempts_and_the_last_that_reached_a_step_wins(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        for step in range(1, 7):
            writer.metrics("rl", step, {"reward": 1.0})
    with RunWriter.resume(tmp_path) as writer:
        writer.resumed("rl", 2)
        for step in range(3, 6):
            writer.metrics("rl", step, {"reward": 2.0})
    with RunWriter.resume(tmp_path) as writer:
        writer.resumed("rl", 4)
        writer.metrics("rl", 5, {"reward": 3.0})
    assert rewards(Run(tmp_path)) == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0, 5: 3.0}


def test_without_a_resume_event_the_same_step_still_goes_to_the_last_attempt(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        writer.metrics("rl", 1, {"reward": 1.0})
        writer.metrics("rl", 2, {"reward": 1.0})
    with RunWriter.resume(tmp_path) as writer:
        writer.metrics("rl", 2, {"reward": 2.0})
    assert rewards(Run(tmp_path)) == {1: 1.0, 2: 2.0}


def test_two_rows_of_one_attempt_and_step_are_one(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        writer.metrics("rl", 1, {"reward": 0.5, "loss": 1.0})
        writer.metrics("rl", 1, {"accuracy/test": 0.25, "loss": 2.0})
    (row,) = Run(tmp_path).metrics()
    assert row.figures == {"reward": 0.5, "loss": 2.0, "accuracy/test": 0.25}


def test_torn_and_foreign_lines_are_skipped(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        writer.metrics("rl", 1, {"reward": 0.5})
    with (tmp_path / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"someone": "else"}\n\xff\xfe\n{"step":2,"stage":"rl","attempt":1,"time":0,"rew')
    run = Run(tmp_path)
    assert rewards(run) == {1: 0.5}


def test_reading_never_changes_the_run(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        writer.metrics("rl", 1, {"reward": 0.5})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run = Run(tmp_path)
    run.metrics(), run.events(), run.rollout_steps("rl"), run.config, run.summary
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_live_run_is_followed(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        run = Run(tmp_path)
        assert run.metrics() == []
        assert run.summary is None
        writer.metrics("rl", 1, {"reward": 0.5})
        assert rewards(run) == {1: 0.5}


def test_clear_lines_for_what_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run in"):
        Run(tmp_path / "absent")
    (tmp_path / "sweep" / "lr=1").mkdir(parents=True)
    (tmp_path / "sweep" / "lr=1" / "config.yaml").write_text("format: 1\n")
    for opened in (Run, pt.load):
        with pytest.raises(UserError, match=r"no run in .*sweep: it has no config.yaml; .*sweep/lr=1 is one$"):
            opened(tmp_path / "sweep")
    (tmp_path / "config.yaml").write_text("a: [1\n")
    with pytest.raises(UserError, match="not valid YAML") as caught:
        Run(tmp_path).config
    assert "\n" not in str(caught.value)
    (tmp_path / "config.yaml").write_text("- 1\n")
    with pytest.raises(UserError, match="does not hold a configuration"):
        Run(tmp_path).config
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        Run(tmp_path).summary


def test_a_configuration_cannot_run_code(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"a: !!python/object/apply:os.mkdir ['{tmp_path}/pwned']\n")
    with pytest.raises(UserError, match="not valid YAML"):
        Run(tmp_path).config
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("stage", ["../../etc", "..", "a/b", "a\\b", "/etc", "C:", "", "a\x00b", "%2e%2e", "x" * 200])
def test_a_stage_is_never_a_path(tmp_path: Path, stage: str) -> None:
    RunWriter.create(tmp_path, {}).close()
    for read in (Run(tmp_path).rollouts, Run(tmp_path).arrays):
        with pytest.raises(UserError, match="plain name"):
            read(stage, 1)


def test_rollout_lines_of_other_programs_are_left_out(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        writer.rollouts("rl", 1, [rollout("ok")])
    path = tmp_path / "rollouts/rl/step-000001.jsonl"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "extra": 1}) + "\n" + json.dumps({"problem": "p"}) + "\n")
    assert [row.response for row in Run(tmp_path).rollouts("rl", 1)] == ["ok"]


@pytest.mark.skipif(sys.platform != "linux", reason="names of bytes that are not UTF-8")
def test_tokens_are_spelled_in_a_folder_that_is_not_utf8(tmp_path: Path) -> None:
    directory = tmp_path / "caf\udce9"
    file = rollout_file(directory, "rl", 0).with_name("tokenizer.json")
    file.parent.mkdir(parents=True)
    file.write_text(Tokenizer(WordLevel({"yes": 0})).to_str())
    assert spell(directory, "rl", [0]) == ["yes"]
