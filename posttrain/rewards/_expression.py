"""Exact arithmetic on untrusted text: + - * / and brackets over plain integers. It is read into a tree, and never run."""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction

LENGTH = 200  # characters of an expression: this also bounds the tree's depth and the size of every number
DIGITS = 6  # digits of a number
PLAIN = re.compile(rf"(?:[0-9]{{1,{DIGITS}}}(?![0-9])|[-+*/() ])*")
LEADING_ZEROS = re.compile(r"(?<![0-9])0+(?=[0-9])")
SIGNS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Unparseable(ValueError):
    """The text is not an expression that has a value."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression and the numbers it uses, in order. `Unparseable` for anything else.

    >>> evaluate("(3+4)/2 * 5")
    (Fraction(35, 2), [3, 4, 2, 5])
    """
    if len(text) > LENGTH:
        raise Unparseable(f"longer than {LENGTH} characters")
    text, numbers = text.strip(), list[int]()
    if not PLAIN.fullmatch(text):
        raise Unparseable("more than whole numbers, signs and brackets")
    try:
        return _value(ast.parse(LEADING_ZEROS.sub("", text), mode="eval").body, numbers), numbers
    except (SyntaxError, ZeroDivisionError) as error:
        raise Unparseable(str(error)) from None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    match node:
        case ast.Constant(int(number)):
            numbers.append(number)
            return Fraction(number)
        case ast.BinOp(left, sign, right) if type(sign) in SIGNS:
            value: Fraction = SIGNS[type(sign)](_value(left, numbers), _value(right, numbers))
            return value
    raise Unparseable(f"unexpected {type(node).__name__}")
