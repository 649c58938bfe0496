"""Rejection sampling into data: which answers are kept, what is told of the rest, and training on what was kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import pytest

from posttrain import config
from posttrain.algorithms.kto import KTO
from posttrain.commands import plan
from posttrain.errors import UserError
from posttrain.evals.contamination import content_hash
from posttrain.models.tiny import character_tokenizer
from posttrain.recipes.base import Recipe
from posttrain.recipes.r1 import r1
from posttrain.recipes.star import star
from posttrain.runs.write import RunWriter
from posttrain.stages._contamination import trained_on
from posttrain.stages._material import Data, gather, placed
from posttrain.stages.base import PRINTABLE, Context, Stage, run_stages
from posttrain.stages.comparisons import ComparisonsStage
from posttrain.stages.preference import PreferenceStage
from posttrain.stages.sample import KINDS, SampleStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks.base import Task
from posttrain.tasks.hinted import Hinted
from posttrain.types import Group, Message, Problem, Rollout, Sampling, Score, Segment


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


@dataclass(frozen=True)
class AtLast(Length):
    """As Length, but an odd number has a good answer from the third one on: those that are given with a hint."""

    seen: dict[int, int] = field(default_factory=dict)

    def score(self, problem: Problem, response: str) -> Score:
        number = problem.facts["n"]
        self.seen[number] = self.seen.get(number, 0) + 1
        return Score(float(number % 2 == 0 or self.seen[number] > 2))


def test_what_is_right_with_a_hint_is_learned_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems without a good answer, and they alone, are asked again with the answer; no training prompt has the hint."""
    asked: list[str] = []
    prompt = Hinted.prompt

    def recorded(self: Hinted, problem: Problem) -> tuple[Message, ...]:
        asked.append(prompt(self, problem)[-1].content)
        return prompt(self, problem)

    monkeypatch.setattr(Hinted, "prompt", recorded)
    stage = sample(task=AtLast(), hint="so 0{answer}0 ", sampling=Sampling(6), prompts=8)
    stage = replace(stage, sampling=Sampling(6, min_new_tokens=6), min_score=1.0)
    monkeypatch.setattr(Rollout, "finish", property(lambda self: "stop"))  # an untrained model never stops
    context = run(tmp_path, stage)
    assert asked == [f"{n} so 0{n}0 " for n in (1, 3, 5, 7)]
    rows = [json.loads(line) for line in (context.folder("sampled") / "data.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [[{"role": "user", "content": f"{n} "}] for n in (0, 2, 4, 6, 1, 3, 5, 7)]
    result = context.result("sampled") or {}
    assert result["answered"] == 4 and result["written"] == 4 and result["hinted"]["written"] == 4
    tokenizer = character_tokenizer(PRINTABLE)
    data = placed((Data(file="sampled"),), context)
    learned = [example for part in gather(data, tokenizer, 0, 64, all_tokens=False).sets for example in part]
    given = [tokenizer.decode(example.ids[~example.mask]) for example in learned]
    assert len(given) == 8 and not any("so" in text for text in given)


def test_feedback_is_every_answer_and_whether_it_is_good(tmp_path: Path) -> None:
    """In the form that KTO learns from: one that is good enough, and one that is not, of what has a score and an end."""
    answers = group(("ok", 0.8, "stop"), ("ok", 0.8, "stop"), ("bad", 0.1, "stop"), ("cut", 1.0, "length"), ("?", None, "stop"))
    counts = dict.fromkeys(KINDS, 0)
    stage = sample(samples=5, min_score=0.7, labels=True)
    assert [(r.response, stage.good(r)) for r in stage.chosen(answers, counts)] == [("ok", True), ("bad", False)]
    assert counts == {"written": 2, "rejected": 0, "repeated": 1, "truncated": 1, "failed": 1}
    begin = SFTStage(name="begin", model="tiny:nano", data=(Data(task=Length(), counts={0: 4}),), steps=1, batch=2)
    learn = PreferenceStage(name="kto", model="begin", data=("sampled",), steps=1, algorithm=KTO(), held_out=0, batch=2)
    context = run(tmp_path, begin, sample(model="begin", skip=6, labels=True, sampling=Sampling(200)), learn)
    rows = [json.loads(line) for line in (context.folder("sampled") / "data.jsonl").read_text().splitlines()]
    assert {row["label"] for row in rows} == {True, False}
    assert all(row["label"] == (int(row["prompt"][0]["content"]) % 2 == 0) for row in rows)
    assert (context.result("kto") or {})["trained_on"] == sum(bool(row["completion"][0]["content"].strip()) for row in rows)
    assert (context.result("sampled") or {})["good"] == sum(row["label"] for row in rows)
    cut = stage.dry_run().stage
    assert isinstance(cut, ComparisonsStage) and cut.name == stage.name, "feedback of one kind would be refused"
    with pytest.raises(UserError, match="no feedback on the model; leave out hint or labels"):
        sample(labels=True, hint="{answer}")


def test_a_problem_without_an_answer_gets_no_hint() -> None:
    task = Hinted(Length(), "so {answer} {x}")
    assert task.prompt(Problem("p", "1 ", "2"))[-1].content == "1 so 2 {x}", "nothing but {answer} is replaced"
    assert task.prompt(Problem("p", "1 "))[-1].content == "1 "
    assert set(task.alphabet or "") == set("0123456789 so {x}")
    for hint in ("so", "{0}"):
        with pytest.raises(UserError, match="a hint has {answer} in it"):
            Hinted(Length(), hint)
        with pytest.raises(UserError, match="has no {answer} in it, so that it would say nothing of the problem"):
            sample(hint=hint)


def test_the_shipped_recipe_tells_answers_to_its_first_model_only_in_prompts_for_hints() -> None:
    stages = {stage.name: stage for stage in star(rounds=2).stages}
    assert [stages[n].model for n in ("sample_1", "sample_2", "train_1", "train_2")] == ["sft", "train_1", "sft", "sft"]  # type: ignore[attr-defined]
    assert stages["sample_2"].skip == 1000 and stages["sample_2"].hint == "{answer}="  # type: ignore[attr-defined]
    assert star(hint=False).stages[2].hint == ""  # type: ignore[attr-defined]


def test_where_nothing_is_good_enough_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no answer ended and scored 1.0 or more; answers of tiny:nano: .*[0-9] rejected"):
        run(tmp_path, sample(task=Length(good=0.9)))
    with pytest.raises(UserError, match=r"answers of tiny:nano: [0-9]+ truncated; .* raise samples or max_new_tokens"):
        run(tmp_path / "cut", sample(sampling=Sampling(1)))
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
