"""Two models side by side: a model against itself, and against one that was trained to please."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from material_for_tests import group, rollout, segment

from posttrain.errors import UserError
from posttrain.models.save import save
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.monitor.rules import ADVICE
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.stages._judged import JudgeSettings
from posttrain.stages._material import Data
from posttrain.stages.base import Context, run_stages
from posttrain.stages.sft import SFTStage
from posttrain.stages.versus import VersusStage, decided, tally, win_rate
from posttrain.tasks.reviews import Reviews
from posttrain.train.optimizer import Optimization
from posttrain.types import Group, Sampling, Score


def scored(value: float | None) -> Group:
    return group([rollout([segment([1], False), segment([2], True)], value)])


def test_wins_ties_and_failures() -> None:
    pairs = ((1.0, 0.5), (0.5, 1.0), (0.5, 0.5), (None, 1.0), (1.0, None))
    ours, theirs = [scored(a) for a, _ in pairs], [scored(b) for _, b in pairs]
    verdicts = decided(ours, theirs)
    assert [verdict.winner for verdict in verdicts] == ["A", "B", "tie", None, None]
    with pytest.raises(UserError, match="hardly any answer could be judged"):
        tally(verdicts[3:], ours[3:], theirs[3:])
    found = tally(verdicts, ours, theirs)
    assert (found["problems"], found["unjudged"], found["ties"], found["win_rate"][0]) == (3, 2, 1, 0.5)
    assert found["win_rate_at_equal_length"][0] == pytest.approx(0.5)


def test_the_interval_of_a_win_rate_by_hand() -> None:
    """Two wins, a tie, a loss: d = 1/6 of n + 2 = 6, half-width 1.96 sqrt(3 + 1 - 1/6) / 6, and a win rate is (1 + d) / 2."""
    half = 1.96 * math.sqrt(4 - 1 / 6) / 6
    assert win_rate([1.0, 0.5, 1.0, 0.0]).row() == pytest.approx([0.625, (7 / 6 - half) / 2, (7 / 6 + half) / 2])
    ties = win_rate([0.5] * 20)
    assert ties.value == 0.5 and ties.high - ties.low == pytest.approx(1.96 / 22), "a width also where all are ties"
    assert win_rate([1.0, 1.0]).row() == pytest.approx([1.0, 1 / (1 + 1.96**2 / 2), 1.0]), "Wilson's without ties"


def test_prompts_that_come_again_are_one_observation_of_a_win_rate() -> None:
    keys = [n % 29 for n in range(493)]
    assert win_rate([1.0] * 493, keys) == win_rate([1.0] * 29), "not as sure as 493 prompts"
    assert win_rate([float(key % 2) for key in keys], keys) == win_rate([float(n % 2) for n in range(29)])
    assert win_rate([0.5, 1.0], ["a", "b"]) == win_rate([0.5, 1.0])


def test_a_model_against_itself_and_against_a_kinder_one(tmp_path: Path) -> None:
    task, fast = Reviews(), Optimization(lr=5e-3, warmup=5)
    kind, plain = Data(task=Reviews(), counts={0: 200}), Data(task=Reviews("any"), counts={0: 200})
    common = {"task": task, "problems": 40, "sampling": Sampling(60)}
    stages = [
        SFTStage(name="plain", model="tiny:nano", data=(plain,), steps=40, batch=16, optimizer=fast),
        SFTStage(name="kind", model="plain", data=(kind,), steps=40, batch=16, optimizer=fast),
        VersusStage(name="same", model="plain", against="plain", **common),
        VersusStage(name="kinder", model="kind", against="plain", text=(plain,), **common),
    ]
    with RunWriter.create(tmp_path / "run", {}) as writer:
        context = Context(writer, seed=0, say=False)
        run_stages(stages, context)
        same, kinder = context.result("same"), context.result("kinder")
    assert same is not None and kinder is not None
    assert same["win_rate"][0] == 0.5 and same["ties"] == 40 and abs(same["kl"]) < 1e-3
    assert kinder["win_rate"][1] > 0.5 and kinder["reward"][0] > kinder["reward_against"][0]
    assert kinder["kl"] > 0.5 and math.isfinite(kinder["kl"])
    assert kinder["perplexity"] > kinder["perplexity_against"] > 1.0  # what it paid
    assert len((tmp_path / "run" / "stages" / "kinder" / "problems.jsonl").read_text().splitlines()) == 40


def test_models_of_different_vocabularies_have_no_kl(tmp_path: Path) -> None:
    """The ids of one are other text to the other: a number there would be about nothing."""
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz ,.:"[::-1])
    save(tiny_model(tokenizer, "nano", 1), tokenizer, tmp_path / "other")
    one = VersusStage(
        name="v", model="tiny:nano", against=str(tmp_path / "other"), task=Reviews(), problems=4, sampling=Sampling(5)
    )
    with RunWriter.create(tmp_path / "run", {}) as writer:
        result = one.run(Context(writer, seed=0, say=False))
    assert result["kl"] is None and result["win_rate"][0] == 0.5


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"problems": 1}, "at least 2"),
        ({"judge": JudgeSettings(model="j"), "reward_model": "r"}, "a judge or a reward_model decides"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        VersusStage(name="v", model="a", against="b", task=Reviews(), **settings)


def answers(length: int, value: float, gold: float | None = None) -> list[Group]:
    """40 answers of about so many tokens, no two of them alike, with a value and what it stands for."""
    made = []
    for n in range(40):
        said = segment(np.random.default_rng((length, n)).integers(3, 10_000, length + n % 4), True)
        parts = {} if gold is None else {"gold": gold + 0.01 * (n % 3)}
        made.append(group([replace(rollout([segment([1, n + 1], False), said], value), score=Score(value, parts))], f"p{n}"))
    return made


@pytest.mark.parametrize(
    ("ours", "heard"),
    [
        (answers(80, 1.0), True),  # four times as long, and nothing else is measured
        (answers(40, 1.0), False),  # twice as long: it may be better for it
        (answers(80, 0.4), False),  # it does not win
        (answers(40, 1.0, gold=0.2), True),  # twice as long, and the gold fell
        (answers(40, 1.0, gold=0.9), False),  # the gold rose
    ],
)
def test_answers_that_win_and_have_changed_far_are_an_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: list[Group], heard: bool
) -> None:
    sides = iter([ours, answers(20, 0.5, None if not ours[0].rollouts[0].score.parts else 0.5)])
    monkeypatch.setattr(VersusStage, "answers", lambda *_: next(sides))
    stage = VersusStage(name="v", model="tiny:nano", against="tiny:nano", task=Reviews(), sampling=Sampling(4, temperature=0.0))
    with RunWriter.create(tmp_path / "run", {}) as writer:
        stage.run(Context(writer, seed=0, say=False))
    alarms = [e.details for e in Run(tmp_path / "run").events() if e.kind == "alarm"]
    assert [a["rule"] for a in alarms] == (["length"] if heard else [])
    if heard:
        assert alarms[0]["stage"] == "v" and alarms[0]["level"] == "warning"
        assert "with 21.5 -> " in alarms[0]["text"] and "tokens a response" in alarms[0]["text"]
        assert alarms[0]["text"].endswith(ADVICE["length"])
