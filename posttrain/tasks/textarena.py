"""Games of the package TextArena, for one player or several (`textarena:TicTacToe-v0`).

    task = TextArena("TicTacToe-v0", opponent="self")

Needs the package: pip install 'posttrain[textarena]'. Every episode makes a new game, because its wrappers keep text across
`reset`. A game seeds the global generator of its process, which is a worker.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal

from posttrain.errors import Count, refuse_unknown
from posttrain.tasks._packaged import INVALID, Packaged, Tally
from posttrain.tasks.base import Generate
from posttrain.types import JSON, Problem, Rollout, Score

MOVES = re.compile(r"'\[([^\[\]']+)\]'")


@dataclass(frozen=True)
class TextArena(Packaged):
    """`game` is an id of `textarena.make`, `options` are its arguments. With several players, `opponent` sets the others,
    `self` or `random`. With self, the policy plays them too, with a conversation and a rollout for each (roles `player 0`,
    ...). A random opponent plays one of the moves that the game lists last as '[move]', and the policy's own seat changes from
    problem to problem. A subclass may override `reply` to play otherwise.

    The score is the game's reward for a player, usually 1, 0 or -1. The game itself decides whether a move is invalid, and ends
    after the second in a row; a player who ends it so gets at most 0, whatever partial reward the game gives.
    """

    name: ClassVar[str] = "textarena"
    module: ClassVar[str] = "textarena"
    shorthand: ClassVar[str] = "game"

    game: str  # the id of a game
    options: Mapping[str, JSON] = field(default_factory=dict)  # arguments of textarena.make
    players: Count = 1  # players of a game
    opponent: Literal["self", "random"] = "self"
    _: KW_ONLY
    max_turns: Count = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(bool(self.game), "give a game, such as textarena:GuessTheNumber-v0")

    def begin(self, seed: int) -> Any:
        textarena = self.package()
        known = textarena.envs.registration.ENV_REGISTRY
        refuse_unknown("game of textarena", [self.game], known)
        game = textarena.make(self.game, **dict(self.options))
        game.reset(num_players=self.players, seed=seed)
        return game

    async def run(self, problem: Problem, generate: Generate) -> list[Rollout]:
        seed = int(problem.facts["seed"])
        game, draw = self.begin(seed), random.Random(seed)
        seats = {(seed // 2) % self.players: generate}
        if self.opponent == "self" and self.players > 1:
            seats = {n: generate.session(f"player {n}") for n in range(self.players)}
        tallies = {n: Tally(session, 0) for n, session in seats.items()}
        read: dict[int, str] = {}
        last: dict[int, str] = {}
        done = False
        while not done:
            player, whole = game.get_observation()
            text = unread(whole, read.get(player, ""), last.get(player, ""))
            read[player] = whole
            if player in tallies:
                last[player] = (await tallies[player].ask(text)).text
                done, _ = game.step(last[player])
                tallies[player].generate.count("env/steps")
                if getattr(game.state, "error_count", 0) and not done:
                    tallies[player].generate.count("env/invalid")
            else:
                done, _ = game.step(self.reply(text, draw))
        rewards, about = game.close()
        return [
            session.rollout(scored(rewards, about, n, session))
            for n, session in seats.items()
            if n in last  # otherwise the game was over before its first move
        ]

    def reply(self, observation: str, draw: random.Random) -> str:
        """Return the move of a player that is not the policy, after the new part of the observation."""
        listed = MOVES.findall(observation.splitlines()[-1] if observation else "")
        if not listed:
            raise LookupError(f"{self.game} lists no moves as '[move]' for a random opponent")
        return f"[{draw.choice(listed)}]"


def unread(whole: str, read: str, said: str) -> str:
    """Return the text that a player has not read yet, without its own move, which the game repeats.

    >>> unread("a[GAME] b", "a", ""), unread("a\\n[Player 0] [4]\\n[GAME] b", "a", "4")
    ('[GAME] b', '[GAME] b')
    """
    new = whole[len(read) :] if whole.startswith(read) else whole
    own = re.match(r"\n?\[[^\]\n]*\] \[?" + re.escape(said) + r"\]?", new) if said else None
    return (new[own.end() :] if own else new).strip("\n")


def scored(
    rewards: Mapping[int, Any] | None, about: Mapping[int, Any], player: int, session: Generate
) -> Score:
    if rewards is None or player not in rewards:
        return Score.failed("the game ended without a reward")
    value = float(rewards[player])
    if about.get(player, {}).get("invalid_move"):
        session.count("env/invalid")
        return Score(min(value, 0.0), outcome=INVALID)
    return Score(value)
