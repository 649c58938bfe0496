"""What the stages of a run answer to the same held-out prompts, kept at its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

import posttrain as pt
from posttrain import config, pipeline
from posttrain.runs.layout import ANSWERS, SUMMARY
from posttrain.runs.read import Run
from posttrain.stages import _side_by_side

BRIEF = {"model": "tiny:nano", "steps": 1, "batch": 4}
TASK = {"name": "arithmetic", "level": 1}


def start(stages: list[dict[str, object]]) -> Path:
    Path("recipe.yaml").write_text(yaml.safe_dump({"name": "mine", "stages": stages}))
    return pipeline.start(config.parse("recipe.yaml", ["out=run", "threads=1"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("side_by_side")


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Demonstrations and pairs from files, two trained models."""
    monkeypatch.chdir(folder)
    if not Path("run").exists():
        pairs = [{"prompt": f"say {n}", "chosen": "yes", "rejected": "no"} for n in range(10)]
        Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
        rows = [{"prompt": row["prompt"], "completion": "yes"} for row in pairs]
        Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sft = {"stage": "sft", "name": "sft", "data": "chats.jsonl", **BRIEF}
        start([sft, {"stage": "preference", "name": "dpo", "data": "pairs.jsonl", **BRIEF, "model": "sft", "held_out": 0.2}])
        Path("said.txt").write_text(capsys.readouterr().out)
    return folder / "run"


def test_the_stages_answer_prompts_that_were_held_out(run: Path) -> None:
    rows = Run(run).answers()
    assert [row.stage for row in rows] == ["sft", "dpo"] * 2 and all(row.held_out for row in rows)
    assert len({row.prompt for row in rows}) == 2 and all("say " in row.prompt for row in rows)
    said = Path("said.txt").read_text()
    assert "What the stages answer" in said and "(held out)" in said


def test_a_killed_run_that_goes_on_writes_them_once_and_alike(run: Path) -> None:
    before = (run / ANSWERS).read_text()
    (run / SUMMARY).unlink()
    pipeline.resume(run)
    assert (run / ANSWERS).read_text() == before and len(before.splitlines()) == 4


def test_no_random_stream_is_touched(run: Path) -> None:
    state = torch.get_rng_state()
    settings = config.from_config(Run(run).config, "config.yaml")
    with pipeline.RunWriter.resume(run) as writer:
        context = pipeline.Context(writer, settings.seed, say=False)
        assert _side_by_side.stage_answers(context, settings.recipe.stages) == Run(run).answers()
    assert torch.equal(torch.get_rng_state(), state)


def test_large_models_are_not_loaded_for_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_side_by_side.MAX_MODELS, "cpu", 1000)
    with pipeline.RunWriter.resume(run) as writer:
        stages = config.from_config(Run(run).config, "config.yaml").recipe.stages
        assert _side_by_side.stage_answers(pipeline.Context(writer, 0, say=False), stages) == []


def test_a_task_gives_its_held_out_problems_and_one_model_alone_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = [{"task": TASK, "counts": {1: 8}}]
    rl = {"stage": "rl", "name": "rl", "model": "sft", "steps": 1, "prompts": 1, "task": TASK, "evaluate_every": 0}
    rl |= {"sampling": {"max_new_tokens": 2}, "algorithm": {"name": "grpo", "group": 2}}
    rows = Run(start([{"stage": "sft", "name": "sft", "data": data, **BRIEF}, rl])).answers()
    assert [(row.stage, row.held_out) for row in rows] == [("sft", True), ("rl", True)] * 2
    assert rows[0].answer and rows[0].prompt.endswith("=")
    alone = pt.sft(model="tiny:nano", data=[{"prompt": "a", "completion": "b"}] * 4, steps=1, out="alone", threads=1)
    assert alone.answers == [] and not Path("alone", ANSWERS).exists()
