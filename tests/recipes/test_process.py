"""The recipe of process rewards: its arms differ in the reward and its anchor, and the longer one has the budget of the labels."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.recipes.process import process
from posttrain.runs.write import RunWriter
from posttrain.stages.base import Context, run_stages
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.types import Problem, Score


def test_the_arms_of_rl_differ_in_the_reward_and_its_anchor_and_the_longer_one_pays_for_the_labels() -> None:
    made = {stage.name: stage for stage in process(steps=60, solutions=512, completions=4).stages}
    outcome, by_step, longer = (made[name] for name in ("outcome", "process", "outcome_longer"))
    assert replace(by_step, name="outcome", reward=outcome.reward, algorithm=outcome.algorithm) == outcome
    assert by_step.algorithm == replace(outcome.algorithm, supervision="process", beta=1.0), "a learned reward has an anchor"
    assert replace(longer, name="outcome", steps=60, evaluate_every=outcome.evaluate_every) == outcome
    assert longer.steps - outcome.steps == 512 * (1 + 2 * 4) // 256, "as many samples as solutions and completions"
    assert replace(made["outcomes"], name="labels", completions=4) == made["labels"], "the same solutions"


@dataclass(frozen=True)
class Coin(Arithmetic):
    """Every other answer is right, so that a model that knows nothing has something to learn from."""

    def score(self, problem: Problem, response: str) -> Score:
        right = sum(map(ord, response)) % 2 == 0
        return Score(float(right), outcome="correct" if right else "wrong")


def test_the_toy_runs_from_labels_to_search_and_rl(tmp_path: Path) -> None:
    few = {
        "sft": {"steps": 1},
        "labels": {"prompts": 8},
        "outcomes": {"prompts": 8},
        "prm": {"steps": 1},
        "orm": {"steps": 1},
        **{key: {"steps": 1, "evaluate_every": 0, "prompts": 2} for key in ("outcome", "process", "outcome_longer")},
    }
    made = process(completions=2, problems=4, samples=4).stages
    task = Coin(level=3, min_level=3)
    stages = [replace(s, **few.get(s.name, {}), **({"task": task} if hasattr(s, "task") else {})) for s in made]
    with RunWriter.create(tmp_path / "run", {}) as writer:
        context = Context(writer, 0, threads=1, say=False)
        run_stages(stages, context)
        found, labels = context.result("search"), context.result("labels")
    assert found is not None and labels is not None and labels["written"] > 2 and labels["completions"] % 2 == 0
    assert {"pass", "majority", "outcome", "process_min", "process_product", "process_last", "beam"} == set(found["accuracy"])
    assert all(0 <= row[0] <= 1 for rows in found["accuracy"].values() for row in rows.values())
    rows = map(json.loads, (tmp_path / "run/metrics.jsonl").open())
    (row,) = (row for row in rows if row.get("stage") == "process")
    assert "reward/task" in row, "the steps' rewards are the model's, and the task's own score is reported"
