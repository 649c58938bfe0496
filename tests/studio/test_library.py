"""The runs below a folder, where there are many: what is kept between two servers, and searches that nobody waits for."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from runs_for_tests import add_step, make_run
from studio_for_tests import Studio

from posttrain.runs.layout import EventRow
from posttrain.runs.status import Status
from posttrain.runs.write import RunWriter
from posttrain.studio import library, pages_runs
from posttrain.studio.library import Library, path_id


def test_a_server_that_is_started_again_looks_only_into_runs_that_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "SAVE_SECONDS", -1.0)
    for name in ("same", "grown"):
        make_run(tmp_path / "runs" / name, 3)
    kept, looked = tmp_path / "kept" / "rows.sqlite", list[str]()
    before = Library([tmp_path / "runs"], kept)
    rows = {name: before.row(name) for name in before.runs()}
    with RunWriter.resume(tmp_path / "runs" / "grown") as writer:
        add_step(writer, 4)
    look = Library._row
    monkeypatch.setattr(Library, "_row", lambda self, name, path: looked.append(path.name) or look(self, name, path))
    after = Library([tmp_path / "runs"], kept)
    found = {name: after.row(name) for name in after.runs()}
    same, grown = (path_id(tmp_path / "runs" / name) for name in ("same", "grown"))
    assert looked == ["grown"] and found[same] == json.loads(json.dumps(rows[same]))
    assert found[grown]["progress"] != rows[grown]["progress"]
    kept.write_bytes(b"no database")
    assert set(Library([tmp_path / "runs"], kept).runs()) == {same, grown}


def test_ids_and_places_are_those_of_the_folder_and_hidden_or_linked_ones_are_left_out(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a" / "one", 2)
    make_run(tmp_path / "runs" / ".hidden" / "two", 2)
    make_run(tmp_path / "elsewhere", 2)
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    for root in (tmp_path / "runs", tmp_path / "link"):  # the same run, however the folder is named
        found = Library([root])
        [(name, path)] = found.runs().items()
        assert name == path_id(tmp_path / "runs" / "a" / "one") and found.place(path) == "a/one"
    alone = Library([tmp_path / "runs" / "a" / "one"])
    assert [alone.place(path) for path in alone.runs().values()] == ["."]


def test_where_a_search_takes_long_answers_come_from_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "one", 2)
    walk, slow = library._walk, [0.0]

    def slowly(*given: object) -> list[library.Place]:
        time.sleep(slow[0])
        return walk(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(library, "_walk", slowly)
    monkeypatch.setattr(library, "QUICK", 0.05)
    slow[0] = 0.1
    found = Library([tmp_path])
    found.runs()
    make_run(tmp_path / "two", 2)
    slow[0] = 0.5
    found._scanned -= 100.0
    began = time.monotonic()
    assert len(found.runs()) == 1 and time.monotonic() - began < 0.3
    for _ in range(100):
        if len(found.runs()) == 2:
            break
        time.sleep(0.05)
    assert len(found.runs()) == 2
    make_run(tmp_path / "three", 2)
    assert found.index(path_id(tmp_path / "three")).run.name == "three"  # one that is asked for is looked for


def test_a_filter_by_status_gets_to_the_end_however_many_runs_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_runs, "ROW_SECONDS", 0.0)  # one run that was not seen before, in each answer
    for number in range(5):
        make_run(tmp_path / f"run-{number}", 2)
    studio = Studio(tmp_path)
    assert [studio.get("/api/runs", status="waiting")["left"] for _ in range(5)] == [4, 3, 2, 1, 0]
    assert len(studio.get("/api/runs")["runs"]) == 5


def test_a_run_that_is_deleted_while_it_is_shown_is_missing_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "three"):
        make_run(tmp_path / name, 3)
    studio = Studio(tmp_path)
    assert len(studio.get("/api/runs")["runs"]) == 3
    shutil.rmtree(tmp_path / "two")
    page = f"/api/runs/{path_id(tmp_path / 'two')}"
    for path in (page, f"{page}/series", f"{page}/rollouts", f"{page}/rollouts/rl/1/0", f"{page}/report.html"):
        assert studio.get(path, 404) == {"error": "no such run"}
    runs, listed = Library.runs, list[int]()

    def then_delete(self: Library, age: float = 0.0) -> dict[str, Path]:
        found = runs(self, 0.0)
        if not listed:
            shutil.rmtree(tmp_path / "three")
        listed.append(len(found))
        return found

    monkeypatch.setattr(Library, "runs", then_delete)
    assert [row["name"] for row in studio.get("/api/runs")["runs"]] == ["one"] and listed[:2] == [2, 1]


def test_a_clock_that_was_set_back_makes_no_run_shorter_than_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "one", 3)
    with RunWriter.resume(tmp_path / "one"):
        monkeypatch.setattr(library, "status", lambda *_: Status("live"))
        monkeypatch.setattr(library.time, "time", lambda: 0.0)
        found = Library([tmp_path / "one"])
        assert [found.row(name)["seconds"] >= 0 for name in found.runs()] == [True]


def test_the_time_of_a_stage_has_all_attempts_and_no_pause(tmp_path: Path) -> None:
    rows = [("stage", 10.0, 1, "sft"), ("stage", 30.0, 1, "rl"), ("ended", 45.0, 1, ""), ("stage", 1000.0, 2, "rl")]
    events = [EventRow(kind, time, attempt, {"stage": stage} if stage else {}) for kind, time, attempt, stage in rows]
    assert library.stage_seconds(events, 1007.0) == {"sft": 20.0, "rl": 15.0 + 7.0}
