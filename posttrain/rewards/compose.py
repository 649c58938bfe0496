"""Several rewards as one: weighted sum, product, or a gate that must be passed first. Each part has its own metrics column.

>>> from posttrain.rewards.answer import answer
>>> from posttrain.rewards.format import format
>>> mix = Weighted((Part("format", format, 0.2), Part("correctness", answer, 0.8)))
>>> score = mix("2+2=", "#4", "4")
>>> score.value, score.outcome, dict(score.parts)
(0.8, 'correct', {'format': 0.0, 'correctness': 1.0})
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from posttrain.errors import require
from posttrain.types import Score, as_number

# (prompt, response, answer): the form of a user's reward and of the shipped ones
Reward = Callable[[str, str, str], "Score | float"]
JUDGED = ("correct", "wrong", "unparseable", "pass", "fail")
CORRECT, WRONG = Score(1.0, outcome="correct"), Score(0.0, outcome="wrong")
UNPARSEABLE = Score(0.0, outcome="unparseable")


def as_score(value: Score | float) -> Score:
    """Convert a reward's result, which may be a plain number of any type. A bool says right or wrong. A number that is not finite
    is a failure, never a 0.

    >>> as_score(True).outcome, as_score(1.0).outcome
    ('correct', '')
    """
    if isinstance(value, Score):
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return CORRECT if value else WRONG
    number = as_number(value, "a reward")
    return Score(number) if math.isfinite(number) else Score.failed(f"the reward returned {number}")


def weigh(parts: Mapping[str, float], weights: Mapping[str, float], outcome: str) -> Score:
    """Combine the parts of a task's score, each in [0, 1], by their weights; the part `answer` gets the weight that the others
    leave. The value is exactly 1 if every part is 1.

    >>> weigh({"answer": 1.0, "format": 0.0}, {"format": 0.25}, "correct").value
    0.75
    """
    missing, rest = 0.0, 1.0
    for name, weight in weights.items():
        missing += weight * (1 - parts[name])
        rest -= weight
    return Score(1 - (missing + rest * (1 - parts["answer"])), parts, outcome=outcome)


@dataclass(frozen=True)
class Part:
    """A reward with its name and its weight."""

    name: str
    reward: Reward
    weight: float = 1.0

    def __post_init__(self) -> None:
        fine = math.isfinite(self.weight)
        require(fine, f"the weight of reward {self.name!r} must be finite, not {self.weight}")


def combined(scores: Mapping[str, Score], value: float) -> Score:
    """Combine scores into one: a failure of any part is a failure of the whole; the outcome is that of the part that judges the
    answer."""
    failed = next(((name, s) for name, s in scores.items() if not s.valid), None)
    if failed is not None:
        return Score.failed(f"{failed[0]}: {failed[1].failure}")
    outcome = next((s.outcome for s in scores.values() if s.outcome in JUDGED), "")
    steps = next((s.steps for s in scores.values() if s.steps), ())
    parts = {name: s.value for name, s in scores.items() if s.value is not None}
    return Score(value, parts, steps, outcome)


@dataclass(frozen=True)
class Composed:
    """Rewards that are all computed; the subclass defines how their values are combined."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        require(names, "a composed reward needs at least one part")
        different = len(set(names)) == len(names)
        require(different, f"parts of a reward need different names: {', '.join(names)}")

    def __call__(self, prompt: str, response: str, answer: str) -> Score:
        scores = {p.name: as_score(p.reward(prompt, response, answer)) for p in self.parts}
        return combined(scores, self.value([score.value or 0.0 for score in scores.values()]))

    def value(self, values: Sequence[float]) -> float:
        raise NotImplementedError


class Weighted(Composed):
    """value = sum_k w_k v_k."""

    def value(self, values: Sequence[float]) -> float:
        return sum(p.weight * value for p, value in zip(self.parts, values, strict=True))


class Product(Composed):
    """value = prod_k v_k: no part can compensate for another. Weights are not used."""

    def value(self, values: Sequence[float]) -> float:
        return math.prod(values)


@dataclass(frozen=True)
class Gate:
    """`reward` if `gate` gives at least `threshold`; else `otherwise`. If the gate is not passed, the reward is not
    computed."""

    gate: Part
    reward: Part
    threshold: float = 1.0
    otherwise: float = 0.0

    def __call__(self, prompt: str, response: str, answer: str) -> Score:
        first = as_score(self.gate.reward(prompt, response, answer))
        if not first.valid:
            return Score.failed(f"{self.gate.name}: {first.failure}")
        assert first.value is not None
        if first.value < self.threshold:
            return Score(self.otherwise, {self.gate.name: first.value}, outcome="wrong")
        second = as_score(self.reward.reward(prompt, response, answer))
        return combined({self.gate.name: first, self.reward.name: second}, second.value or 0.0)
