"""Compares the trees of a prediction and of the gold answer: same kind, same values, and nothing left to compute.

Rational values are compared exactly, others to 140 bits. Expressions with symbols are compared by their values at points that
depend only on the gold answer's symbols. An operation that is left to do (a sum of numbers, a power, a logarithm) is accepted
only if the gold answer leaves it too.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import Annotated, Literal

from posttrain.errors import Range
from posttrain.rewards.mathematics import naming, numbers
from posttrain.rewards.mathematics.form import FLIPPED, constants, decimal_places
from posttrain.rewards.mathematics.numbers import Meter, Undefined, Value, evaluate
from posttrain.rewards.mathematics.tree import Node, is_integer, negative, node, symbols
from posttrain.rewards.mathematics.words import Unit, spelled, unit_of, words

Point = dict[str, Fraction]  # a number for each symbol
Places = Annotated[int, Range(ge=0, le=30, text="a number of decimal places from 0 to 30")]
POINTS = 8  # the number of points at which expressions are compared
MIN_POINTS = 3  # the fewest points at which both sides must have a value
SCALARS = words("number symbol constant add multiply divide negative power root function")
SCALARS |= words("factorial binomial degrees pm mp")
UNORDERED = {"list", "set", "union"}
MEASURED = {"quantity", "percent", "degrees"}
NO_UNIT = Unit(Fraction(1), "", Fraction(1), True)
_CLOCK = re.compile("[0-9]{1,2}(?::[0-9]{2}){0,2}")
_HALF = {"am": "am", "pm": "pm", "noon": "pm", "midnight": "am", "in the morning": "am"}


@dataclass(frozen=True, slots=True)
class Conventions:
    """A data set's conventions for comparing its answers."""

    # exact: 50% is 0.5 and not 50; bare: the sign is dropped on both sides
    percent: Literal["exact", "bare"] = "exact"
    bases: bool = False  # 1001_2 is 9
    # a decimal with at least this many places may be the gold answer rounded; 0: never
    rounding: Places = 0
    # an answer without the gold answer's unit is wrong; another unit is always wrong
    require_units: bool = False


class Comparison:
    """Compares one gold answer with one prediction; the meter bounds the work."""

    def __init__(self, conventions: Conventions):
        self.conventions, self.meter = conventions, Meter()

    def same(self, gold: Node, given: Node) -> bool:
        self.meter.charge(1)
        if "option" in (gold.kind, given.kind):
            return self.same_option(gold, given)
        if naming.is_named_tuple(given) and (gold.kind == "list" or naming.is_named_tuple(gold)):
            return self.same(naming.spread(gold), naming.spread(given))
        if naming.is_named_tuple(gold) and given.kind == "list":
            return self.same(naming.spread(gold), given)
        if gold.kind == "relation" or given.kind == "relation":
            return self.same_relation(gold, given)
        if clock(gold)[1] or clock(given)[1]:
            return self.same_time(gold, given)
        if given.kind == "multiply" and _is_metres(given.nodes[-1]) and not symbols(gold):
            given = lettered(given)
        if "ratio" in (gold.kind, given.kind):
            return self.same_ratio(gold, given)
        if gold.kind in MEASURED or given.kind in MEASURED:
            return self.same_quantity(gold, given)
        if gold.kind in UNORDERED:
            alike = given.kind == gold.kind or {gold.kind, given.kind} == {"list", "set"}
            return alike and self.same_collection(gold, given)
        if gold.kind in ("domain", "builder", "without"):
            return gold == given
        if gold.kind in naming.ORDERED:
            return self.same_sequence(gold, given)
        if gold.kind == "based" or given.kind == "based":
            return self.same_based(gold, given)
        if gold.kind in ("text", "choice"):
            return self.same_words(gold, given)
        if gold.kind in SCALARS and given.kind in SCALARS:
            return self.same_scalar(gold, given)
        return gold.kind == "symbol" and given.kind == "choice" and gold.text == given.text

    def same_option(self, gold: Node, given: Node) -> bool:
        """(B) 5 matches B, and it matches 5; if both sides name a letter and a value, both must agree."""
        named = ("option", "choice", "symbol")
        letters = [side.text.upper() for side in (gold, given) if side.kind in named]
        if len(letters) == 2 and letters[0] != letters[1]:
            return False
        if len(letters) == 2 and {gold.kind, given.kind} != {"option"}:
            return True
        return self.same_or_not(*(s.nodes[0] if s.kind == "option" else s for s in (gold, given)))

    def same_words(self, gold: Node, given: Node) -> bool:
        if gold.kind == "choice":
            return given.kind in ("symbol", "choice") and gold.text.lower() == given.text.lower()
        return given.kind == "text" and spelled(gold.text) == spelled(given.text) != ""

    def same_sequence(self, gold: Node, given: Node) -> bool:
        if gold.kind != given.kind or len(gold.nodes) != len(given.nodes):
            return False
        first, second = gold.labels, given.labels
        if first[:1] != second[:1]:
            return False  # other brackets, or another number of rows
        if first[1:] and second[1:] and first[1:] != second[1:]:
            return False  # another variable
        return all(self.same(a, b) for a, b in zip(gold.nodes, given.nodes, strict=True))

    def same_collection(self, gold: Node, given: Node) -> bool:
        """Whether both have the same members, each as often; a set has each once. Exact members are counted, the rest is
        matched one by one."""
        both = [naming.names_of(side) for side in (gold, given)]
        names = [naming.roots_of(side) for side in both]
        if min(map(len, both)) < 2 and len(names[0] | names[1]) == 1:
            gold, given = naming.unnamed(gold), naming.unnamed(given)  # x=1, x=2 is 1, 2
        measures = any(member.kind in MEASURED for member in (*gold.nodes, *given.nodes))
        sides = [self.members(side, not measures) for side in (gold, given)]
        if sides[0][0] != sides[1][0] or len(sides[0][1]) != len(sides[1][1]):
            return False
        left = list(sides[1][1])
        for member in sides[0][1]:
            for candidate in left:
                alike = (member.kind == "relation") == (candidate.kind == "relation")
                # x=5,y=6 is not the same as 5,6
                if alike and self.same(member, candidate):
                    left.remove(candidate)
                    break
            else:
                return False
        return True

    def members(self, collection: Node, counted: bool) -> tuple[Counter[Fraction], list[Node]]:
        exact: Counter[Fraction] = Counter()
        others: list[Node] = []
        for member in collection.nodes:
            if counted and member.kind in SCALARS and not infinity(member) and not symbols(member):
                value = evaluate(member, {}, self.meter)
                if isinstance(value, Fraction):
                    exact[value] += 1
                    continue
            if collection.kind != "set" or not any(self.same(member, other) for other in others):
                others.append(member)
        return (Counter(set(exact)) if collection.kind == "set" else exact), others

    def same_relation(self, gold: Node, given: Node) -> bool:
        if gold.kind != "relation":
            return naming.names_value(given, gold) and self.same(gold, given.nodes[1])
        if given.kind != "relation":
            named = naming.is_equation(gold) and (
                naming.is_name(gold.nodes[0]) or naming.is_named_tuple(gold)
            )
            return named and self.same(gold.nodes[1], given)
        if len(gold.nodes) != len(given.nodes):
            return False
        pairs = zip(gold.nodes, given.nodes, strict=True)
        if gold.text == given.text and all(self.same_or_not(a, b) for a, b in pairs):
            return True
        equations = naming.is_equation(gold) and naming.is_equation(given)
        if equations and {naming.graph(gold), naming.graph(given)} == {"y", "f(x)"}:
            return self.same(gold.nodes[1], given.nodes[1])
        sides = (*gold.nodes, *given.nodes)
        if len(gold.nodes) != 2 or any(side.kind not in SCALARS for side in sides):
            return False
        if gold.text != given.text and FLIPPED.get(gold.text) != given.text:
            return False
        factor = self.proportion(difference(gold), difference(given))
        if factor is None or gold.text in ("=", "!="):
            return factor is not None
        return (factor > 0) == (gold.text == given.text)

    def same_or_not(self, gold: Node, given: Node) -> bool:
        try:
            return self.same(gold, given)
        except Undefined:
            return False

    def same_ratio(self, gold: Node, given: Node) -> bool:
        if gold.kind != "ratio" and given.kind == "ratio":
            fraction = is_fraction(given, gold) and not is_integer(gold)  # 6:1 is not 6
            return fraction and self.same_scalar(gold, quotient(given))
        if gold.kind == "ratio" and given.kind == "ratio":
            if is_time(gold):
                times = {spelled(s.text.replace(":", " ")).lstrip("0") for s in (gold, given)}
                return len(times) == 1
            if len(gold.nodes) != len(given.nodes):
                return False
            shares = ([node("divide", n, s.nodes[-1]) for n in s.nodes[:-1]] for s in (gold, given))
            return all(map(self.same_scalar, *shares))
        return is_fraction(gold, given) and self.same_scalar(quotient(gold), given)

    def same_time(self, gold: Node, given: Node) -> bool:
        """Whether both are the same time: 3:30 pm is 15:30, and 3:30 if one side does not say am or pm."""
        (wanted, half), (time, other) = clock(gold), clock(given)
        if not wanted or not time or gold.kind == "number":
            return False
        if given.kind == "number":  # 3 pm may leave out pm
            plain = gold.nodes[0].kind == "number" and (wanted[0], half) != (12, "am")
            return plain and wanted == time
        if half == other or (half and other):
            return half == other and wanted == time
        whole, twelve, said = (wanted, time, other) if other else (time, wanted, half)
        if twelve[0] > 12:
            return False
        full = (twelve[0] % 12 + 12 * (said == "pm"), *twelve[1:])
        return whole == full or (whole == twelve and whole[0] != 12)

    def same_based(self, gold: Node, given: Node) -> bool:
        """Compare numbers such as 1011 in base 2. Another base, or none, is accepted only with the convention `bases`."""
        if gold.kind == given.kind:
            if gold.parts[1] == given.parts[1]:
                return gold.text.lstrip("0").lower() == given.text.lstrip("0").lower()
            return self.conventions.bases and in_base(gold) == in_base(given)
        bases, both = self.conventions.bases, (gold, given)
        sides = [node("number", in_base(s), "integer") if s.kind == "based" else s for s in both]
        return bases and all(s.kind in SCALARS for s in sides) and self.same_scalar(*sides)

    def same_quantity(self, gold: Node, given: Node) -> bool:
        given = lettered(given) if gold.kind == "quantity" else given
        gold = lettered(gold) if given.kind == "quantity" else gold
        (wanted, wanted_unit), (value, unit) = measured(gold), measured(given)
        if self.conventions.percent == "bare":
            wanted_unit, unit = ("" if text == "percent" else text for text in (wanted_unit, unit))
        if wanted.kind not in SCALARS or value.kind not in SCALARS:
            return wanted_unit == unit and wanted.kind not in MEASURED and self.same(wanted, value)
        measure, other = (unit_of(text) if text else NO_UNIT for text in (wanted_unit, unit))
        if measure is None or other is None:
            return spelled(wanted_unit) == spelled(unit) != "" and self.same_scalar(wanted, value)
        sizes = [measure.scale, other.scale]
        if wanted_unit == "percent" and other.measures:
            return False
        if measure.measures and other.measures:
            if measure.measures != other.measures:
                return False
            sizes = [measure.scale * measure.size, other.scale * other.size]
        elif not (measure.plain and other.plain) or (len(unit) == 1 and unit.isupper()):
            return False  # a word or letter that may change the number: 5 W, 5 reciprocal
        elif measure.measures and (self.conventions.require_units or unit == "percent"):
            return False
        return self.same_scalar(scaled(wanted, sizes[0]), scaled(value, sizes[1]))

    def same_scalar(self, gold: Node, given: Node) -> bool:
        if infinity(gold) or infinity(given):
            return infinity(gold) == infinity(given)
        names = symbols(gold)
        if names != symbols(given):
            return False
        if not names:
            wanted, value = evaluate(gold, {}, self.meter), evaluate(given, {}, self.meter)
            if self.rounds_to(wanted, value, given):
                return True
            evasive = hidden(wanted, value, gold, given) or truncated(wanted, value)
            return numbers.equal(wanted, value) and not evasive
        pairs = list(self.both(gold, given, names))
        real = [pair for pair in pairs if numbers.is_real(pair[0])]
        used = real if len(real) >= MIN_POINTS else pairs
        alike = all(b is not None and numbers.equal(a, b) for a, b in used)
        return len(used) >= MIN_POINTS and alike

    def both(
        self, gold: Node, given: Node, names: frozenset[str]
    ) -> Iterator[tuple[Value, Value | None]]:
        """Return both values at each point where the gold answer has one; None if only the prediction lacks it."""
        for point in points(names, counts(gold)):
            if (wanted := self.at(gold, point)) is not None:
                yield wanted, self.at(given, point)

    def at(self, side: Node, point: Point) -> Value | None:
        try:
            return evaluate(side, point, self.meter)
        except Undefined:
            return None

    def rounds_to(self, wanted: Value, value: Value, given: Node) -> bool:
        """With `rounding` n, a decimal with at least n places may be the gold answer rounded to as many places as it shows."""
        places, needed = decimal_places(given), self.conventions.rounding
        if not needed or places < needed or not isinstance(value, Fraction):
            return False
        if isinstance(wanted, Fraction):
            return bool(abs(wanted - value) * 2 * 10**places <= 1)
        scaled_up = numbers.multiply(wanted, Fraction(10**places), self.meter)
        middle = numbers.add(scaled_up, Fraction(1, 2), self.meter)
        return bool(numbers.apply("floor", middle, None, self.meter) == value * 10**places)

    def proportion(self, gold: Node, given: Node) -> int | None:
        """Return the sign (1 or -1) of the constant c with given = c * gold at every point, or None if there is no such
        constant."""
        names = symbols(gold)
        if names != symbols(given) or not names:
            return None
        ratios: list[Value] = []
        for wanted, value in self.both(gold, given, names):
            if value is None or numbers.is_zero(wanted) or numbers.is_zero(value):
                return None
            ratios.append(numbers.divide(value, wanted, self.meter))
        if len(ratios) < MIN_POINTS:
            return None
        first = ratios[0]
        if not all(numbers.equal(first, other) for other in ratios) or not numbers.is_real(first):
            return None
        return 1 if numbers.is_positive(first) else -1


def hidden(wanted: Value, value: Value, gold: Node, given: Node) -> bool:
    """Whether a rational number is written with radicals or pi that would cancel. e^(i pi) is accepted, since it is meant that
    way."""
    exact = isinstance(value, Fraction) or not isinstance(wanted, Fraction)
    if exact or constants(given) >= {"e", "i"}:
        return False
    return given.has("root", "constant") and not gold.has("root", "constant")


def truncated(wanted: Value, value: Value) -> bool:
    """Whether a decimal has so many places that it agrees with an irrational number."""
    if not isinstance(value, Fraction) or isinstance(wanted, Fraction):
        return False
    return value.denominator.bit_length() > numbers.AGREE // 2


def difference(relation: Node) -> Node:
    left, right = relation.nodes
    return node("add", left, negative(right))


def quotient(ratio: Node) -> Node:
    return node("divide", *ratio.nodes)


def scaled(value: Node, factor: Fraction) -> Node:
    return value if factor == 1 else node("multiply", node("number", factor, "scale"), value)


def measured(value: Node) -> tuple[Node, str]:
    """Return a value and its unit."""
    if value.kind == "percent":
        return value.nodes[0], "percent"
    if value.kind == "quantity":
        return value.nodes[0], value.text
    if value.kind == "degrees":
        return value.nodes[0], "degrees"
    return value, ""


def lettered(value: Node) -> Node:
    """Read `10 m` without a text macro as a number with a unit, not as a product; used if the other side has a unit."""
    below, written = "", value
    if value.kind == "divide" and value.nodes[1].kind == "symbol":  # 20 m/s
        value, below = value.nodes[0], f"/{value.nodes[1].text}"
    if value.kind != "multiply":
        return written
    *rest, last = value.nodes
    base, *power = last.nodes if last.kind == "power" else (last,)
    raised = f" ^{power[0].value}" if power and is_integer(power[0]) else ""
    if base.kind != "symbol" or unit_of(base.text) is None or bool(power) != bool(raised):
        return written
    number = rest[0] if len(rest) == 1 else node("multiply", *rest)
    return node("quantity", base.text + raised + below, number)


def _is_metres(value: Node) -> bool:
    """Whether it is m^2 or m^3."""
    metre, *power = value.nodes if value.kind == "power" else (value,)
    return metre == node("symbol", "m") and [part.parts[0] for part in power] in ([2], [3])


def is_fraction(ratio: Node, other: Node) -> bool:
    """Whether a ratio may be written as the number `other`: 7:20 may also be a time, so 7/20 is the same and 0.35 is not."""
    if is_time(ratio) or len(ratio.nodes) != 2 or other.kind not in SCALARS:
        return False
    return not is_clock(ratio) or other.kind == "divide"


def is_clock(ratio: Node) -> bool:
    """Whether the numbers could be a time on a clock."""
    return bool(clock(ratio)[0])


def is_time(ratio: Node) -> bool:
    """Whether it is a time: 12:30 and 7:05 are times of day; 3:4 is a ratio, and so may 9:16 be, in lowest terms."""
    pieces = ratio.text.split(":")
    if not is_clock(ratio):
        return False
    return any(piece[0] == "0" for piece in pieces[1:]) or gcd(*map(int, pieces)) > 1


def in_base(based: Node) -> Fraction:
    base = int(based.parts[1])  # type: ignore[arg-type]
    try:
        return Fraction(int(based.text, base))
    except ValueError:
        raise Undefined(f"not a number in base {base}") from None


def clock(value: Node) -> tuple[tuple[int, ...], str]:
    """Return the numbers of a time of day, and am, pm or ""; no numbers if it is not a time."""
    half = ""
    if value.kind == "quantity":
        half = _HALF.get(spelled(value.text.replace(".", "")), "")
        value = value.nodes[0] if half else value
    if value.kind not in ("ratio", "number") or not _CLOCK.fullmatch(value.text):
        return (), half
    figures = tuple(map(int, value.text.split(":")))
    fits = figures[0] <= 24 and all(figure < 60 for figure in figures[1:])
    return (figures if len(figures) > 1 else (*figures, 0)) if fits else (), half


def infinity(value: Node) -> int:
    """Return 1 and -1 for the two infinities, 0 for anything else."""
    if value.kind == "negative":
        return -infinity(value.nodes[0])
    return int(value.kind == "constant" and value.text == "inf")


def counts(value: Node) -> bool:
    """Whether it has a value for whole numbers only: n!, n choose k."""
    places = (place for place in value.walk() if place.kind in ("factorial", "binomial"))
    return any(place.has("symbol") for place in places)


def points(names: frozenset[str], whole: bool) -> list[Point]:
    """Return points that depend only on the names: whole numbers, or rational ones, the first half positive, the rest of either
    sign."""
    made = []
    for number in range(POINTS):
        point = {}
        for name in names:
            text = f"{'|'.join(sorted(names))}/{name}/{number}"
            drawn = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
            sign = -1 if number >= POINTS // 2 and drawn & 1 else 1
            rational = Fraction(sign * (301 + (drawn >> 1) % 2_700), 1_009)
            point[name] = Fraction(3 + drawn % 40) if whole else rational
        made.append(point)
    return made
