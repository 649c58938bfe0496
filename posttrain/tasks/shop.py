"""Sell what a customer wants, and ask for the wishes that the customer has not stated.

The prompt is what the customer says, `red hat`. `size?` is answered with a size, and so are `colour?` and `cloth?`. The sale
ends the conversation: `sell red m wool hat`, right if every wish is met.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Annotated, ClassVar

from posttrain.errors import Range, Share
from posttrain.tasks._procedural import Procedural
from posttrain.tasks._turns import Environment, Play, Reply, drawn
from posttrain.types import Problem

WISHES: dict[str, tuple[str, ...]] = {
    "colour": ("red", "blue", "pink", "grey", "green", "black"),
    "size": ("s", "m", "l", "xl"),
    "cloth": ("wool", "silk", "felt"),
}
ITEMS = ("hat", "cap", "coat", "shirt", "scarf", "dress", "skirt", "vest")


@dataclass(frozen=True)
class Shop(Environment):
    """A right sale is worth 1, minus `price` for each question whose answer was known."""

    alphabet: ClassVar[str] = "abcdefghijklmnopqrstuvwxyz ?"

    turns: Annotated[int, Range(ge=4, le=20)] = 5  # turns of an episode, including the sale
    price: Share = 0.1
    seed: int = 0  # which problems are drawn; never which side of the split a problem is on

    def problems(self, split: str, level: int | None = None) -> Procedural:
        return drawn("shop", split, _draw, _problem, self.seed)

    def begin(self, problem: Problem) -> Play:
        facts = problem.facts
        wishes = {name: str(facts[name]) for name in WISHES}
        said = {name: wishes[name] for name in WISHES if facts[f"said_{name}"]}
        return _Selling(str(facts["item"]), wishes, said, self.turns, self.price)


def _draw(source: Random) -> tuple[str | int, ...]:
    wishes = [source.choice(values) for values in WISHES.values()]
    return source.choice(ITEMS), *wishes, *(source.randrange(2) for _ in WISHES)


def _problem(name: str, drawn: tuple[str | int, ...]) -> Problem:
    item, rest = str(drawn[0]), drawn[1:]
    wishes = dict(zip(WISHES, map(str, rest[: len(WISHES)]), strict=True))
    said = dict(zip(WISHES, map(int, rest[len(WISHES) :]), strict=True))
    question = " ".join([*(wishes[n] for n in WISHES if said[n]), item])
    wanted = _sale(item, wishes)
    facts = {"item": item, **wishes, **{f"said_{n}": said[n] for n in WISHES}, "state": wanted}
    return Problem(name, question, wanted, 0, facts)


def _sale(item: str, wishes: Mapping[str, str]) -> str:
    return " ".join(["sell", *(wishes[name] for name in WISHES), item])


@dataclass(slots=True)
class _Selling(Play):
    item: str
    wishes: dict[str, str]
    said: dict[str, str]
    left: int
    price: float
    needless: int = 0

    def move(self, text: str) -> Reply:
        self.left -= 1
        if text.startswith("sell "):
            right = text == _sale(self.item, self.wishes)
            value = max(0.0, 1.0 - self.price * self.needless) if right else 0.0
            return Reply(value=value, outcome="correct" if right else "wrong")
        name = text.removesuffix("?")
        if name not in self.wishes or name == text:
            return Reply(value=0.0, outcome="not understood")
        if not self.left:
            return Reply(value=0.0, outcome="customer left")
        self.needless += name in self.said
        self.said[name] = self.wishes[name]
        return Reply(self.wishes[name])

    def best(self) -> str:
        unknown = [name for name in WISHES if name not in self.said]
        return f"{unknown[0]}?" if unknown else _sale(self.item, self.said)

    def legal(self) -> list[str]:
        """Every question, and as many sales, which guess what is not known."""
        known = [(self.said[n],) if n in self.said else values for n, values in WISHES.items()]
        drawn = (dict(zip(WISHES, values, strict=True)) for values in product(*known))
        sales = [_sale(self.item, wishes) for wishes in drawn]
        questions = [f"{name}?" for name in WISHES] if self.left > 1 else []
        return [*questions * max(1, len(sales) // 3), *sales]
