"""Judges, reward models and rules together, as a user has them: comparisons by a judge, and rewards mixed on one answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import posttrain as pt
from posttrain import config, pipeline
from posttrain.errors import UserError
from posttrain.rewards._asking import Form
from posttrain.runs.read import Run
from posttrain.stages.comparisons import ComparisonsStage
from posttrain.stages.reward_sources import RewardModels
from posttrain.tasks.prompts import Prompts
from posttrain.train.judging import LocalModel
from tests.rewards.test_judge import ASKS_FOR_A_VERDICT, Reply, serve, shown  # noqa: F401  serve is a fixture
from tests.stages.test_rl import reward_model
from tests.train.test_judging import saved  # noqa: F401

SMALL: dict[str, Any] = {"device": "cpu", "threads": 1}
SUMS = {"name": "arithmetic", "level": 1}


def longer(body: dict[str, Any], number: int) -> Reply:
    """Prefers the longer answer; by itself an answer has as many points as letters, but a canary one."""
    if ASKS_FOR_A_VERDICT in str(body["messages"][1]["content"]):
        a, b = len(shown(body, "A")), len(shown(body, "B"))
        return 200, json.dumps({"verdict": "A" if a > b else "B" if b > a else "tie"})
    length = len(shown(body, "ANSWER"))
    return 200, json.dumps({"score": length if 1 <= length <= 6 else 1})


def started(folder: Path, tree: dict[str, Any]) -> Path:
    """A run of a recipe in YAML."""
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(tree))
    return pipeline.start(config.parse(str(file), [f"out={folder / 'run'}", "device=cpu", "threads=1"]))


def test_comparisons_by_a_judge_behind_an_address(serve: Any, tmp_path: Path) -> None:  # noqa: F811
    """The prompts have no score of their own. What the judge finds equal is counted, not written."""
    _, endpoint = serve(longer)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"n{n}"}) + "\n" for n in range(8)))
    stage = {
        "stage": "comparisons", "name": "pairs", "model": "tiny:nano", "prompts": 8, "judge": {"model": "m", "url": endpoint.url},
        "task": {"name": "prompts", "file": str(tmp_path / "prompts.jsonl"), "held_out": 0},
        "sampling": {"max_new_tokens": 60, "min_new_tokens": 1},
    }  # fmt: skip
    directory = started(tmp_path, {"stages": [stage]})
    rows = [json.loads(line) for line in (directory / "stages/pairs/data.jsonl").read_text().splitlines()]
    assert rows and all(len(row["chosen"][0]["content"]) > len(row["rejected"][0]["content"]) for row in rows)
    result = json.loads((directory / "stages/pairs/result.json").read_text())
    assert result["written"] == len(rows) and result["unjudged"] == 0 and result["usage"]["requests"] > 2 * len(rows)
    assert result["written"] + result["tied"] + result["equal"] == 8


def test_comparisons_by_a_model_in_this_process_are_data_for_dpo(
    saved: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The network's own verdicts are replaced by a rule, since one made by hand cannot compare: the longer answer wins."""

    def decide(self: LocalModel, prompts: Sequence[tuple[int, ...]], form: Form) -> list[str | None]:
        def choice(text: str) -> str:
            a, b = (len(re.search(rf"{name}:\n<(\w+)>\n(.*?)\n</\1>", text, re.DOTALL)[2]) for name in "AB")  # type: ignore[index]
            return "A" if a > b else "B" if b > a else "tie"

        texts = [self.policy.tokenizer.decode(list(prompt)) for prompt in prompts]
        return [json.dumps({form.field: 1 if form.field == "score" else choice(text)}) for text in texts]

    monkeypatch.setattr(LocalModel, "decide", decide)
    how: dict[str, Any] = {"model": "tiny:nano", "max_new_tokens": 40, "min_new_tokens": 1, **SMALL}
    prompts = [f"n{n}" for n in range(6)]
    run = pt.comparisons(prompts=prompts, judge=saved, samples=3, out=tmp_path / "ranked", **how)
    rows = [json.loads(line) for line in run.data.read_text().splitlines()]
    assert rows and len(rows) == run.result["written"]
    for row in rows:
        sizes = [len(response[0]["content"]) for response in row["responses"]]
        assert sizes == sorted(sizes, reverse=True)
        assert row["ranking"] == [1 + sum(other > size for other in sizes) for size in sizes], "equal answers share a place"
    pairs = pt.comparisons(prompts=prompts, judge={"model": saved}, out=tmp_path / "pairs", **how)
    tuned = pt.dpo("tiny:nano", pairs, steps=1, batch=2, held_out=0.0, out=tmp_path / "dpo", warmup=0, **SMALL)
    assert len(tuned.metrics) == 1


def test_a_task_without_a_score_needs_a_judge() -> None:
    with pytest.raises(
        UserError, match="the task scores nothing by itself; give it a reward .task.reward., or name a reward_model or a judge"
    ):
        ComparisonsStage(name="c", model="tiny:nano", task=Prompts("prompts.jsonl"))


def test_rules_a_judge_and_weighted_reward_models_on_one_answer(serve: Any, tmp_path: Path) -> None:  # noqa: F811
    _, endpoint = serve(longer)
    members = [reward_model(tmp_path / name, seed) for seed, name in enumerate("ab")]
    parts = [
        {"reward": {"name": "task"}, "weight": 0.5},
        {"reward": {"name": "judge", "model": "m", "url": endpoint.url}, "weight": 2.0},
        {"reward": {"name": "models", "models": members, "weights": [3, 1]}, "weight": -1.0},
    ]
    stage = {
        "stage": "rl", "name": "rl", "model": "tiny:nano", "task": SUMS, "steps": 1, "prompts": 2, "rollouts_every": 1,
        "algorithm": {"name": "grpo", "group": 2, "beta": 0.0}, "sampling": {"max_new_tokens": 6},
        "evaluate_every": 0, "reward": {"name": "mix", "parts": parts},
    }  # fmt: skip
    rows = Run(started(tmp_path, {"stages": [stage]})).rollouts("rl", 1)
    assert len(rows) == 4
    for row in rows:
        assert row.parts["models"] == pytest.approx((3 * row.parts["member/0"] + row.parts["member/1"]) / 4)
        length = len(row.response)
        assert row.parts["judge"] == pytest.approx((length - 1) / 9 if 1 <= length <= 6 else 0.0)
        whole = 0.5 * row.parts["task"] + 2.0 * row.parts["judge"] - row.parts["models"]
        assert row.reward == pytest.approx(whole)


def test_the_same_from_python(serve: Any, tmp_path: Path) -> None:  # noqa: F811
    _, endpoint = serve(longer)
    how: dict[str, Any] = {"model": "tiny:nano", "steps": 1, "batch": 2, "group": 2, "beta": 0.0, "max_new_tokens": 6, **SMALL}
    judge = pt.JudgeReward(model="m", url=endpoint.url)
    run = pt.grpo(
        prompts=["a", "b"],
        reward={"judge": judge, "brief": lambda response: -len(response)},
        weights={"judge": 2.0},
        out=tmp_path / "judged",
        **how,
    )
    for row in run.rollouts():
        assert row["reward"] == pytest.approx(2.0 * row["parts"]["judge"] - len(row["response"]))
    members = [reward_model(tmp_path / name, seed) for seed, name in enumerate("ab")]
    run = pt.grpo(task=SUMS, reward_models=members, weights=[3, 1], out=tmp_path / "models", **how)
    for row in run.rollouts():
        assert row["reward"] == pytest.approx((3 * row["parts"]["member/0"] + row["parts"]["member/1"]) / 4)
    with pytest.raises(UserError, match="weights: 1 for 2 reward models"):
        pt.rl(task=SUMS, reward_models=members, weights=[3], out=tmp_path / "none", **how)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": (1.0,)}, "weights: 1 for 2 models; give one for each"),
        ({"weights": (1.0, 0.0)}, "weights must be above 0"),
        ({"weights": (1.0, 2.0), "combine": "worst"}, "the worst of several has no weights"),
    ],
)
def test_weights_that_no_ensemble_has(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RewardModels(models=("a", "b"), **settings)


def test_a_judge_is_refused_before_the_first_stage(tmp_path: Path) -> None:
    for settings, message in (
        ({"url": "ftp://x"}, "no http address"),
        ({"rubric": "nowhere.txt"}, "there is no rubric file nowhere.txt"),
    ):
        reward = pt.JudgeReward(model="m", **settings)
        with pytest.raises(UserError, match=message):
            pt.rl("tiny:nano", ["a"], {"judge": reward, "length": len}, out=tmp_path / "run")
