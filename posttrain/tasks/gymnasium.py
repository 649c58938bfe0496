"""Gymnasium's toy text environments, or others with discrete actions, played in words (`gymnasium:FrozenLake-v1`).

    task = Gymnasium("FrozenLake-v1", options={"is_slippery": False})

Needs the package: pip install 'posttrain[gymnasium]'. The policy reads the environment's own text (render mode `ansi`), with
colours written out; the last action named in a turn, by word or number, is played.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from posttrain.errors import Whole, refuse_unknown
from posttrain.tasks._packaged import Packaged, Tally
from posttrain.tasks.base import Generate
from posttrain.types import JSON, Problem, Rollout

# the words of each action, by the name of the environment's class, and a description of the game
WORDS = {
    "FrozenLakeEnv": (
        ("left", "down", "right", "up"),
        "Walk from S to G over the frozen lake F, without falling into a hole H. You are at the cell in brackets.",
    ),
    "CliffWalkingEnv": (
        ("up", "right", "down", "left"),
        "Walk from x to T around the cliff C. Each step costs 1, the cliff 100.",
    ),
    "TaxiEnv": (
        ("south", "north", "east", "west", "pickup", "dropoff"),
        "Drive to the passenger, pick them up, and drop them off at their destination. | and : are borders; : can be passed.",
    ),
    "BlackjackEnv": (("stick", "hit"), "Come closer to 21 than the dealer, without going over it."),
}
HIGHLIGHT = re.compile(r"\x1b\[[0-9;]*m(.)\x1b\[0m")
CORNERS = ("R", "G", "Y", "B")


@dataclass(frozen=True)
class Gymnasium(Packaged):
    """`env` is the id of an environment, `options` are arguments of `gymnasium.make`. The score is the sum of the rewards, or
    each turn gets its own (`credit=turn`). A turn without an action is answered with the list of actions; one more than
    `invalid` ends the episode. A random environment (slippery ice) is seeded: the same actions lead to the same states."""

    name: ClassVar[str] = "gymnasium"
    module: ClassVar[str] = "gymnasium"
    shorthand: ClassVar[str] = "env"
    verifiable = False  # the score is a return: -13 is the best possible on the cliff

    env: str  # the id of an environment
    options: Mapping[str, JSON] = field(default_factory=dict)  # arguments of gymnasium.make
    credit: Literal["end", "turn"] = "end"
    invalid: Whole = 1  # invalid actions that an episode may have

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(bool(self.env), "give an environment, such as gymnasium:FrozenLake-v1")

    def begin(self, seed: int) -> tuple[Any, Any]:
        gymnasium = self.package()
        known = gymnasium.registry
        refuse_unknown("environment of gymnasium", [self.env], known)
        creator = gymnasium.envs.registration.load_env_creator(known[self.env].entry_point)
        text = "ansi" in getattr(creator, "metadata", {}).get("render_modes", ())
        world = gymnasium.make(self.env, render_mode="ansi" if text else None, **dict(self.options))
        discrete = hasattr(world.action_space, "n")
        self.check(discrete, f"{self.env} has no discrete actions that could be named")
        return world, world.reset(seed=seed)[0]

    async def run(self, problem: Problem, generate: Generate) -> Rollout:
        world, state = self.begin(int(problem.facts["seed"]))
        words, about = actions(world)
        tally = Tally(generate, self.invalid, self.credit == "turn")
        listed = "Actions: " + ", ".join(words) + "."
        text = "\n".join(line for line in (about, listed, shown(world, state)) if line)
        while True:
            reply = await tally.ask(text)
            action = chosen(reply.text, words)
            if action is None:
                tally.invalid()
                text = f"That is no action. {listed}"
                continue
            state, reward, terminated, truncated, _ = world.step(action)
            tally.pay(float(reward))
            if terminated or truncated:
                world.close()
                return generate.rollout(tally.score("" if terminated else "truncated"))
            text = shown(world, state)


def actions(world: Any) -> tuple[tuple[str, ...], str]:
    """Return the words of the actions, in their order, and a description of the game."""
    if (found := WORDS.get(type(world.unwrapped).__name__)) is not None:
        return found
    return tuple(str(n) for n in range(int(world.action_space.n))), ""


def chosen(text: str, words: tuple[str, ...]) -> int | None:
    """Return the last action that a turn names, by its word or its number.

    >>> chosen("Not left, so: Right.", ("left", "right")), chosen("1", ("left", "right")), chosen("upright", ("right",))
    (1, 1, None)
    """
    numbers = {str(n): n for n in range(len(words))} | {word: n for n, word in enumerate(words)}
    said = [word for word in re.findall(r"[a-z]+|[0-9]+", text.casefold()) if word in numbers]
    return numbers[said[-1]] if said else None


def shown(world: Any, state: Any) -> str:
    """Return a state as text."""
    if world.render_mode != "ansi":
        if type(world.unwrapped).__name__ == "BlackjackEnv":
            total, dealer, ace = (int(part) for part in state)
            hand = f"{total} with a usable ace" if ace else str(total)
            return f"You have {hand}; the dealer shows {dealer}."
        return str(state)
    text = HIGHLIGHT.sub(r"[\1]", world.render()).strip("\n")
    if type(world.unwrapped).__name__ != "TaxiEnv":
        return text
    row, column, passenger, goal = (int(part) for part in world.unwrapped.decode(state))
    where = "in the taxi" if passenger == len(CORNERS) else f"at {CORNERS[passenger]}"
    plain = re.sub(r"\[(.)\]", r"\1", text)
    return f"{plain}\nThe taxi is at row {row}, column {column}. The passenger is {where} and wants to go to {CORNERS[goal]}."
