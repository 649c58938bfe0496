"""Plain values as text: the messages between the grader and a program in its sandbox, in both directions.

A value is null, true, false, a string or an integer below 2^53 in JSON; everything else is [tag, content]. `decode` returns
only exact builtins and the plain types of `TEXTS` and `NUMBERS`, so no `__eq__` of the program survives. The text's length is
limited before it is parsed, and any other form is refused.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn
from uuid import UUID

# None, bool, int, float, complex, str, bytes, the types of TEXTS and NUMBERS, and list, tuple, set, frozenset, deque and dict of these
Plain = Any

DEPTH, NODES, DIGITS, SAME_HASH = 100, 200_000, 100_000, 100
SMALL = 1 << 53
HEXADECIMAL = re.compile(r"-?0x[0-9a-f]+")
TAGS: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "z", deque: "q"}
FLOAT = re.compile(r"-?0x[01]\.[0-9a-f]{1,13}p[+-][0-9]{1,4}|-?inf|nan")


DECIMAL = r"-?(?:[0-9]{1,9999}(?:\.[0-9]{1,9999})?(?:E[+-][0-9]{1,9})?|Infinity|NaN)"
# ["o", [name, text]], with a pattern for the text and the function that makes the value; and ["o", [name, numbers ...]]
TEXTS: dict[type, tuple[str, Callable[[str], Any]]] = {
    Decimal: (DECIMAL, Decimal),
    datetime: (r"[0-9T:.+-]{1,64}", datetime.fromisoformat),
    date: (r"[0-9-]{10}", date.fromisoformat),
    time: (r"[0-9:.+-]{1,64}", time.fromisoformat),
    UUID: (r"[0-9a-f-]{36}", UUID),
}
NUMBERS: dict[type, tuple[str, ...]] = {
    Fraction: ("numerator", "denominator"),
    range: ("start", "stop", "step"),
    timedelta: ("days", "seconds", "microseconds"),
}
NAMED = {kind.__name__: kind for kind in (*TEXTS, *NUMBERS)}
LONGEST = 1 << 40_000  # a bound, because a fraction is reduced when it is made
Number = int | float | complex | Fraction | Decimal


class Malformed(ValueError):
    """Text that is not a value, or a value that cannot be sent."""


def encode(value: Plain) -> str:
    """Return the text of a plain value.

    >>> encode([1, (2.5, None)])
    '["l",[1,["t",[["f","0x1.4000000000000p+1"],null]]]]'
    >>> encode(object())
    Traceback (most recent call last):
    posttrain.rewards.sandbox.wire.Malformed: a value of type object cannot cross into a sandbox
    """
    return json.dumps(tagged(value), separators=(",", ":"))


def tagged(value: Plain, depth: int = DEPTH) -> Any:
    """Return a plain value as a tree that JSON can write."""
    kind = type(value)
    if depth < 0:
        raise Malformed(f"a value is nested more than {DEPTH} deep")
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -SMALL < value < SMALL else ["i", hex(value)]
    if kind is float:
        return ["f", value.hex()]
    if kind is complex:
        return ["c", [value.real.hex(), value.imag.hex()]]
    if kind is bytes:
        return ["b", value.hex()]
    if kind in TAGS:
        return [TAGS[kind], [tagged(item, depth - 1) for item in value]]
    if kind is dict:
        return ["d", [[tagged(each, depth - 1) for each in pair] for pair in value.items()]]
    if kind in TEXTS:
        written = value.isoformat() if hasattr(value, "isoformat") else str(value)
        return ["o", [kind.__name__, written]]
    if kind in NUMBERS:
        return ["o", [kind.__name__, *(tagged(getattr(value, name)) for name in NUMBERS[kind])]]
    raise Malformed(f"a value of type {kind.__name__} cannot cross into a sandbox")


def parse(text: bytes, limit: int) -> Any:
    """Parse JSON without objects, floats, constants or long numbers, of at most `limit` bytes.

    >>> parse(b'[1, {"a": 2}]', 100)
    Traceback (most recent call last):
    posttrain.rewards.sandbox.wire.Malformed: an object, float or constant
    """
    if len(text) > limit:
        raise Malformed(f"{len(text)} bytes, more than {limit}")
    try:
        return json.loads(
            text.decode("ascii"),
            object_pairs_hook=_refuse,
            parse_float=_refuse,
            parse_constant=_refuse,
            parse_int=_integer,
        )
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, Malformed) else Malformed("not JSON") from error


def _refuse(_: Any) -> NoReturn:
    raise Malformed("an object, float or constant")


def _integer(text: str) -> int:
    if len(text) > 17:
        raise Malformed("a long number")
    return int(text)


def decode(tree: Any) -> Plain:
    """Return the plain value of a parsed text.

    >>> decode(parse(encode({(1, 2): {3}, "x": -1e300}).encode(), 1000))
    {(1, 2): {3}, 'x': -1e+300}
    """
    return _Decoder().value(tree, DEPTH)


class _Decoder:
    def __init__(self) -> None:
        self.left = NODES

    def value(self, tree: Any, depth: int) -> Plain:
        self.left -= 1
        if depth < 0 or self.left < 0:
            raise Malformed("a value too deep or too large")
        match tree:
            case None | bool() | int() | str():
                return tree
            case ["l" | "t" | "s" | "z" | "q" | "d" as tag, list(content)]:
                return self.container(tag, content, depth)
            case ["o", [str(name), *parts]] if name in NAMED:
                return _named(NAMED[name], [self.value(part, 0) for part in parts])
            case ["i", str(text)] if len(text) <= DIGITS and HEXADECIMAL.fullmatch(text):
                return int(text, 16)
            case ["f", text]:
                return _float(text)
            case ["c", [real, imaginary]]:
                return complex(_float(real), _float(imaginary))
            case ["b", str(text)] if re.fullmatch(r"(?:[0-9a-f]{2})*+", text):
                return bytes.fromhex(text)
        raise Malformed("neither a plain value nor a known tag with its content")

    def container(self, tag: str, content: list[Any], depth: int) -> Plain:
        if tag == "d":
            if not all(isinstance(pair, list) and len(pair) == 2 for pair in content):
                raise Malformed("a dict without pairs")
            pairs = [tuple(self.value(each, depth - 1) for each in pair) for pair in content]
            return _hashed(dict, pairs)
        items = [self.value(item, depth - 1) for item in content]
        if tag in ("l", "t", "q"):
            return {"l": list, "t": tuple, "q": deque}[tag](items)
        return _hashed(set if tag == "s" else frozenset, items)


def _hashed(kind: type, items: list[Any]) -> Any:
    try:
        # building a table takes time quadratic in the number of items that share a hash, and equal hashes are easy to make:
        # multiples of 2^61 - 1
        hashes = Counter(hash(item[0] if kind is dict else item) for item in items)
        if hashes and max(hashes.values()) > SAME_HASH:
            raise Malformed("too many elements of one hash")
        made = kind(items)
    except TypeError as error:
        raise Malformed("an unhashable key or element") from error
    if len(made) != len(items):
        raise Malformed("a repeated key or element")
    return made


def _named(kind: type, parts: list[Any]) -> Any:
    try:
        if kind in NUMBERS:
            [*numbers] = (part for part in parts if type(part) is int and abs(part) < LONGEST)
            if len(numbers) == len(parts) == len(NUMBERS[kind]):
                return kind(*numbers)
        [text] = parts
        form, make = TEXTS[kind]
        if isinstance(text, str) and re.fullmatch(form, text):
            return make(text)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        pass
    raise Malformed(f"not a {kind.__name__}")


def _float(text: Any) -> float:
    if not (isinstance(text, str) and FLOAT.fullmatch(text)):
        raise Malformed("not a float")
    try:
        return float.fromhex(text)
    except OverflowError as error:
        raise Malformed("not a float") from error


def same(given: Plain, expected: Plain, exact: bool = False, tolerance: float = 1e-9) -> bool:
    """Whether a decoded value equals the expected one. Neither side holds code of the program.

    Like `==`, but |a - b| <= tolerance * max(1, |b|) for numbers if one is a float, nan equals nan, and a list equals a tuple
    of the same items. `exact` distinguishes these, and True from 1.

    >>> same(2, 2.0), same((1, 2), [1, 2]), same((1, 2), [1, 2], exact=True), same(True, 1), same(float("nan"), float("nan"))
    (True, True, False, True, True)
    """
    if given is None or expected is None:
        return given is expected
    if exact and isinstance(given, bool) is not isinstance(expected, bool):
        return False
    if isinstance(given, Number) and isinstance(expected, Number):
        return _same_number(given, expected, tolerance)
    if isinstance(given, list | tuple) and isinstance(expected, list | tuple):
        if len(given) != len(expected) or (exact and type(given) is not type(expected)):
            return False
        return all(same(a, b, exact, tolerance) for a, b in zip(given, expected, strict=True))
    if isinstance(given, dict) and isinstance(expected, dict):
        if given.keys() != expected.keys():
            return False
        return all(same(given[key], expected[key], exact, tolerance) for key in expected)
    if isinstance(given, set | frozenset) and isinstance(expected, set | frozenset):
        return given == expected
    return type(given) is type(expected) and bool(given == expected)


def _same_number(given: Any, expected: Any, tolerance: float) -> bool:
    try:
        if given == expected or (given != given and expected != expected):
            return True
        if not isinstance(given, float | complex) and not isinstance(expected, float | complex):
            return False
        given, expected = (
            float(v) if isinstance(v, Fraction | Decimal) else v for v in (given, expected)
        )
        size = abs(expected)
        return bool(abs(given - expected) <= tolerance * max(1.0, size)) and size != float("inf")
    except ArithmeticError:  # an integer beyond the range of floats
        return False
