r"""Sets of real numbers: unions, complements and conditions as disjoint intervals in order.

The ends of an interval are cuts of the line: (v, 0) is just before v, (v, 1) just after it. So [1, 2) lies between (1, 0) and
(2, 0), the point 3 between (3, 0) and (3, 1), and closed and open ends need no separate cases.
"""

from __future__ import annotations

from fractions import Fraction
from math import inf

from mpmath import libmp  # type: ignore[import-untyped]

from posttrain.rewards.mathematics import numbers
from posttrain.rewards.mathematics.tree import Node, negative, node

Cut = tuple[Fraction | float, int]
Span = tuple[Cut, Cut]
INFINITY = node("constant", "inf")
LINE = node("interval", "()", negative(INFINITY), INFINITY)
_BITS = 120  # the precision to which ends of intervals are distinguished


def united(*sets: Node) -> Node | None:
    """Return the union in normal form; None if an end is not a number."""
    return _combined(sets, _merged)


def common(*sets: Node) -> Node | None:
    return _combined(sets, _common)


def without(whole: Node, part: Node) -> Node | None:
    """Return the members of one set that are not in the other."""
    return _combined((whole, part), lambda spans: _common([spans[0], _complement(spans[1])]))


def _combined(sets: tuple[Node, ...], combine: object) -> Node | None:
    ends: dict[Fraction | float, Node] = {}
    try:
        spans = [_spans(one, ends) for one in sets]
    except (numbers.Undefined, numbers.Exhausted, KeyError):
        return None
    names = {piece.labels[1:] for one in sets for piece in one.walk() if piece.kind == "interval"}
    label = next(iter(names)) if len(names) == 1 else ()
    pieces = [
        node("interval", "[("[low[1]] + ")]"[high[1]], ends[low[0]], ends[high[0]], *label)
        for low, high in combine(spans)  # type: ignore[operator]
    ]
    if not pieces:
        return node("set")
    return pieces[0] if len(pieces) == 1 else node("union", *pieces)


def _spans(value: Node, ends: dict[Fraction | float, Node]) -> list[Span]:
    """Return the spans of a set of intervals and numbers; `ends` records how each end was written."""
    if value.kind in ("union", "set"):
        return _merged([_spans(part, ends) for part in value.nodes])
    low, high = value.nodes if value.kind == "interval" else (value, value)
    brackets = value.text if value.kind == "interval" else "[]"
    first, last = place(low), place(high)
    ends.setdefault(first, low)
    ends.setdefault(last, high)
    span = ((first, int(brackets[0] == "(")), (last, int(brackets[1] == "]")))
    return [span] if span[0] < span[1] else []


def place(end: Node) -> Fraction | float:
    """Return the real value of a number, to 120 bits."""
    sign, inner = (-1, end.nodes[0]) if end.kind == "negative" else (1, end)
    if inner == INFINITY:
        return sign * inf
    value: numbers.Value = numbers.evaluate(end, {}, numbers.Meter(2_000))
    if isinstance(value, Fraction):
        return value
    if not numbers.is_real(value):
        raise numbers.Undefined("an end that is not real")
    return Fraction(round(Fraction(*libmp.to_rational(value[0])) * 2**_BITS), 2**_BITS)


def _merged(sets: list[list[Span]]) -> list[Span]:
    found: list[Span] = []
    for low, high in sorted(span for spans in sets for span in spans):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def _complement(spans: list[Span]) -> list[Span]:
    cuts = [(-inf, 1), *(cut for span in spans for cut in span), (inf, 0)]
    return [(low, high) for low, high in zip(cuts[::2], cuts[1::2], strict=True) if low < high]


def _common(sets: list[list[Span]]) -> list[Span]:
    return _complement(_merged([_complement(spans) for spans in sets]))
