"""Language consistency, as in R1: the share of a response's words that are in the target language.

    consistency = (words of the target language) / (all words)

The script of a word decides its language. Languages of the Latin script are distinguished by profiles: their commonest words
(_languages.json) and the letter trigrams of these. A word is foreign if it and its neighbours are far likelier in another
language than in the target, so one or two words among others decide little. With `others`, a word is foreign if it is in the
short list of one of these languages, whatever its neighbours: for tasks with a small known vocabulary.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from posttrain.errors import refuse_unknown
from posttrain.types import Score

PROFILED = ("en", "de", "fr", "es", "it", "pt", "nl")
_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
SCRIPTS: dict[str, list[str]] = _TABLES["scripts"]
WRITTEN = {name: scripts for name, scripts in SCRIPTS.items() if name != "latin"} | _TABLES["more"]
WORDS = {name: frozenset(text.split()) for name, text in _TABLES["reasoning"].items()}
# written without spaces: every character counts as a word
IDEOGRAPHS = ("CJK", "HIRAGANA", "KATAKANA", "THAI")
# mathematics and code belong to no language
FORMULA = re.compile(r"\$\$[^$]*\$\$|\$[^$\n]*\$|\\[A-Za-z]+|```[\s\S]*?```|`[^`\n]*`")
WORD = re.compile(r"[^\W\d_]+")
SENTENCE = re.compile(r"[.!?;:\n]+(?:\s|$)")
LIMIT = 200_000  # characters that are read
# with a smaller share of kana, ideographs are Chinese
KANA, KANA_SHARE = ("HIRAGANA", "KATAKANA"), 0.05
# log-likelihoods: the most that a word adds to a comparison, that of a word of a profile, and the margin above which a word is
# foreign
WORD_LIMIT, LISTED, MARGIN = 5.0, -5.0, 4.0
NEIGHBOURS = 6  # words on each side that count


@lru_cache(maxsize=8192)
def script(character: str) -> str:
    """The first word of a letter's Unicode name: LATIN, CYRILLIC, CJK, ..."""
    return unicodedata.name(character, "UNKNOWN").split()[0].split("-")[0]


def words(text: str) -> list[tuple[str, str]]:
    """Return the words of a text, each with its script. A word in two scripts counts as MIXED, which belongs to no language.

    >>> [kind for _, kind in words("Also 你好 and да, x₁ = 3 `code`")]
    ['LATIN', 'CJK', 'CJK', 'LATIN', 'CYRILLIC', 'LATIN']
    """
    found = []
    for word in WORD.findall(FORMULA.sub(" ", text[:LIMIT])):
        # an index such as x₁ belongs to the word, but has no script
        scripts = [script(c) for c in word if c.isalpha()]
        if not scripts:
            continue
        if any(s in IDEOGRAPHS for s in scripts):
            found += [(c, script(c)) for c in word if c.isalpha()]
        else:
            found.append((word, scripts[0] if len(set(scripts)) == 1 else "MIXED"))
    return found


def share(response: str, target: str = "en", others: Sequence[str] = ()) -> float:
    """Words of the target language divided by all words; 1 without words, since none is foreign.

    >>> share("We add 2 and 2, то есть four"), share("2+2=4")
    (0.6666666666666666, 1.0)
    >>> share("Nous avons donc trouvé la réponse."), share("2 plus 2 macht 4, und so", "en", others=("de",))
    (0.0, 0.5)
    """
    refuse_unknown("language", [target], SCRIPTS)
    found = words(response)
    if not found:
        return 1.0
    if others or target not in PROFILED:
        foreign = _foreign(target, tuple(others))
        own = [s in SCRIPTS[target] and w.lower() not in foreign for w, s in found]
        if target in ("zh", "ja"):
            ideographs = [s for _, s in found if s in IDEOGRAPHS]
            kana = sum(s in KANA for s in ideographs) >= KANA_SHARE * len(ideographs)
            fits = [s != "CJK" or kana == (target == "ja") for _, s in found]
            own = [fine and fit for fine, fit in zip(own, fits, strict=True)]
        return sum(own) / len(own)
    foreign_count = 0
    for sentence in SENTENCE.split(FORMULA.sub(" ", response[:LIMIT])):
        latin = [word.lower() for word, s in words(sentence) if s == "LATIN"]
        foreign_count += sum(foreign_words(latin, target))
    return (sum(s == "LATIN" for _, s in found) - foreign_count) / len(found)


def written_in(text: str, target: str) -> bool:
    """Whether a text as a whole is in a language: most of its letters are of its script and, if other languages share that
    script, none of them has more of its commonest words in the text. A text without letters is in any language.

    >>> written_in("Das ist ein Haus.", "de"), written_in("Das ist ein Haus.", "en"), written_in("यह एक घर है", "hi")
    (True, False, True)
    >>> written_in("Hii ni nyumba ya watu, lakini si yake.", "sw"), written_in("Тази къща е на хората и не се продава.", "ru")
    (True, False)
    """
    refuse_unknown("language", [target], WRITTEN)
    plain = FORMULA.sub(" ", text[:LIMIT])
    letters = [script(character) for character in plain if character.isalpha()]
    if not letters:
        return True
    if 2 * sum(own in WRITTEN[target] for own in letters) < len(letters):
        return False
    if target in ("zh", "ja"):
        return 2 * share(text, target) >= 1
    marks = "".join({c for c in plain if unicodedata.category(c)[0] in "PS"})
    said = Counter(word.strip(marks).lower() for word in plain.split())
    rivals = [name for name in _commonest() if WRITTEN[name] == WRITTEN[target]]
    counts = {name: sum(said[word] for word in _commonest()[name]) for name in rivals}
    return counts.get(target, 0) >= max(counts.values(), default=0)


@lru_cache(maxsize=1)
def _commonest() -> dict[str, list[str]]:
    """The commonest words of each language that shares its script with another."""
    place = Path(__file__).with_name("_languages.json")
    return {name: text.split() for name, text in json.loads(place.read_text("utf-8")).items()}


def foreign_words(found: Sequence[str], target: str) -> list[bool]:
    """Whether each word of a sentence, with its neighbours, is likelier in another language of the Latin script than in the
    target. At least one of these words must be a common word of that language: names and terms alone are no evidence."""
    place, profiles = PROFILED.index(target), _profiles()
    evidence, foreign = [_evidence(word) for word in found], []
    for n, own in enumerate(evidence):
        near = slice(max(0, n - NEIGHBOURS), n + NEIGHBOURS + 1)
        columns = zip(zip(*evidence[near], strict=True), own, strict=True)
        totals = [sum(column) + extra for column, extra in columns]
        best = totals.index(max(totals))
        common = profiles[best].words - profiles[place].words
        likelier = totals[best] - totals[place] > MARGIN
        foreign.append(likelier and any(word in common for word in found[near]))
    return foreign


@lru_cache(maxsize=65536)
def _evidence(word: str) -> tuple[float, ...]:
    """Return the log-likelihood of a word in each language of PROFILED, minus that in the likeliest; a single letter is no
    evidence."""
    if len(word) < 2 and word not in "aàeèoéyui":
        return (0.0,) * len(PROFILED)
    found = [profile.likelihood(word) for profile in _profiles()]
    return tuple(max(-WORD_LIMIT, each - max(found)) for each in found)


@dataclass(frozen=True)
class Profile:
    """The commonest words of a language and the frequencies of letter sequences in them."""

    words: frozenset[str]
    trigrams: Mapping[str, int]
    pairs: Mapping[str, int]  # pairs of letters that begin a trigram

    @classmethod
    def of(cls, listed: Sequence[str]) -> Profile:
        padded = [f"  {word} " for word in listed]
        trigrams = Counter(w[n : n + 3] for w in padded for n in range(len(w) - 2))
        pairs = Counter(w[n : n + 2] for w in padded for n in range(len(w) - 2))
        return cls(frozenset(listed), trigrams, pairs)

    def likelihood(self, word: str) -> float:
        """log p of the word: each letter given the two before it, smoothed."""
        padded = f"  {word[:24]} "
        total = 0.0
        for n in range(len(padded) - 2):
            seen = self.trigrams.get(padded[n : n + 3], 0)
            before = self.pairs.get(padded[n : n + 2], 0)
            total += math.log((seen + 0.5) / (before + 15))
        return max(LISTED, total) if word in self.words else total


@lru_cache(maxsize=1)
def _profiles() -> tuple[Profile, ...]:
    return tuple(Profile.of(_commonest()[name]) for name in PROFILED)


@lru_cache(maxsize=64)
def _foreign(target: str, others: tuple[str, ...]) -> frozenset[str]:
    refuse_unknown("language with a list of words:", (target, *others) if others else (), WORDS)
    theirs = frozenset(word for name in others for word in WORDS[name])
    return theirs - WORDS[target] if others else theirs


def language(
    prompt: str, response: str, answer: str, target: str = "en", others: Sequence[str] = ()
) -> Score:
    """The reward: the share of words in the target language."""
    value = share(response, target, others)
    return Score(value, parts={"language": value})
