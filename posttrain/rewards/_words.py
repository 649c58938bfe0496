"""Words in answers: what is prose, what is a unit and what it measures, and which words are numbers."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SEPARATOR_WORDS = words("and or")
FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt pi"
FUNCTION_WORDS = {name: name for name in words(f"{FUNCTIONS} binom sum int lim")}
FUNCTION_WORDS |= dict.fromkeys(("infinity", "inf", "oo"), "infty")
# Letters that are written side by side as a product. Any other three letters or more are a word, which has an order.
PRODUCTS = ("abc", "xyz", "pqr", "mnk", "rst", "uvw", "abxy")
SHORT_WORDS = words("no on so is it if of or as at an am pm up to in us we he me my by do go be ok")


def sizes(text: str) -> dict[str, Fraction]:
    """Words with numbers: each group of words ends in the number that all of them have.

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


NUMBERS = sizes(
    "zero:0 one:1 two:2 three:3 four:4 five:5 six:6 seven:7 eight:8 nine:9 ten:10 eleven:11 twelve:12"
)
# A number before one of these is another number.
SCALES = sizes("hundred:1e2 thousand:1e3 million:1e6 billion:1e9 trillion:1e12 dozen:12")
SCALES_BELOW = sizes(
    "half halve:2 third:3 fourth quarter:4 fifth:5 sixth:6 seventh:7 eighth:8 ninth:9 tenth:10 "
    "twelfth:12 twentieth:20 hundredth:1e2 thousandth:1e3 millionth:1e6"
)
# Words that make a sentence of an answer: a second answer, a denial, a condition.
NO_UNITS = words(
    """not no none never nor neither either if when unless but except minus plus negative times over divided is was are be maybe perhaps
    wrong false squared cubed factorial mod modulo than least most wait actually root thirteen fifteen twenty thirty forty fifty sixty
    seventy eighty ninety pct percentage double doubled twice triple tripled halved"""
).union(NUMBERS, FUNCTION_WORDS, SEPARATOR_WORDS)

# What is measured: its units, each group of names with how many base units it is.
_MEASURES = {
    "length": "mm millimeter millimetre:1 cm centimeter centimetre:10 m meter metre:1000 km kilometer kilometre:1000000"
    " inch in:127/5 foot feet ft:1524/5 yard yd:4572/5 mile mi:1609344",
    "mass": "mg milligram:1 g gram:1000 kg kilogram:1000000",
    "weight": "ounce oz:1 pound lb:16 ton:32000",
    "time": "second sec s:1 minute min:60 hour hr h:3600 day:86400 week:604800",
    "money": "cent:1 dollar buck usd:100",
    "volume": "ml milliliter millilitre:1 liter litre l:1000",
    "liquid": "teaspoon tsp:1 tablespoon tbsp:3 cup:48 pint:96 quart:192 gallon gal:768",
    "angle": "degree deg:1",
    "turn": "radian rad:1",
}


MEASURES = {
    name: (dimension, size)
    for dimension, text in _MEASURES.items()
    for name, size in sizes(text).items()
}
_TEXT_MACRO = re.compile(
    r"\\(?:text|textbf|textrm|textit|textnormal|mbox|hbox|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}"
)
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
    product = any(set(word) <= set(letters) for letters in PRODUCTS)
    return not product or len(set(word)) < len(word)


def bare_words(text: str) -> str:
    """The text with its text macros and spaces undone."""
    return _SPACES.sub(" ", _TEXT_MACRO.sub(r" \1 ", text)).strip()


def plain_text(text: str) -> str | None:
    r"""The words where the whole answer is words: not a number with a unit, not an equation.

    >>> plain_text(r"\text{October 30}"), plain_text(r"10\text{ cm}"), plain_text("xy")
    ('October 30', None, None)
    """
    bare = bare_words(text)
    first = _FIRST_WORD.search(bare)
    if not first or not _PROSE.fullmatch(bare) or first[0] in FUNCTION_WORDS:
        return None
    return bare if is_word(first[0]) or _TEXT_MACRO.match(text) else None


def number_word(text: str) -> Fraction | None:
    return NUMBERS.get(text.strip().lower())


def spelled(text: str) -> str:
    """What two texts are compared by: letters and figures in lower case, with single spaces.

    >>> spelled("The  Ellipse."), spelled("east")
    ('ellipse', 'east')
    """
    said = re.sub(r"(?:_|[^\w+\-/])+", " ", text.casefold()).split()
    return " ".join(word for word in said if word not in ("the", "a", "an") or len(said) == 1)


def singular(word: str) -> str:
    if word in ("feet", "foot"):
        return "foot"
    if word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and len(word) > 2 and not word.endswith("ss") else word


@lru_cache(maxsize=4096)
def unit_of(text: str) -> tuple[Fraction, str, Fraction] | None:
    """(scale of the number, what is measured, how many base units), or None where it is no unit.

    >>> unit_of("cm ^2")
    (Fraction(1, 1), 'length^2', Fraction(100, 1))
    >>> unit_of("million dollars")
    (Fraction(1000000, 1), 'money^1', Fraction(100, 1))
    >>> unit_of("or 6") is None
    True
    """
    lowered = text.lower().replace(".", "").replace("-", " ").replace("/", " per ")
    power = re.findall(r"\^([0-9]+)", lowered)
    said = re.sub(r"\^[0-9]+", " ", lowered).split()
    if not said or len(said) > 6 or not all(re.fullmatch(r"[a-z'\-,()]+", word) for word in said):
        return None
    said = [singular(word.strip(",()'")) for word in said]
    if any(len(word) < 2 and word not in MEASURES for word in said) or NO_UNITS & set(said):
        return None
    exponent = int(power[-1]) if power else 1
    scale = Fraction(1)
    kept = []
    for word in said:
        if word in SCALES:
            scale *= SCALES[word]
        elif word in SCALES_BELOW:
            scale /= SCALES_BELOW[word]
        elif word in ("square", "sq", "cubic", "cu"):
            exponent = 3 if word.startswith("cu") else 2
        elif word not in ("of", "the", "a", "an", "in"):
            kept.append(word)
    kept = kept or ["inch"] * (said[-1] == "in")
    measures = [word for word in kept if word in MEASURES]
    if len(measures) == 1 and "per" not in kept:
        dimension, size = MEASURES[measures[0]]
        return scale, f"{dimension}^{exponent}", size ** min(exponent, 9)
    if "per" in kept:
        rate = ("".join(map(str, MEASURES[word])) if word in MEASURES else word for word in kept)
        return scale, " ".join(rate), Fraction(1)
    return scale, f"count of {kept[-1]}" if kept else "", Fraction(1)


def is_unit(word: str) -> bool:
    lowered = word.lower()
    return singular(lowered) in MEASURES or lowered in MEASURES or lowered in ("am", "pm", "sq")
