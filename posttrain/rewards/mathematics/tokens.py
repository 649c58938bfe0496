r"""Splits an answer into tokens: numbers in all their spellings, macros, words, signs. Display markup is dropped."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from posttrain.rewards.mathematics import words

LENGTH = 2_000  # characters of an answer


class Unreadable(ValueError):
    """The text is not an answer in the grammar."""


class Unevaluated(Unreadable):
    """The text is an integral, a sum, a limit: a question, whatever its value."""


def _pairs(name: str, after: str = "") -> dict[str, str]:
    listed = words.TABLES[name].split()
    return {sign: way + after for sign, way in zip(listed[::2], listed[1::2], strict=True)}


_LETTERS, _ALIASES = _pairs("greek", " "), _pairs("aliases")
_UNICODE = str.maketrans(_pairs("signs", " "))
_UNICODE |= str.maketrans({"\xa0": " ", "¢": " cents ", "‰": " permille "})
_UNICODE |= str.maketrans(dict.fromkeys("\u200b\ufeff\u2060", ""))
_UNICODE |= str.maketrans(dict.fromkeys("\u2009\u202f", r"\,"))
_RAISED = re.compile("([⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+)|[₀₁₂₃₄₅₆₇₈₉]+")
_LEVEL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789-+n0123456789")
# of full width; mathematical letters and digits
_COMPATIBLE = re.compile("[\uff01-\uff5e\U0001d400-\U0001d7ff]+")
_RADICAND = re.compile(r"(?<=[√∛])\s*([0-9]+(?:\.[0-9]+)?)")
# in a word, Greek letters are no symbols
_GREEK_LETTER = re.compile(rf"(?<![Ͱ-Ͽ])[{''.join(_LETTERS)}](?![Ͱ-Ͽ])")
_GREEK = words.words(
    """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon phi varphi
    chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell hbar"""
)
_ENDS = ("}", "pi")  # what may end a number, as digits do
_OPENING, _CLOSING = ("(", "[", r"\{"), (")", "]", r"\}")
_LAKHS = r"[0-9]{1,2}(?:(?:,|\{,\}|\\,)[0-9]{2})+(?:,|\{,\}|\\,)[0-9]{3}(?![0-9]|,[0-9])"
_GROUPED = (
    r"[0-9]{1,3}(?:(?:\{,\}|,\\!\s?|,?\\[,;:]|,?\\thinspace\s?|\\? |~)[0-9]{3})+(?![0-9]|\s*/)"
)
_COMMAS = r"(?<![0-9],)[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])"
_NUMBER = (
    r"(?:(?P<whole>[0-9]*)\.(?P<start>[0-9]*)\\(?:overline|bar|dot)\s*\{?(?P<cycle>[0-9]+)\}?"
    r"|(?P<number>(?:{grouped}[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE](?P<exponent>[+-]?[0-9]+))?)"
)
_TOKEN = (
    r"(?P<skip>\s+|\\[,;:! ]|~|\\(?:left|right|middle|[bB]igg?[lr]?|quad|qquad|limits|thinspace|hspace\{[^{}]*\}"
    r"|phantom\s*(?:\{[^{}]*\}|\S))(?![A-Za-z])\.?)"
    r"|\\(?P<edge>begin|end)\s*\{(?P<environment>[a-zA-Z]+\*?)\}(?:\s*\{[lcr| ]*\})?"
    rf"|\\(?P<style>{words.TEXT_MACROS}|mathbb|operatorname\*?)\s*\{{(?P<text>[^{{}}]*)\}}"
    r"|(?P<based>[0-9]+[A-Fa-f][0-9A-Fa-f]*(?=_\{?16(?![0-9])))"
    rf"|{_NUMBER}"
    r"|\\(?P<macro>[A-Za-z]+)|\\(?P<escaped>[{}$%|\\])|(?P<word>[A-Za-z]+)"
    r"|(?P<sign>\*\*|<=|>=|!=|[-+*/^_=<>(){}\[\],;:.|!%&'$])"
)
_TOKENS = (
    re.compile(_TOKEN.replace("{grouped}", f"{_GROUPED}|")),
    re.compile(_TOKEN.replace("{grouped}", f"{_GROUPED}|{_COMMAS}|{_LAKHS}|")),
)
_DEGREES = re.compile(
    r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z])|\{\s*\\degree\s*\})|\\(?:degree|textdegree)(?![A-Za-z])"
)
_TEMPERATURE = re.compile(r"\\degree\s*(?:\\(?:text|mathrm)\s*\{\s*)?([CF])(?![A-Za-z])\s*\}?")
_SCALE_OF = {"C": "celsius", "F": "fahrenheit"}
_DIGIT = re.compile("[0-9]")
_FIGURES = re.compile(r"[^A-Za-z]*[0-9]|[^=]*=")
_WRAPPERS = re.compile(r"\\[()\[\]]")
_DISPLAY = re.compile(
    r"\\(?:(?:text)?color(?:box)?\s*(?:\[\w+\])?\s*\{[^{}]*\}|fcolorbox\s*\{[^{}]*\}\s*\{[^{}]*\}|(?:tiny|scriptsize|footnotesize|small|normalsize"
    r"|large|Large|LARGE|huge|Huge|rm|bf|it|sf|tt|bfseries|itshape|displaystyle|textstyle|scriptstyle|boldmath|boldsymbol|bm|pmb"
    r"|underline|ensuremath|strut|mathstrut|forall)(?![A-Za-z]))"
)
_DOMAIN = re.compile(
    r"\\(?:mathbb|Bbb)\s*\{?\s*([RZNQC])\s*\}?|\\mathbf\s*\{([R])\}|\\([RZNQC])(?![A-Za-z])"
)
_ALIAS = re.compile(rf"(?:{'|'.join(map(re.escape, _ALIASES))})(?![A-Za-z])")
_ROW_GAP = re.compile(r"(?<=\\\\)\s*\[[0-9.]+\s*(?:pt|em|ex|mm|cm|px)\]")  # \\[4pt]
_QUOTED = re.compile(r"""^(\*\*|[*`"“])([^*`"“”]+)(?:\1|”)$""")
_UNION = re.compile(r"(?<=[)\]])\s*U\s*(?=(?:\\left\s*)?[(\[])")
_TRAILING = re.compile(r"(?<![,;\s\\])(?:\\[,;:! \\]|[,;\s])+$")  # begins at one place, not at each
_HALF_OF_DAY = re.compile(r"\b([AaPp])\.\s?[Mm](?![A-Za-z])\.?")
_OUTWARD = re.compile(r"([\[\]])([^][()]+,[^][()]+)([\[\]])")
_MATHS_DOLLAR = re.compile(r"(?<!\\)\$")


@dataclass(frozen=True, slots=True)
class Token:
    kind: str  # number, symbol, macro, text, separator, sign, begin, end
    text: str
    value: Fraction | int = 0
    form: str = ""


def clean(text: str) -> str:
    """Return the text without display markup: dollar signs in pairs, brackets of display mathematics, a full stop at the
    end."""
    if not text.isascii():
        text = _COMPATIBLE.sub(lambda m: unicodedata.normalize("NFKC", m[0]), text)
        text = _RAISED.sub(lambda m: f"{'^' if m[1] else '_'}{{{m[0].translate(_LEVEL)}}}", text)
        text = _GREEK_LETTER.sub(lambda m: _LETTERS[m[0]], _RADICAND.sub(r"{\1}", text))
        text = text.translate(_UNICODE)
    if "\\" in text:
        text = _DISPLAY.sub(" ", _ALIAS.sub(lambda m: _ALIASES[m[0]], _ROW_GAP.sub("", text)))
        text = _DOMAIN.sub(lambda m: rf" \mathbb{{{m[1] or m[2] or m[3]}}}", text)
        text = _WRAPPERS.sub(" ", _DEGREES.sub(r" \\degree ", text))
        text = _TEMPERATURE.sub(lambda m: rf"\text{{{_SCALE_OF[m[1]]}}}", text)
    text = text.replace("{:}", ":")
    if len(_MATHS_DOLLAR.findall(text)) % 2 == 0:
        text = _MATHS_DOLLAR.sub(" ", text)
    text = _HALF_OF_DAY.sub(r"\1m", _TRAILING.sub("", text.strip()))
    text = _UNION.sub(r" \\cup ", _QUOTED.sub(r"\2", text))
    if text[:1] == "]" or text[-1:] == "[":  # ]1, 2[ is (1, 2)
        text = _OUTWARD.sub(lambda m: "[("[m[1] == "]"] + m[2] + "])"[m[3] == "["], text)
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text


def tokens_of(text: str, thousands: bool) -> list[Token]:
    """Return the tokens; `1,000` is one number if `thousands` is set and no bracket is open."""
    found: list[Token] = []
    position, open_brackets = 0, 0
    while position < len(text):
        match = _TOKENS[thousands and open_brackets == 0].match(text, position)
        if not match:
            raise Unreadable(f"unexpected {text[position : position + 10]!r}")
        position = match.end()
        if match["skip"] is not None:
            continue
        digits = match["style"] and text.startswith("_", position) and _DIGIT.search(match["text"])
        if digits:  # \text{2E}_{16}
            found.append(Token("text", match["text"].strip()))
            continue
        if match["style"] and _FIGURES.match(match["text"]):
            found += tokens_of(match["text"], thousands)  # digits in a text macro are digits
            continue
        last = found[-1] if found else Token("", "")
        made = _token(match, last.kind in ("number", "text") or last.text in _ENDS)
        for token in made:
            open_brackets += (token.text in _OPENING) - (token.text in _CLOSING)
        found += made
    return found


def _token(match: re.Match[str], after_number: bool) -> list[Token]:
    if match["edge"]:
        return [Token(match["edge"], match["environment"])]
    if match["style"]:
        return _styled(match["style"], match["text"], after_number)
    if match["cycle"] is not None:
        whole, start, cycle = match["whole"] or "0", match["start"], match["cycle"]
        ten = 10 ** len(start)
        rest = Fraction(int(cycle), ten * (10 ** len(cycle) - 1))
        return [Token("number", match[0], Fraction(int(whole + start), ten) + rest, "decimal")]
    if match["based"]:
        return [Token("text", match["based"])]
    if match["number"] is not None:
        return [_number(match["number"], match["exponent"])]
    if match["macro"]:
        return [Token("symbol" if match["macro"] in _GREEK else "macro", match["macro"])]
    if match["escaped"]:
        sign = match["escaped"]
        return [Token("sign", sign if sign in "%|" else "\\" + sign)]
    if match["word"]:
        return _word(match["word"], after_number)
    return [Token("sign", {"$": r"\$", "**": "^"}.get(match[0], match[0]))]


def _number(digits: str, exponent: str | None) -> Token:
    digits = re.sub(r"[^0-9.]", "", digits)
    form = "decimal" if "." in digits else "integer"
    if exponent is None:
        value = Fraction(digits) if form == "decimal" else Fraction(int(digits))
        return Token("number", digits, value, form)
    if len(exponent) > 5 or abs(int(exponent)) > LENGTH:
        raise Unevaluated("an exponent beyond all bounds")
    return Token("number", "", Fraction(digits) * Fraction(10) ** int(exponent), "decimal")


def _styled(style: str, text: str, after_number: bool) -> list[Token]:
    bare = words.bare_words(text)
    letter = len(bare) == 1 and bare.isalpha() and not (after_number and words.is_unit(bare))
    if letter and style in ("mathrm", "mathbf", "mathit"):
        return [Token("symbol", bare)]
    if style == "mathbb":
        return [Token("macro", f"mathbb {bare}")]
    if bare.strip("\\") == "%":
        return [Token("sign", "%")]
    lowered = bare.strip(" ,").lower()
    if words.FUNCTION_WORDS.get(lowered) == "infty":
        return [Token("macro", "infty")]
    if lowered in words.SEPARATOR_WORDS or (not lowered and "," in bare):
        return [Token("separator", lowered or ",")]
    return [Token("text", bare)] if bare else []


def _word(word: str, after_number: bool) -> list[Token]:
    lowered = word.lower()
    if lowered in words.SEPARATOR_WORDS:
        return [Token("separator", lowered)]
    if word in words.FUNCTION_WORDS:
        return [Token("macro", words.FUNCTION_WORDS[word])]
    if words.is_word(word) or (len(word) > 1 and after_number and words.is_unit(word)):
        return [Token("text", word)]
    return [Token("symbol", letter) for letter in word]
