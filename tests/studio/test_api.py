"""The API behind the pages: what a run directory says, by ids alone; hostile ids, hostile text, and what a browser may start."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from runs_for_tests import STAGES, add_step, arrays, make_run, rollout
from studio_for_tests import Studio

from posttrain.errors import UserError
from posttrain.runs.write import RunWriter
from posttrain.studio import jobs, pages_review, pages_rollouts, pages_runs
from posttrain.studio.library import path_id


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Studio:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "one")
    make_run(root / "folder" / "two", 10, finish=False)
    return Studio(root)


@pytest.fixture(scope="module")
def one(studio: Studio) -> str:
    return f"/api/runs/{path_id(studio.root / 'one')}"


def test_the_table_says_what_each_run_is(studio: Studio) -> None:
    found = {row["name"]: row for row in studio.get("/api/runs")["runs"]}
    assert found["one"]["status"]["kind"] == "finished" and found["two"]["status"]["kind"] == "crashed"
    assert found["one"]["score"] == [0.9, pytest.approx(0.85), pytest.approx(0.95), "accuracy/test"]
    assert found["one"]["verdict"]["answer"] == "careful" and found["one"]["alarms"] == 1
    assert found["two"]["folder"] == "folder/two" and len(found["one"]["spark"]) == 40
    assert [row["name"] for row in studio.get("/api/runs", text="FOLDER")["runs"]] == ["two"]
    assert [row["name"] for row in studio.get("/api/runs", status="finished")["runs"]] == ["one"]


def test_scores_before_and_after_are_percent_only_where_they_are_shares(tmp_path: Path) -> None:
    """A mean reward of 6 is not 600%."""
    directory = make_run(tmp_path / "one") or tmp_path / "one"
    config, summary = directory / "config.yaml", directory / "summary.json"
    config.write_text(
        "".join(line for line in config.open() if not line.startswith(("before:", "after:"))) + "before: a\nafter: b\n"
    )
    studio, page = Studio(tmp_path), f"/api/runs/{path_id(directory)}"
    for results, percent in (({}, True), ({"a": {"verifiable": False}, "b": {"verifiable": False}}, False)):
        whole = json.loads(summary.read_text()) | {"before": [3.0, 2.0, 4.0], "after": [6.0, 5.0, 7.0], "stages": results}
        summary.write_text(json.dumps(whole))
        assert studio.get(page)["summary"]["percent"] is percent


def test_runs_that_were_never_looked_at_do_not_hold_up_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        make_run(tmp_path / f"run-{number}", 3, finish=number % 2 == 0)
    monkeypatch.setattr(pages_runs, "ROW_SECONDS", -1.0)  # one at a time
    studio = Studio(tmp_path)
    first = studio.get("/api/runs")
    assert len(first["runs"]) == 1 and first["left"] == 5 and first["total"] == 6
    monkeypatch.setattr(pages_runs, "ROW_SECONDS", 60.0)
    assert len(studio.get("/api/runs", status="finished")["runs"]) == 3
    assert [len(studio.get("/api/runs", skip=skip, limit=4)["runs"]) for skip in (0, 4)] == [4, 2]


def test_the_page_of_a_run_has_stages_alarms_and_figures(studio: Studio, one: str) -> None:
    run = studio.get(one)
    assert [(s["name"], s["state"]) for s in run["stages"]] == [
        ("sft", "begun"),
        ("before", "done"),
        ("rl", "begun"),
        ("after", "done"),
    ]
    assert run["alarms"][0]["rule"] == "length" and run["figures"]["loss"] == ["sft", "rl"]
    series = studio.get(f"{one}/series", figure=["reward", "loss"], buckets=10)["series"]
    assert [(s["stage"], s["figure"], len(s["step"])) for s in series] == [
        ("rl", "reward", 10),
        ("sft", "loss", 10),
        ("rl", "loss", 10),
    ]
    zoomed = studio.get(f"{one}/series", figure="reward", first=5, last=9)["series"][0]
    assert zoomed["step"] == [5, 6, 7, 8, 9]


def test_every_figure_that_training_records_is_explained() -> None:
    static = Path(pages_rollouts.__file__).parent / "static" / "metrics.json"
    table = json.loads(static.read_text())
    known = table["figures"]
    recorded = """reward reward/answer kl entropy length truncated failed reflection loss loss/policy nll grad_norm
    clip_fraction ratio/min
    mismatch mismatch/max learning_rate tokens_per_second seconds/train level accuracy/test reward/test
    accuracy/held_out loss/held_out margin
    repetition distinct keyword agreement reward_spread groups/zero_variance updates tokens trained turns failed/timeout
    role/solver/reward"""
    for name in recorded.split():
        assert name in known or f"{name.split('/')[0]}/*" in known, name
    assert {entry[1] for entry in known.values()} <= set(table["groups"])


def test_rollouts_are_found_and_shown_with_their_group_and_tokens(studio: Studio, one: str) -> None:
    found = studio.get(f"{one}/rollouts", sort="reward", down="true", text="thinking", step_from=20, limit=5)
    assert found["total"] == 24 and len(found["rollouts"]) == 5 and found["left"] == 0
    assert found["choices"]["part"] == ["answer", "format"]
    shown = studio.get(f"{one}/rollouts/rl/40/1")
    assert [r["number"] for r in shown["group"]] == [0, 1, 2, 3] and shown["rollout"]["number"] == 1
    assert len(shown["tokens"]["text"]) == len(shown["tokens"]["figures"]["logprob"]) == 2 + shown["rollout"]["length"]
    assert shown["tokens"]["figures"]["sampled"][:3] == [False, False, True]
    lines = studio.get(f"{one}/rollouts.jsonl", step_from=40).splitlines()
    assert len(lines) == 8 and json.loads(lines[0])["response"] == "thinking about it 40 0"


def test_the_pipeline_shows_one_prompt_at_every_stage(studio: Studio, one: str) -> None:
    found = studio.get(f"{one}/pipeline", prompt="what is 1+1?")
    assert [(a["stage"], a["model"], a["answers"][0]["text"]) for a in found["answers"]] == [
        ("before", "sft", "3"),
        ("after", "rl", "2"),
    ]
    assert found["prompts"][0] == {"question": "what is 1+1?"}
    drawn = studio.get(f"{one}/pipeline", prompt="what is 2+2?")["answers"]
    assert [a["model"] for a in drawn] == ["rl, step 10", "rl, step 40"]


def test_settings_are_compared_with_another_run(studio: Studio, one: str) -> None:
    other = studio.root / "other"
    with RunWriter.create(other, {"name": "quickstart", "seed": 7, "stages": []}):
        pass
    found = studio.get(f"{one}/settings", against=path_id(other))
    assert found["differences"]["seed"] == [0, 7] and found["settings"]["rl.algorithm.name"] == "grpo"


def test_what_a_run_appends_is_there_at_the_next_request(studio: Studio, one: str) -> None:
    before = studio.get(one)["figures"]
    with RunWriter.resume(studio.root / "folder" / "two") as writer:
        add_step(writer, 11)
        row = next(r for r in studio.get("/api/runs")["runs"] if r["name"] == "two")
        assert row["status"]["kind"] == "live" and row["progress"]["step"] == 11
    assert studio.get(one)["figures"] == before


BAD_IDS = [
    "..",
    "../one",
    "%2e%2e",
    "..%2f..%2fetc",
    "%252e%252e%252f",
    "..\\one",
    "/etc/passwd",
    "file:///etc/passwd",
    "~",
    "C:\\",
    "one%00",
    "a" * 10_000,
    "．．/",
    "/proc/self/environ",
]


@pytest.mark.parametrize("name", BAD_IDS)
def test_what_is_no_id_is_no_run(studio: Studio, one: str, name: str) -> None:
    for path in (
        f"/api/runs/{name}",
        f"{one}/rollouts/{name}/40/0",
        f"/api/label/{name}/next",
        f"/static/{name}",
        f"/static/../{name}",
    ):
        answer = studio.client.get(path)
        assert answer.status_code in (400, 404, 405) or "text/html" in answer.headers["content-type"], path
        assert "root:" not in answer.text and "PATH=" not in answer.text


def test_files_that_lie_elsewhere_are_no_run(tmp_path: Path) -> None:
    make_run(tmp_path / "outside", 10)
    root = tmp_path / "root"
    linked = make_run(root / "linked", 10)
    (linked / "config.yaml").unlink()
    (linked / "config.yaml").symlink_to(tmp_path / "outside" / "config.yaml")
    (root / "whole").symlink_to(tmp_path / "outside")
    assert Studio(root).get("/api/runs")["runs"] == []


@pytest.mark.parametrize(
    "query",
    [
        {"sort": "1; DROP"},
        {"step_from": "x"},
        {"reward_to": "nan"},
        {"reward_to": "1e999"},
        {"step_to": "9" * 30},
        {"text": "a" * 20_000},
    ],
)
def test_filters_that_make_no_sense_are_one_line(studio: Studio, one: str, query: dict[str, str]) -> None:
    assert "error" in studio.get(f"{one}/rollouts", 400, **query)


def test_one_broken_run_does_not_hide_the_others(tmp_path: Path) -> None:
    make_run(tmp_path / "good", 10)
    bad = make_run(tmp_path / "bad", 10, finish=False)
    (bad / "config.yaml").write_text("a: [")
    (bad / "metrics.jsonl").write_bytes(b"\xff\xfe{}\n[1]\n{}\n")
    rows = {row["name"]: row for row in Studio(tmp_path).get("/api/runs")["runs"]}
    assert rows["good"]["recipe"] == "quickstart" and "cannot be read" in rows["bad"]["status"]["said"]


def test_the_export_is_one_file_in_which_text_is_text(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 10)
    with RunWriter.resume(tmp_path / "run") as writer:
        writer.metrics("rl", 50, {"reward": 1.0})
        writer.rollouts("rl", 50, [rollout(1, 0, "<script>alert(1)</script>", 1.0, "<img src=x onerror=alert(1)>")])
        writer.event("alarm", {"stage": "rl", "text": "</style><script>alert(2)</script>", "level": "warning"})
    page = Studio(tmp_path).client.get(f"/api/runs/{path_id(tmp_path / 'run')}/report.html")
    assert "<script" not in page.text and "<img src=x" not in page.text and "&lt;script&gt;alert(1)" in page.text
    assert 'src="http' not in page.text and "data:image/png;base64," in page.text
    assert (
        "script-src" not in page.headers["content-security-policy"]
        and "default-src 'none'" in page.headers["content-security-policy"]
    )


def test_a_full_disk_under_a_review_is_one_line_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    make_run(tmp_path / "run")
    studio, run = Studio(tmp_path), f"/api/runs/{path_id(tmp_path / 'run')}"
    studio.get(f"{run}/rollouts")
    first = studio.get(f"{run}/review", order="highest")["rollout"]
    monkeypatch.setattr(pages_review, "_store", full)
    said = studio.post(f"{run}/review", 500, **{key: first[key] for key in ("stage", "step", "number")}, agrees=True)
    assert said == {"error": "a file cannot be read or written: database or disk is full; check space and rights there"}


def test_reviews_are_counted_by_part_and_flagged_ones_become_cases(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    studio, run = Studio(tmp_path), f"/api/runs/{path_id(tmp_path / 'run')}"
    studio.get(f"{run}/rollouts")
    first = studio.get(f"{run}/review", order="highest")["rollout"]
    assert first["reward"] == 1.0
    place = {key: first[key] for key in ("stage", "step", "number")}
    studio.post(f"{run}/review", 201, **place, agrees=False, flagged=True, note="says nothing")
    second = studio.get(f"{run}/review", order="highest")["rollout"]
    assert {key: second[key] for key in place} != place
    studio.post(f"{run}/review", 201, **{key: second[key] for key in place}, agrees=True)
    report = studio.get(f"{run}/review/report")
    assert (
        report["reviewed"] == 2
        and report["precision"]["answer"]["value"] == 0.5
        and report["precision"]["answer"]["count"] == 2
    )
    (case,) = [json.loads(line) for line in studio.get(f"{run}/flagged.jsonl").splitlines()]
    assert (case["agrees"], case["note"], case["response"]) == (False, "says nothing", first["response"])
    with closing(sqlite3.connect(tmp_path / "run" / ".studio" / "reviews.sqlite")) as reviews, reviews:
        reviews.execute("UPDATE reviews SET step = 99 WHERE flagged")  # of a step that a resumed run has dropped
    report = studio.get(f"{run}/review/report")
    assert (report["reviewed"], report["flagged"]) == (1, 0) and studio.get(f"{run}/flagged.jsonl") == ""
    studio.post(f"{run}/review", 400, **place, agrees="yes")
    studio.post(f"{run}/review", 404, stage="../x", step=1, number=1, agrees=True)


def test_the_rollouts_behind_an_alarm_are_named(studio: Studio, one: str) -> None:
    studio.get(f"{one}/rollouts")
    found = studio.get(f"{one}/hacking")
    assert (
        found["stage"] == "rl" and found["alarms"][0]["rollouts"] == 30 and {"reward", "kl", "length"} <= set(found["series"])
    )


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_run_is_started_stopped_and_resumed_by_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that is started here is a stand-in that opens the run and waits to be interrupted."""
    program = (
        "import signal, sys, time\nfrom pathlib import Path\nfrom posttrain.runs.write import RunWriter\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # as a run does; a parent in the background may ignore it
        "out = next((a[4:] for a in sys.argv if a.startswith('out=')), sys.argv[-1])\n"
        "if 'bad=1' in sys.argv: sys.exit('posttrain: no such key')\n"
        "made = RunWriter.resume(out) if Path(out, 'config.yaml').exists() else RunWriter.create(out, {'name': 'quickstart'})\n"
        "with made as writer:\n    writer.event('ready')\n    time.sleep(60)\n"
    )
    (tmp_path / "program.py").write_text(program)
    monkeypatch.setattr(jobs, "PYTHON", (str(tmp_path / "python"),))
    (tmp_path / "python").write_text(
        f'#!/bin/sh\nshift 2\nexec {Path(sys.prefix) / "bin" / "python"} {tmp_path / "program.py"} "$@"\n'
    )
    (tmp_path / "python").chmod(0o755)
    root = tmp_path / "runs"
    root.mkdir()
    studio = Studio(root)
    assert "key=value" in studio.post("/api/runs", 400, recipe="quickstart", settings=["rm -rf"])["error"]
    assert "unknown recipe" in studio.post("/api/runs", 400, recipe="../evil.py", settings=[])["error"]
    monkeypatch.chdir(tmp_path)
    files = (
        "sft.data=/etc/passwd",
        "rl.task=prompts:~/x.jsonl",
        'sft.data="\\x2fetc/passwd"',
        "sft.data=[../x]",
        "sft.data=program.py",
    )
    files += ("a.model=runs/..", "sft.data=[{path: 'runs/../program.txt'}]", "rl.model=./runs")
    for setting in ("out=/tmp/x", "checkpoint_hook=[rm]", "rl.reward=evil.py:f", "rl.model=http://evil", *files):
        assert "command line" in studio.post("/api/runs", 400, recipe="quickstart", settings=[setting])["error"]
    assert "no such key" in studio.post("/api/runs", 400, recipe="quickstart", settings=["bad=1"])["error"]
    assert not (root / "quickstart-1").exists()
    made = studio.post("/api/runs", 201, recipe="quickstart", settings=["seed=1"])["run"]
    events = root / "quickstart-1" / "events.jsonl"
    until(lambda: events.is_file() and "ready" in events.read_text())
    assert studio.get(f"/api/runs/{made}")["status"]["kind"] == "live"
    assert "is running" in studio.post(f"/api/runs/{made}/resume", 400)["error"]
    studio.post(f"/api/runs/{made}/stop")
    until(lambda: studio.get(f"/api/runs/{made}")["status"]["kind"] == "interrupted")
    studio.post(f"/api/runs/{made}/resume")
    assert studio.get(f"/api/runs/{made}")["status"]["kind"] == "live"
    studio.post(f"/api/runs/{made}/stop")


def test_two_starts_at_once_get_a_directory_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run makes its directory seconds after it was started: a second start, also of another studio, got the first one's."""
    done = subprocess.Popen(["true"])
    done.wait()
    (tmp_path / "runs" / ".studio").mkdir(parents=True)
    monkeypatch.setattr(jobs, "_run_apart", lambda words, log: log.touch() or done)
    made = [jobs.Jobs(tmp_path / "runs").start("quickstart", [f"seed={n}"]).name for n in (1, 2)]
    assert made == ["quickstart-1", "quickstart-2"]


def test_stop_that_is_pressed_twice_asks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal would end the run at once, without a checkpoint."""
    sent: list[int] = []
    monkeypatch.setattr(jobs, "live_owner", lambda path: 7)
    monkeypatch.setattr(jobs.os, "kill", lambda process, number: sent.append(process))
    (tmp_path / "one").mkdir()
    holder = tmp_path / "one" / "lock.holder"
    holder.write_text("7, the first attempt")
    jobs.Jobs(tmp_path).stop(tmp_path / "one")
    with pytest.raises(UserError, match="one stops after its current step"):
        jobs.Jobs(tmp_path).stop(tmp_path / "one")  # another studio, or this one after a restart
    holder.write_text("7, resumed: in a container processes have the same numbers again")
    jobs.Jobs(tmp_path).stop(tmp_path / "one")
    assert sent == [7, 7]


def test_two_studios_that_stop_a_run_at_the_same_time_send_one_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def kill(process: int, number: int) -> None:
        sent.append(process)
        if len(sent) == 1:
            with pytest.raises(UserError, match="stops after its current step"):
                jobs.Jobs(tmp_path).stop(tmp_path)

    monkeypatch.setattr(jobs, "live_owner", lambda path: 7)
    monkeypatch.setattr(jobs.os, "kill", kill)
    (tmp_path / "lock.holder").write_text("7")
    jobs.Jobs(tmp_path).stop(tmp_path)
    assert sent == [7]


def test_a_stop_that_could_not_be_sent_may_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: int, number: int) -> None:
        raise PermissionError("of another user")

    monkeypatch.setattr(jobs, "live_owner", lambda path: 7)
    monkeypatch.setattr(jobs.os, "kill", refuse)
    (tmp_path / "lock.holder").write_text("7")
    for _ in range(2):
        with pytest.raises(PermissionError):
            jobs.Jobs(tmp_path).stop(tmp_path)


def test_tags_are_kept(studio: Studio, one: str) -> None:
    studio.post(f"{one}/tags", tags=["good", "<b>seed 1</b>"])
    again = Studio(studio.root)
    assert again.get(one)["tags"] == ["good", "<b>seed 1</b>"]
    assert [row["name"] for row in again.get("/api/runs", text="seed 1")["runs"]] == ["one"]
    studio.post(f"{one}/tags", 400, tags=["x" * 41])


def test_two_studios_over_one_folder_lose_no_tag(tmp_path: Path) -> None:
    names = [f"/api/runs/{path_id(make_run(tmp_path / f'run{n}', 2))}" for n in range(4)]
    studios = [Studio(tmp_path) for _ in names]

    def tag(place: int) -> None:
        for number in range(25):
            studios[place].post(f"{names[place]}/tags", tags=[f"tag {number}"], seen=[f"tag {number - 1}"])

    with ThreadPoolExecutor() as pool:
        [*pool.map(tag, range(len(names)))]
    assert [studios[0].get(name)["tags"] for name in names] == [["tag 24"]] * len(names)


def test_a_tag_that_another_page_has_added_stays(tmp_path: Path) -> None:
    run, first, second = f"/api/runs/{path_id(make_run(tmp_path / 'run', 2))}", Studio(tmp_path), Studio(tmp_path)
    first.post(f"{run}/tags", tags=["good", "old"])
    first.post(f"{run}/tags", tags=["good", "mine"], seen=["good", "old"])
    second.post(f"{run}/tags", tags=["good", "old", "theirs"], seen=["good", "old"])
    assert {*first.get(run)["tags"]} >= {"good", "mine", "theirs"}
    file = tmp_path / ".studio" / "tags.json"
    for text in ("{", "[]", '{"run": 1}'):
        file.write_text(text)
        assert first.get(run)["tags"] == []
        assert "tags.json is damaged" in first.post(f"{run}/tags", 400, tags=["new"])["error"]
        assert file.read_text() == text


def test_an_answer_that_many_rollouts_give_is_reviewed_once(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", {"format": 2, "name": "same", "stages": STAGES}) as writer:
        rows = [rollout(1, n, text) for n, text in enumerate(["four", "four", "five", "four"])]
        writer.rollouts("rl", 1, rows, None, arrays(rows))
    studio, run = Studio(tmp_path), f"/api/runs/{path_id(tmp_path / 'run')}"
    said = []
    while shown := studio.get(f"{run}/review")["rollout"]:
        said.append(shown["response"])
        studio.post(f"{run}/review", 201, **{key: shown[key] for key in ("stage", "step", "number")}, agrees=True)
    assert said == ["four", "five"]


def test_a_review_is_of_the_response_that_was_read(tmp_path: Path) -> None:
    """A stage that runs again writes other responses in the same places."""
    directory = make_run(tmp_path / "run")
    studio, run = Studio(tmp_path), f"/api/runs/{path_id(directory)}"
    studio.get(f"{run}/rollouts")
    first = studio.get(f"{run}/review", order="highest")["rollout"]
    place = {key: first[key] for key in ("stage", "step", "number")}
    studio.post(f"{run}/review", 201, **place, agrees=False, flagged=True)
    file = directory / "rollouts" / first["stage"] / f"step-{first['step']:06}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row["response"] = "another"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / ".studio" / "index.sqlite").unlink()
    studio = Studio(tmp_path)
    studio.get(f"{run}/rollouts")
    assert studio.get(f"{run}/flagged.jsonl") == "" and studio.get(f"{run}/review/report")["reviewed"] == 0
    asked = studio.get(f"{run}/review", order="highest")["rollout"]
    assert {key: asked[key] for key in place} == place and asked["response"] == "another"


@pytest.mark.parametrize("change", ["shorter", "removed"])
def test_reviews_are_reported_of_the_rollouts_that_are_left(tmp_path: Path, change: str) -> None:
    directory = make_run(tmp_path / "run")
    studio, run = Studio(tmp_path), f"/api/runs/{path_id(directory)}"
    studio.get(f"{run}/rollouts")
    found = [studio.get(f"{run}/review", order="highest")["rollout"]]
    while found[-1]["step"] == found[0]["step"]:
        studio.post(f"{run}/review", 201, **{key: found[-1][key] for key in ("stage", "step", "number")}, agrees=True)
        found.append(studio.get(f"{run}/review", order="highest")["rollout"])
    studio.post(f"{run}/review", 201, **{key: found[-1][key] for key in ("stage", "step", "number")}, agrees=True)
    file = directory / "rollouts" / found[0]["stage"] / f"step-{found[0]['step']:06}.jsonl"
    file.write_text(file.read_text()[:20]) if change == "shorter" else file.unlink()
    assert studio.get(f"{run}/review/report")["reviewed"] == 1


def test_reviews_of_a_run_that_cannot_be_written_are_kept(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "runs" / "run")
    (directory / ".studio").touch()  # as if there were no right to make the folder
    studio, run = Studio(tmp_path / "runs"), f"/api/runs/{path_id(directory)}"
    studio.get(f"{run}/rollouts")
    first = studio.get(f"{run}/review", order="highest")["rollout"]
    studio.post(f"{run}/review", 201, **{key: first[key] for key in ("stage", "step", "number")}, agrees=True)
    assert [*(tmp_path / "runs" / ".studio").glob("reviews-*.sqlite")]
    assert studio.get(f"{run}/review/report")["reviewed"] == 1


def test_without_a_model_server_the_playground_says_so(studio: Studio) -> None:
    assert studio.get("/api/models") == {"models": []}
    sent = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert "no model server" in studio.post("/api/chat", 400, **sent)["error"]
    studio.post("/api/chat", 400, model="m", messages=[{"role": "user", "content": "hi"}], temperature=99)


def test_text_with_a_nul_is_refused_before_it_is_an_argument_of_a_program(studio: Studio, one: str) -> None:
    said = studio.post(f"{one}/replay", 400, stage="rl", step=1, prompt="a\0b")
    assert said["error"] == "prompt must be a text of at most 10000 characters, none of them NUL"
    said = studio.post("/api/runs", 400, recipe="quickstart", settings=["size=\0"])
    assert said["error"] == "'size=\\x00' is not key=value"


@pytest.mark.parametrize(
    "sent", ["", "{", "[]", "[" * 100_000, '{"a":' * 100_000, "\xff", '{"tags": ["\\ud800"], "note": "\\ud800"}']
)
def test_a_body_that_is_no_json_object_is_one_line(studio: Studio, one: str, sent: str) -> None:
    headers = {"x-studio-token": "secret", "content-type": "application/json"}
    for path in (f"{one}/tags", f"{one}/review", "/api/label", "/api/chat"):
        answer = studio.client.post(path, content=sent.encode("latin-1"), headers=headers)
        assert (answer.status_code, answer.json()["error"][:18]) == (400, "send a JSON object")
