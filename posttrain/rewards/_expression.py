"""Exact arithmetic on untrusted text: + - * / and brackets over plain integers. The text is parsed, and never run."""

from __future__ import annotations

import ast
import re
from fractions import Fraction
from operator import add, mul, sub, truediv

# characters of an expression; this also bounds the depth of the tree and the size of every number
LENGTH = 200
DIGITS = 6  # digits of a number
PLAIN = re.compile(rf"(?:[0-9]{{1,{DIGITS}}}(?![0-9])|[-+*/() ])*")
DECIMALS = re.compile(r"(?:[0-9]{1,15}(?:\.[0-9]{1,9})?(?![0-9.])|[-+*/() ])*")
LEADING_ZEROS = re.compile(r"(?<![0-9.])0+(?=[0-9])")
SIGNS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}


class Unparseable(ValueError):
    """The text is not an expression with a value."""


def evaluate(text: str, decimals: bool = False) -> tuple[Fraction, list[int]]:
    """Return the exact value of an expression and the whole numbers it uses, in order. Raises `Unparseable` for anything else.
    With `decimals`, numbers may be longer and have a decimal point and a sign.

    >>> evaluate("(3+4)/2 * 5")
    (Fraction(35, 2), [3, 4, 2, 5])
    >>> evaluate("-0.1 * (2 - 0.05)", decimals=True)[0]
    Fraction(-39, 200)
    """
    if len(text) > LENGTH:
        raise Unparseable(f"longer than {LENGTH} characters")
    text, numbers = text.strip(), list[int]()
    if not (DECIMALS if decimals else PLAIN).fullmatch(text):
        raise Unparseable(f"more than {'' if decimals else 'whole '}numbers, signs and brackets")
    try:
        tree = ast.parse(LEADING_ZEROS.sub("", text), mode="eval").body
        return _value(tree, numbers, decimals), numbers
    except (SyntaxError, ZeroDivisionError) as error:
        raise Unparseable(str(error)) from None


def _value(node: ast.expr, numbers: list[int], decimals: bool = False) -> Fraction:
    match node:
        case ast.Constant(int(number)):
            numbers.append(number)
            return Fraction(number)
        case ast.BinOp(left, sign, right) if type(sign) in SIGNS:
            sides = (_value(side, numbers, decimals) for side in (left, right))
            value: Fraction = SIGNS[type(sign)](*sides)
            return value
        case ast.Constant(float(decimal)):  # of at most 24 digits: the value as written, or nearly
            return Fraction(repr(decimal))
        case ast.UnaryOp(ast.USub(), inner) if decimals:
            return -_value(inner, numbers, decimals)
    raise Unparseable(f"unexpected {type(node).__name__}")
