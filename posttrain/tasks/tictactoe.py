"""Tic-tac-toe, against itself or against a program.

A board is nine characters, row by row, in which an empty field is its number: `x2o456789`. The prompt is the policy's side and
the board, `x:x2o456789`. A move is the number of an empty field. In problems and in code an empty field is a dot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Annotated, ClassVar, Literal

from posttrain.errors import Range
from posttrain.tasks._procedural import Procedural, stable_hash
from posttrain.tasks._turns import Environment, Play, Reply, drawn
from posttrain.tasks.base import Generate
from posttrain.types import Message, Problem, Rollout, Score

LINES = ("012", "345", "678", "036", "147", "258", "048", "246")
EMPTY = "." * 9
SIDES = ("x", "o")
# boards by the number of moves; random moves reach each of them equally often
BOARDS = (1, 9, 72, 252, 756, 1260)


@dataclass(frozen=True)
class TicTacToe(Environment):
    """Games begin after up to `opening` random moves, each opening as often as any other. With `opponent: self` the policy plays
    both sides, each a role with its own groups, and gets 1 for a win, 0.5 for a draw. Against a program (`random`, or `best`,
    which never loses) the value is 1 if the result is at least that of perfect play from the opening."""

    alphabet: ClassVar[str] = "123456789xo:"

    opponent: Literal["self", "random", "best"] = "self"  # who plays the other side
    opening: Annotated[int, Range(ge=1, le=5)] = 4
    seed: int = 0  # which problems are drawn; never which side of the split a problem is on

    def problems(self, split: str, level: int | None = None) -> Procedural:
        return drawn("tictactoe", split, self._draw, _problem, self.seed)

    def _draw(self, source: Random) -> tuple[str]:
        board, lengths = EMPTY, range(self.opening + 1)
        for _ in range(source.choices(lengths, BOARDS[: len(lengths)])[0]):
            following = after(board, source.choice(free(board)))
            if not winner(following):
                board = following
        return (board,)

    def begin(self, problem: Problem) -> Play:
        return _Game(problem.answer, "best" if self.opponent == "best" else "random", problem.id)

    async def run(self, problem: Problem, generate: Generate) -> Rollout | Sequence[Rollout]:
        if self.opponent != "self":
            return await super().run(problem, generate)
        players = {side: generate.session(side) for side in SIDES}
        board, moved, paid = problem.answer, set[str](), {"x": 0.5, "o": 0.5}
        outcome = "draw"
        while free(board) and not winner(board):
            side = to_move(board)
            seen = numbered(board) if side in moved else shown(board)
            turn = await players[side]([Message("user", seen)])
            moved.add(side)
            if turn.text not in free(board):
                paid, outcome = {**paid, side: 0.0}, "illegal move"
                break
            board = after(board, turn.text)
            if winner(board):
                paid, outcome = {other: float(other == side) for other in SIDES}, "won"
        scores = {side: Score(paid[side], outcome=outcome) for side in SIDES if side in moved}
        return [players[side].rollout(score) for side, score in scores.items()]


def _problem(name: str, drawn: tuple[str | int, ...]) -> Problem:
    board = str(drawn[0])
    return Problem(name, shown(board), board)


def to_move(board: str) -> str:
    return "x" if board.count("x") == board.count("o") else "o"


def shown(board: str) -> str:
    """Return a board as the side to move first reads it."""
    return f"{to_move(board)}:{numbered(board)}"


def numbered(board: str) -> str:
    """Return a board with the numbers of its empty fields."""
    return "".join(str(n + 1) if field == "." else field for n, field in enumerate(board))


def free(board: str) -> list[str]:
    return [str(n + 1) for n, field in enumerate(board) if field == "."]


def after(board: str, move: str) -> str:
    place = int(move) - 1
    return board[:place] + to_move(board) + board[place + 1 :]


def winner(board: str) -> str:
    """Return x, o, or "" if neither has three in a row."""
    lines = ({board[int(place)] for place in line} for line in LINES)
    return next((line.pop() for line in lines if len(line) == 1 and "." not in line), "")


@lru_cache(maxsize=10_000)
def value(board: str) -> int:
    """Return the result of perfect play from a board: 1 if x wins, -1 if o wins, 0 for a draw."""
    if (won := winner(board)) or not free(board):
        return {"x": 1, "o": -1, "": 0}[won]
    found = [value(after(board, move)) for move in free(board)]
    return max(found) if to_move(board) == "x" else min(found)


def best_move(board: str) -> str:
    """Return the first move that keeps the value of a board, preferring one that wins at once."""
    sign = 1 if to_move(board) == "x" else -1
    boards = {move: after(board, move) for move in free(board)}
    rank = {move: (sign * value(own), bool(winner(own))) for move, own in boards.items()}
    return max(rank, key=lambda move: rank[move])


class _Game(Play):
    """A game against a program, from an opening in which the policy is to move."""

    def __init__(self, board: str, opponent: str, name: str) -> None:
        self.board, self.opponent, self.side = board, opponent, to_move(board)
        self.source = Random(stable_hash("tictactoe", "opponent", name))
        self.sign = 1 if self.side == "x" else -1
        self.due = self.sign * value(board)

    def move(self, text: str) -> Reply:
        if text not in free(self.board):
            return Reply(value=0.0, outcome="illegal move")
        self.board = after(self.board, text)
        if not self._over():
            moves = free(self.board)
            answer = best_move(self.board) if self.opponent == "best" else self.source.choice(moves)
            self.board = after(self.board, answer)
        if not self._over():
            return Reply(numbered(self.board))
        result = self.sign * value(self.board)
        outcome = "lost" if result < 0 else "drawn"
        kept = result >= self.due
        return Reply(value=float(kept), outcome="correct" if kept else outcome)

    def _over(self) -> bool:
        return bool(winner(self.board)) or not free(self.board)

    def best(self) -> str:
        return best_move(self.board)

    def legal(self) -> list[str]:
        return free(self.board)
