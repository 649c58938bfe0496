"""The stand-in annotator: a Bradley-Terry draw for each pair, nothing unusable written, the same rows for the same seed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from material_for_tests import group, rollout, segment

from posttrain.data.preferences import read_preferences
from posttrain.errors import UserError, Waiting
from posttrain.models.load import stop_ids
from posttrain.models.policy import wrap_model
from posttrain.models.save import save
from posttrain.models.scorer import from_policy
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.runs.write import RunWriter
from posttrain.stages._lineage import RECORD
from posttrain.stages.base import PRINTABLE, Context, data_place, run_stages
from posttrain.stages.comparisons import KINDS, ComparisonsStage
from posttrain.tasks.prompts import Prompts
from posttrain.tasks.reviews import Reviews
from posttrain.train.rating import last_scores
from posttrain.types import JSON, Rollout, Sampling, Segment


def stage(**settings: object) -> ComparisonsStage:
    return ComparisonsStage(name="comparisons", model="tiny:nano", task=Reviews(), **settings)  # type: ignore[arg-type]


def said(text: str, value: float | None, finish: str = "stop") -> Rollout:
    one = rollout([segment([1], False)], value)
    answer = Segment(segment([2], True).ids, text, True, finish=finish)
    return Rollout(one.problem, 0, (one.segments[0], answer), one.score)


def rows(
    one: ComparisonsStage, answers: list[Rollout], coin: int = 0, counts: dict[str, int] | None = None
) -> list[dict[str, JSON]]:
    """The rows of one prompt with these answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComparisonsStage, "groups", lambda *_: iter([(group(answers), coin)]))
        return list(one.rows(None, dict.fromkeys(KINDS, 0) if counts is None else counts))  # type: ignore[arg-type]


@pytest.mark.parametrize("difference", [0.0, 0.25, 0.5])
def test_a_pair_is_ordered_as_often_as_bradley_and_terry_say(difference: float) -> None:
    pair = [said("a", 0.5 + difference), said("b", 0.5)]
    count = 4000
    made = (rows(stage(noise=0.5), pair, coin)[0] for coin in range(count))
    first = sum(row["chosen"][0]["content"] == "a" for row in made)
    expected = 1 / (1 + math.exp(-difference / 0.5))
    assert abs(first / count - expected) < 4 * math.sqrt(expected * (1 - expected) / count)


def test_without_noise_the_better_one_always_comes_first() -> None:
    three = [said("a", 0.1), said("b", 0.9), said("c", 0.5)]
    for coin in range(50):
        (row,) = rows(stage(noise=0.0, samples=3), three, coin)
        assert [turn["content"] for (turn,) in row["responses"]] == ["b", "c", "a"] and row["ranking"] == [1, 2, 3]


def test_without_noise_answers_that_score_the_same_share_a_place() -> None:
    counts, exact = dict.fromkeys(KINDS, 0), stage(noise=0.0, samples=3)
    assert not rows(exact, [said("a", 0.5), said("b", 0.5), said("c", 0.5)], counts=counts) and counts["equal"] == 1
    (row,) = rows(exact, [said("a", 0.1), said("b", 0.5), said("c", 0.5)])
    assert row["ranking"] == [1, 1, 3]
    (tied,) = rows(stage(samples=3), [said("a", 0.5), said("b", 0.5)])
    assert tied["ranking"] == [1, 2], "an annotator who errs prefers one"


def test_people_are_told_what_is_left_out_of_what_they_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [group([said("a", None), said("b", None)]), group([said("a", None), said("b", None, "length")])]
    monkeypatch.setattr(ComparisonsStage, "groups", lambda *_: ((one, 0) for one in made))
    texts: list[str] = []
    with RunWriter(tmp_path) as writer:
        context = Context(writer, 0, "cpu", say=False)
        context.write_lines("comparisons", ["{}"], RECORD)
        with context.events.shown_by(lambda event: texts.append(event.text)), pytest.raises(Waiting, match="0 of 1"):
            stage(annotator="people").run(context)
    assert texts[0] == "1 prompt to compare; left out: 1 equal, 1 truncated"


def test_a_reward_model_orders_the_answers(tmp_path: Path) -> None:
    """Of a task that scores nothing by itself; by what the model gives each whole conversation."""
    write = (tmp_path / "prompts.jsonl").write_text
    write("".join(json.dumps({"prompt": f"{letter} film:"}) + "\n" for letter in "abcdefgh"))
    tokenizer = character_tokenizer(PRINTABLE)
    model = tiny_model(tokenizer, "nano", 1)
    scorer = from_policy(wrap_model(model, tokenizer, stop_ids(model, tokenizer)), zero=False, seed=1)
    judge = str(save(scorer.model, tokenizer, tmp_path / "judge"))
    task = Prompts(str(tmp_path / "prompts.jsonl"), held_out=0)
    settings = {"prompts": 8, "noise": 0.0, "sampling": Sampling(400, min_new_tokens=2)}
    with pytest.raises(UserError, match="give it a reward .task.reward., or name a reward_model or a judge"):
        ComparisonsStage(name="c", model="tiny:nano", task=task, **settings)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="a reward_model, a judge or people decide, not two of them"):
        ComparisonsStage(name="c", model="m", task=task, reward_model="r", annotator="people")
    made = ComparisonsStage(name="c", model="tiny:nano", task=task, reward_model=judge, **settings)  # type: ignore[arg-type]
    assert made.named("reward model") == [("reward_model", judge)]
    with RunWriter.create(tmp_path / "run", {}) as writer:
        ordered = list(made.rows(Context(writer, seed=3, say=False), dict.fromkeys(KINDS, 0)))
    assert len(ordered) > 2
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ordered))
    units = read_preferences(tmp_path / "rows.jsonl", tokenizer, 900).units
    scores = last_scores(scorer, [example.ids for unit in units for example in unit])
    assert all(better > worse for better, worse in zip(scores[::2], scores[1::2], strict=True))


def test_what_cannot_be_compared_is_counted_and_left_out() -> None:
    counts = dict.fromkeys(KINDS, 0)
    made = [
        rows(stage(), members, counts=counts)
        for members in (
            [said("x", 0.2), said("x", 0.2)],
            [said("x", 0.2), said("y", None)],
            [said("x", 0.2), said("y", 0.3, "length")],
            [said("x", 0.2), said(" ", 0.3)],
            [said("x", 0.2), said("y", 0.9)],
        )
    ]
    assert [len(some) for some in made] == [0, 0, 0, 0, 1]
    assert counts == {"written": 1, "equal": 4, "failed": 1, "truncated": 1, "empty": 1}


@pytest.mark.parametrize("samples", [2, 4])
def test_what_is_written_is_read_as_preferences(tmp_path: Path, samples: int) -> None:
    files = []
    for name in ("one", "two"):
        with RunWriter.create(tmp_path / name, {}) as writer:
            context = Context(writer, seed=3, say=False)
            run_stages([stage(prompts=16, samples=samples, sampling=Sampling(60, min_new_tokens=2))], context)
            result = context.result("comparisons")
            place = data_place("comparisons", context)
            assert data_place("other.jsonl", context) == "other.jsonl"
            context.folder("empty").mkdir()
            with pytest.raises(UserError, match="has written no data"):
                data_place("empty", context)
        files.append(Path(place).read_text())
    assert files[0] == files[1]
    assert result is not None
    found = read_preferences(place, character_tokenizer(Reviews().alphabet), 200)
    assert len(found.units) == result["written"] > 3


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UserError, match="at least 2"):
        stage(samples=1)
    with pytest.raises(UserError, match="temperature"):
        stage(sampling=Sampling(temperature=0.0))


def test_a_second_model_is_read_by_its_own_tokenizer(tmp_path: Path) -> None:
    """Its ids mean other characters than the first one's: decoded by the first, its answers would be text that nobody wrote."""
    tokenizer = character_tokenizer("ABCDEFGH")
    save(tiny_model(tokenizer, "nano", 1), tokenizer, tmp_path / "other")
    one = stage(prompts=8, against=str(tmp_path / "other"), sampling=Sampling(200, min_new_tokens=2))
    counts = dict.fromkeys(KINDS, 0)
    with RunWriter.create(tmp_path / "run", {}) as writer:
        rows = list(one.rows(Context(writer, seed=3, say=False), counts))
    assert len(rows) > 2
    for row in rows:
        capitals = sorted(row[side][0]["content"].isupper() for side in ("chosen", "rejected"))
        assert capitals == [False, True], "one answer of each model"
