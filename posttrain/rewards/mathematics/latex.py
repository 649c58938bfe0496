r"""Parses an answer in LaTeX, or in plain text, into a small tree. Nothing is evaluated here, and nothing is ever run.

answer   = relation ((',' | ';' | and | or) relation)*          more than one: a `list`
relation = union (('=' | '<' | '\le' | ...) union)*             more than one side: a `relation`
union    = quantity ('\cup' quantity)*
quantity = ratio [percent] [unit]
ratio    = sum (':' sum)*
sum      = ['+' | '-' | '\pm'] product (('+' | '-' | '\pm') product)*
product  = factor (('\cdot' | '/' | nothing) factor)*
factor   = atom ('^' atom | '!' | degrees)*

The length of the text, the nesting and the size of the tree are bounded, so that later code may recurse over a tree safely.
"""

from __future__ import annotations

from fractions import Fraction

from posttrain.rewards.mathematics import tokens as lexer
from posttrain.rewards.mathematics import tree
from posttrain.rewards.mathematics.phrases import option, rephrased
from posttrain.rewards.mathematics.tokens import LENGTH, Token, Unreadable, clean, tokens_of
from posttrain.rewards.mathematics.tree import Node, joined, negative, node, node_integer, text_node
from posttrain.rewards.mathematics.words import TABLES, TEXT_MACROS, plain_text, words

NESTING = 40  # the deepest nesting of brackets, powers and signs

_FRACTIONS = ("frac", "dfrac", "tfrac", "cfrac", "nicefrac", "sfrac")
_BARRED = words("int iint oint sum prod lim limsup liminf det max min gcd lcm partial nabla mod")
_BARRED |= words("bmod pmod dots ldots cdots")
_RELATIONS = {name: sign for sign, names in TABLES["relations"].items() for name in names.split()}
_FUNCTIONS = words("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp")
_MATRICES = words("matrix pmatrix bmatrix Bmatrix smallmatrix array")
_LABELS = words("angle triangle overline overrightarrow vec hat bar widehat measuredangle mathcal")
_WRAPPERS = frozenset(TEXT_MACROS.split("|")) | words("boxed fbox")
_MINUS = ("setminus", "backslash", "smallsetminus")
_SUCH_THAT = ("|", ":", "mid", "vert")
_CURRENCIES = {"\\$": "dollars", "euro": "euros", "pounds": "sterling"}
_CURRENCIES |= {"rupee": "rupees", "yen": "yen"}
_NO_FACTORS = words("cup cap pm mp degree cdot times div ast rfloor rceil rvert circ")
_NO_FACTORS |= words("over choose mid vert not")
_NO_FACTORS |= {*_MINUS, *_CURRENCIES}
_END = Token("end of text", "")
_ONE = node("number", Fraction(1), "integer")
_CONSTANTS = {"pi": "pi", "infty": "inf", "i": "i", "e": "e", "imath": "i"}


class Reader:
    """A recursive descent parser over the tokens, with a counter of the depth."""

    def __init__(self, tokens: list[Token]):
        self.tokens, self.position, self.nesting = tokens, 0, 0
        self.bars, self.currency = 0, ""

    @property
    def next(self) -> Token:
        return self.tokens[self.position] if self.position < len(self.tokens) else _END

    def sees(self, *texts: str) -> bool:
        token = self.next
        return token.kind in ("sign", "macro") and token.text in texts

    def take(self) -> Token:
        token = self.next
        if token.kind == "end of text":
            raise Unreadable("ends too early")
        self.position += 1
        return token

    def accept(self, *texts: str) -> Token | None:
        return self.take() if self.sees(*texts) else None

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise Unreadable(f"expected {text!r}, found {self.next.text!r}")

    def deeper(self) -> None:
        self.nesting += 1
        if self.nesting > NESTING:
            raise Unreadable("nested too deeply")

    def answer(self) -> Node:
        items, joined = [self.relation()], ","
        while self.next.kind == "separator" or self.sees(",", ";"):
            while self.next.kind == "separator" or self.sees(",", ";"):
                token = self.take()
                joined = token.text if token.kind == "separator" else joined
            if self.sees("&"):
                break  # the comma after a case's value
            items.append(self.relation())
        return items[0] if len(items) == 1 else node("list", joined, *items)

    def relation(self) -> Node:
        sides, signs = [self.union()], []
        while self.sees("not", *_RELATIONS):
            denied = self.accept("not")
            sign = _RELATIONS.get(self.take().text, "")
            if denied and sign not in ("=", "in"):
                raise Unreadable("a relation denied")
            signs.append({"=": "!=", "in": "notin"}[sign] if denied else sign)
            sides.append(self.union())
        return node("relation", " ".join(signs), *sides) if signs else sides[0]

    def union(self) -> Node:
        items = [self.quantity()]
        while self.accept("cup"):
            items.append(self.quantity())
        value = items[0] if len(items) == 1 else node("union", *items)
        return node("without", value, self.quantity()) if self.accept(*_MINUS) else value

    def quantity(self) -> Node:
        while self.accept("approx"):
            pass
        self.currency = ""
        value = self.text_value() if self.next.kind == "text" else self.ratio()
        if self.accept("%"):
            value = node("percent", value)
        elif self.next.kind == "text":
            value = node("quantity", f"{self.unit()} {self.currency}".strip(), value)
            value = tree.compound(value, self.quantity()) if self.next.kind == "number" else value
        elif sign := self.accept(*_CURRENCIES):
            value = node("quantity", _CURRENCIES[sign.text], value)
        elif self.currency:
            value = node("quantity", self.currency, value)
        return value

    def text_value(self) -> Node:
        words = [self.take().text]
        while self.next.kind == "text":
            words.append(self.take().text)
        if self.sees("_"):
            return self.based(words[0])
        return text_node(" ".join(words))

    def unit(self) -> str:
        pieces: list[str] = []
        while self.next.kind == "text" or (
            pieces and (self.sees("/", "^") or (pieces[-1] == "/" and self.next.kind == "symbol"))
        ):
            token = self.take()
            pieces.append(token.text if token.text != "^" else f"^{self.unit_power()}")
        return " ".join(pieces)

    def unit_power(self) -> int:
        power = self.argument()
        sign = -1 if power.kind == "negative" else 1
        return sign * node_integer(power.nodes[0] if sign < 0 else power)

    def ratio(self) -> Node:
        start = self.position
        parts = [self.sum()]
        while self.accept(":"):
            parts.append(self.sum())
        if len(parts) == 1:
            return parts[0]
        written = "".join(token.text for token in self.tokens[start : self.position])
        return node("ratio", written, *parts)

    def sum(self) -> Node:
        self.deeper()
        terms = [self.term(self.accept("+", "-", "pm", "mp"))]
        while sign := self.accept("+", "-", "pm", "mp"):
            terms.append(self.term(sign))
        self.nesting -= 1
        return terms[0] if len(terms) == 1 else node("add", *terms)

    def term(self, sign: Token | None) -> Node:
        signs = [sign.text] if sign else []
        while again := self.accept("+", "-"):
            signs.append(again.text)
        if currency := self.accept(*_CURRENCIES):
            self.currency = _CURRENCIES[currency.text]
            signs += [again.text for again in [self.accept("+", "-")] if again]
        value = self.product()
        if signs.count("-") % 2:
            based = value.kind == "based"
            value = node("based", f"-{value.text}", value.parts[1]) if based else negative(value)
        return node(signs[0], value) if signs and signs[0] in ("pm", "mp") else value

    def product(self) -> Node:
        # 2 1/2 is a mixed number, 2 \\cdot 1/2 and (2)(1/2) are not
        mixes = self.next.kind == "number"
        factors = [self.factor()]
        while True:
            if self.accept("*", "cdot", "times", "ast"):
                mixes = mixes and len(factors) > 1
                factors.append(self.signed_factor())
            elif self.accept("/", "div"):
                below = self.signed_factor()
                above = factors[0] if len(factors) == 1 else node("multiply", *factors)
                two = mixes and len(factors) == 2
                mixed = tree.mixed_number(factors[0], factors[1], below) if two else None
                factors = [mixed or node("divide", above, below)]
            elif self.starts_factor():
                self.refuse_two_numbers()
                adjacent = self.next.kind == "number" or self.sees(*_FRACTIONS)
                mixes = mixes and (adjacent or len(factors) > 1)
                factors.append(self.factor())
            else:
                break
        if len(factors) == 1:
            return factors[0]
        return joined(factors) if mixes else node("multiply", *factors)

    def refuse_two_numbers(self) -> None:
        """Refuse `5 6`, which is no product; `2 1/2` is a mixed number, and anything may follow \\frac12."""
        place = self.position
        before, after = self.tokens[place - 1], self.tokens[place + 1 : place + 2]
        if before.kind == self.next.kind == "number" and not (after and after[0].text == "/"):
            raise Unreadable("two numbers side by side")

    def signed_factor(self) -> Node:
        sign = self.accept("-", "+")
        value = self.factor()
        return negative(value) if sign and sign.text == "-" else value

    def starts_factor(self) -> bool:
        token = self.next
        if token.kind in ("number", "symbol", "begin"):
            return True
        if token.kind == "macro":
            return token.text not in _RELATIONS and token.text not in _NO_FACTORS
        opening = ("(", "{", "[", r"\{") if self.bars else ("(", "{", "[", r"\{", "|")
        return token.kind == "sign" and token.text in opening

    def factor(self) -> Node:
        value = self.atom()
        while True:
            if value.kind == "domain" and self.accept("^", "_"):
                value = node("domain", value.text + self.half_line())
            elif value.kind == "number" and self.sees("_") and tree.is_integer(value):
                value = self.based(str(value.value))
            elif self.accept("^"):
                self.deeper()
                power = self.factor_of_power()
                self.nesting -= 1
                value = node("power", value, power)
            elif self.accept("!"):
                value = node("factorial", value)
            elif self.accept("degree"):
                value = node("degrees", value)
            elif self.accept("'"):
                symbol = value.kind == "symbol"
                value = node("symbol", f"{value.text}'") if symbol else node("prime", value)
            else:
                return value

    def half_line(self) -> str:
        """Read the suffix of a set of numbers: + or -, > 0, or a number of dimensions."""
        if not self.accept("{"):
            return self.take().text
        text = ""
        while not self.accept("}"):
            token = self.take().text
            text += _RELATIONS.get(token, token)
        return text

    def factor_of_power(self) -> Node:
        """Read what follows ^: a group, or one atom with its sign; a tower is right-associative."""
        sign = self.accept("-", "+")
        value = self.group() if self.sees("{") else self.atom()
        if self.accept("^"):
            self.deeper()
            value = node("power", value, self.factor_of_power())
            self.nesting -= 1
        return negative(value) if sign and sign.text == "-" else value

    def argument(self) -> Node:
        """Read the argument of a macro or a subscript: a group in braces, or a single character as in TeX."""
        token = self.next
        if token.kind == "number" and token.form == "integer" and len(token.text) > 1:
            first, rest = token.text[0], token.text[1:]
            self.tokens[self.position] = Token("number", rest, Fraction(int(rest)), "integer")
            return node("number", Fraction(int(first)), "integer")
        self.deeper()
        value = self.group() if self.sees("{") else self.atom()
        self.nesting -= 1
        return value

    def group(self) -> Node:
        self.expect("{")
        if self.next.kind == "text":
            value = self.quantity()
        else:
            value = self.answer()
            if infix := self.accept("over", "choose"):
                value = node("divide" if infix.text == "over" else "binomial", value, self.answer())
        self.expect("}")
        return value

    def atom(self) -> Node:
        token = self.take()
        if token.kind == "number":
            return self.number(token)
        if token.kind == "symbol":
            return self.symbol(token.text)
        if token.kind == "begin":
            return self.matrix(token.text)
        if token.kind == "macro":
            return self.macro(token.text)
        if token.kind == "sign" and token.text in ("(", "[", r"\{"):
            return self.bracket(token.text)
        if token.kind == "sign" and token.text == "{":
            self.position -= 1
            return self.group()
        if token.kind == "sign" and token.text == "|":
            return self.between_bars("|")
        raise Unreadable(f"unexpected {token.text!r}")

    def number(self, token: Token) -> Node:
        if token.form == "integer" and self.sees("_"):
            return self.based(token.text)
        return node("number", Fraction(token.value), token.form)

    def based(self, digits: str) -> Node:
        self.expect("_")
        base = node_integer(self.argument())
        if base == 10 and digits.isdecimal():
            return node("number", Fraction(int(digits)), "integer")
        return node("based", digits, base)

    def symbol(self, name: str) -> Node:
        if self.accept("_"):
            return node("symbol", f"{name}_{tree.flat(self.argument())}")
        return node("constant", _CONSTANTS[name]) if name in _CONSTANTS else node("symbol", name)

    def macro(self, name: str) -> Node:
        if name in _BARRED:
            raise lexer.Unevaluated(f"\\{name} is left to do")
        if name in _FRACTIONS:
            above = self.argument()
            return node("divide", above, self.argument(), "frac")
        if name == "sqrt":
            return self.root()
        if name in ("binom", "dbinom", "tbinom"):
            above = self.argument()
            return node("binomial", above, self.argument())
        if name in _CONSTANTS:
            return node("constant", _CONSTANTS[name])
        if name in _FUNCTIONS:
            return self.function(name)
        if name in ("lfloor", "lceil", "lvert"):
            return self.between_bars({"lfloor": "rfloor", "lceil": "rceil", "lvert": "rvert"}[name])
        if name in ("emptyset", "varnothing"):
            return node("set")
        if name.startswith("mathbb "):
            return node("domain", name[7:])
        if name in _LABELS:
            named = self.next.kind == "text"  # \angle ABC
            made = node("symbol", self.take().text) if named else self.argument()
            return tree.labelled(name, made)
        if name in _WRAPPERS:
            return self.argument()
        raise Unreadable(f"unknown \\{name}")

    def root(self) -> Node:
        index = node("number", Fraction(2), "integer")
        if self.accept("["):
            index = self.sum()
            self.expect("]")
        return node("root", self.bracket("(") if self.accept("(") else self.argument(), index)

    def function(self, name: str) -> Node:
        self.deeper()
        base = power = None
        while self.sees("_", "^"):
            if self.take().text == "_":
                base = self.argument()
            else:
                power = self.factor_of_power()
        if self.sees("{"):
            inner = self.group()
        else:
            inner = self.atom() if self.sees("(", "[") else self.function_argument()
        self.nesting -= 1
        if power is not None and power.kind == "negative":
            if f"arc{name}" not in _FUNCTIONS or power.nodes[0] != _ONE:
                raise Unreadable("an inverse function or a reciprocal")
            name, power = f"arc{name}", None  # sin^{-1} x
        value = node("function", name, inner, *([base] if base else []))
        return node("power", value, power) if power else value  # sin(x)^2 is raised by the caller

    def function_argument(self) -> Node:
        """sin 2x is sin(2x), but sin x cos y is a product."""
        factors = [self.signed_factor()]
        while self.next.kind in ("number", "symbol") or self.sees("pi", *_FRACTIONS):
            factors.append(self.factor())
        return factors[0] if len(factors) == 1 else joined(factors)

    def between_bars(self, closing: str) -> Node:
        self.bars += closing == "|"
        value = self.sum()
        self.expect(closing)
        self.bars -= closing == "|"
        return node("function", {"rfloor": "floor", "rceil": "ceil"}.get(closing, "abs"), value)

    def bracket(self, opening: str) -> Node:
        self.deeper()
        bars, self.bars = self.bars, 0
        closers = (r"\}",) if opening == r"\{" else (")", "]")
        value = self.builder() if opening == r"\{" and self.next.kind == "symbol" else None
        if value is None and not self.sees(*closers):
            value = self.answer()
        closing = self.accept(*closers)
        if not closing:
            raise Unreadable("a bracket is not closed")
        self.nesting -= 1
        self.bars = bars
        return tree.bracketed(opening, closing.text, value)

    def builder(self) -> Node | None:
        """Read `x | x > 2` and `x \\in S : x > 2` in braces; None if the braces hold something else."""
        start, self.bars = self.position, 1
        name = node("symbol", self.take().text)
        domain = self.product() if self.accept("in") else None
        self.bars = 0
        if self.accept(*_SUCH_THAT):
            return node("builder", name, self.answer(), *([domain] if domain else []))
        self.position = start
        return None

    def matrix(self, environment: str) -> Node:
        if environment in ("cases", "dcases"):
            return self.cases()
        if environment not in _MATRICES:
            raise Unreadable(f"unknown environment {environment!r}")
        return node("matrix", *self.rows())

    def cases(self) -> Node:
        self.tokens = [
            t
            for t in self.tokens
            if t.kind != "text" or t.text.lower().strip(" ,") not in ("if", "for", "when")
        ]
        return node("cases", *self.rows())

    def rows(self) -> list[Node | int]:
        """Return the number of rows, then the entries row by row."""
        self.deeper()
        rows: list[list[Node]] = [[]]
        while self.next.kind != "end":
            rows[-1].append(self.answer())
            if self.accept(r"\\"):
                rows.append([])
            elif not self.accept("&") and self.next.kind != "end":
                raise Unreadable(f"unexpected {self.next.text!r} in a matrix")
        self.take()
        self.nesting -= 1
        rows = [row for row in rows if row]
        if not rows or len({len(row) for row in rows}) != 1:
            raise Unreadable("a matrix needs rows of one length")
        return [len(rows), *(entry for row in rows for entry in row)]


def read(text: str, thousands: bool = True) -> Node:
    r"""Return the tree of an answer.

    >>> read(r"\frac12").kind, read("(1, 2]").kind, read("x = 5").kind, read(r"\text{Monday}").kind
    ('divide', 'interval', 'relation', 'text')
    """
    text = clean(text)
    if len(text) > LENGTH:
        raise Unreadable(f"longer than {LENGTH} characters")
    text = rephrased(text)
    if chosen := option(text):
        return node("option", chosen[0], option_content(chosen[1], thousands))
    if (plain := plain_text(text)) is not None:
        return text_node(plain)
    tokens = tokens_of(text, thousands)
    if not tokens:
        raise Unreadable("nothing there")
    reader = Reader(tokens)
    value = reader.answer()
    if reader.next.kind != "end of text":
        raise Unreadable(f"unexpected {reader.next.text!r}")
    return value


def option_content(text: str, thousands: bool) -> Node:
    try:
        return read(text, thousands)
    except Unreadable:
        return node("text", text)
