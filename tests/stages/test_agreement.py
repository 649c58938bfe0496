"""A judge of rules and a reward model against people, whose pairs an earlier stage or a file has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain import pipeline
from posttrain.config import Settings
from posttrain.errors import UserError
from posttrain.recipes.base import Recipe
from posttrain.stages._judged import JudgeSettings
from posttrain.stages.agreement import AgreementStage
from posttrain.stages.base import Stage
from posttrain.tasks.posts import Posts
from tests.stages.test_rl import reward_model

POST, GOOD, BAD = "cat fire job sun", "fire, job.", "cat."


def results(folder: Path, *stages: Stage) -> list[dict[str, Any]]:
    settings = Settings(name="agreement", recipe=Recipe(stages), out=str(folder / "run"), device="cpu", threads=1)
    run = pipeline.start(settings)
    return [json.loads((run / "stages" / stage.name / "result.json").read_text()) for stage in stages]


def written(folder: Path, pairs: list[tuple[str, str]]) -> str:
    rows = [{"prompt": f"{POST} {n}", "chosen": better, "rejected": worse} for n, (better, worse) in enumerate(pairs)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "pairs.jsonl")


def test_rules_agree_with_people_of_the_same_taste_and_the_order_sways_the_biased(tmp_path: Path) -> None:
    data = written(tmp_path, [(GOOD, BAD)] * 6 + [(BAD, GOOD)] * 2 + [(GOOD, "fire.")] * 2)
    exact = AgreementStage(name="exact", data=data, judge=JudgeSettings(rules=Posts()))
    swayed = AgreementStage(name="swayed", data=data, judge=JudgeSettings(rules=Posts(), position_bias=0.45))
    first, second = results(tmp_path, exact, swayed)
    assert first["agreement"][0] == 0.8 and first["swayed"] == 0
    assert second["agreement"][0] == 0.6 and second["swayed"] == second["ties"] == 2
    other = tmp_path / "other.jsonl"
    other.write_text(Path(data).read_text().replace('"chosen"', '"better"').replace('"rejected"', '"worse"'))
    named = replace(exact, data=str(other), columns={"chosen": "better", "rejected": "worse"})
    (third,) = results(tmp_path / "named", named)
    assert third["agreement"] == first["agreement"]


def test_the_accuracy_of_a_reward_model_on_pairs_of_people(tmp_path: Path) -> None:
    scorer = reward_model(tmp_path / "scorer", 0)
    texts = [(f"{n}+{n}=", f"{n + 1}") for n in range(20)]
    file = written(tmp_path, texts)
    (found,) = results(tmp_path, AgreementStage(name="people", data=file, reward_model=scorer))
    (tmp_path / "other").mkdir()
    file = written(tmp_path / "other", [(worse, better) for better, worse in texts])
    (mirrored,) = results(tmp_path / "other", AgreementStage(name="people", data=file, reward_model=scorer))
    assert found["judged"] == 20 and found["agreement"][0] == pytest.approx(1 - mirrored["agreement"][0])


def test_one_of_judge_and_reward_model_is_compared_with_people() -> None:
    with pytest.raises(UserError, match="name a judge or a reward_model"):
        AgreementStage(name="people", data="pairs.jsonl")
    with pytest.raises(UserError, match="a model that judges, or the rules of a task"):
        JudgeSettings()
    with pytest.raises(UserError, match="are of rules, not of a model"):
        JudgeSettings(model="m", position_bias=0.1)
