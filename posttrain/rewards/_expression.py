"""Exact arithmetic on untrusted text: + - * / and brackets over plain integers, read by a tiny parser. Never `eval`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction

LENGTH = 200  # characters of an expression: this also bounds the parser's depth and the size of every number
DIGITS = 6  # digits of a number
TOKEN = re.compile(rf" *([0-9]{{1,{DIGITS}}}(?![0-9])|[-+*/()])")


class Unparseable(ValueError):
    """The text is not an expression that has a value."""


@dataclass(slots=True)
class _Reader:
    """expression = term (('+'|'-') term)*; term = factor (('*'|'/') factor)*; factor = number | '(' expression ')'."""

    tokens: list[str]
    position: int = 0
    numbers: list[int] = field(default_factory=list)

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self) -> str:
        self.position += 1
        return self.tokens[self.position - 1]

    def expression(self) -> Fraction:
        value = self.term()
        while self.peek() in ("+", "-"):
            value = value + self.term() if self.take() == "+" else value - self.term()
        return value

    def term(self) -> Fraction:
        value = self.factor()
        while self.peek() in ("*", "/"):
            if self.take() == "*":
                value *= self.factor()
                continue
            divisor = self.factor()
            if divisor == 0:
                raise Unparseable("division by zero")
            value /= divisor
        return value

    def factor(self) -> Fraction:
        token = self.take() if self.peek() else ""
        if token == "(":
            value = self.expression()
            if not self.peek() or self.take() != ")":
                raise Unparseable("a bracket is not closed")
            return value
        if not token.isdigit():
            raise Unparseable(f"expected a number or a bracket, not {token or 'the end'!r}")
        self.numbers.append(int(token))
        return Fraction(int(token))


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression and the numbers it uses, in order. `Unparseable` for anything else.

    >>> evaluate("(3+4)/2 * 5")
    (Fraction(35, 2), [3, 4, 2, 5])
    """
    if len(text) > LENGTH:
        raise Unparseable(f"longer than {LENGTH} characters")
    text, tokens, position = text.strip(), [], 0
    while position < len(text):
        found = TOKEN.match(text, position)
        if not found:
            raise Unparseable(f"unexpected {text[position : position + 10]!r}")
        tokens.append(found[1])
        position = found.end()
    reader = _Reader(tokens)
    value = reader.expression()
    if reader.peek():
        raise Unparseable(f"unexpected {reader.peek()!r}")
    return value, reader.numbers
