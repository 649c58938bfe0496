"""People in the loop: a run writes its comparisons and waits; labels made over HTTP resume it, train a reward model, and move the
policy towards what was preferred."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from studio_for_tests import Studio

from posttrain import cli
from posttrain.evals.statistics import Interval
from posttrain.runs.read import Run
from posttrain.runs.status import status
from posttrain.studio.library import path_id
from posttrain.tasks.reviews import taste

ASKED = 400
SMALL = ["annotator=people", f"compared={ASKED + 40}", f"comparisons.needed={ASKED}", "pretrain.steps=500", "reward.steps=120"]
SMALL += ["reward.min_accuracy=0.5", "steps=40", "prompts=64", "problems=500", "ptx=0", "threads=1"]


def kind(directory: Path) -> str:
    run = Run(directory)
    return status(run, run.events()).kind


@pytest.mark.slow
def test_from_labels_made_in_the_page_to_a_better_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    assert cli.main(["run", "instructgpt", f"out={directory}", *SMALL]) == 0
    assert f"waiting for labels: 0 of {ASKED}" in capsys.readouterr().out and kind(directory) == "waiting"
    studio = Studio(tmp_path)
    (found,) = studio.get("/api/label")
    assert found["run"] == path_id(directory)
    place = f"/api/label/{found['id']}"
    for number in range(ASKED):
        item = studio.get(f"{place}/next", annotator="ann")["item"]
        liked = [taste(text)[0] for text in item["responses"]]  # a person who likes what the task likes
        choice = "tie" if liked[0] == liked[1] else [liked.index(max(liked))]
        answer = studio.post(f"{place}/vote", 201, annotator="ann", item=item["id"], choice=choice)
        assert answer["resumed"] is (number == ASKED - 1)
        if number == 50:  # too early: it waits on
            assert cli.main(["resume", str(directory)]) == 0 and kind(directory) == "waiting"
            rows = (directory / "labels").glob("*.jsonl")
            assert len([file for file in rows if not file.name.endswith(".labels.jsonl")]) == 1
    end = time.monotonic() + 900
    while kind(directory) == "live" and time.monotonic() < end:
        time.sleep(0.5)
    assert kind(directory) == "finished"
    data = [json.loads(line) for line in (directory / "stages" / "comparisons" / "data.jsonl").read_text().splitlines()]
    assert len(data) > ASKED / 2 and set(data[0]) == {"prompt", "chosen", "rejected"}
    (result,) = Run(directory).stage_rows("versus_sft", "result.json")
    wins = Interval(*result["win_rate"])
    print("wins against sft:", wins)
    assert wins.low > 0.5
