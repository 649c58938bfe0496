"""Answers in words: numbers, announcements ("the answer is"), sets of numbers, choices that are written with what they say."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import takewhile

from posttrain.rewards._words import NUMBERS, SCALES, SCALES_BELOW, bare_words, singular

_MONTH = r"(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)(?:[a-z]+(?:y|ch|l|t|er))?"
_OF_WORDS = re.compile(
    rf"\b(?:answer|result|solutions?|value|so|thus|hence|therefore|reals?|integers|numbers|option|choice|noon|midnight|base|to|set|is|half|{_MONTH})\b"
    r"|^=",
    re.IGNORECASE,
)
_REALS = (
    r"(?:[a-z] (?:is|can be) )?(?=.*(?:all|any|every|set of|reals|numbers))(?:the )?(?:set of )?(?:(?:all|any|every) )?(?:the )?"
    r"(?:real numbers?|reals?)(?: [a-z])?(?: (?:that|which) are)?"
)
_ABOVE, _BELOW = r"(?:greater|larger|more)", r"(?:less|smaller)"
# What words stand for. Each is looked for once, in this order, in the text without its text macros.
_PHRASES = [
    (re.compile(pattern, re.IGNORECASE), written)
    for pattern, written in (
        (r"^(?:so|thus|hence|therefore)\b,?\s*", ""),
        (
            r"^(?:(?:the|our|my) )?(?:(?:final|correct|right|required|desired) )*(?:answer|result|solution|value)(?: set)?"
            r"(?: (?:of|for) [a-z])?\s*(?:(?:is|are|equals)\b|=|:)[\s:]*",
            "",
        ),
        (r"^=\s*", ""),
        (r" is (?:the )?(?:(?:final|correct|right) )*(?:answer|choice|option|correct)$", ""),
        (r"^(?:option|(?:answer )?choice)[\s:]*(?=\(?[A-J]\b)", ""),
        (rf"^{_REALS}$", r"\\mathbb{R}"),
        (
            rf"^{_REALS},? (?:except|excluding|other than|but|besides|not equal to)(?: for)? (?:[a-z]\s*=\s*)?(?=[^a-z]|and\b)(.+)$",
            r"\\mathbb{R} \\setminus \\{\1\\}",
        ),
        (rf"^{_REALS} (?:{_ABOVE} than or equal to|at least) ([^a-z]+)$", r"[\1,\\infty)"),
        (rf"^{_REALS} (?:{_BELOW} than or equal to|at most) ([^a-z]+)$", r"(-\\infty,\1]"),
        (rf"^{_REALS} {_ABOVE} than ([^a-z]+)$", r"(\1,\\infty)"),
        (rf"^{_REALS} {_BELOW} than ([^a-z]+)$", r"(-\\infty,\1)"),
        (r"^(?:the set of )?(?:all )?positive real(?: number)?s$", r"(0,\\infty)"),
        (r"^(?:the set of )?(?:all )?negative real(?: number)?s$", r"(-\\infty,0)"),
        (r"^(?:all|the set of)(?: all)?(?: the)? integers$", r"\\mathbb{Z}"),
        (r"^(?:all|the set of)(?: all)?(?: the)? rational numbers$", r"\\mathbb{Q}"),
        (r"^no (?:real )?solutions?(?: exists?)?$|^(?:the )?(?:empty|null) set$", r"\\emptyset"),
        (r"^(?:12(?::00)? ?)?noon$", "12:00 pm"),
        (r"^(?:12(?::00)? ?)?midnight$", "12:00 am"),
        (r"^([0-9]+) to ([0-9]+)$", r"\1:\2"),
        (rf"^([0-9]{{1,2}})(?:st|nd|rd|th)? (?:of )?({_MONTH}(?: [0-9]+)?)$", r"\2 \1"),
        (r"^(-?[0-9]+) and (?:a|one) half$", r"\1\\frac12"),
        (r"^([0-9]*[0-9A-F]) ?\(?(?:in )?base[ -]?([0-9]+|[a-z]+)\)?$", r"\1_{\\text{\2}}"),
        (r"^([a-z]) is not (?:equal to )?([^a-z]+)$", r"\1 \\neq \2"),
        (r"^([a-z]) is (?=[^a-z]+$)", r"\1 = "),
    )
]
_OPTION = re.compile(r"(?:\\[a-z]+\s*\{)?\s*\(?\s*[A-J]\s*[).:]")
_OPTION_CONTENT = re.compile(
    r"\(?\s*([A-J])\s*(?:\)[.:]?|[.:](?=\s))(?:\s+(?=-))?\s*(?![-^_+*/=,!'()]|or\b|and\b)(.+)|\(?([A-J])\)?[.:)]? (-.+)"
)
_ANOTHER = re.compile(r"\([A-J]\)|\b[A-J][.)]\s")


def rephrased(text: str) -> str:
    r"""The answer without the words that announce it, and with the signs that others stand for.

    >>> rephrased(r"\text{The answer is } 5"), rephrased("all real numbers except 0"), rephrased("The answer is not 5")
    ('5', '\\mathbb{R} \\setminus \\{0\\}', 'not 5')
    """
    if not _OF_WORDS.search(text):
        return text
    bare = said = bare_words(text).rstrip(". ")
    for pattern, written in _PHRASES:
        said = pattern.sub(written, said, count=1)
    return text if said == bare else said


def option(text: str) -> tuple[str, str] | None:
    r"""The letter of a choice and what it says.

    >>> option(r"\textbf{(B)}\ 5"), option("(B) or (C)"), option("(A)(B)"), option("A:B")
    (('B', '5'), None, None, None)
    """
    if not _OPTION.match(text):
        return None
    found = _OPTION_CONTENT.fullmatch(bare_words(text))
    if not found:
        return None
    letter, content = found[1] or found[3], found[2] or found[4]
    return None if _ANOTHER.search(content) else (letter, content)


def spoken(text: str) -> tuple[Fraction, str] | None:
    """The number that a text in words begins with, and the rest of it; None where it begins with none.

    >>> [str(spoken(t)[0]) for t in ("minus twenty-five", "one hundred and five", "two and a half", "two thirds", "three dozen eggs")]
    ['-25', '105', '5/2', '2/3', '36']
    >>> spoken("five twenty")[1], spoken("third")
    ('twenty', None)
    """
    said = re.findall(r"[^\W\d_]+|[^\w\s-]|\d+", text.lower())
    sign = -1 if said[:1] in (["minus"], ["negative"]) else 1
    place = int(sign < 0)
    total, size, found = Fraction(0), Fraction("1e30"), False
    while place < len(said):
        taken, value = _below_thousand(said[place:])
        scales = [
            SCALES[word] for word in map(singular, said[place + taken :][:1]) if word in SCALES
        ]
        if scales and (taken or not found) and scales[0] < size:
            total, size, found = total + (value if taken else 1) * scales[0], scales[0], True
            place += taken + 1
            more = said[place + 1 : place + 2]
            place += (
                said[place : place + 1] in (["and"], [","]) and bool(more) and more[0] in NUMBERS
            )
        else:
            total, found = total + value, found or taken > 0
            place += taken
            break
    after = [singular(word) for word in said[place:]]
    if after[:1] == ["point"] and found:
        digits = list(takewhile(lambda w: NUMBERS.get(w, 10) < 10, after[1:]))
        total += Fraction("0." + "".join(str(NUMBERS[d]) for d in digits) + "0")
        place += 1 + len(digits)
    part = re.match(r"(and )?(?:(?:an?|one) )?(\w+)", " ".join(after))
    below = SCALES_BELOW.get(part[2]) if part else None
    if part and below and (found == bool(part[1]) or (found and part[0] == part[2])):
        if not found and part[0] not in ("half", f"a {part[2]}"):
            return None  # an ordinal number
        total = total / below if found and not part[1] else total + 1 / below
        place, found = place + len(part[0].split()), True
    return (sign * total, " ".join(said[place:])) if found else None


def _below_thousand(said: list[str]) -> tuple[int, Fraction]:
    """How many words spell a number below a thousand, and the number."""
    value, place = Fraction(0), 0
    for place, word in enumerate(said):
        number = NUMBERS.get(word)
        joins = (
            word == "and"
            and value >= 100
            and value % 100 == 0
            and NUMBERS.get(said[place + 1 :][0] if said[place + 1 :] else "")
        )
        if joins:
            continue
        if word in ("a", "an") and place == 0 and singular(said[1] if said[1:] else "") in SCALES:
            value = Fraction(1)
        elif word == "hundred" and 0 < value < 100:
            value *= 100
        elif number is None or (place and not _continues(value, number)):
            return place, value
        else:
            value += number
    return len(said), value


def _continues(value: Fraction, number: Fraction) -> bool:
    """Whether a number word goes on: twenty five, two hundred twenty."""
    tens = value % 100 >= 20 and value % 10 == 0 and 0 < number < 10
    return tens or (value >= 100 and value % 100 == 0 and 0 < number < 100)
