"""The normal form of an answer: one shape for different spellings; and the operations that an answer leaves undone."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from posttrain.rewards.mathematics.numbers import Exhausted, Meter, Undefined, evaluate
from posttrain.rewards.mathematics.sets import INFINITY, LINE, common, place, united, without
from posttrain.rewards.mathematics.tree import Node, is_integer, negative, node

SIGNS = ("pm", "mp")  # signs that stand for two values
LIMIT = 64  # the most members that such signs may produce
_KINDS_OF_FUNCTIONS = dict.fromkeys(("log", "ln", "lg"), "logarithm")
_KINDS_OF_FUNCTIONS |= dict.fromkeys(("floor", "ceil"), "rounding")
_KINDS_OF_FUNCTIONS |= {"exp": "exponential", "abs": "absolute value"}
ZERO = node("number", Fraction(0), "integer")
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


def settled(value: Node) -> Node:
    r"""Return the tree with one shape for each meaning.

    \pm gives two members; x \in S is S; a solved inequality is an interval; several of them joined by "or" are a union.

    >>> from posttrain.rewards.mathematics.latex import read
    >>> settled(read("1 < x < 2")).kind, settled(read(r"\pm 2")).kind, settled(read(r"x<1 \text{ or } x>2")).kind
    ('interval', 'list', 'union')
    """
    if value.kind == "relation":
        return _settled_relation(value)
    if value.kind in ("list", "set", "union"):
        return _settled_collection(value)
    if value.kind in ("domain", "without", "builder", "cases", "option"):
        return _settled_set(value)
    if value.kind == "add" and [part.kind for part in value.nodes] == ["domain", "negative"]:
        return settled(node("without", value.nodes[0], *value.nodes[1].nodes))  # \mathbb{R} - \{0\}
    if value.kind == "multiply" and is_point(value):
        return value.nodes[1]
    return _both_signs(value)


def is_point(value: Node) -> bool:
    """Whether it is a named point: P(3, 4)."""
    first, second, *rest = value.nodes
    named = first.kind == "symbol" and first.text in set("ABCDMOPQRS")
    return named and second.kind in ("interval", "tuple") and not rest


def _settled_set(value: Node) -> Node:
    r"""Normalise \mathbb{R}, a difference of sets, \{x : x > 2\}; for a function in cases and an option, the parts."""
    if value.kind == "domain":
        above, below = (ZERO, INFINITY), (negative(INFINITY), ZERO)
        half = {"R+": ("()", *above), "R>0": ("()", *above), "R>=0": ("[)", *above)}
        half |= {"R-": ("()", *below), "R<0": ("()", *below)}
        if value.text == "R":
            return LINE
        return node("interval", *half[value.text]) if value.text in half else value
    if value.kind != "builder":
        parts = (settled(part) if isinstance(part, Node) else part for part in value.parts)
        made = node(value.kind, *parts)
        if value.kind == "cases" and all(map(_is_named, made.nodes)):
            return node("list", "and", *made.nodes)  # a system's solution
        return (without(*made.nodes) or made) if value.kind == "without" else made
    name, condition, *domain = value.nodes
    made = settled(condition)
    if domain and settled(domain[0]) != LINE:
        return node("builder", name, made, *domain)
    if made.kind == "interval":
        return node("interval", *made.parts[:3])
    if made.kind == "union":
        return node("union", *(node("interval", *piece.parts[:3]) for piece in made.nodes))
    return made if made.kind == "domain" else node("builder", name, made)


def _settled_collection(value: Node) -> Node:
    members: list[Node] = []
    if value.kind == "list":
        conditions = [
            m for m in value.nodes if m.kind != "relation" or m.text != "in" or settled(m) != LINE
        ]
        if len(conditions) == 1:  # x \in \mathbb{R}, x > 2
            return settled(conditions[0])
        if excluded := _excluded(value):
            return excluded
    for member in value.nodes:
        made = settled(member)
        inner = made.kind == value.kind != "set" or (made.kind == "list" and value.kind == "set")
        members += made.nodes if inner else (made,)
    if len(members) > LIMIT and len(members) > len(value.nodes):
        raise Undefined("too many members")
    if value.kind == "union":
        return united(*members) or node("union", *members)
    if value.kind == "set":
        return node("set", *(m.nodes[1] if _is_named(m) else m for m in members))
    solved = members and all(m.kind in ("interval", "union") and _variable(m) for m in members)
    if value.text == "or" and solved:
        return united(*members) or node("union", *members)
    if value.text == "and" and solved and len(set(map(_variable, members))) == 1:
        met = common(*members)
        return met if met and met.nodes else node("list", "and", *members)
    return node("list", value.text, *members)


def _is_named(value: Node) -> bool:
    return value.kind == "relation" and value.text == "=" and value.nodes[0].kind == "symbol"


def _variable(value: Node) -> str:
    """Return the variable of a solved inequality; "" for a plain interval."""
    names = {str(piece.labels[-1]) for piece in value.walk() if len(piece.labels) > 1}
    return min(names, default="")


def _excluded(value: Node) -> Node | None:
    r"""Read x \ne 1, x \ne 2 and x \ne 1, 2 as all numbers without these."""
    first = value.nodes[0]
    if first.kind != "relation" or first.text != "!=" or first.nodes[0].kind != "symbol":
        return None
    numbers = []
    for member in value.nodes:
        again = member.kind == first.kind and member.text == "!="
        again = again and member.nodes[0] == first.nodes[0]
        numbers.append(member.nodes[1] if again else member)
    return _all_but(first.nodes[0], node("set", *numbers))


def _all_but(name: Node, excluded: Node) -> Node | None:
    line = node("interval", *LINE.parts, name.text)
    return without(line, settled(excluded)) if not excluded.has("symbol", "relation") else None


def _rounds(exact: Node, decimal: Node) -> bool:
    """Whether a decimal is the number rounded to the places that it shows."""
    half = Fraction(1, 2 * 10 ** decimal_places(decimal))
    try:
        near = place(decimal) - half <= place(exact) <= place(decimal) + half
    except (Undefined, Exhausted, KeyError):
        return False
    return near and decimal.kind == "number"


def _settled_relation(value: Node) -> Node:
    if value.text.endswith("~") and _rounds(*value.nodes[-2:]):  # 2\sqrt3 \approx 3.46
        rest = value.nodes[:-1]
        return settled(node("relation", value.text[:-2], *rest) if len(rest) > 1 else rest[0])
    signs, sides = value.text.replace("~", "=").split(), value.nodes
    if signs == ["in"]:
        return settled(sides[1])
    if signs in (["="], ["!="]) and sides[1].kind == "symbol" and not sides[0].has("symbol"):
        sides = sides[::-1]
    if signs in (["!="], ["notin"]) and sides[0].kind == "symbol":
        excluded = sides[1] if signs == ["notin"] else node("set", sides[1])
        return _all_but(sides[0], excluded) or node("relation", *signs, *sides)
    if signs == ["="] and sides[1].has(*SIGNS) and not sides[0].has(*SIGNS):
        values = _both_signs(sides[1])
        return node("list", "or", *(node("relation", "=", sides[0], v) for v in values.nodes))
    return _interval(signs, sides) or node("relation", " ".join(signs), *sides)


def _interval(signs: list[str], sides: tuple[Node, ...]) -> Node | None:
    """Return the interval of a solved inequality with one symbol and bounds without symbols."""
    where = [i for i, side in enumerate(sides) if side.kind == "symbol"]
    where = [1] if len(sides) == 3 and 1 in where else where
    if len(where) != 1 or any(sign not in FLIPPED for sign in signs) or len(sides) > 3:
        return None
    place = where[0]
    others = [side for index, side in enumerate(sides) if index != place]
    open_ = len(others) != 2 or any(sides[place] in side.walk() for side in others)
    if open_ and any(side.has("symbol") for side in others):
        return None  # 2x + y < 3 may be solved for either variable; a < x < b is solved for x
    low, high, ends = negative(INFINITY), INFINITY, ["(", ")"]
    bounds = []
    if place > 0:
        bounds.append((FLIPPED[signs[place - 1]], sides[place - 1]))
    if place < len(signs):
        bounds.append((signs[place], sides[place + 1]))
    for sign, bound in bounds:
        if sign.startswith(">"):
            low, ends[0] = bound, "[" if sign == ">=" else "("
        else:
            high, ends[1] = bound, "]" if sign == "<=" else ")"
    if len({sign[0] for sign, _ in bounds}) != len(bounds) or (len(sides) == 3 and place != 1):
        return None
    return node("interval", "".join(ends), low, high, sides[place].text)


def _both_signs(value: Node) -> Node:
    if not value.has(*SIGNS):
        return value
    return node("list", ",", _with_sign(value, False), _with_sign(value, True))


def _with_sign(value: Node, flipped: bool) -> Node:
    if value.kind in SIGNS:
        inner = _with_sign(value.nodes[0], flipped)
        return negative(inner) if (value.kind == "mp") != flipped else inner
    parts = (_with_sign(part, flipped) if isinstance(part, Node) else part for part in value.parts)
    return node(value.kind, *parts)


def undone(value: Node) -> frozenset[str]:
    r"""Return what an answer leaves to do: the names of the operations that a reader would still carry out.

    Fractions, decimals, mixed numbers, scientific notation, radicals and multiples of pi leave nothing to do.

    >>> from posttrain.rewards.mathematics.latex import read
    >>> sorted(undone(read("2+2"))), sorted(undone(read("12^2"))), sorted(undone(read(r"3\sqrt2/4")))
    (['like terms', 'sum'], ['power'], [])
    """
    found: set[str] = set()
    _look(value, found)
    return frozenset(found)


def _look(value: Node, found: set[str]) -> None:
    kind, parts = value.kind, value.nodes
    if _is_scientific(value) or _is_power_of_ten(value):
        return
    if kind == "add":
        if not value.has("symbol"):
            found.add("sum")
        keys = [_term_key(part) for part in _terms(value)]
        if len(set(keys)) < len(keys):
            found.add("like terms")
    elif kind == "multiply":
        if sum(_is_literal(part) for part in parts) > 1 or len(set(parts)) < len(parts):
            found.add("product")
    elif kind == "divide":
        if all(map(_is_literal, parts)) and not all(map(_is_whole, parts)):
            found.add("quotient")
    elif kind == "negative" and parts[0].kind == "negative":
        found.add("sign")
    elif kind in ("power", "root"):
        _look_at_power(value, found)
    elif kind == "function":
        found.add(_KINDS_OF_FUNCTIONS.get(value.text, "trigonometry"))
    elif kind in ("factorial", "binomial"):
        found.add(kind)
    for part in parts:
        _look(part, found)


def _look_at_power(value: Node, found: set[str]) -> None:
    base = value.nodes[0]
    if value.has("symbol") and (value.kind == "root" or base.has("symbol")):
        return
    if base.kind == "constant" and base.text in ("pi", "e"):
        if base.text == "e" and "i" not in constants(value.nodes[1]):
            found.add("exponential")
        return
    if value.kind == "power" and (value.has("symbol") or "i" in constants(base)):
        found.add("power")
        return
    if _is_rational(value):
        found.add(value.kind)


def _is_rational(value: Node) -> bool:
    """Whether a power or root of numbers is rational; a power too large to compute counts as left undone."""
    try:
        return isinstance(evaluate(value, {}, Meter(500)), Fraction)
    except Exhausted:
        return True
    except Undefined:
        return False


def constants(value: Node) -> frozenset[str]:
    return frozenset(place.text for place in value.walk() if place.kind == "constant")


def _terms(value: Node) -> list[Node]:
    """Return the terms of a sum, without brackets."""
    inner = (_terms(part) if part.kind == "add" else [part] for part in value.nodes)
    return [term for terms in inner for term in terms]


def _is_scientific(value: Node) -> bool:
    """Whether it is scientific notation, a x 10^n, which is a literal."""
    two = value.kind == "multiply" and len(value.nodes) == 2
    return two and value.nodes[0].kind == "number" and _is_power_of_ten(value.nodes[1])


def _is_power_of_ten(value: Node) -> bool:
    if value.kind != "power" or value.nodes[0].kind != "number":
        return False
    return value.nodes[0].value == 10 and _is_whole(value.nodes[1])


def _is_literal(value: Node) -> bool:
    """Whether it is a plain number: 3, -3, 0.5, 3/4."""
    if value.kind == "negative":
        return _is_literal(value.nodes[0])
    quotient = value.kind == "divide" and all(map(_is_whole, value.nodes))
    return value.kind == "number" or quotient


def _is_whole(value: Node) -> bool:
    if value.kind == "negative":
        return _is_whole(value.nodes[0])
    return is_integer(value) or _is_power_of_ten(value)


def _term_key(term: Node) -> frozenset[tuple[Node, int]]:
    """Return what a term is a multiple of: terms with the same key could be added up."""
    if term.kind == "negative":
        return _term_key(term.nodes[0])
    if _is_literal(term) or _is_scientific(term):
        return frozenset()
    if term.kind == "divide" and _is_literal(term.nodes[1]):
        return _term_key(term.nodes[0])
    factors = term.nodes if term.kind == "multiply" else (term,)
    return frozenset(Counter(factor for factor in factors if not _is_literal(factor)).items())


def decimal_places(value: Node) -> int:
    """Return how many places a decimal shows; 0 for anything else."""
    while value.kind == "negative":
        value = value.nodes[0]
    if value.kind != "number" or value.parts[1] != "decimal":
        return 0
    below = value.value.denominator
    return next((places for places in range(41) if 10**places % below == 0), 0)
