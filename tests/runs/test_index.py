"""The index of a run: what was appended, what a resume supersedes, buckets, filters, words, and damage."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runs_for_tests import GROUP, add_step, make_run, rollout, step_rollouts

from posttrain.errors import UserError
from posttrain.runs.index import Filter, Index
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    made = Index(Run(make_run(tmp_path_factory.mktemp("runs") / "run")))
    assert made.read_rollouts(60) == 0
    return made


def test_the_index_says_what_the_reader_says(index: Index) -> None:
    for stage in index.run.stages():
        for figure in index.figures(stage):
            steps, values = index.run.column(figure, stage)
            found = index.points(stage, figure)
            assert [step for step, _ in found] == steps.tolist()
            assert np.allclose([value for _, value in found if value is not None], values)
    rows = [row for step in index.run.rollout_steps("rl") for row in index.run.rollouts("rl", step)]
    assert index.text(index.find(Filter(), limit=1000)) == rows


def test_buckets_keep_the_extremes_that_a_mean_hides(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        for step in range(1000):
            writer.metrics("rl", step, {"loss": 100.0 if step == 517 else float("nan") if step == 3 else 1.0})
    index = Index(Run(tmp_path))
    index.read_metrics()
    whole = index.series("rl", "loss", buckets=10)
    assert len(whole.step) == 10 and max(filter(None, whole.high)) == 100.0 and min(filter(None, whole.low)) == 1.0
    near = index.series("rl", "loss", 10, first=515, last=519)
    assert near.step == [515, 516, 517, 518, 519] and near.mean[2] == 100.0
    assert index.points("rl", "loss")[3] == (3, None)


def test_only_what_was_appended_is_read_again(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=20, finish=False)
    index = Index(Run(tmp_path / "run"))
    assert index.read_metrics() and not index.read_metrics()
    assert not index.behind()
    with RunWriter.resume(tmp_path / "run") as writer:
        add_step(writer, 21)
        assert index.behind()
    assert index.read_metrics() and index.points("rl", "reward", 1)[0][0] == 21
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"stage":"rl","step":22,"attempt":2,"time":1,"reward":0.1')  # a line in the middle of being written
        file.flush()
        began = time.process_time()
        assert not index.read_metrics() and not index.behind() and time.process_time() - began < 5
        assert index.points("rl", "reward", 1)[0][0] == 21
        file.write(b"}\n")
    assert index.read_metrics() and index.points("rl", "reward", 1) == [(22, 0.1)]


def test_a_resumed_run_has_no_rows_of_what_never_happened(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=40, finish=False)
    index = Index(Run(tmp_path / "run"))
    index.read_rollouts(60)
    with RunWriter.resume(tmp_path / "run") as writer:
        writer.resumed("rl", 25)
        writer.metrics("rl", 26, {"reward": 9.0})
    index.read_rollouts(60)
    assert (
        [step for step, _ in index.points("rl", "reward")] == [row.step for row in index.run.metrics("rl")] == [*range(1, 27)]
    )
    assert [step for step, *_ in index.rollout_steps("rl")] == index.run.rollout_steps("rl") == [10, 20]
    assert [step for step, _ in index.points("sft", "loss")] == [*range(1, 21)]


@pytest.mark.parametrize("damage", [b"", b"not a database" * 100])
def test_a_damaged_index_is_made_anew(tmp_path: Path, damage: bytes) -> None:
    make_run(tmp_path / "run", steps=10, finish=False)
    index = Index(Run(tmp_path / "run"))
    index.read_metrics()
    for file in index.path.parent.iterdir():
        file.unlink()
    index.path.write_bytes(damage)
    again = Index(Run(tmp_path / "run"))
    again.read_metrics()
    assert len(again.points("rl", "reward")) == 10


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        (Filter(), 32),
        (Filter(stage="rl", step_from=20, step_to=20), 8),
        (Filter(problem="train/1"), 4 * GROUP),
        (Filter(question="what is 2+2?"), 4 * GROUP),
        (Filter(text="thinking 30"), 8),
        (Filter(text="thinki"), 32),
        (Filter(text="nowhere"), 0),
        (Filter(text='" OR 1=1 --'), 0),
        (Filter(part="format", part_from=1.0), 32),
        (Filter(part="format", part_to=0.5), 0),
        (Filter(failed=True), 0),
        (Filter(length_from=5, length_to=5), 32),
        (Filter(role="nobody"), 0),
    ],
)
def test_filters_by_hand(index: Index, wanted: Filter, count: int) -> None:
    assert index.count(wanted) == len(index.find(wanted, limit=100)) == count


def test_rollouts_are_sorted_and_paged(index: Index) -> None:
    rewards = [one.reward for one in index.find(Filter(), "reward", down=True, limit=100)]
    assert rewards == sorted(rewards, key=lambda r: -(r or 0))
    first, second = (index.find(Filter(), "reward", True, 10, skip) for skip in (0, 10))
    assert not {(o.step, o.number) for o in first} & {(o.step, o.number) for o in second}
    with pytest.raises(UserError, match="sorted by"):
        index.find(Filter(), "reward; DROP TABLE rollouts")
    with pytest.raises(UserError, match="quotation mark"):
        index.count(replace(Filter(), part='a") --', part_from=1.0))


def test_a_step_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, {}) as writer:
        writer.metrics("rl", 10, {"reward": 1.0})
        writer.rollouts("rl", 10, step_rollouts(10))
        index = Index(Run(tmp_path))
        index.read_rollouts(60)
        writer.rollouts("rl", 10, [rollout(1, 0, "another text", None)])
    index.read_rollouts(60)
    (found,) = index.find(Filter())
    assert found.failure == "timeout: 5 s" and found.reward is None and index.count(Filter(text="thinking")) == 0


def test_the_step_that_is_asked_for_is_read_first(tmp_path: Path) -> None:
    index = Index(Run(make_run(tmp_path / "run")))
    assert index.read_rollouts(-1.0, ("rl", 30)) == 3
    assert [step for step, *_ in index.rollout_steps("rl")] == [30]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_run_that_cannot_be_written_has_its_index_elsewhere(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=10)
    run.chmod(0o555)
    index = Index(Run(run))
    assert run not in index.path.parents and index.read_metrics()
    run.chmod(0o755)


@pytest.mark.parametrize("other", ["folder", "link", "broken link", "file"])
def test_a_temporary_folder_of_somebody_else_holds_no_index(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can make a folder of that name in /tmp and put an index there, whose rows the studio would show."""
    run, there = make_run(tmp_path / "run", steps=10), tmp_path / f"posttrain-index-{os.getuid()}"
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    first = Index(Run(run))
    assert first.path.parent.parent == there and there.stat().st_mode & 0o777 == 0o700
    if other != "folder":
        there.rename(tmp_path / "theirs")
        there.touch() if other == "file" else there.symlink_to(tmp_path / ("theirs" if other == "link" else "nowhere"))
    else:
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
        there = tmp_path / "posttrain-index-4000000"
        there.mkdir()  # of the user who runs the tests
    second = Index(Run(run))
    assert second.path.parent.parent != there and second.path.parent.parent.name.startswith(f"{there.name}-")
    assert second.read_metrics()
