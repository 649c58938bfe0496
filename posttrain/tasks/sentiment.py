"""Kind words from a real model: it writes a sentence or two about a subject, and a simulated annotator scores their kindness.

The annotator is the VADER lexicon (Hutto and Gilbert 2014; pip install 'posttrain[sentiment]') with rules that a person would
have: a word of praise counts once however often it is repeated, and a text that repeats itself, is not an English sentence or
has only a few words is worth less. A strict annotator also wants kind words about the subject, and deducts for flattery. Most
answers of an ordinary model name the subject and few flatter, so a reward model fitted to few comparisons of them learns that
kind words are good, and next to nothing of the other rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from posttrain.errors import require
from posttrain.tasks._packaged import packaged
from posttrain.tasks._procedural import Procedural, listed, words
from posttrain.tasks.base import Task
from posttrain.types import Problem, Score

SUBJECTS = words("""
    film book song play poem game town garden kitchen train teacher neighbour doctor market river winter dog cat bridge school
    museum hotel phone bicycle jacket meal cake beach concert painting forest journey""")
KINDS = ("", *words("new old small large local famous quiet busy cheap first last", after=" "))
Style = Literal["sentence", "review", "complete", "story", "continue"]
STYLES: dict[Style, str] = {
    "sentence": "Write one sentence about {what}.",
    "review": "Write a review of {what} in two sentences.",
    "complete": "Complete this sentence: The {thing} is",
    "story": "Once upon a time there was {what}. The",
    "continue": "I want to tell you about {what}.",
}
WORD, SENTENCE = re.compile(r"[a-z']+"), re.compile(r"[^.!?\n]+")
SMALL = words("""
    a about after all an and are as at be because been but by can for from had has have he her his i in is it its me my not of on
    or our she so than that the their them there they this to was we were what when which who will with would you your""")
MIN_WORDS, MIN_SMALL, MIN_DISTINCT = 8, 0.25, 0.6  # a text with fewer is worth less
# the VADER valence, from -4 to 4, at which a word counts as kind: 1.9 good, 2.9 beautiful
KIND = 1.5
# kind words without a cost for a strict annotator, and the number at which the text is worth nothing
FREE_WORDS, TOO_MANY = (3, 6)
ELSEWHERE = 0.1  # a strict annotator's factor for an answer about something else
MAX_LENGTH = 4_000


@lru_cache(maxsize=1)
def lexicon() -> Any:
    return packaged("vaderSentiment.vaderSentiment", "sentiment").SentimentIntensityAnalyzer()


def factors(text: str) -> dict[str, float]:
    """Return the annotator's factors apart from praise, each in [0, 1]; a text is worth their product times its praise.

    >>> {name: round(value, 2) for name, value in factors("good good good good good good").items()}
    {'length': 0.75, 'sentence': 0.0, 'distinct': 0.28}
    """
    said = WORD.findall(text.lower())
    count = max(1, len(said))
    small = sum(word in SMALL for word in said) / count
    return {
        "length": min(1.0, len(said) / MIN_WORDS),
        "sentence": min(1.0, small / MIN_SMALL),
        "distinct": min(1.0, len(set(said)) / count / MIN_DISTINCT),
    }


def praise(text: str) -> float:
    """Return the mean over sentences of VADER's compound score in [-1, 1]; a word of feeling counts only the first time."""
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
    """Count the kind words, with repetitions."""
    valence = lexicon().lexicon
    return sum(valence.get(word, 0.0) >= KIND for word in WORD.findall(text.lower()))


def names(text: str, subject: str) -> bool:
    """Whether the text names the subject, in the singular or the plural.

    >>> names("The old bridges are near the town.", "bridge"), names("It is a lovely day.", "bridge")
    (True, False)
    """
    return re.search(rf"\b{re.escape(subject)}(?:s|es|'s)?\b", text.lower()) is not None


def strict_factors(text: str, subject: str) -> dict[str, float]:
    """Return the further factors of a strict annotator: whether the subject is named, and flattery, which is worth 0 from
    TOO_MANY on."""
    left = (TOO_MANY - kind_words(text)) / (TOO_MANY - FREE_WORDS)
    about = 1.0 if names(text, subject) else ELSEWHERE
    return {"about": about, "measured": min(1.0, max(0.0, left))}


def taste(response: str, subject: str = "") -> tuple[float, dict[str, float]]:
    """Return the simulated annotator's reward in [0, 1], (1 + praise) / 2 times its factors, and its parts. With a `subject`,
    the factors of a strict annotator are included."""
    text = response.strip()[:MAX_LENGTH]
    if not text:
        return 0.0, {"praise": 0.0}
    seen, found = factors(text), praise(text)
    if subject:
        seen |= strict_factors(text, subject)
    value = (1 + found) / 2
    for factor in seen.values():
        value *= factor
    return min(1.0, max(0.0, value)), {"praise": found, **seen}


def subject_of(problem: Problem) -> str:
    """Return the subject: the one word of SUBJECTS in the question."""
    asked = WORD.findall(problem.question.lower())
    found = [subject for subject in SUBJECTS if subject in asked]
    many = f"sentiment: problem {problem.id} asks about {len(found)} of the subjects, not about one"
    require(len(found) == 1, many)
    return found[0]


@dataclass(frozen=True)
class Sentiment(Task):
    """`style` is how the model is asked; `story` and `continue` are for models that continue a text."""

    style: Style = "sentence"
    # a stricter annotator, whose rules show little in ordinary answers: see `strict_factors`
    strict: bool = False

    def ready(self) -> tuple[str, ...]:
        # raises an error if the lexicon is missing, before anything is sampled: later, an answer that cannot be scored is only
        # counted
        lexicon()
        return ()

    def problems(self, split: str, level: int | None = None) -> Procedural:
        return listed("sentiment", split, len(SUBJECTS) * len(KINDS), self._question, repeats=20)

    def _question(self, place: int) -> str:
        kind, subject = KINDS[place // len(SUBJECTS)], SUBJECTS[place % len(SUBJECTS)]
        what = f"{'an' if kind[:1] == 'o' else 'a'} {kind}{subject}"
        return STYLES[self.style].format(what=what, thing=kind + subject)

    def score(self, problem: Problem, response: str) -> Score:
        return Score(*taste(response, subject_of(problem) if self.strict else ""))

    def demonstration(self, problem: Problem) -> str:
        """Return an answer with a high reward, though hardly any answer gets the full one."""
        if self.strict:
            return f"I am glad to tell you about the {subject_of(problem)}, because it was a wonderful thing to see."
        return "I love it, because it is a beautiful and wonderful thing, and it gives us the best and happiest days of our life."
