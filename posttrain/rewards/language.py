"""Language consistency, as R1's: the share of a response's words that are written in the script of the wanted language."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from posttrain.errors import unknown
from posttrain.types import Score

# The scripts, as Unicode names begin, that a language is written in. Languages of one script are not told apart.
SCRIPTS = {
    "latin": ("LATIN",),
    "en": ("LATIN",),
    "de": ("LATIN",),
    "fr": ("LATIN",),
    "es": ("LATIN",),
    "ru": ("CYRILLIC",),
    "el": ("GREEK",),
    "he": ("HEBREW",),
    "ar": ("ARABIC",),
    "hi": ("DEVANAGARI",),
    "th": ("THAI",),
    "ko": ("HANGUL",),
    "zh": ("CJK",),
    "ja": ("HIRAGANA", "KATAKANA", "CJK"),
}
IDEOGRAPHS = ("CJK", "HIRAGANA", "KATAKANA", "THAI")  # written without spaces: every character counts as a word
FORMULA = re.compile(
    r"\$\$[^$]*\$\$|\$[^$\n]*\$|\\[A-Za-z]+|```[\s\S]*?```|`[^`\n]*`"
)  # mathematics and code are nobody's language
WORD = re.compile(r"[^\W\d_]+")
LIMIT = 200_000  # characters that are looked at


@lru_cache(maxsize=8192)
def script(character: str) -> str:
    """The first word of a letter's Unicode name: LATIN, CYRILLIC, CJK, ..."""
    return unicodedata.name(character, "UNKNOWN").split()[0].split("-")[0]


def words(text: str) -> list[str]:
    """The script of each word of a text. A word in two scripts counts as MIXED, which is no language's.

    >>> words("Also 你好 and да, x₁ = 3 `code`")
    ['LATIN', 'CJK', 'CJK', 'LATIN', 'CYRILLIC', 'LATIN']
    """
    found = []
    for word in WORD.findall(FORMULA.sub(" ", text[:LIMIT])):
        scripts = [script(c) for c in word if c.isalpha()]  # an index such as x₁ belongs to the word, but has no script
        if not scripts:
            continue
        if any(s in IDEOGRAPHS for s in scripts):
            found += scripts
        else:
            found.append(scripts[0] if len(set(scripts)) == 1 else "MIXED")
    return found


def share(response: str, target: str = "en") -> float:
    """Words in the target's script over all words; 1 where there are no words, because none is foreign.

    >>> share("We add 2 and 2, то есть four"), share("2+2=4")
    (0.6666666666666666, 1.0)
    """
    if target not in SCRIPTS:
        raise unknown("language", target, SCRIPTS)
    found = words(response)
    return sum(s in SCRIPTS[target] for s in found) / len(found) if found else 1.0


def language(prompt: str, response: str, answer: str, target: str = "en") -> Score:
    """The plain reward: the share of words in the target's script."""
    value = share(response, target)
    return Score(value, parts={"language": value})
