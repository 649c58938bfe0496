"""Gymnasium's toy text environments: the real ones, played in words."""

from __future__ import annotations

import sys

import pytest
from environments_for_tests import needs, page_task, play

from posttrain import config_tree
from posttrain.errors import UserError
from posttrain.tasks.base import Task
from posttrain.tasks.gymnasium import Gymnasium, chosen
from posttrain.types import Score

pytestmark = pytest.mark.environments


@pytest.fixture(autouse=True)
def package(request: pytest.FixtureRequest) -> None:
    if "without_the_package" not in request.node.name:
        needs("gymnasium", "gymnasium")


LAKE = Gymnasium("FrozenLake-v1", {"is_slippery": False}, max_turns=8)
WAY = ["down", "down", "right", "right", "down", "right"]


def test_gold_play_scores_one_and_what_is_no_action_is_named_and_counted() -> None:
    lake = page_task("gymnasium")
    (problem,) = lake.problems("test")[:1]
    (group,) = play(lake, [problem], lambda text, turn: [*WAY[:2], "swim", "I go 2.", *WAY[3:]][turn])
    (rollout,) = group.rollouts
    assert rollout.score == Score(1.0) and rollout.counts == {"env/steps": 6.0, "env/invalid": 1.0}
    given = [s.text for s in rollout.segments if not s.sampled]
    assert "Actions: left, down, right, up." in given[0] and "[S]FFF\nFHFH\nFFFH\nHFFG" in given[0]
    assert given[3] == "That is no action. Actions: left, down, right, up." and "F[F]FH" in given[4]
    for policy, score in [
        ("", Score(0.0, outcome="invalid action")),
        ("left", Score(0.0, outcome="turn limit")),
        ("right", Score(0.0, outcome="turn limit")),  # against the wall
    ]:
        (group,) = play(LAKE, [problem], lambda text, turn, policy=policy: policy)
        assert group.rollouts[0].score == score


@pytest.mark.parametrize(
    ("env", "action", "seen", "outcome", "value"),
    [
        (
            "Taxi-v4",
            "north",
            r"The taxi is at row 2, column 4. The passenger is at G and wants to go to R.",
            "turn limit",
            -3.0,
        ),
        ("CliffWalking-v1", "up", "x  o  o  o  o  o  o  o  o  o  o  o\no  C  C", "turn limit", -3.0),
        ("Blackjack-v1", "hit", "the dealer shows 5", "", -1.0),
    ],
)
def test_each_world_is_text_and_its_rewards_are_the_return(
    env: str, action: str, seen: str, outcome: str, value: float
) -> None:
    task = Gymnasium(env, max_turns=3, credit="turn")
    (group,) = play(task, task.problems("test")[:1], lambda text, turn: action)
    (rollout,) = group.rollouts
    assert seen in "".join(s.text for s in rollout.segments if not s.sampled)
    assert rollout.score.outcome == outcome and rollout.paid == value, "credit by turn: the turns are paid"
    (same,) = play(Gymnasium(env, max_turns=3), task.problems("test")[:1], lambda text, turn: action)
    assert same.rollouts[0].score.value == value and same.rollouts[0].paid == 0


def test_a_slippery_world_slips_alike_in_every_episode_of_a_problem() -> None:
    task = Gymnasium("FrozenLake-v1", max_turns=20)
    groups = play(task, task.problems("train")[:6], lambda text, turn: "right", samples=2)
    assert all(a.response == b.response for a, b in (g.rollouts for g in groups))
    assert len({g.rollouts[0].response for g in groups}) > 1, "and otherwise in another problem"


def test_an_environment_that_raises_is_an_episode_without_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    from gymnasium.envs.toy_text import FrozenLakeEnv

    def breaks(self: object, action: int) -> None:
        raise ZeroDivisionError("thin ice")

    monkeypatch.setattr(FrozenLakeEnv, "step", breaks)
    (group,) = play(LAKE, LAKE.problems("test")[:1], lambda text, turn: "down")
    assert str(group.rollouts[0].score.failure).startswith(f"ZeroDivisionError: thin ice at {__file__} line ")


def test_splits_share_no_seed_and_loading_is_deterministic() -> None:
    task = Gymnasium("Taxi-v4", train=300, test=100)
    train, test = (task.problems(split) for split in ("train", "test"))
    assert (len(train), len(test)) == (300, 100) and list(train) == list(Gymnasium("Taxi-v4", train=300).problems("train"))
    seeds = {p.facts["seed"] for p in train}, {p.facts["seed"] for p in test}
    assert len(seeds[0]) == 300 and not seeds[0] & seeds[1]
    assert {p.facts["seed"] for p in Gymnasium("Taxi-v4", seed=1).problems("train")[:300]} != seeds[0]


def test_settings_that_cannot_work_are_one_line() -> None:
    assert config_tree.from_tree({"name": "gymnasium:FrozenLake-v1", "max_turns": 8}, Task, "task").env == "FrozenLake-v1"
    for task, words in [
        (Gymnasium("FrozenLak-v1"), "did you mean 'FrozenLake-v1'"),
        (Gymnasium("FrozenLake-v1", {"depth": 3}), "FrozenLake-v1 cannot be begun: TypeError"),
        (Gymnasium("Pendulum-v1"), "no discrete actions"),
    ]:
        with pytest.raises(UserError, match=words):
            task.ready()


def test_the_last_action_of_a_turn_counts() -> None:
    assert [chosen(text, ("stick", "hit")) for text in ("hit or stick? Stick!", "1", "2", "hits", "")] == [
        0,
        1,
        None,
        None,
        None,
    ]


def test_without_the_package_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(UserError, match=r"pip install 'posttrain\[gymnasium\]'"):
        Gymnasium("FrozenLake-v1").ready()
