"""Answers that name their value: x = 5, f(2) = 5, (x, y) = (3, -4)."""

from __future__ import annotations

import re
from fractions import Fraction

from posttrain.rewards.mathematics.tree import Node, node, symbols

ORDERED = {"tuple", "interval", "bracket", "matrix", "cases"}
NAMES = {"symbol", "text", "choice"}
TRIGONOMETRIC = {"sin", "cos", "tan", "cot", "sec", "csc"}
MINUS_ONE = node("negative", node("number", Fraction(1), "integer"))
_ROOT = re.compile(r"(.+)_,?[0-9]+")


def is_equation(relation: Node) -> bool:
    return len(relation.nodes) == 2 and relation.text == "="


def is_name(value: Node) -> bool:
    r"""Whether it may stand left of `=` without being a statement of its own: x, AB, |AB|, f(x), f(2), f^{-1}(2), \cos A, words."""
    if value.kind in NAMES:
        return True
    if value.kind == "function":
        (inside, *base), length = (
            value.nodes,
            value.text == "abs" and value.nodes[0].kind == "multiply",
        )
        return (length or value.text in TRIGONOMETRIC) and not base and is_name(inside)
    if value.kind != "multiply":
        return False
    first, *rest = value.nodes
    if first.kind == "power" and first.nodes[1] == MINUS_ONE:
        first = first.nodes[0]
    called = first.kind == "symbol" and first.text in set("fghpqFGHPQ")
    known = NAMES | {"number", "interval", "tuple"} if called else NAMES
    return all(part.kind in known for part in (first, *rest))


def is_named_tuple(value: Node) -> bool:
    """Whether it is of the form (x, y) = (3, -4)."""
    if value.kind != "relation" or value.text != "=" or len(value.nodes) != 2:
        return False
    names, values = value.nodes
    alike = (names.kind, names.labels) == (values.kind, values.labels)
    alike = alike and len(names.nodes) == len(values.nodes)
    return alike and names.kind in ORDERED and all(part.kind == "symbol" for part in names.nodes)


def names_value(given: Node, gold: Node) -> bool:
    """Whether `given` names the value `gold`: `x = 5` gives 5 a name; `2 + 3 = 5` does not, nor does `x = x + 1`."""
    name = given.nodes[0]
    # the order of names matters: (y, x) = (3, -4) is another pair than (3, -4)
    if is_named_tuple(given):
        names = [(part.text.islower(), len(part.text), part.text) for part in name.nodes]
        return names == sorted(names)
    known = name.kind == "symbol" and name.text in symbols(gold)
    return is_equation(given) and is_name(name) and not known


def graph(equation: Node) -> str:
    """Return what an equation of a graph names: a symbol such as y, or f(x); "" for anything else."""
    name = equation.nodes[0]
    called = name.kind == "multiply" and [part.text for part in name.nodes] == ["f", "x"]
    return "f(x)" if called else name.text if name.kind == "symbol" else ""


def spread(value: Node) -> Node:
    """Rewrite (x, y) = (3, -4) as x = 3, y = -4."""
    if not is_named_tuple(value):
        return value
    pairs = zip(*(side.nodes for side in value.nodes), strict=True)
    return node("list", "and", *(node("relation", "=", name, each) for name, each in pairs))


def name_of(relation: Node) -> str:
    """Return the name in an equation: x, or (x,y)."""
    if relation.kind != "relation" or relation.text != "=":
        return ""
    if is_named_tuple(relation):
        return ",".join(part.text for part in relation.nodes[0].nodes)
    return relation.nodes[0].text if relation.nodes[0].kind in NAMES else ""


def names_of(collection: Node) -> set[str]:
    relations = (member for member in collection.nodes if member.kind == "relation")
    return {name for side in relations if (name := name_of(side))}


def roots_of(names: set[str]) -> set[str]:
    """Return the common name that others are made of: x_1 and x_2 are both x."""
    stems = {found[1] if (found := _ROOT.fullmatch(name)) else name for name in names}
    return stems if len(stems) == 1 and len(names) > 1 else names


def unnamed(collection: Node) -> Node:
    members = (n.nodes[1] if name_of(n) else n for n in collection.nodes)
    return node(collection.kind, *collection.labels, *members)
