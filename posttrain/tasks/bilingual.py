"""Sums with reasoning in words, in one language or a mix of two: the material of R1's stages, small enough for a CPU.

47+85= is answered `<think>750 makes 12 then 481 makes 13</think>132`: 7+5+0 is 12, 4+8+1 is 13. The score has R1's three
rewards: the answer, the format and the consistency of the language. Demonstrations for pretraining can be of low quality:
without tags (`style="plain"`), every word in English or German at random (`language_mix="mixed"`), with forgotten carries
(`error_rate`). Chat models are asked `What is 47 + 85?` (`wording="words"`) and answer `<think>7+5 makes 12 then 4+8+1 makes
13</think>132`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from posttrain.errors import Seed, Share
from posttrain.rewards.answer import integer_answer, strict_integer
from posttrain.rewards.compose import weigh
from posttrain.rewards.format import match
from posttrain.rewards.language import share
from posttrain.tasks._procedural import Procedural, stable_hash
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Task
from posttrain.tasks.sums import in_words
from posttrain.types import Problem, Score

TEMPLATE = "<think>{text}</think>{integer}"
TAGS, LETTERS = re.compile("</?think>"), re.compile("[a-z]")
ENDS = {"tagged": "</think>", "plain": "#"}  # the text before the answer
SAYS = {"en": ("makes", "then"), "de": ("macht", "dann")}
NUMBER = re.compile("[0-9]+")
LETTERS_USED = set("think").union(*(word for words in SAYS.values() for word in words))
ALPHABET = "0123456789+-=#<>/ " + "".join(sorted(LETTERS_USED))


@dataclass(frozen=True)
class Bilingual(Task):
    """Sums of two numbers with `level` digits. value = the sum of the weights of the parts that are right; the answer gets the
    weight that the others leave.

    `language` is the share of the reasoning's words that are in the `target` language; reasoning without a word gets 0.
    """

    level: int = 2
    target: Literal["en", "de"] = "en"
    format_weight: Share = 0.1
    language_weight: Share = 0.2
    style: Literal["tagged", "plain"] = "tagged"  # of demonstrations
    # demonstrations in one language (the target), or mixed word by word
    language_mix: Literal["one", "mixed"] = "one"
    error_rate: Share = 0.0  # the share of a demonstration's carries that are forgotten
    # short: 47+85= and 750 makes 12; words: as people write, for chat models
    wording: Literal["short", "words"] = "short"
    seed: Seed = 0  # which problems are drawn; never which side of the split a pair is on

    def __post_init__(self) -> None:
        super().__post_init__()
        together = self.format_weight + self.language_weight <= 1
        self.check(together, "format_weight and language_weight lie between 0 and 1 together")
        self._sums()  # raises an error for an invalid level

    def _sums(self) -> Arithmetic:
        return Arithmetic(level=self.level, min_level=self.level, seed=self.seed)

    @property
    def alphabet(self) -> str:
        if self.wording == "words":
            return "".join(sorted(set(ALPHABET + "What is {a} + {b}?")))
        return ALPHABET

    @property
    def levels(self) -> tuple[int, ...]:
        return (self.level,)

    def problems(self, split: str, level: int | None = None) -> Procedural:
        made = self._sums().problems(split, level)
        return made.map(in_words) if self.wording == "words" else made

    def demonstration(self, problem: Problem) -> str:
        """Return a solution that depends only on the problem and the settings. It scores 1 if it is tagged, in one language and
        without errors."""
        a, b = int(problem.facts["a"]), int(problem.facts["b"])
        coins = iter(_coins(self.language_mix, problem))
        carry, total, place, text = 0, 0, 1, ""
        for step in range(problem.level):
            (a, x), (b, y) = divmod(a, 10), divmod(b, 10)
            carry *= next(coins) >= self.error_rate
            sum_ = x + y + carry
            makes, then = (self._word(n, next(coins)) for n in range(2))
            if self.wording == "words":
                line = f"{x}+{y}{'+1' * carry} {makes} {sum_}"
            else:
                line = f"{x}{y}{carry} {makes} {sum_:02d}"
            text += f" {then} {line}" if step else line
            carry, total, place = sum_ // 10, total + sum_ % 10 * place, place * 10
        opening = "<think>" if self.style == "tagged" else ""
        return f"{opening}{text}{ENDS[self.style]}{total + carry * place}"

    def _word(self, number: int, coin: float) -> str:
        other = next(name for name in SAYS if name != self.target)
        return SAYS[other if self.language_mix == "mixed" and coin < 0.5 else self.target][number]

    def final(self, response: str) -> str | None:
        given = strict_integer(self._split(response)[1].strip())
        return None if given is None else str(given)

    def score(self, problem: Problem, response: str) -> Score:
        """An answer counts after `</think>` or `#`, so that models without the format can be compared with those that have it;
        if the sum is asked in words and neither is there, the last number counts."""
        reasoning, said = self._split(response)
        judged = integer_answer("#" + said, int(problem.answer))
        worded = bool(LETTERS.search(reasoning))
        others = [name for name in SAYS if name != self.target]
        parts = {
            "answer": judged.value or 0.0,
            "format": float(match(TEMPLATE, response) is not None),
            "language": share(reasoning, self.target, others) if worded else 0.0,
        }
        weights = {"format": self.format_weight, "language": self.language_weight}
        return weigh(parts, weights, judged.outcome)

    def _split(self, response: str) -> tuple[str, str]:
        """Return (the reasoning without its tags, the answer after the last end of it; "" if it does not end)."""
        place, end = max((response.rfind(end), end) for end in ENDS.values())
        if place >= 0:
            return TAGS.sub(" ", response[:place]), response[place + len(end) :]
        numbers = NUMBER.findall(response) if self.wording == "words" else []
        return TAGS.sub(" ", response), numbers[-1] if numbers else ""


def _coins(purpose: str, problem: Problem) -> list[float]:
    """Return numbers in [0, 1) for a problem's demonstration: three per digit."""
    count = 3 * problem.level
    return [stable_hash("bilingual", purpose, problem.id, n) / 2**128 for n in range(count)]
