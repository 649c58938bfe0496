"""The writer: whole lines, whole files, one writer, and a run that survives being killed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from posttrain.errors import UserError
from posttrain.runs import layout, write
from posttrain.runs.layout import TokenArrays
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.types import Problem, Rollout, Score, Segment


def lines(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_bytes().splitlines()]


def rollout(sample: int = 0, text: str = "= 46", score: Score | None = None, version: int = 3) -> Rollout:
    problem = Problem("add-1", "12+34", "46", level=2)
    prompt = Segment(np.array([1, 2]), "12+34", sampled=False)
    response = Segment(
        np.array([5, 6, 7]), text, True, np.zeros(3, np.float32), versions=np.full(3, version, np.int32), finish="stop"
    )
    return Rollout(problem, sample, (prompt, response), score or Score(1.0, {"format": 0.5}, outcome="correct"))


def arrays(*lengths: int) -> TokenArrays:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(starts[-1])
    return TokenArrays(starts, {"ids": np.arange(total), "logprob": -np.ones(total, np.float32)})


def test_create_writes_the_configuration_and_the_first_event(tmp_path: Path) -> None:
    config = {"recipe": "quickstart", "rate": 1e-5, "stages": [{"kind": "rl", "seed": 0}], "note": "naïve: yes"}
    with RunWriter.create(tmp_path / "a" / "run", config) as writer:
        assert writer.attempt == 1
    assert yaml.safe_load((tmp_path / "a/run/config.yaml").read_text()) == config
    (event,) = lines(tmp_path / "a/run/events.jsonl")
    assert event["kind"] == "open"
    assert event["attempt"] == 1


def test_a_directory_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, {"seed": 1})
    with pytest.raises(UserError, match="already holds a run"):  # rather than: is being written
        RunWriter.create(tmp_path, {"seed": 2})
    writer.close()
    before = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(UserError, match="already holds a run") as caught:
        RunWriter.create(tmp_path, {"seed": 2})
    assert str(tmp_path) in str(caught.value)
    assert "posttrain resume" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "config.yaml").read_bytes() == before


def test_a_run_with_a_function_of_its_program_is_continued_by_the_call(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "run", {"task": {"reward": "python:right (mine.py line 3)"}}).close()
    with pytest.raises(UserError, match="continue with: the same call with its out= and again=True, or choose another"):
        RunWriter.create(tmp_path / "run", {})


def test_a_command_to_copy_quotes_the_directory(tmp_path: Path) -> None:
    directory = tmp_path / "my run"
    RunWriter.create(directory, {}).close()
    with pytest.raises(UserError, match=f"posttrain resume '{directory}'"):
        RunWriter.create(directory, {})


def test_remains_of_a_run_without_its_configuration_are_refused_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        RunWriter.create(tmp_path, {})


def test_resuming_needs_a_run_and_counts_attempts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.yaml"):
        RunWriter.resume(tmp_path)
    RunWriter.create(tmp_path, {}).close()
    for attempt in (2, 3):
        with RunWriter.resume(tmp_path) as writer:
            assert writer.attempt == attempt
            assert writer.metrics("rl", 1, {"reward": 0.5}).attempt == attempt
    assert [row["attempt"] for row in lines(tmp_path / "metrics.jsonl")] == [2, 3]


def test_a_path_that_is_a_file_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="cannot write the run directory"):
            RunWriter.create(path, {})


def test_metrics_hold_no_bare_nan_and_keep_their_kind(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        figures = {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": np.float32(0.5), "e": 3}
        row = writer.metrics("rl", 7, figures)
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert (line["a"], line["b"], line["c"], line["d"], line["e"]) == ("nan", "inf", "-inf", 0.5, 3.0)
    assert (line["step"], line["stage"], line["attempt"], line["time"]) == (7, "rl", 1, row.time)


def test_reserved_names_and_paths_in_stages_are_refused(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        with pytest.raises(ValueError, match="step"):
            writer.metrics("rl", 1, {"step": 2.0})
        with pytest.raises(ValueError, match="attempt"):
            writer.event("warning", {"attempt": 2})
        for stage in ("../rl", "a/b", "", ".", "a\x00"):
            with pytest.raises(UserError, match="plain name"):
                writer.metrics(stage, 1, {})
            with pytest.raises(UserError, match="plain name"):
                writer.rollouts(stage, 1, [rollout()])
    assert not (tmp_path / "rollouts").exists()


def test_a_second_writer_is_refused_and_told_who_has_the_run(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}), pytest.raises(UserError, match=f"process {os.getpid()} on "):
        RunWriter.resume(tmp_path)
    RunWriter.resume(tmp_path).close()


def test_a_second_process_is_refused_and_a_killed_one_leaves_the_run_free(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time; from posttrain.runs.write import RunWriter\n"
        "writer = RunWriter.create(pathlib.Path(sys.argv[1]), {})\n"
        "writer.metrics('rl', 1, {'reward': 1.0}); print('ready', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with pytest.raises(UserError, match=f"process {child.pid} on "):
            RunWriter.resume(tmp_path)
    finally:
        child.kill()
        child.communicate()
    with RunWriter.resume(tmp_path) as writer:
        assert writer.attempt == 2
    assert [row["reward"] for row in lines(tmp_path / "metrics.jsonl")] == [1.0]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_tail_is_cut_and_later_lines_are_whole(tmp_path: Path, cut: int) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        writer.metrics("rl", 1, {"reward": 0.25})
        writer.metrics("rl", 2, {"reward": 0.5})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with RunWriter.resume(tmp_path) as writer:
        writer.metrics("rl", 3, {"reward": 0.75})
    # a cut of one byte takes only the newline: the second line was whole, and stays
    assert [row["step"] for row in lines(path)] == ([1, 2, 3] if cut == 1 else [1, 3])
    repairs = [event for event in lines(tmp_path / "events.jsonl") if event["kind"] == "repair"]
    assert len(repairs) == (0 if cut == 1 else 1)


@pytest.mark.parametrize("how", ["the directory is renamed", "the directory is removed", "the file is removed"])
def test_a_run_that_is_moved_or_removed_while_it_is_written_stops(how: str, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with RunWriter.create(directory, {}) as writer:
        writer.metrics("rl", 1, {"loss": 1.0})
        if how == "the directory is renamed":
            directory.rename(tmp_path / "other")
        elif how == "the directory is removed":
            shutil.rmtree(directory)
        else:
            (directory / "metrics.jsonl").unlink()
        with pytest.raises(UserError, match="was moved or removed while the run was being written; put it back"):
            writer.metrics("rl", 2, {"loss": 1.0})
    assert directory.exists() == (how == "the file is removed")


@pytest.mark.parametrize(("rows", "lost"), [(4, 0), (3, 1), (0, 4)])
def test_rows_that_were_lost_before_a_resume_are_counted(rows: int, lost: int, tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        for step in range(rows):
            writer.metrics("rl", step + 1, {"loss": 1.0})
    with RunWriter.resume(tmp_path) as writer:
        writer.resumed("rl", 4)
    said = [event.details["text"] for event in Run(tmp_path).events() if event.kind == "damaged"]
    text = f"{tmp_path / 'metrics.jsonl'} has lost {lost} of the 4 steps up to here; the model has not"
    assert said == ([text] if lost else [])


def test_the_working_directory_does_not_matter_to_a_relative_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunWriter.create(Path("run"), {}) as writer:
        monkeypatch.chdir("/")
        writer.metrics("rl", 1, {"loss": 1.0})
    assert [row.step for row in Run(tmp_path / "run").metrics()] == [1]


def test_a_torn_events_file_is_repaired_and_its_attempts_still_count(tmp_path: Path) -> None:
    RunWriter.create(tmp_path, {}).close()
    with (tmp_path / "events.jsonl").open("ab") as stream:
        stream.write(b'{"kind":"alarm","time":1.0,"att' + b"x" * 200_000)
    with RunWriter.resume(tmp_path) as writer:
        assert writer.attempt == 2
    assert [event["kind"] for event in lines(tmp_path / "events.jsonl")] == ["open", "open", "repair"]


def test_a_full_disk_names_the_directory_and_takes_back_the_part_that_fitted(tmp_path, monkeypatch) -> None:
    real = os.write
    with RunWriter.create(tmp_path, {}) as writer:
        writer.metrics("rl", 1, {"reward": 0.25})
        fitted = []

        def nearly_full(fd: int, data: bytes) -> int:
            if fitted:
                raise OSError(errno.ENOSPC, "No space left on device")
            fitted.append(real(fd, data[:10]))
            return fitted[0]

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", nearly_full)
            with pytest.raises(UserError, match="no space left on the disk of") as caught:
                writer.metrics("rl", 2, {"reward": 0.5})
        assert str(tmp_path) in str(caught.value)
        assert fitted == [10]
        writer.metrics("rl", 3, {"reward": 0.75})  # space was made
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [1, 3]


def test_a_full_disk_leaves_the_old_summary_and_no_rubbish(tmp_path, monkeypatch) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        writer.summary({"after": 0.5})

        def full(*paths: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            with pytest.raises(UserError, match="no space left on the disk of"):
                writer.summary({"after": 0.75})
            with pytest.raises(UserError, match="no space left on the disk of"):
                writer.rollouts("rl", 1, [rollout()], arrays=arrays(5))
    assert json.loads((tmp_path / "summary.json").read_text()) == {"after": 0.5}
    assert [path.name for path in tmp_path.rglob("*.tmp")] == []
    assert not list(tmp_path.rglob("step-*"))


def test_other_errors_keep_their_traceback(tmp_path, monkeypatch) -> None:
    with RunWriter.create(tmp_path, {}) as writer, monkeypatch.context() as patch:

        def broken(fd: int, data: bytes) -> int:
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr(os, "write", broken)
        with pytest.raises(OSError, match="Input/output error"):
            writer.event("alarm")


def test_rollouts_are_one_line_each_whatever_the_model_wrote(tmp_path: Path) -> None:
    nasty = 'two\nlines\r\u2028\x1b[2J "quoted" \ud800 \x00 {"reward": 9}'
    failed = Score.failed("timeout")
    with RunWriter.create(tmp_path, {}) as writer:
        writer.rollouts("rl", 123, [rollout(0, nasty), rollout(1, score=failed)], advantages=[0.5, float("nan")])
    path = tmp_path / "rollouts/rl/step-000123.jsonl"
    assert path.read_bytes().isascii()
    first, second = lines(path)
    assert first == {
        "problem": "add-1",
        "level": 2,
        "question": "12+34",
        "answer": "46",
        "sample": 0,
        "response": nasty,
        "reward": 1.0,
        "parts": {"format": 0.5},
        "outcome": "correct",
        "failure": None,
        "finish": "stop",
        "length": 3,
        "version": 3,
        "attempt": 1,
        "advantage": 0.5,
    }
    assert (second["reward"], second["failure"], second["advantage"]) == (None, "timeout", "nan")


def test_the_version_of_a_rollout_is_its_oldest_tokens(tmp_path: Path) -> None:
    old, new = rollout(version=3), rollout(version=5)
    mixed = Rollout(old.problem, 0, (new.segments[1], old.segments[0], old.segments[1], new.segments[1]), old.score)
    with RunWriter.create(tmp_path, {}) as writer:
        writer.rollouts("rl", 1, [mixed])
    (row,) = lines(tmp_path / "rollouts/rl/step-000001.jsonl")
    assert (row["version"], row["length"], row["response"]) == (3, 9, "= 46= 46= 46")


def test_rollouts_of_a_repeated_step_replace_the_old_ones(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        writer.rollouts("rl", 1, [rollout(0, "old"), rollout(1, "old")])
        writer.rollouts("rl", 1, [rollout(0, "new")])
    assert [row["response"] for row in lines(tmp_path / "rollouts/rl/step-000001.jsonl")] == ["new"]


def test_arrays_are_flat_with_starts_and_must_match_the_rollouts(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        writer.rollouts("rl", 4, [rollout(0), rollout(1)], arrays=arrays(2, 3))
        with pytest.raises(ValueError, match="3 sequences for 2 rollouts"):
            writer.rollouts("rl", 5, [rollout(0), rollout(1)], arrays=arrays(2, 3, 1))
        with pytest.raises(ValueError, match="1 advantages for 2 rollouts"):
            writer.rollouts("rl", 5, [rollout(0), rollout(1)], advantages=[1.0])
    stored = load_file(tmp_path / "rollouts/rl/step-000004.safetensors")
    assert stored["starts"].tolist() == [0, 2, 5]
    assert stored["ids"].tolist() == [0, 1, 2, 3, 4]
    assert stored["logprob"].dtype == np.float32
    assert not (tmp_path / "rollouts/rl/step-000005.jsonl").exists()


def test_arrays_that_are_views_are_stored_as_they_read(tmp_path: Path) -> None:
    reversed_view = np.arange(4)[::-1]
    with RunWriter.create(tmp_path, {}) as writer:
        writer.rollouts("rl", 1, [rollout()], arrays=TokenArrays(np.array([0, 4]), {"ids": reversed_view}))
    assert load_file(tmp_path / "rollouts/rl/step-000001.safetensors")["ids"].tolist() == [3, 2, 1, 0]


def kept(directory: Path, stage: str = "rl") -> list[int]:
    return sorted(
        step for path in (directory / "rollouts" / stage).glob("*.safetensors") if (step := layout.step_of(path)) is not None
    )


def keep(monkeypatch: pytest.MonkeyPatch, last: int, every: int = 1000) -> None:
    monkeypatch.setattr(write, "KEEP_LAST", last)
    monkeypatch.setattr(write, "KEEP_EVERY", every)


def test_retention_keeps_the_last_and_every_mth_and_all_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, last=2, every=5)
    with RunWriter.create(tmp_path, {}) as writer:
        for step in range(1, 13):
            writer.rollouts("rl", step, [rollout()], arrays=arrays(3))
    assert kept(tmp_path) == [5, 10, 11, 12]
    assert len(list((tmp_path / "rollouts/rl").glob("*.jsonl"))) == 12


def test_retention_is_by_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, last=1)
    with RunWriter.create(tmp_path, {}) as writer:
        for stage in ("rl", "rl-2"):
            for step in (10, 20):
                writer.rollouts(stage, step, [rollout()], arrays=arrays(3))
    assert kept(tmp_path) == [20]
    assert kept(tmp_path, "rl-2") == [20]


def test_after_a_resume_the_superseded_arrays_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, last=2)
    with RunWriter.create(tmp_path, {}) as writer:
        writer.rollouts("rl", 9, [rollout()], arrays=arrays(3))
    with RunWriter.resume(tmp_path) as writer:
        writer.rollouts("rl", 8, [rollout()], arrays=arrays(3))
    for age, step in enumerate((8, 9)):  # a copy may have the files in any order
        os.utime(tmp_path / f"rollouts/rl/step-{step:06d}.safetensors", ns=(10**18 + age, 10**18 + age))
    with RunWriter.resume(tmp_path) as writer:
        writer.resumed("rl", 5)
        writer.rollouts("rl", 6, [rollout()], arrays=arrays(3))
        assert kept(tmp_path) == [6, 8]
        writer.rollouts("rl", 7, [rollout()], arrays=arrays(3))
    assert kept(tmp_path) == [6, 7]


def test_threads_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer:

        def work(thread: int) -> None:
            for step in range(50):
                writer.event("tick", {"thread": thread, "step": step, "text": "x" * 500})

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
    assert sum(event["kind"] == "tick" for event in lines(tmp_path / "events.jsonl")) == 200


def test_only_json_values_are_taken() -> None:
    with pytest.raises(TypeError, match="not object"):
        layout.dump_line({"thing": object()})
    assert layout.dump_line({"flag": np.bool_(True)}) == b'{"flag":true}\n'
    numbers = {"part": np.float32("nan"), "loss": float("inf"), "by step": {np.int64(3): np.int64(4)}, "pair": (0.5, None)}
    assert layout.dump_line(numbers) == b'{"part":"nan","loss":"inf","by step":{"3":4},"pair":[0.5,null]}\n'
