"""The recipes that learn from feedback: their stages, what they refuse, and one of them from the command line to its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain import cli
from posttrain.errors import UserError
from posttrain.recipes.rlaif import rlaif
from posttrain.recipes.safety import safety
from posttrain.recipes.summarize import summarize
from posttrain.stages.base import Stage
from posttrain.tasks.posts import Posts

FILES = {"model": "m", "posts": "p.jsonl", "data": "d.jsonl", "judge": "j"}


def named(stages: tuple[Stage, ...]) -> dict[str, Any]:
    return {stage.name: stage for stage in stages}


def test_the_judge_of_summarize_is_not_who_compared() -> None:
    toy = named(summarize().stages)
    assert list(toy) == ["sft", "comparisons", "reward", "rl", "versus_sft", "versus_writer"]
    assert (toy["comparisons"].task, toy["versus_sft"].task) == (Posts(), Posts(annotator="reader"))
    real = named(summarize(**FILES, demonstrations="s.jsonl").stages)  # type: ignore[arg-type]
    assert list(real) == ["sft", "reward", "rl", "versus_sft"] and real["versus_sft"].judge.model == "j"
    assert named(summarize(**FILES).stages)["rl"].model == "m", "without demonstrations it begins with the model"  # type: ignore[arg-type]


def test_people_judge_what_they_have_not_labelled() -> None:
    toy = named(rlaif().stages)
    assert list(toy) == ["sft", "people", "agreement", "comparisons", "reward", "rl", "versus_sft"]
    assert toy["comparisons"].judge.rules == Posts(annotator="reader") and toy["versus_sft"].judge is None
    asked = {p.id for p in toy["people"].training_problems()}
    assert not asked & {p.id for p in toy["comparisons"].training_problems()}
    assert named(rlaif(labels="people").stages)["comparisons"].judge is None
    assert list(named(rlaif(pairs="h.jsonl").stages))[:2] == ["sft", "agreement"]
    real = named(rlaif(model="m", questions="q.jsonl", judge="j", evaluator="e", pairs="h.jsonl").stages)
    assert list(real) == ["agreement", "comparisons", "reward", "rl", "versus_sft"]
    assert (real["comparisons"].judge.model, real["versus_sft"].judge.model) == ("j", "e")


def test_the_harmless_reward_model_of_safety_has_its_weight_and_its_test_by_people() -> None:
    toy = named(safety(harmless_weight=3.0).stages)
    assert list(toy) == ["sft", "before", "helps", "harms", "helpful", "harmless", "rl", "after"]
    assert {part.key: part.weight for part in toy["rl"].reward.parts} == {"helpful": 1.0, "harmless": 3.0}
    real = named(safety(model="m", pairs="h.jsonl").stages)
    assert real["agreement"].reward_model == "harmless" and real["before"].model == "m" and "sft" not in real


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: summarize(posts="p.jsonl"), "are for a real model"),
        (lambda: summarize(judge="j"), "a judge is for a real model"),
        (lambda: summarize(model="m"), "a real model needs a JSONL file of prompts"),
        (lambda: summarize(model="m", posts="p.jsonl"), "needs posts, data"),
        (lambda: rlaif(model="m", questions="q.jsonl"), "needs questions and a judge"),
        (lambda: rlaif(evaluator="e"), "a judge is for a real model"),
        (lambda: rlaif(model="m", questions="q.jsonl", judge="j", labels="people"), "labels=people is for the toy"),
    ],
)
def test_files_and_judges_that_do_not_go_together(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_rlaif_runs_from_imitation_to_what_people_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    demonstrations = "sft.data=[{task: {name: posts, summary: any}, counts: {0: 960}}]"  # as many as 60 steps of 16 read
    shorter = [
        "sft.steps=60",
        "sft.batch=16",
        demonstrations,
        "people.prompts=60",
        "compared=60",
        "reward.steps=2",
        "problems=20",
    ]
    words = [
        f"out={run}",
        "threads=1",
        *shorter,
        "reward.min_accuracy=0",
        "steps=1",
        "prompts=4",
        "rl.algorithm.critic_warmup=0",
    ]
    assert cli.main(["run", "rlaif", *words]) == 0
    results = {path.parent.name: json.loads(path.read_text()) for path in (run / "stages").glob("*/result.json")}
    agreement, compared, versus = (results[name] for name in ("agreement", "comparisons", "versus_sft"))
    assert agreement["judged"] > 5 and agreement["swayed"] > 0 and "agrees with people on" in capsys.readouterr().out
    assert compared["tied"] > 0 and compared["usage"]["requests"] == 2 * (compared["written"] + compared["tied"])
    assert versus["win_rate_at_equal_length"][1] < versus["win_rate_at_equal_length"][0] and len(versus["length"]) == 2


def test_instructgpt_ends_at_its_kl_budget_and_is_judged_by_who_labelled_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    cut = [f"{name}.sampling.max_new_tokens=12" for name in ("rl", "versus_sft", "versus_base", "second_judge")]
    cut += ["comparisons.sampling.max_new_tokens=60", "compared=8", "reward.steps=1", "problems=4"]
    shorter = [f"{name}.{key}" for name in ("pretrain", "sft") for key in ("steps=1", "batch=4")]
    reached = ["max_kl=1e-9", "rl.stop.kl_steps=1", "steps=4", "prompts=2", "ptx=0", "rl.algorithm.critic_warmup=0", "lr=1e-2"]
    few = [f"{name}.data=[{{task: {{name: reviews, mood: any}}, counts: {{0: 64}}}}]" for name in ("pretrain", "sft")]
    words = [*cut, *shorter, *reached, *few, "reward.min_accuracy=0", "versus_sft.text=[]", "threads=1"]
    assert cli.main(["run", "instructgpt", f"out={run}", *words]) == 0
    results = {path.parent.name: json.loads(path.read_text()) for path in (run / "stages").glob("*/result.json")}
    assert 1 <= results["rl"]["steps"] < 4 and results["rl"]["stopped"].endswith("(stop.kl=1e-09)")
    judged = results["second_judge"]
    assert judged["usage"]["requests"] == 2 * judged["problems"] == 8, "asked in both orders"
    assert "usage" not in results["versus_sft"] and len(results["versus_base"]["win_rate"]) == 3
