"""Language consistency, as R1's: the share of a response's words that are of the wanted language.

    consistency = (words of the target language) / (all words)

The language of a word is known by its script. Languages of one script are distinguished by their commonest words, where `others` names
them: a word that one of those has in its list and the target has not is foreign. Other words of the script count as the target's.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

from posttrain.errors import unknown
from posttrain.types import Score

# The scripts, as Unicode names begin, that a language is written in.
_SCRIPTS = "latin LATIN, en LATIN, de LATIN, fr LATIN, es LATIN, ru CYRILLIC, el GREEK, he HEBREW, "
_SCRIPTS += "ar ARABIC, hi DEVANAGARI, th THAI, ko HANGUL, zh CJK, ja HIRAGANA KATAKANA CJK"
SCRIPTS = {name: scripts for name, *scripts in map(str.split, _SCRIPTS.split(","))}
# Common words of reasoning, in the languages of one script that can be distinguished.
COMMON = {
    "en": """the a an and or but not of to in on at by for with from as is are was were be been has have had do does so then than
    thus hence that this these those there here it its we you they what which who when where how because if else each every all some
    more most less first next now carry makes gives equals plus minus times sum total answer therefore let wait check again""",
    "de": """der das ein eine einen und oder aber nicht von zu im auf bei mit aus als ist sind waren sein haben hatte dann dass dies
    diese dieser dort es wir ihr sie wenn weil welche wer wo wie jede jeder alle mehr weniger zuerst erst nun jetzt merke macht gibt
    gleich mal summe antwort daher deshalb sei warte noch nochmal""",
}
WORDS = {name: frozenset(text.split()) for name, text in COMMON.items()}
# written without spaces: every character counts as a word
IDEOGRAPHS = ("CJK", "HIRAGANA", "KATAKANA", "THAI")
# mathematics and code are no language
FORMULA = re.compile(r"\$\$[^$]*\$\$|\$[^$\n]*\$|\\[A-Za-z]+|```[\s\S]*?```|`[^`\n]*`")
WORD = re.compile(r"[^\W\d_]+")
LIMIT = 200_000  # characters that are looked at


@lru_cache(maxsize=8192)
def script(character: str) -> str:
    """The first word of a letter's Unicode name: LATIN, CYRILLIC, CJK, ..."""
    return unicodedata.name(character, "UNKNOWN").split()[0].split("-")[0]


def words(text: str) -> list[tuple[str, str]]:
    """The words of a text, each with its script. A word in two scripts counts as MIXED, which is no language's.

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
    """Words of the target's script, and of no other language's own, over all words; 1 where there are no words: none is foreign.

    >>> share("We add 2 and 2, то есть four"), share("2+2=4")
    (0.6666666666666666, 1.0)
    >>> share("2 plus 2 macht 4, und so", "en", others=("de",))
    0.5
    """
    if target not in SCRIPTS:
        raise unknown("language", target, SCRIPTS)
    foreign = _foreign(target, tuple(others))
    found = words(response)
    if found:
        return sum(s in SCRIPTS[target] and w.lower() not in foreign for w, s in found) / len(found)
    return 1.0


@lru_cache(maxsize=64)
def _foreign(target: str, others: tuple[str, ...]) -> frozenset[str]:
    for name in (target, *others) if others else ():
        if name not in WORDS:
            raise unknown("language with a list of words:", name, WORDS)
    theirs = frozenset(word for name in others for word in WORDS[name])
    return theirs - WORDS[target] if others else theirs


def language(
    prompt: str, response: str, answer: str, target: str = "en", others: Sequence[str] = ()
) -> Score:
    """The plain reward: the share of words of the target language."""
    value = share(response, target, others)
    return Score(value, parts={"language": value})
