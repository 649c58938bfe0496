"""Games of TextArena: the real ones, alone, in self-play and against a scripted player."""

from __future__ import annotations

import random
import re
import sys

import pytest
from environments_for_tests import needs, page_task, play

from posttrain.errors import UserError
from posttrain.tasks.textarena import TextArena, unread
from posttrain.types import Score

pytestmark = pytest.mark.environments


@pytest.fixture(autouse=True)
def package(request: pytest.FixtureRequest) -> None:
    if "without_the_package" not in request.node.name:
        needs("textarena", "textarena")


def test_a_guess_by_halving_wins_and_two_invalid_moves_pay_nothing() -> None:
    task = TextArena("GuessTheNumber-v0")
    problems = task.problems("test")[:4]
    bounds: dict[str, list[int]] = {}

    def halve(text: str, turn: int) -> str:
        if turn == 0:
            bounds["now"] = [1, 20, 0]
        elif "higher" in text:
            bounds["now"][0] = bounds["now"][2] + 1
        else:
            bounds["now"][1] = bounds["now"][2] - 1
        bounds["now"][2] = sum(bounds["now"][:2]) // 2
        return f"[{bounds['now'][2]}]"

    for problem in problems:
        (group,) = play(task, [problem], halve)
        assert group.rollouts[0].score == Score(1.0) and group.rollouts[0].turns <= 5
    (group,) = play(task, problems[:1], lambda text, turn: ["[10]", "ten", "ten"][turn])
    (rollout,) = group.rollouts
    assert rollout.score == Score(0.0, outcome="invalid action"), "the game would pay for having come near"
    assert rollout.counts == {"env/steps": 3.0, "env/invalid": 2.0}
    assert [s.text[:33] for s in rollout.segments[2:5:2]] == [
        "[GAME] The target number is highe",
        "[GAME] You attempted an invalid m",
    ]


def test_self_play_is_a_rollout_for_each_player_in_a_group_of_its_role() -> None:
    task = page_task("textarena")

    def policy(text: str, turn: int) -> str:
        placed = re.findall(r"Player (\d) placed", text)
        second = "You are Player 1" in text or (turn > 0 and placed[-1] == "0")
        return f"[{turn + (3 if second else 0)}]" if turn < 2 else f"[{8 if second else 2}]"

    first, second = play(task, task.problems("train")[:1], policy, samples=2)
    assert (first.role, second.role) == ("player 0", "player 1")
    assert [r.score for g in (first, second) for r in g.rollouts] == [Score(1.0)] * 2 + [Score(-1.0)] * 2
    assert [len([s for s in r.segments if s.sampled]) for r in (first.rollouts[0], second.rollouts[0])] == [3, 2]
    seen = [s.text for s in first.rollouts[0].segments if not s.sampled]
    assert "Player 1 placed their symbol (X) in cell 3" in seen[1] and "Tic Tac Toe" not in seen[1], "only what is new"


def test_a_scripted_opponent_plays_listed_moves_by_the_seed_of_the_problem() -> None:
    task = TextArena("TicTacToe-v0", players=2, opponent="random")
    problems = task.problems("test")[:4]
    state = random.getstate()
    groups = play(task, problems, lambda text, turn: re.findall(r"'\[(\d)\]'", text)[-1], samples=2)
    assert random.getstate() == state, "the global generator of this process is left alone"
    assert {g.role for g in groups} == {""} and all(r.score.valid for g in groups for r in g.rollouts)
    assert all(a.response == b.response for a, b in (g.rollouts for g in groups)), "a group has one opponent"
    assert {"You are Player 0" in g.rollouts[0].segments[0].text for g in groups} == {True, False}, "seats change"
    nim = TextArena("GuessTheNumber-v0", {"max_number": 3})
    with pytest.raises(LookupError, match="lists no moves"):
        nim.reply("anything", random.Random(0))


def test_what_is_new_leaves_out_what_was_read_and_said() -> None:
    assert unread("ab", "a", "") == "b" and unread("other", "a", "") == "other"
    assert unread("a\n[Player 1] [x]\nb", "a", "[x]") == "b"


def test_settings_that_cannot_work_are_one_line() -> None:
    for task, words in [
        (TextArena("TicTacTo-v0"), "did you mean 'TicTacToe-v0'"),
        (TextArena("TicTacToe-v0"), "cannot be begun: AssertionError: The number of players has to be 2"),
    ]:
        with pytest.raises(UserError, match=words):
            task.ready()


def test_without_the_package_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(UserError, match=r"pip install 'posttrain\[textarena\]'"):
        TextArena("Nim-v0").ready()
