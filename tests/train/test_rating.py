"""Reward models as a reward: scores at the last token, combined, or failed by name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from material_for_tests import VOCABULARY, group, rollout, segment, small_policy

from posttrain.collect import rate_groups
from posttrain.errors import UserError
from posttrain.models.scorer import Scorer, from_policy
from posttrain.models.tiny import character_tokenizer
from posttrain.train.pack import step_rewards
from posttrain.train.rating import ModelRating, ProcessRating
from posttrain.types import Problem, Rollout, Score, Segment

PROMPT = [3, 4, 5, 6, 7]


def rollouts() -> list[Rollout]:
    """Two of one prompt, which share its computation, and a short one of another."""
    parts = [(PROMPT, [8, 9, 2]), (PROMPT, [8, 10]), ([11], [12])]
    return [rollout([segment(p, False), segment(r, True)], 0.5) for p, r in parts]


def scorers(count: int) -> list[Scorer]:
    return [from_policy(small_policy(), zero=False, seed=seed) for seed in range(count)]


def alone(scorer: Scorer, one: Rollout) -> float:
    """Without packing: the body and the head of transformers on the one sequence, at its last token."""
    with torch.no_grad():
        hidden = scorer.body(torch.from_numpy(one.ids)[None]).last_hidden_state
        return float(scorer.model.score(hidden)[0, -1, 0])


@pytest.mark.parametrize("budget", [1, 10, 8192])
def test_the_score_is_read_at_the_last_token(budget: int) -> None:
    (scorer,) = scorers(1)
    found = ModelRating([scorer], token_budget=budget).rate(rollouts())
    assert [s.value for s in found] == pytest.approx([alone(scorer, r) for r in rollouts()], abs=1e-10)
    assert all(dict(s.parts) == {} for s in found)
    assert all(p.grad is None for p in scorer.model.parameters())


@pytest.mark.parametrize(
    ("kind", "function"),
    [("mean", lambda x: x.mean(0)), ("worst", lambda x: x.min(0)), ("mean_minus", lambda x: x.mean(0) - 0.5 * x.std(0))],
)
def test_members_are_combined_and_shown(kind: str, function) -> None:
    members = scorers(3)
    values = np.array([[alone(s, r) for r in rollouts()] for s in members])
    assert values.std(0).min() > 1e-3, "the heads should differ"
    found = ModelRating(members, kind, k=0.5).rate(rollouts())
    assert [s.value for s in found] == pytest.approx(function(values).tolist(), abs=1e-10)
    for n, score in enumerate(found):
        assert set(score.parts) == {"member/0", "member/1", "member/2", "disagreement"}
        assert [score.parts[f"member/{m}"] for m in range(3)] == pytest.approx(values[:, n].tolist(), abs=1e-10)
        assert score.parts["disagreement"] == pytest.approx(values[:, n].std(), abs=1e-10)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_a_failure(bad: float) -> None:
    members = scorers(2)
    with torch.no_grad():
        members[1].model.score.weight.fill_(bad)
    found = ModelRating(members).rate(rollouts())
    assert [s.valid for s in found] == [False] * 3
    assert found[0].failure is not None and "reward model 1: " in found[0].failure and "not a finite score" in found[0].failure


def test_the_tasks_own_score_is_kept_as_a_part() -> None:
    (rated,) = rate_groups(ModelRating(scorers(1)), [group(rollouts())])
    assert [r.score.parts["task"] for r in rated.rollouts] == [0.5] * 3
    assert rated.rollouts[0].score.value != 0.5


def test_nothing_to_rate() -> None:
    assert ModelRating(scorers(1)).rate([]) == []


def test_another_vocabulary_is_refused_in_words() -> None:
    one, other = character_tokenizer("0123456789"), character_tokenizer("9876543210")
    (scorer,) = scorers(1)
    scorer.tokenizer, scorer.source = other, "runs/reward"
    with pytest.raises(
        UserError,
        match="^reward model: runs/reward has another vocabulary than the policy .10 tokens differ, such as '0': id 15 against 6",
    ):
        ModelRating([scorer], tokenizer=one)
    member = from_policy(small_policy())
    member.tokenizer = one
    with pytest.raises(UserError, match="another member of the ensemble"):
        ModelRating([scorer, member])
    longer = character_tokenizer("01234567890abc")
    scorer.tokenizer = longer
    with pytest.raises(UserError, match="3 tokens differ, such as 'a': id 16 against None"):
        ModelRating([scorer], tokenizer=one)
    scorer.tokenizer = character_tokenizer("0123456789")
    ModelRating([scorer], tokenizer=one)


def test_refusals() -> None:
    with pytest.raises(UserError, match="at least one reward model"):
        ModelRating([])
    with pytest.raises(UserError, match="combine must be one of"):
        ModelRating(scorers(1), "median")
    foreign = rollout([segment([3], False), segment([VOCABULARY], True)], None)
    with pytest.raises(UserError, match=f"token id {VOCABULARY} is unknown to the reward model, which has {VOCABULARY}"):
        ModelRating(scorers(1)).rate([foreign])
    long = rollout([segment([3], False), segment([4] * 600, True)], None)
    with pytest.raises(UserError, match="601 tokens is too long for the reward model, which has 512 positions"):
        ModelRating(scorers(1)).rate([long])


def stepped(text: str) -> Rollout:
    """A response over ids of 8 and up, one character a token, ended by the stop token."""
    ids = np.array([*(8 + ord(c) % 8 for c in text), 2])
    response = Segment(
        ids, text, True, np.zeros(len(ids), np.float32), np.append(np.arange(len(text)) + 1, len(text)), 0, "stop"
    )
    return Rollout(Problem("p", ""), 0, (segment(PROMPT, False), response), Score(1.0))


@pytest.mark.parametrize("kind", ["mean", "worst"])
def test_a_process_rating_scores_every_step(kind: str) -> None:
    """sigmoid of the score where each step ends, combined over members; the response is worth its worst step."""
    members, one = scorers(2), stepped("ab\ncd\ne")
    with torch.no_grad():
        by_member = [s.model.score(s.body(torch.from_numpy(one.ids)[None]).last_hidden_state)[0, :, 0].numpy() for s in members]
    chances = 1 / (1 + np.exp(-np.array(by_member)[:, [6, 9, 11]]))
    expected = chances.mean(0) if kind == "mean" else chances.min(0)
    (found,) = ProcessRating(members, kind).rate([one])
    assert [position for position, _ in found.steps] == [2, 5, 7]
    assert [value for _, value in found.steps] == pytest.approx(expected.tolist(), abs=1e-10)
    assert found.value == pytest.approx(expected.min(), abs=1e-10)
    assert found.parts["disagreement"] == pytest.approx(chances.std(0).max(), abs=1e-10)
    placed = step_rewards(replace(one, score=found))
    assert placed is not None and np.flatnonzero(~np.isnan(placed)).tolist() == [6, 9, 11]


def test_a_process_rating_of_nothing_and_of_what_is_not_finite() -> None:
    (scorer,) = scorers(1)
    blank = stepped("\n")
    (found,) = ProcessRating([scorer]).rate([blank])
    assert found.steps == () and found.value == pytest.approx(1 / (1 + np.exp(-alone(scorer, blank))), abs=1e-10)
    assert ProcessRating([scorer]).rate([]) == []
    with torch.no_grad():
        scorer.model.score.weight.fill_(float("nan"))
    assert [s.failure for s in ProcessRating([scorer]).rate([stepped("a")])] == [
        "a reward model's score of a step is not finite"
    ]


def test_a_response_whose_steps_a_pattern_cannot_find_in_time_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """And others of the batch keep their scores."""
    monkeypatch.setattr("posttrain.data.steps.SECONDS", 0.05)
    rating = ProcessRating(scorers(1), separator="pattern:(?:a|a)+c|b")
    slow, fine = rating.rate([stepped("a" * 60), stepped("xbx")])
    assert not slow.valid and "it backtracks" in str(slow.failure)
    assert [position for position, _ in fine.steps] == [1, 3]


def test_steps_may_end_in_a_token_of_their_own() -> None:
    """As in models that mark the end of a step: id 9 here, which is "a" in `stepped`. What follows the last mark is a step too."""
    (scorer,) = scorers(1)
    scorer.tokenizer = SimpleNamespace(get_vocab=lambda: {"<step>": 9})
    one = stepped("xxaxxxaxx")
    with torch.no_grad():
        score_T = scorer.model.score(scorer.body(torch.from_numpy(one.ids)[None]).last_hidden_state)[0, :, 0].numpy()
    (found,) = ProcessRating([scorer], separator="token:<step>").rate([one])
    assert [position for position, _ in found.steps] == [3, 7, 9]
    expected = 1 / (1 + np.exp(-score_T[[5 + 2, 5 + 6, 5 + 8]]))
    assert [value for _, value in found.steps] == pytest.approx(expected.tolist(), abs=1e-10)
    assert found.value == pytest.approx(expected.min(), abs=1e-10)
    (ended,) = ProcessRating([scorer], separator="token:<step>").rate([stepped("xxa")])
    assert [position for position, _ in ended.steps] == [3]
    with pytest.raises(UserError, match="'<end>' is no token of its vocabulary"):
        ProcessRating([scorer], separator="token:<end>")
