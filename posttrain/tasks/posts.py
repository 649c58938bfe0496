"""Short posts and summaries, compared by simulated people with readable rules: a toy of summarization from human feedback.

A post is a list of four facts, `cat fire job sun`: news has 3 points (fire), a plan 2 (job), small talk 1 (cat, sun). A summary
is a sentence of facts, `fire, job.`; a fact that is not in the post is invented. Two people score it, each by their own rules
(`taste`). The writer wants the two most important facts. The reader, whose scores no model trains on, also wants important
facts, and pays 1.5 points of time for every fact.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from posttrain.tasks import _procedural
from posttrain.tasks.base import Task
from posttrain.types import Problem, Score

EVENTS, PLANS = _procedural.words("fire flu baby win"), _procedural.words("job exam rent move")
POINTS = dict.fromkeys(EVENTS, 3) | dict.fromkeys(PLANS, 2)
POINTS |= dict.fromkeys(_procedural.words("cat hat nap sun"), 1)  # small talk
# the number of facts in a post, in the summary that the writer wants, and at most in a summary that people write
LENGTH, WANTED, MAX_STATED = 4, 2, 3
# the cost in points of a fact that is not in the post, is repeated, or is one too many
INVENTED, REPEATED, SURPLUS = 1.0, 1.0, 1.0
READING = 1.5  # points that the reader pays for each fact
SENTENCE = re.compile(r"[a-z]+(?:, [a-z]+)*\.")
MAX_LENGTH, TEST_COUNT = 1_000, 2_000


def facts_of(post: str) -> dict[str, int]:
    """Return the points of each fact of a post.

    >>> facts_of("cat fire job")
    {'cat': 1, 'fire': 3, 'job': 2}
    """
    return {fact: POINTS[fact] for fact in post.split() if fact in POINTS}


def taste(facts: Mapping[str, int], summary: str, reader: bool) -> tuple[float, dict[str, float]]:
    """Return the writer's or the reader's score of a summary, in [0, 1], and its parts.

    >>> post = facts_of("cat fire job sun")
    >>> texts = ("fire, job.", "fire.", "fire, cat, job.", "fire, fire.", "fire, flu.", "no")
    >>> [taste(post, text, reader=False)[0] for text in texts]
    [1.0, 0.6, 1.0, 0.4, 0.4, 0.0]
    >>> [taste(post, text, reader=True)[0] for text in texts]
    [1.0, 0.75, 0.75, 0.0, 0.0, 0.0]
    """
    text = summary.strip()
    if len(text) > MAX_LENGTH or not SENTENCE.fullmatch(text):
        return 0.0, {"grammar": 0.0}
    said = text.removesuffix(".").split(", ")
    stated = set(said)
    points = float(sum(facts.get(fact, 0) for fact in stated))
    invented, repeated = len(stated - facts.keys()), len(said) - len(stated)
    cost = INVENTED * invented + REPEATED * repeated
    if reader:
        cost += READING * len(said)
        full = sum(max(0.0, value - READING) for value in facts.values())
    else:
        cost += SURPLUS * max(0, len(said) - WANTED)
        full = float(sum(sorted(facts.values())[-WANTED:]))
    counts = {"facts": float(len(said)), "points": points, "invented": float(invented)}
    value = (points - cost) / max(1.0, full)
    return min(1.0, max(0.0, value)), {"grammar": 1.0, **counts}


@dataclass(frozen=True)
class Posts(Task):
    """`summary` sets the demonstrations, the `best` one or `any`, as people write them, with one to three facts of the post,
    whichever they are. `annotator` sets who scores, the writer or the reader."""

    alphabet: ClassVar[str] = "abcdefghijklmnopqrstuvwxyz ,."

    summary: Literal["best", "any"] = "best"
    annotator: Literal["writer", "reader"] = "writer"

    def problems(self, split: str, level: int | None = None) -> _procedural.Procedural:
        _procedural.require_split(split)
        indices = range(_procedural.TRAIN_COUNT if split == "train" else TEST_COUNT)
        return _procedural.Procedural(lambda n: Problem(f"{split}/{n}", post(split, n)), indices)

    def score(self, problem: Problem, response: str) -> Score:
        return Score(*taste(facts_of(problem.question), response, self.annotator == "reader"))

    def demonstration(self, problem: Problem) -> str:
        facts = facts_of(problem.question)
        said = sorted(facts, key=lambda fact: -facts[fact])
        if self.summary == "any":
            dice = _procedural.Dice(_procedural.stable_hash("summary", problem.id))
            left = list(facts)
            said = [dice.take(left) for _ in range(dice.roll(MAX_STATED) + 1)]
        elif self.annotator == "reader":
            said = [fact for fact in said if facts[fact] > READING]
        else:
            said = said[:WANTED]
        return f"{', '.join(said)}."


def post(split: str, index: int) -> str:
    """Return a post of this split. It depends only on its number, and has at least one fact that is news."""
    for attempt in range(1000):
        dice = _procedural.Dice(_procedural.stable_hash("post", split, index, attempt))
        left = list(POINTS)
        facts = [dice.take(left) for _ in range(LENGTH)]
        text = " ".join(facts)
        if set(facts) & set(EVENTS) and _procedural.side("posts", text) == split:
            return text
    raise AssertionError("one draw in five at least is of either split")
