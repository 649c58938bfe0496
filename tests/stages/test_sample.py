"""Rejection sampling into data: which answers are kept, what is told of the rest, and training on what was kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest

from posttrain import config
from posttrain.commands import plan
from posttrain.errors import UserError
from posttrain.evals.contamination import content_hash
from posttrain.recipes.base import Recipe
from posttrain.recipes.r1 import r1
from posttrain.runs.write import RunWriter
from posttrain.stages._contamination import trained_on
from posttrain.stages._material import Data, placed
from posttrain.stages.base import Context, Stage, run_stages
from posttrain.stages.comparisons import ComparisonsStage
from posttrain.stages.sample import KINDS, SampleStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks.base import Task
from posttrain.types import Group, Problem, Rollout, Sampling, Score, Segment


@dataclass(frozen=True)
class Length(Task):
    """Any answer to an even number is good; to others none is, and that to 5 cannot be scored."""

    good: float = 1.0
    alphabet = "0123456789 "

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return [Problem(f"{split}/{n}", f"{n + 100 * (split == 'test')} ", str(n), 0, {"n": n}) for n in range(20)]

    def score(self, problem: Problem, response: str) -> Score:
        number = problem.facts["n"]
        return Score.failed("lost") if number == 5 else Score(self.good * (number % 2 == 0))


def sample(**settings: object) -> SampleStage:
    few = {"name": "sampled", "model": "tiny:nano", "task": Length(), "prompts": 6, "samples": 2, "sampling": Sampling(40)}
    return SampleStage(**(few | settings))  # type: ignore[arg-type]


def run(directory: Path, *stages: Stage) -> Context:
    with RunWriter.create(directory, {}) as writer:
        context = Context(writer, 0, threads=1, say=False)
        run_stages(stages, context)
    return context


def group(*answers: tuple[str, float | None, str]) -> Group:
    problem = Problem("p", "?")
    rollouts = [
        Rollout(
            problem, n, (Segment(np.array([1]), text, True, np.zeros(1), finish=finish),),
            Score.failed("lost") if value is None else Score(value),
        )
        for n, (text, value, finish) in enumerate(answers)
    ]  # fmt: skip
    return Group(problem, tuple(rollouts))


def test_what_is_kept_by_hand() -> None:
    answers = group(
        ("ok", 0.8, "stop"), ("ok", 0.8, "stop"), ("best", 1.0, "stop"), ("fair", 0.7, "stop"),
        ("bad", 0.1, "stop"), ("cut", 1.0, "length"), ("?", None, "stop"),
    )  # fmt: skip
    counts = dict.fromkeys(KINDS, 0)
    kept = sample(samples=7, min_score=0.7, keep=2).chosen(answers, counts)
    assert [r.response for r in kept] == ["best", "ok"]
    assert counts == {"written": 2, "rejected": 1, "repeated": 2, "truncated": 1, "failed": 1}


def test_only_good_answers_are_written_and_an_sft_stage_learns_them(tmp_path: Path) -> None:
    learn = SFTStage(name="sft", model="begin", data=(Data(file="sampled"),), steps=2, batch=2)
    begin = SFTStage(name="begin", model="tiny:nano", data=(Data(task=Length(), counts={0: 4}),), steps=1, batch=2)
    context = run(tmp_path, begin, sample(model="begin", skip=2), learn)
    rows = [json.loads(line) for line in (context.folder("sampled") / "data.jsonl").read_text().splitlines()]
    assert [row["prompt"][0]["content"] for row in rows] == ["2 ", "4 ", "6 "][: len(rows)] and rows
    assert all(row["completion"][0]["role"] == "assistant" for row in rows)
    result = context.result("sampled") or {}
    assert result["written"] == result["answered"] == len(rows) and result["problems"] == 6
    assert sum(int(result[kind]) for kind in KINDS) == 12
    assert placed(learn.data, context)[0].file == str(context.folder("sampled") / "data.jsonl")
    assert (context.folder("sft") / "model").is_dir()
    assert "sampled" in (context.result("sft") or {})["lineage"]["inputs"], "a change of what was sampled trains again"
    assert content_hash(rows[0]["prompt"][0]["content"]) in trained_on(context, "sft")


def test_where_nothing_is_good_enough_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sampled: no answer of tiny:nano scored 1.0 or more"):
        run(tmp_path, sample(task=Length(good=0.9)))
    for bad, words in (
        ({"samples": 0}, "samples must be at least 1"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"skip": -1}, "skip must be at least 0"),
        ({"sampling": Sampling(4, temperature=0.0)}, "all the same"),
    ):
        with pytest.raises(UserError, match=words):
            sample(**bad)


def test_a_plan_prices_a_stage_whose_data_is_not_there_yet() -> None:
    begin = SFTStage(name="begin", model="tiny:nano", data=(Data(task=Length(), counts={0: 4}),), steps=1, batch=2)
    known, later = Data(task=Length(), counts={0: 4}), Data(file="sampled")
    stages = (begin, sample(model="begin"), SFTStage(name="both", model="begin", data=(known, later), steps=2, batch=2),
              SFTStage(name="alone", model="begin", data=(later,), steps=2, batch=2))  # fmt: skip
    lines = plan.describe(config.Settings(Recipe(stages), "test"))
    assert sum("written by sampled" in line for line in lines) == 2
    assert sum("passes over 4 examples" in line for line in lines) == 2


def tiny(stage: Stage) -> Stage:
    """The stage as it is, with next to no work."""
    few = {"steps": 1, "batch": 4, "prompts": 4, "problems": 4, "min_score": 0.0, "min_accuracy": 0.0, "sampling": Sampling(8)}
    names = {f.name for f in fields(stage)}
    changed: dict[str, object] = {k: v for k, v in few.items() if k in names and not isinstance(getattr(stage, k), str)}
    if isinstance(stage, SFTStage):
        changed["data"] = tuple(replace(d, counts=dict.fromkeys(d.counts, 4)) if d.task else d for d in stage.data)
    if isinstance(stage, SampleStage | ComparisonsStage):
        changed |= {"prompts": 48, "sampling": Sampling(200)}  # a model that has learned nothing ends few answers
    return replace(stage, **changed)  # type: ignore[arg-type]


def test_r1_chains_its_four_stages(tmp_path: Path) -> None:
    context = run(tmp_path, *(tiny(stage) for stage in r1().stages))
    used = {
        name: set((context.result(name) or {})["lineage"]["inputs"]) for name in ("cold_start", "reasoning", "mixture", "final")
    }
    assert (
        used["cold_start"] == {"base"} and used["reasoning"] == {"cold_start"} and used["final"] == {"mixture", "preferences"}
    )
    assert "sampled" in used["mixture"]
    whole = config.Settings(r1(), "r1")
    assert config.from_config(config.to_config(whole), "config").recipe == whole.recipe
