"""Environments of several turns played by a program: a `Play` is the state of one episode, with scripted players' moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from posttrain.errors import UserError
from posttrain.tasks._procedural import TRAIN_COUNT, Procedural, require_split, side, stable_hash
from posttrain.tasks.base import Generate, Task
from posttrain.types import Message, Problem, Rollout, Score

TEST_COUNT = 1000
ATTEMPTS = 10_000


@dataclass(frozen=True, slots=True)
class Reply:
    """An environment's answer to a move: what the policy reads next or, with a `value`, how the episode ends."""

    text: str = ""
    value: float | None = None
    outcome: str = ""
    paid: float = 0.0  # the reward of this move, if the task rewards turns


class Play(ABC):
    """One episode."""

    @abstractmethod
    def move(self, text: str) -> Reply: ...

    @abstractmethod
    def best(self) -> str:
        """Return the move of optimal play."""

    @abstractmethod
    def legal(self) -> Sequence[str]:
        """Return the moves that a random player draws from."""


Player = Callable[[Play], str]


def best_player(play: Play) -> str:
    return play.best()


def random_player(seed: int) -> Player:
    """Return a player that draws one of the legal moves uniformly."""
    source = Random(seed)
    return lambda play: source.choice(play.legal())


class Environment(Task):
    """A task whose episodes are conversations with a program. The score of a text, one move per line, is that of its moves."""

    by_turn = False  # give the reward of a move at once

    @abstractmethod
    def begin(self, problem: Problem) -> Play: ...

    def teacher(self, problem: Problem) -> Player:
        """Return the player whose episodes supervised training learns from. A random player shows only the form of moves."""
        return random_player(stable_hash("teacher", problem.id, problem.question))

    async def run(self, problem: Problem, generate: Generate) -> Rollout | Sequence[Rollout]:
        play, turn = self.begin(problem), await generate()
        while (reply := play.move(turn.text)).value is None:
            self._pay(generate, reply)
            turn = await generate([Message("user", reply.text)])
        self._pay(generate, reply)
        return generate.rollout(Score(reply.value, outcome=reply.outcome))

    def _pay(self, generate: Generate, reply: Reply) -> None:
        if self.by_turn and reply.paid:
            generate.reward(reply.paid)

    def episode(self, problem: Problem, player: Player) -> tuple[list[str], list[str], Score]:
        """Return a player's moves, the environment's answer to each but the last, and the score."""
        play, moves, replies = self.begin(problem), list[str](), list[str]()
        while True:
            moves.append(player(play))
            reply = play.move(moves[-1])
            if reply.value is not None:
                return moves, replies, Score(reply.value, outcome=reply.outcome)
            replies.append(reply.text)

    def conversation(self, problem: Problem) -> tuple[Message, ...]:
        moves, replies, _ = self.episode(problem, self.teacher(problem))
        said = [Message("user", reply) for reply in replies]
        turns = [Message("assistant", move) for move in moves]
        asked = (m for pair in zip(turns, said, strict=False) for m in pair)
        return (*self.prompt(problem), *asked, turns[-1])

    def demonstration(self, problem: Problem) -> str:
        return "\n".join(self.episode(problem, best_player)[0])

    def score(self, problem: Problem, response: str) -> Score:
        play = self.begin(problem)
        for move in response.split("\n"):
            reply = play.move(move)
            if reply.value is not None:
                return Score(reply.value, outcome=reply.outcome)
        return Score(0.0, outcome="unfinished")


def drawn(
    task: str,
    split: str,
    make: Callable[[Random], tuple[str | int, ...]],
    problem: Callable[[str, tuple[str | int, ...]], Problem],
    seed: int,
) -> Procedural:
    """Return problems that are drawn again until they are on the right side of the split; `problem` makes one from an id and
    the draw."""
    require_split(split)

    def at(index: int) -> Problem:
        source = Random(stable_hash(task, seed, split, index))
        for found in (make(source) for _ in range(ATTEMPTS)):
            if side(task, *found) == split:
                return problem(f"{split}/{index}", found)
        none = f"{task}: no {split} problem was found with these settings"
        raise UserError(f"{none}; allow more of them")

    return Procedural(at, range(TRAIN_COUNT if split == "train" else TEST_COUNT))
