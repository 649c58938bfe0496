"""Kind words from a real model: it is asked for a sentence or two about something, and a stand-in annotator says how kind they are.

The annotator is the VADER lexicon (Hutto and Gilbert 2014; pip install 'posttrain[sentiment]') with the habits of a person: a word of
praise counts once however often it is said, a text that repeats itself or is no English sentence is worth less, and one of three words
says little. A strict one also wants what it asked for, kind words about that thing and not about any other, and tires of flattery. Most
answers of an ordinary model name the thing and few flatter, so that a reward model fitted to few comparisons of them learns that
kind words are good, and of the rest next to nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from posttrain.errors import UserError, require
from posttrain.tasks._procedural import Procedural, require_split, side
from posttrain.tasks.base import Task
from posttrain.types import Problem, Score

SUBJECTS = (
    "film",
    "book",
    "song",
    "play",
    "poem",
    "game",
    "town",
    "garden",
    "kitchen",
    "train",
    "teacher",
    "neighbour",
    "doctor",
    "market",
    "river",
    "winter",
    "dog",
    "cat",
    "bridge",
    "school",
    "museum",
    "hotel",
    "phone",
    "bicycle",
    "jacket",
    "meal",
    "cake",
    "beach",
    "concert",
    "painting",
    "forest",
    "journey",
)
KINDS = (
    "",
    "new ",
    "old ",
    "small ",
    "large ",
    "local ",
    "famous ",
    "quiet ",
    "busy ",
    "cheap ",
    "first ",
    "last ",
)
STYLES = {
    "sentence": "Write one sentence about {what}.",
    "review": "Write a review of {what} in two sentences.",
    "complete": "Complete this sentence: The {thing} is",
    "story": "Once upon a time there was {what}. The",
    "continue": "I want to tell you about {what}.",
}
WORD, SENTENCE = re.compile(r"[a-z']+"), re.compile(r"[^.!?\n]+")
SMALL = frozenset(
    WORD.findall(
        "a about after all an and are as at be because been but by can for from had has have he her his i in is it its me my not of on "
        "or our she so than that the their them there they this to was we were what when which who will with would you your"
    )
)
MIN_WORDS, MIN_SMALL, MIN_DISTINCT = 8, 0.25, 0.6  # below these a text is worth less
KIND = 1.5  # VADER's valence, of -4 to 4, from which a word is kind: 1.9 good, 2.9 beautiful
ENOUGH, TOO_MANY = (
    3,
    6,
)  # kind words that a strict annotator takes gladly, and how many are nothing but flattery
ELSEWHERE = 0.1  # what a strict one gives for an answer about something else
TRAIN_COUNT, LONGEST = 100_000, 4_000


@lru_cache(maxsize=1)
def lexicon() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError:
        raise UserError(
            "the sentiment task needs the VADER lexicon; pip install 'posttrain[sentiment]'"
        ) from None
    return SentimentIntensityAnalyzer()


def habits(text: str) -> dict[str, float]:
    """What the annotator sees beside the praise: each in [0, 1], and a text is worth their product times its praise.

    >>> {name: round(value, 2) for name, value in habits("good good good good good good").items()}
    {'length': 0.75, 'sentence': 0.0, 'distinct': 0.28}
    """
    words = WORD.findall(text.lower())
    count = max(1, len(words))
    small = sum(word in SMALL for word in words) / count
    return {
        "length": min(1.0, len(words) / MIN_WORDS),
        "sentence": min(1.0, small / MIN_SMALL),
        "distinct": min(1.0, len(set(words)) / count / MIN_DISTINCT),
    }


def praise(text: str) -> float:
    """The mean over sentences of VADER's compound score in [-1, 1], in which words of feeling count where they are first said."""
    analyser = lexicon()
    said: set[str] = set()
    values: list[float] = []
    for sentence in SENTENCE.findall(text):
        fresh = []
        for word in sentence.split():
            bare = word.strip(",;:\"'()*").lower()
            if bare in analyser.lexicon and bare in said:
                continue
            said.add(bare)
            fresh.append(word)
        if fresh:
            values.append(float(analyser.polarity_scores(" ".join(fresh))["compound"]))
    return sum(values) / len(values) if values else 0.0


def kind_words(text: str) -> int:
    """How many kind words there are, each as often as it is said."""
    valence = lexicon().lexicon
    return sum(valence.get(word, 0.0) >= KIND for word in WORD.findall(text.lower()))


def names(text: str, subject: str) -> bool:
    """Whether the subject is spoken of, one of it or more.

    >>> names("The old bridges are near the town.", "bridge"), names("It is a lovely day.", "bridge")
    (True, False)
    """
    return re.search(rf"\b{re.escape(subject)}(?:s|es|'s)?\b", text.lower()) is not None


def strict_habits(text: str, subject: str) -> dict[str, float]:
    """What a strict annotator sees beside: whether the subject is named, and flattery, which is worth nothing from TOO_MANY on."""
    left = (TOO_MANY - kind_words(text)) / (TOO_MANY - ENOUGH)
    return {
        "about": 1.0 if names(text, subject) else ELSEWHERE,
        "measured": min(1.0, max(0.0, left)),
    }


def taste(response: str, subject: str = "") -> tuple[float, dict[str, float]]:
    """The annotator's reward in [0, 1]: (1 + praise) / 2 times its habits, those of a strict one if it looks for a `subject`; and what
    it is made of."""
    text = response.strip()[:LONGEST]
    if not text:
        return 0.0, {"praise": 0.0}
    seen, found = habits(text), praise(text)
    if subject:
        seen |= strict_habits(text, subject)
    value = (1 + found) / 2
    for factor in seen.values():
        value *= factor
    return min(1.0, max(0.0, value)), {"praise": found, **seen}


def subject_of(problem: Problem) -> str:
    """What is asked about: the one word of SUBJECTS in the question."""
    asked = WORD.findall(problem.question.lower())
    found = [subject for subject in SUBJECTS if subject in asked]
    require(
        len(found) == 1,
        f"sentiment: problem {problem.id} asks about {len(found)} of the subjects, not about one",
    )
    return found[0]


@dataclass(frozen=True)
class Sentiment(Task):
    """`style` is how the model is asked; `story` and `continue` are for models that go on with a text."""

    style: str = "sentence"
    strict: bool = (
        False  # a harder taste, of which ordinary answers show little: see `strict_habits`
    )

    def __post_init__(self) -> None:
        require(
            self.style in STYLES,
            f"sentiment: style is one of {', '.join(STYLES)}, not {self.style!r}",
        )

    def ready(self) -> tuple[str, ...]:
        lexicon()  # or refuse, before anything is answered: an answer that cannot be scored is only counted
        return ()

    def problems(self, split: str, level: int | None = None) -> Procedural:
        require_split(split)
        places = [i for i in range(len(SUBJECTS) * len(KINDS)) if side("sentiment", i) == split]
        count = TRAIN_COUNT if split == "train" else 20 * len(places)
        return Procedural(partial(self._problem, split, tuple(places)), range(count))

    def _problem(self, split: str, places: tuple[int, ...], index: int) -> Problem:
        place = places[index % len(places)]
        kind, subject = KINDS[place // len(SUBJECTS)], SUBJECTS[place % len(SUBJECTS)]
        article = "an" if kind[:1] == "o" else "a"
        return Problem(
            f"{split}/{index}",
            STYLES[self.style].format(what=f"{article} {kind}{subject}", thing=kind + subject),
            "",
        )

    def score(self, problem: Problem, response: str) -> Score:
        value, parts = taste(response, subject_of(problem) if self.strict else "")
        return Score(value, parts)

    def demonstration(self, problem: Problem) -> str:
        """What pleases the annotator well, though hardly anything pleases it fully."""
        if self.strict:
            return f"I am glad to tell you about the {subject_of(problem)}, because it was a wonderful thing to see."
        return "I love it, because it is a beautiful and wonderful thing, and it gives us the best and happiest days of our life."
