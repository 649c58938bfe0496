"""Words in answers: which are prose, which are units and what they measure, and which are numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import yaml


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SEPARATOR_WORDS = words("and or")
FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt pi"
FUNCTION_WORDS = {name: name for name in words(f"{FUNCTIONS} binom sum int lim")}
FUNCTION_WORDS |= dict.fromkeys(("infinity", "inf", "oo"), "infty")
# Letters that are written side by side as a product. Any other group of three or more letters is a word, whose order matters.
PRODUCTS = ("abc", "xyz", "pqr", "mnk", "rst", "uvw", "abxy")
SHORT_WORDS = words("no on so is it if of or as at an am pm up to in us we he me my by do go be ok")


def sizes(text: str) -> dict[str, Fraction]:
    """Read words with numbers: each group of words ends in the number that applies to all of them.

    >>> sizes("foot feet:12 yard:36")
    {'foot': Fraction(12, 1), 'feet': Fraction(12, 1), 'yard': Fraction(36, 1)}
    """
    table: dict[str, Fraction] = {}
    names: list[str] = []
    for word in text.split():
        name, _, size = word.partition(":")
        names.append(name)
        if size:
            table |= dict.fromkeys(names, Fraction(size))
            names = []
    return table


TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
NUMBERS, SCALES, RATES = (sizes(TABLES[name]) for name in ("numbers", "scales", "rates"))
SCALES_BELOW = RATES | sizes(TABLES["below"])
SCALES_BELOW |= {
    f"{name.removesuffix('y')}{'ie' * name.endswith('y')}th": size
    for name, size in {**NUMBERS, **SCALES}.items()
    if size > 3
}
NO_UNITS = words(TABLES["no_units"]).union(
    NUMBERS, FUNCTION_WORDS, SEPARATOR_WORDS, SCALES, SCALES_BELOW
)
MONTH = "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
MONTH += "|sept?(?:ember)?|oct(?:ober)?|(?:nov|dec)(?:ember)?"
_MONTH = re.compile(MONTH)
# Countable nouns without a plural s.
_COUNTED = words("people men women children mice geese teeth fish sheep unit way person")

MEASURES: dict[str, tuple[str, Fraction]] = {
    name: (dimension, size)
    for dimension, text in TABLES["measures"].items()
    for name, size in sizes(text).items()
}
TEXT_MACROS = "text|textbf|textrm|textit|textsf|texttt|textsc|textup|textnormal|emph|mbox|hbox|mathrm|mathbf|mathit|mathsf|mathtt"
_TEXT_MACRO = re.compile(rf"\\(?:{TEXT_MACROS}|operatorname)\s*\{{([^{{}}]*)\}}")
# Other spellings of units.
_REWRITTEN = [
    (re.compile(pattern, re.IGNORECASE), written) for pattern, written in TABLES["rewritten"]
]
_SPACES = re.compile(r"\\[,;:! ]|~|\\(?:quad|qquad)(?![A-Za-z])|\s+")
_PROSE = re.compile(r"\(?[^\W\d_](?:[^\W_]|[ .,'()\-])*")
_FIRST_WORD = re.compile(r"[^\W\d_]+")


def is_word(word: str) -> bool:
    """Whether letters side by side are a word, not a product: `cab` is one, `xy` and `abc` are not.

    >>> is_word("Monday"), is_word("xyz"), is_word("ab"), is_word("no")
    (True, False, False, True)
    """
    if len(word) < 3 or not word.isascii():
        return word.lower() in SHORT_WORDS or not word.isascii()
    return not any(set(word) <= set(letters) for letters in PRODUCTS) or len(set(word)) < len(word)


def bare_words(text: str) -> str:
    """Return the text without its text macros and extra spaces."""
    return _SPACES.sub(" ", _TEXT_MACRO.sub(r" \1 ", text)).strip()


def plain_text(text: str) -> str | None:
    r"""Return the words if the whole answer is words: not a number with a unit, not an equation.

    >>> plain_text(r"\text{October 30}"), plain_text(r"10\text{ cm}"), plain_text("xy")
    ('October 30', None, None)
    """
    bare = bare_words(text)
    first = _FIRST_WORD.search(bare)
    if not first or not _PROSE.fullmatch(bare) or first[0] in FUNCTION_WORDS:
        return None
    article = first[0].lower() in ("a", "an") and " " in bare  # a dozen
    return bare if article or is_word(first[0]) or _TEXT_MACRO.match(text) else None


def spelled(text: str) -> str:
    """Return the form in which two texts are compared: letters and digits in lower case, with single spaces.

    >>> spelled("The  Ellipse."), spelled("east")
    ('ellipse', 'east')
    """
    said = re.sub(r"(?:_|[^\w+\-/])+", " ", text.casefold()).split()
    if len(said) < 5 and any(map(_MONTH.fullmatch, said)):  # 4 July, July 4th
        ending = re.compile(r"(?<=[0-9])(?:st|nd|rd|th)$")
        said = sorted(ending.sub("", word) for word in said if word != "of")
    return " ".join(word for word in said if word not in ("the", "a", "an") or len(said) == 1)


def singular(word: str) -> str:
    if word in ("feet", "foot"):
        return "foot"
    if word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and len(word) > 2 and not word.endswith("ss") else word


@dataclass(frozen=True, slots=True)
class Unit:
    scale: Fraction  # factor of the number before it
    measures: str  # the quantity that is measured or counted; "" for none
    size: Fraction  # in base units
    # a measure, or a plural noun, which may be left out. Any other word could change the number
    plain: bool


@lru_cache(maxsize=4096)
def unit_of(text: str) -> Unit | None:
    """Return the unit after a number, or None if the text is not a unit.

    >>> unit_of("cm ^2").measures, unit_of("million dollars").scale, unit_of("km/h") == unit_of("kilometers per hour")
    ('length^2', Fraction(1000000, 1), True)
    >>> unit_of("red marbles").plain, unit_of("foo").plain, unit_of("reciprocal"), unit_of("or 6")
    (True, False, None, None)
    """
    for pattern, written in _REWRITTEN:
        text = pattern.sub(written, text)
    above, *below = (part.split() for part in text.split(" per "))
    if (scaled := _scaled(above)) is None or sum(map(len, (above, *below))) > 7:
        return None
    scale, rest = scaled
    if not rest:
        return None if below or scale == 1 else Unit(scale, "", Fraction(1), True)
    factors, size = list[str](), Fraction(1)
    plain = True
    for sign, segment in ((1, rest), *((-1, part) for part in below)):
        if (found := _segment(segment)) is None:
            return None
        for name, each, power in found[0]:
            factors.append(f"{name}^{sign * power}")
            size *= each ** (sign * power)
        plain = plain and (found[1] or sign < 0)
    return Unit(scale, " ".join(sorted(factors)), size, plain)


def _scaled(said: list[str]) -> tuple[Fraction, list[str]] | None:
    """Return the factor of the first words, and the other words: (million) dollars, (thousandths) inch."""
    scale = Fraction(1)
    for place, word in enumerate(said):
        *above, below = (singular(part) for part in word.lower().split("-"))
        if below in SCALES_BELOW and all(part in SCALES or part == "ten" for part in above):
            for part in above:
                scale /= SCALES.get(part, 10)
            # five hundred thousandths may be 500/1000 or 5/100000
            return (scale / SCALES_BELOW[below], said[place + 1 :]) if not place else None
        if above or below not in SCALES:
            return scale, said[place:]
        scale *= SCALES[below]
    return scale, []


def _segment(said: list[str]) -> tuple[list[tuple[str, Fraction, int]], bool] | None:
    """Return the measures (name, size, power) that words name, or what they count; and whether that is certain."""
    measures: list[tuple[str, Fraction, int]] = []
    nouns, raised = list[str](), 0
    for word in " ".join(said).replace("-", " ").replace("^ ", "^-").split():
        lowered = singular(word.lower())
        if word[0] == "^":
            power = max(-9, min(9, int(word[1:])))
            if measures:
                measures[-1] = (*measures[-1][:2], power)
            raised = power
        elif word.lower() in ("square", "sq", "cubic", "cu"):
            raised = 3 if lowered.startswith("cu") else 2
        elif found := measure(word):
            measures.append((*found, raised if not measures and raised else 1))
        elif lowered in NO_UNITS or len(word) < 2 or not word.isalpha():
            return None
        else:
            nouns.append(word.lower())
    if measures or not nouns:
        return (measures, True) if measures else None
    counted = next(filter(is_plural, nouns), nouns[-1])
    return [(f"count of {singular(counted)}", Fraction(1), raised or 1)], is_plural(counted)


def is_plural(word: str) -> bool:
    return word in _COUNTED or (len(word) > 3 and word[-1] == "s" and word[-2] not in "sui")


def measure(word: str) -> tuple[str, Fraction] | None:
    """Return what a word measures and its size. A symbol of one letter is case-sensitive."""
    return MEASURES.get(word) or (MEASURES.get(singular(word.lower())) if len(word) > 1 else None)


def is_unit(word: str) -> bool:
    return measure(word) is not None or word.lower() in ("am", "pm", "sq")
