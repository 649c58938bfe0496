"""What every shipped environment obeys: gold play scores 1, a silent player 0, loading is repeatable, splits are apart, no torch."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from posttrain.errors import UserError
from posttrain.evals.contamination import text
from posttrain.tasks._turns import Environment, best_player, random_player
from posttrain.tasks.base import Task, validate
from posttrain.tasks.calculator import CalculatorSums
from posttrain.tasks.guess import Guess
from posttrain.tasks.shop import Shop
from posttrain.tasks.solver_critic import SolverCritic
from posttrain.tasks.tictactoe import TicTacToe, best_move, value
from posttrain.types import Message, Problem, Rollout, Score, Segment

TASKS: tuple[Task, ...] = (
    Guess(), Guess(numbers=60, turns=6, pay="turn"), Shop(), TicTacToe(), TicTacToe("random"), TicTacToe("best"), CalculatorSums(),
    SolverCritic(),
)  # fmt: skip
PLAYED = [task for task in TASKS if isinstance(task, Environment) and task != TicTacToe()]
each = pytest.mark.parametrize("task", TASKS, ids=str)

Answer = Callable[[Sequence[str]], str]  # from the turns that were read so far


@dataclass
class Talk:
    """A conversation whose turns a function writes."""

    problem: Problem
    task: Task
    answer: Answer
    role: str = ""
    read: list[str] = field(default_factory=list)
    said: list[Segment] = field(default_factory=list)
    template: str = ""

    async def __call__(self, given: Any = None, last: bool = False, **more: Any) -> Segment:
        messages = self.task.prompt(self.problem) if given is None else given
        self.read.append(messages if isinstance(messages, str) else "\n".join(m.content for m in messages))
        self.said.append(
            Segment(np.zeros(1, np.int64), self.answer([self.role, *self.read]), True, np.zeros(1, np.float32), finish="stop")
        )
        return self.said[-1]

    def reward(self, value: float) -> None:
        self.said[-1] = replace(self.said[-1], reward=self.said[-1].reward + value)

    def count(self, name: str, amount: float = 1.0) -> None:
        pass

    def session(self, role: str) -> Talk:
        return Talk(self.problem, self.task, self.answer, role)

    def rollout(self, score: Score | None = None, outcome: str = "", answer: str | None = None) -> Rollout:
        return Rollout(self.problem, 0, tuple(self.said), score or Score.pending(), self.role, answer)


def played(task: Task, problem: Problem, answer: Answer) -> list[Rollout]:
    found: Any = asyncio.run(task.run(problem, Talk(problem, task, answer)))  # type: ignore[arg-type]
    return [found] if isinstance(found, Rollout) else list(found)


@each
def test_gold_play_scores_1_and_an_empty_answer_less(task: Task) -> None:
    validate(task)


@each
def test_a_silent_player_scores_0_in_every_role(task: Task) -> None:
    for problem in task.problems("test")[:20]:
        assert {r.score.value for r in played(task, problem, lambda read: "") if r.turns} <= {0.0, 0.5}
        assert played(task, problem, lambda read: "")[0].score.value == 0.0


@each
def test_loading_is_repeatable_and_splits_share_nothing(task: Task) -> None:
    train, test = task.problems("train"), task.problems("test")
    assert [train[n] for n in range(50)] == [task.problems("train")[n] for n in range(50)]
    assert not {text(p) for p in train[:2000]} & {text(p) for p in test}
    assert len({p.id for p in test}) == len(test) >= 300
    with pytest.raises(UserError, match="split"):
        task.problems("dev")


@each
def test_what_is_read_and_written_has_characters_of_the_alphabet_alone(task: Task) -> None:
    alphabet = set(task.alphabet)  # type: ignore[attr-defined]
    for problem in task.problems("train")[:200]:
        conversation = task.conversation(problem)
        assert {c for message in conversation for c in message.content} <= alphabet
        assert conversation[-1].role == "assistant" and conversation[0].role == "user"


@pytest.mark.parametrize("task", PLAYED, ids=str)
def test_a_scripted_episode_is_the_one_that_the_task_runs(task: Environment) -> None:
    """The moves of the gold player, said turn by turn, have the same replies and the same score."""
    for problem in task.problems("test")[:30]:
        moves, replies, score = task.episode(problem, best_player)
        talk = Talk(problem, task, lambda read, moves=moves: moves[len(read) - 2])  # type: ignore[misc]
        rollout = asyncio.run(task.run(problem, talk))  # type: ignore[arg-type]
        assert isinstance(rollout, Rollout) and talk.read[1:] == replies and rollout.score == score
        assert score.value == 1.0 and score.solved


@pytest.mark.parametrize("task", PLAYED, ids=str)
def test_a_random_player_is_far_from_gold(task: Environment) -> None:
    scores = [task.episode(p, random_player(n))[2] for n, p in enumerate(task.problems("test")[:200])]
    assert sum(score.solved for score in scores) / 200 < 0.75


def test_halving_finds_every_number_in_time_and_is_paid_1_by_turn() -> None:
    task = Guess(pay="turn")
    for problem in task.problems("test")[:100]:
        moves, _, score = task.episode(problem, best_player)
        talk = Talk(problem, task, lambda read, moves=moves: moves[len(read) - 2])  # type: ignore[misc]
        [rollout] = [asyncio.run(task.run(problem, talk))]  # type: ignore[arg-type]
        assert isinstance(rollout, Rollout) and len(moves) <= 5 and score.value == 1.0
        candidates = problem.facts["probe"] - 1 if problem.question[0] == "<" else 30 - problem.facts["probe"]
        assert rollout.paid == pytest.approx(1.0 if candidates > 1 else 0.0)


def test_a_number_that_hints_exclude_is_paid_nothing() -> None:
    play = Guess(pay="turn").begin(Problem("1", ">10", "17", 0, {"probe": 10}))
    assert play.move("05").paid == 0.0
    assert 0 < play.move("20").paid < 1
    assert play.move("7x").outcome == "no number"


def test_a_question_whose_answer_was_said_costs_and_asking_for_the_rest_does_not() -> None:
    facts = {"item": "hat", "colour": "red", "size": "m", "cloth": "wool", "said_colour": 1, "said_size": 0, "said_cloth": 0}
    problem = Problem("1", "red hat", "sell red m wool hat", 0, facts)
    task = Shop()
    assert task.score(problem, "size?\ncloth?\nsell red m wool hat").value == 1.0
    assert task.score(problem, "colour?\nsize?\ncloth?\nsell red m wool hat").value == pytest.approx(0.9)
    assert task.score(problem, "sell red s wool hat").outcome == "wrong"
    assert task.score(problem, "size?\nsize?\nsize?\nsize?\nsize?").outcome == "customer left"
    assert task.score(problem, "hello").outcome == "not understood"


def test_perfect_play_draws_and_takes_a_win_at_once() -> None:
    assert value(".........") == 0 and value("xx.oo....") == 1
    assert best_move("xx.oo....") == "3" and best_move("xx.o..o.x") in "345"


def test_both_sides_of_a_game_are_paid_by_its_result() -> None:
    opening = Problem("1", "x:xx.oo....", "xx.oo....")
    (x,) = played(TicTacToe(), opening, lambda read: "3")
    assert (x.role, x.score.value, x.score.outcome) == ("x", 1.0, "won")
    x, o = played(TicTacToe(), opening, lambda read: {"x": "9", "o": "6"}[read[0]])
    assert (x.score.value, o.score.value) == (0.0, 1.0)
    x, o = played(TicTacToe(), opening, lambda read: {"x": "9", "o": "1"}[read[0]])
    assert (x.score.value, o.score.value, o.score.outcome) == (0.5, 0.0, "illegal move")


def test_every_opening_is_as_likely_as_any_other_and_none_is_of_both_splits() -> None:
    """With every number of moves as likely, two openings were 299 of the 1,000 games that are measured."""
    often = Counter(p.answer for p in TicTacToe("best").problems("test"))
    assert (len(often), max(often.values())) == (207, 12)
    assert not set(often) & {p.answer for p in TicTacToe().problems("train")[:2000]}


def test_a_call_of_the_calculator_costs_and_its_result_can_be_copied() -> None:
    task, problem = CalculatorSums(), Problem("1", "587+865=", "1452", 0, {"easy": False})

    def caller(read: Sequence[str]) -> str:
        return "calc(587+865)=" if len(read) == 2 else f"#{read[-1]}"

    [called], [alone] = played(task, problem, caller), played(task, problem, lambda read: "#1452")
    assert (called.score.value, alone.score.value) == (0.9, 1.0) and called.score.solved
    [without] = played(CalculatorSums(tools=False), problem, caller)
    assert without.score.value == 0.0, "without tools a call is an answer, and a wrong one"


def test_the_critic_is_paid_for_its_verdict_and_the_solver_for_its_last_answer() -> None:
    task, problem = SolverCritic(), Problem("1", "47 85=", "85")

    def answers(first: str, verdict: str) -> list[float | None]:
        def answer(read: Sequence[str]) -> str:
            return verdict if read[0] == "critic" else first if len(read) == 2 else "85"

        return [r.score.value for r in played(task, problem, answer)]

    assert answers("85", "y") == [1.0, 1.0] and answers("47", "n") == [1.0, 1.0]
    assert answers("47", "y") == [0.0, 0.0] and answers("85", "n") == [1.0, 0.0]


def test_settings_that_cannot_be_won_are_refused() -> None:
    for make in (
        lambda: Guess(numbers=99, turns=5),
        lambda: Shop(turns=2),
        lambda: TicTacToe("nobody"),
        lambda: CalculatorSums(digits=1),
    ):  # type: ignore[arg-type]
        with pytest.raises(UserError):
            make()


def test_environments_import_no_torch() -> None:
    names = "calculator guess shop solver_critic tictactoe"
    code = f"import sys; [__import__('posttrain.tasks.' + n) for n in '{names}'.split()]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_messages_of_a_conversation_alternate() -> None:
    for task in TASKS:
        roles = [message.role for message in task.conversation(task.problems("train")[0])]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert isinstance(task.conversation(task.problems("train")[0])[0], Message)
