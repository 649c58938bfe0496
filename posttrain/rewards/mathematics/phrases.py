"""Answers in words: numbers, announcements ("the answer is"), sets of numbers, choices with their letter and text."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import takewhile
from pathlib import Path

import yaml

from posttrain.rewards.mathematics import words

_OF_WORDS = re.compile(
    rf"\b(?:answer|result|solutions?|value|so|thus|hence|therefore|reals?|integers|numbers|option|choice|noon|midnight|base|to|set|is|half|{words.MONTH}|exactly|point|dne|exist|total|number|positive|negative|minus|nonnegative)\b"
    r"|^=|^[A-J][):]$",
    re.IGNORECASE,
)
_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
_NAME = re.compile("REALS|ABOVE|BELOW|MONTH")
_NAMES = {"MONTH": words.MONTH, **_TABLES["names"]}
_PHRASES = [
    (re.compile(_NAME.sub(lambda name: _NAMES[name[0]], pattern), re.IGNORECASE), written)
    for pattern, written in _TABLES["phrases"]
]
_OPTION = re.compile(r"(?:\\[a-z]+\s*\{)?\s*\(?\s*[A-J]\s*[).:]")
_OPTION_CONTENT = re.compile(
    r"\(?\s*([A-J])\s*(?:\)[.:]?|[.:](?=\s))(?:\s+(?=-))?\s*(?![-^_+*/=,!'()]|or\b|and\b)(.+)|\(?([A-J])\)?[.:)]? (-.+)"
)
_ANOTHER = re.compile(r"\b[A-J]\b")


def rephrased(text: str) -> str:
    r"""Return the answer without the words that announce it, and with words replaced by their symbols.

    >>> rephrased(r"\text{The answer is } 5"), rephrased("all real numbers except 0"), rephrased("The answer is not 5")
    ('5', '\\mathbb{R} \\setminus \\{0\\}', 'not 5')
    """
    if not _OF_WORDS.search(text):
        return text
    bare = said = words.bare_words(text).rstrip(". ")
    for pattern, written in _PHRASES:
        said = pattern.sub(written, said, count=1)
    return text if said == bare else said


def option(text: str) -> tuple[str, str] | None:
    r"""Return the letter and the text of a choice.

    >>> option(r"\textbf{(B)}\ 5"), option("(B) or (C)"), option("(A)(B)"), option("A:B")
    (('B', '5'), None, None, None)
    """
    if not _OPTION.match(text):
        return None
    found = _OPTION_CONTENT.fullmatch(words.bare_words(text))
    if not found:
        return None
    letter, content = found[1] or found[3], found[2] or found[4]
    return None if _ANOTHER.search(content) else (letter, content)


def spoken(text: str) -> tuple[Fraction, str] | None:
    """Return the number in words at the start of a text, and the rest of it; None if there is no such number.

    >>> [str(spoken(t)[0]) for t in ("minus twenty-five", "one hundred and five", "two and a half", "two thirds", "three dozen eggs")]
    ['-25', '105', '5/2', '2/3', '36']
    >>> spoken("five twenty")[1], spoken("third"), spoken("twenty-fifth")
    ('twenty', None, None)
    """
    said = re.findall(r"[^\W\d_]+|[^\w\s-]|\d+", text.lower())
    sign = -1 if said[:1] in (["minus"], ["negative"]) else 1
    total, place = _counted(said[sign < 0 :])
    found, place = place > 0, place + (sign < 0)
    after = [words.singular(word) for word in said[place:]]
    if after[:1] == ["point"] and found:
        digits = list(takewhile(lambda word: words.NUMBERS.get(word, 10) < 10, after[1:]))
        decimals = Fraction(f"0.{''.join(str(words.NUMBERS[d]) for d in digits)}0")
        return sign * (total + decimals), " ".join(said[place + 1 + len(digits) :])
    # half a dozen
    if not found and after[:2] == ["half", "a"] and after[2:3] and after[2] in words.SCALES:
        return sign * words.SCALES[after[2]] / 2, " ".join(said[place + 3 :])
    part = re.match(r"(and )?(an? |one )?(\w+)", " ".join(after))
    if part and part[3] not in words.RATES and (below := words.SCALES_BELOW.get(part[3])):
        parts = part[1] if found else part[2] or part[3] == "half"  # two and a half; a third; half
        # two thirds
        plural = found and not part[1] and not part[2] and (total == 1 or said[place].endswith("s"))
        if not parts and not plural:
            return None  # third, twenty-fifth
        total, found = total / below if plural else total + 1 / below, True
        place += len(part[0].split())
    return (sign * total, " ".join(said[place:])) if found else None


def _counted(said: list[str]) -> tuple[Fraction, int]:
    """Return the whole number that the first words spell, and the number of these words."""
    total = group = Fraction(0)  # group: what the next scale word multiplies
    size, place, fresh = Fraction("1e30"), 0, True
    for place, word in enumerate([*map(words.singular, said), ""]):
        following = said[place + 1] if place + 1 < len(said) else ""
        if word in words.NUMBERS and (fresh or _continues(group, words.NUMBERS[word])):
            group, fresh = group + words.NUMBERS[word], False
        elif word in ("a", "an") and fresh and words.singular(following) in words.SCALES:
            group, fresh = Fraction(1), False
        elif word == "hundred" and group < 100 and (group or not place):
            group, fresh = max(group, Fraction(1)) * 100, False
        elif word in words.SCALES and words.SCALES[word] < size and (group or not place):
            total += max(group, Fraction(1)) * words.SCALES[word]
            group, size, fresh = Fraction(0), words.SCALES[word], True
        elif not (place and following in words.NUMBERS and _joins(word, group, fresh)):
            break
    return total + group, place


def _joins(word: str, group: Fraction, fresh: bool) -> bool:
    """Whether a number may continue after the word: one hundred and five, one thousand, two hundred."""
    return word in ("and", ",") and (fresh or (word == "and" and group % 100 == 0 < group))


def _continues(value: Fraction, number: Fraction) -> bool:
    """Whether a number word continues the number: twenty five, two hundred twenty."""
    tens = value % 100 >= 20 and value % 10 == 0 and 0 < number < 10
    return tens or (value >= 100 and value % 100 == 0 and 0 < number < 100)
