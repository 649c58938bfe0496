"""The tree of an answer: its nodes, and the rules for brackets, words and adjacent factors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from posttrain.rewards.mathematics.phrases import spoken
from posttrain.rewards.mathematics.tokens import Unreadable
from posttrain.rewards.mathematics.words import unit_of

DEPTH = 100  # the greatest depth of the tree


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the tree: `kind` says what `parts` are: nodes, or a leaf's text and numbers."""

    kind: str
    parts: tuple[Node | str | Fraction | int, ...] = ()
    depth: int = 1

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(part for part in self.parts if isinstance(part, Node))

    @property
    def labels(self) -> tuple[str | Fraction | int, ...]:
        """Return the parts that are not nodes."""
        return tuple(part for part in self.parts if not isinstance(part, Node))

    @property
    def text(self) -> str:
        return str(self.parts[0])

    @property
    def value(self) -> Fraction:
        """The value of a number."""
        return Fraction(self.parts[0])  # type: ignore[arg-type]

    def walk(self) -> Iterator[Node]:
        """Yield this node and all below it, from left to right."""
        yield self
        for below in self.nodes:
            yield from below.walk()

    def has(self, *kinds: str) -> bool:
        """Whether there is a node of one of these kinds."""
        return any(place.kind in kinds for place in self.walk())


def node(kind: str, *parts: Node | str | Fraction | int) -> Node:
    depth = 1 + max((part.depth for part in parts if isinstance(part, Node)), default=0)
    if depth > DEPTH:
        raise Unreadable("nested too deeply")
    return Node(kind, parts, depth)


def bracketed(opening: str, closing: str, value: Node | None) -> Node:
    items = () if value is None else value.nodes if value.kind == "list" else (value,)
    if opening == r"\{":
        return items[0] if items and items[0].kind == "builder" else node("set", *items)
    if len(items) == 1 and (items[0].kind == "matrix" or (opening, closing) == ("(", ")")):
        return items[0]
    if not items:
        raise Unreadable("empty brackets")
    if len(items) == 2:
        return node("interval", opening + closing, *items)
    if (opening, closing) == ("(", ")"):
        return node("tuple", *items)
    return node("bracket", opening + closing, *items)


def text_node(text: str) -> Node:
    """Make a node of words; of a letter that names a choice, or several with commas; or of a number in words."""
    letters = [piece.strip(" ().") for piece in text.split(",")]
    if all(len(letter) == 1 and letter.isalpha() for letter in letters):
        choices = [node("choice", letter) for letter in letters]
        return choices[0] if len(choices) == 1 else node("list", ",", *choices)
    number = spoken(text)
    if number is None:
        return node("text", text)
    value = node("number", number[0], "integer" if number[0].denominator == 1 else "decimal")
    if not number[1]:
        return value
    unit = unit_of(number[1])
    return node("quantity", number[1], value) if unit and unit.plain else node("text", text)


def compound(larger: Node, smaller: Node) -> Node:
    """Return 5 feet 3 inches as inches."""
    parts = [part for part in (larger, smaller) if part.kind == "quantity"]
    units = [unit_of(part.text) for part in parts if part.nodes[0].kind == "number"]
    first, second = units if len(units) == 2 else (None, None)
    if first and second and first.measures == second.measures and first.size > second.size:
        total = larger.nodes[0].value * first.size / second.size + smaller.nodes[0].value
        return node("quantity", smaller.text, node("number", total, "decimal"))
    raise Unreadable("two quantities side by side")


def labelled(macro: str, value: Node) -> Node:
    r"""Read what is under a bar, an arrow or a hat as a name. \overline{AB} is AB, but \bar z is not z, and \overline{3+4i} is
    no name."""
    names = [place for place in value.walk() if place.kind != "multiply"]
    if any(place.kind not in ("symbol", "text", "choice", "constant") for place in names):
        raise Unreadable(f"\\{macro} of what is no name")
    conjugate = macro in ("overline", "bar") and len(names) == 1
    return node("symbol", f"bar {names[0].text}") if conjugate else value


def node_integer(value: Node) -> int:
    if not is_integer(value):
        raise Unreadable("expected a whole number")
    whole = int(value.value)
    if whole > 1_000:
        raise Unreadable("a base or a unit's power beyond all bounds")
    return whole


def flat(value: Node) -> str:
    """Return a subscript as text."""
    parts = (part for part in value.parts if part != "integer")
    return "".join(flat(part) if isinstance(part, Node) else str(part) for part in parts)


def joined(factors: list[Node]) -> Node:
    """Return a product, unless it is a mixed number such as 2\\frac12."""
    written = len(factors) >= 2 and factors[1].kind == "divide" and factors[1].parts[-1] == "frac"
    if written and (mixed := mixed_number(factors[0], *factors[1].nodes)):
        factors = [mixed, *factors[2:]]
    return factors[0] if len(factors) == 1 else node("multiply", *factors)


def mixed_number(whole: Node, above: Node, below: Node) -> Node | None:
    """Read `2 1/2`: a whole number before a proper fraction of whole numbers; None for anything else."""
    if not all(map(is_integer, (whole, above, below))) or not 0 < above.value < below.value:
        return None
    return node("number", whole.value + above.value / below.value, "mixed")


def symbols(value: Node) -> frozenset[str]:
    """Return the names of all symbols in it."""
    return frozenset(place.text for place in value.walk() if place.kind == "symbol")


def is_integer(value: Node) -> bool:
    return value.kind == "number" and value.parts[1] == "integer"


def negative(value: Node) -> Node:
    """Return -x; the sign of an angle in degrees goes to its number."""
    if value.kind == "degrees":
        return node("degrees", negative(*value.nodes))
    return node("negative", value)
