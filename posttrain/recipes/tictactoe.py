"""A small model learns tic-tac-toe from games against itself, after SFT on random moves."""

from __future__ import annotations

from posttrain.recipes._episodes import episodes
from posttrain.recipes.base import Recipe
from posttrain.tasks.tictactoe import TicTacToe


def tictactoe(size: str = "nano") -> Recipe:
    """The model plays both sides; groups compare games of one side from the same opening. Success is measured in games that it
    never trained on, against a program that plays perfectly and one that plays at random: the share of results that are at
    least those of perfect play."""
    others = {"": TicTacToe("best"), "_random": TicTacToe("random")}
    return episodes(
        "tictactoe",
        size,
        TicTacToe(),
        tokens=2,
        steps=140,
        sft_steps=800,
        measured=others,
        evaluate_every=0,
    )
