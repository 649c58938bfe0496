"""Short posts and their summaries, compared by simulated people whose rules can be read: a toy of summarization from human feedback.

A post is a list of facts, each behind a mark that says how much the writer stresses it: `*rain -tea +job *dog -cat` has 3 points
for `rain` and `dog` (*), 2 for `job` (+) and 1 for `tea` and `cat` (-). A summary quotes facts with their marks, `*rain *dog +job.`,
and a quote that is not in the post, or has another mark there, is invented. Two people score it, each by their own rules (`taste`).
The writer wants the three most important facts. The reader, who is not asked while a model learns, wants important ones too, and pays
1.5 points of time for every fact that is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from posttrain.errors import check_fields
from posttrain.tasks._procedural import (
    TRAIN_COUNT,
    Procedural,
    require_split,
    side,
    stable_hash,
    words,
)
from posttrain.tasks.base import Task
from posttrain.types import Problem, Score

FACTS = words(
    "ant bus cat dog egg fog gym hat ice job key law map nap oil pay rain ski tea van win yoga zoo"
)
MARKS = {"*": 3, "+": 2, "-": 1}
LENGTH, WANTED = 5, 3  # facts of a post, and of a summary that the writer wants
INVENTED, REPEATED, SURPLUS = (
    2.0,
    1.0,
    1.0,
)  # points that a fact costs which is none of the post, comes again, or is one too many
READING = 1.5  # points that the reader pays for each fact
FACT, SENTENCE = re.compile(r"[*+-][a-z]+"), re.compile(r"[*+-][a-z]+(?: [*+-][a-z]+)*\.")
MAX_LENGTH, TEST_COUNT = 1_000, 2_000


def facts_of(post: str) -> dict[str, int]:
    """The points of each fact of a post.

    >>> facts_of("*rain -tea +job")
    {'*rain': 3, '-tea': 1, '+job': 2}
    """
    return {fact: MARKS[fact[0]] for fact in FACT.findall(post)}


def taste(facts: Mapping[str, int], summary: str, reader: bool) -> tuple[float, dict[str, float]]:
    """What the writer or the reader gives for a summary, in [0, 1], and its parts.

    >>> post = facts_of("*rain -tea +job *dog -cat")
    >>> [taste(post, text, reader=False)[0] for text in ("*rain *dog +job.", "*rain.", "*rain *rain.", "*rain *tea.", "no")]
    [1.0, 0.375, 0.25, 0.125, 0.0]
    >>> [round(taste(post, text, reader=True)[0], 2) for text in ("*rain *dog +job.", "*rain *dog.", "-tea *rain.")]
    [1.0, 0.86, 0.29]
    """
    text = summary.strip()
    if len(text) > MAX_LENGTH or not SENTENCE.fullmatch(text):
        return 0.0, {"grammar": 0.0}
    said = text.removesuffix(".").split(" ")
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
    return min(1.0, max(0.0, (points - cost) / max(1.0, full))), {"grammar": 1.0, **counts}


@dataclass(frozen=True)
class Posts(Task):
    """`summary` is what the demonstrations are like: the `best` one, or `any`, as people write them: one to three facts, a stressed one
    more often than others. `annotator` is who scores."""

    alphabet: ClassVar[str] = "abcdefghijklmnopqrstuvwxyz .*+-"

    summary: Literal["best", "any"] = "best"
    annotator: Literal["writer", "reader"] = "writer"

    def __post_init__(self) -> None:
        check_fields(self, "posts: ")

    def problems(self, split: str, level: int | None = None) -> Procedural:
        require_split(split)
        count = TRAIN_COUNT if split == "train" else TEST_COUNT
        return Procedural(
            lambda index: Problem(f"{split}/{index}", post(split, index)), range(count)
        )

    def score(self, problem: Problem, response: str) -> Score:
        reader = self.annotator == "reader"
        return Score(*taste(facts_of(problem.question), response, reader))

    def demonstration(self, problem: Problem) -> str:
        facts = facts_of(problem.question)
        by_points = sorted(facts, key=lambda fact: -facts[fact])
        if self.summary == "best":
            reader = [fact for fact in by_points if facts[fact] > READING]
            return f"{' '.join(reader if self.annotator == 'reader' else by_points[:WANTED])}."
        seed = stable_hash("summary", problem.id)
        seed, count = divmod(seed, WANTED)
        bag, said = [fact for fact in facts for _ in range(facts[fact])], []
        for _ in range(count + 1):
            seed, place = divmod(seed, len(bag))
            said.append(bag[place])
            bag = [fact for fact in bag if fact != said[-1]]
        return f"{' '.join(said)}."


def post(split: str, index: int) -> str:
    """A post of this split that depends on its number alone; one fact at least is stressed."""
    for attempt in range(1000):
        seed, left, facts = stable_hash("post", split, index, attempt), list(FACTS), []
        for _ in range(LENGTH):
            seed, place = divmod(seed, len(left))
            seed, mark = divmod(seed, len(MARKS))
            facts.append(f"{[*MARKS][mark]}{left.pop(place)}")
        text = " ".join(facts)
        if "*" in text and side("posts", text) == split:
            return text
    raise AssertionError("one draw in five at least is of either split")
